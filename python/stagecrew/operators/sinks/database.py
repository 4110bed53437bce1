"""A table of a database: staged in a table beside it, committed by one transaction that records the commit's id."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sqlite3
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from stagecrew.errors import CommitConflict, CommitFailed, OperatorMisused

if TYPE_CHECKING:
    from stagecrew.operators.commits import Message, Staging

__all__ = ["DatabaseSink"]

#: Where the ids of commits are recorded.
_COMMITS: Final = "stagecrew_commits"
_ATTEMPT: Final = "stagecrew_attempt"
#: How long one waits for another's transaction, in seconds.
_BUSY: Final = 60
#: And for the host of a server of which nothing comes, not even that it is there.
_SILENCE: Final = 60
_ESCAPE: Final = "in a password, and in names, write / as %2F, @ as %40, ? as %3F and % as %25"
#: And for a task that is over, and stages yet.
_PATIENCE: Final = 5


class DatabaseSink:
    """Rows of a table that exists, in SQLite or PostgreSQL; its columns are those of the dataset, in any order.

    Readers see all rows of a commit or none: one transaction adds them, and the commit's id to `stagecrew_commits`. Two commits to one
    table both land. Tasks stage in a table of the run, `stagecrew_stage_…`, which is gone behind the commit. A commit whose rows the
    table refuses leaves an entry in `stagecrew_commits`, with `… refused` as its target: behind it no other driver can add them.

    `url` is `sqlite:///relative.db` (to the folder in which the sink is made), `sqlite:////absolute.db` (a file that all executors see:
    one host), or `postgresql://…` (with `stagecrew[postgres]`). It is pickled to tasks and stands in no log; a password is better in
    `PGPASSFILE` or a service file.

    A server whose host vanishes without a word is given up after 60 seconds, unless the url says otherwise by `tcp_user_timeout` or
    `keepalives…` (what a service file says of them is not heard). Not promised: the same of one that stands still on a host that answers.

    Raises `OperatorMisused` for another url, or a table's name that is none.
    """

    def __init__(self, url: str, table: str) -> None:
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in ("sqlite", "postgresql", "postgres"):
            raise OperatorMisused(
                f"a database is sqlite:///file or postgresql://..., not {scheme if separator else 'this'}"
            )
        if scheme != "sqlite" and _is_misread(rest):
            raise OperatorMisused(f"the url of the database of table {table} has an @ after its first /: {_ESCAPE}")
        if not re.fullmatch(r"\w+(\.\w+)?", table):
            raise OperatorMisused(f"a table is a name, or schema.name, not {table!r}")
        self._url, self._table = url, table
        self._lite = scheme == "sqlite"
        # That of this process: tasks run in folders of their own.
        self._file = os.path.abspath(urllib.parse.unquote(url.partition("sqlite:///")[2])) if self._lite else ""  # noqa: PTH100

    def __repr__(self) -> str:
        return f"<table {self._table} of {self._url.partition('://')[0]}>"

    @property
    def identity(self) -> str:
        """See `Committer`."""
        if self._lite:
            return f"{self!r} in {self._file}"
        known = self._parsed()
        known.setdefault("dbname", known.get("user", ""))
        if path := re.search(r"search_path=(\S+)", str(known.get("options", ""))):
            known["search_path"] = path[1]
        where = ("service", "host", "hostaddr", "port", "dbname", "search_path")
        return f"{self!r} in {' '.join(f'{name}={known[name]}' for name in where if known.get(name))}"

    def _parsed(self) -> dict[str, Any]:
        """The parts of the url of a server."""
        import psycopg
        from psycopg.conninfo import conninfo_to_dict

        try:
            return dict(conninfo_to_dict(self._url))
        except psycopg.Error:  # whose text has parts of the url
            raise OperatorMisused(
                f"the url of the database of table {self._table} cannot be parsed: {_ESCAPE}"
            ) from None

    def begin(self, staging: Staging) -> None:
        """See `Committer`."""
        try:
            with self._transaction() as database:
                cursor = database.execute(f"SELECT * FROM {self._table} WHERE 1 = 0")  # noqa: S608 (a checked name)
                theirs = {column[0] for column in cursor.description}
                ours = set(staging.schema.names)
                if ours != theirs:
                    different = [f"{name} is not there" for name in sorted(ours - theirs)]
                    different += [f"{name} is missing" for name in sorted(theirs - ours)]
                    raise CommitFailed(
                        f"the dataset does not fit table {self._table}: {'; '.join(different)}. Select and cast its columns first"
                    )
                self._make_stage(database, staging)
                self._try_out(database, staging)
        except self._errors() as error:
            raise CommitFailed(f"table {self._table} cannot be written: {type(error).__name__}: {error}") from error

    def _make_stage(self, database: Any, staging: Staging) -> None:
        stage = self._stage_of(staging)
        if self._lite:
            # A strict table keeps SQLite from taking text for a number.
            schema, dot, table = self._table.rpartition(".")
            kinds = {row[1]: row[2] for row in database.execute(f"PRAGMA {schema}{dot}table_xinfo({table})")}
            columns = ", ".join(f"{_quoted(name)} {_strict(kinds[name])}" for name in staging.schema.names)
            database.execute(f"CREATE TABLE {stage} ({_ATTEMPT} INTEGER, {columns}) STRICT")
        else:
            columns = ", ".join(map(_quoted, staging.schema.names))
            database.execute(
                f"CREATE TABLE {stage} AS SELECT CAST(0 AS BIGINT) AS {_ATTEMPT}, {columns} "  # noqa: S608
                f"FROM {self._table} WHERE 1 = 0"
            )

    def _try_out(self, database: Any, staging: Staging) -> None:
        """Does what the commit will do, without rows, and undoes it: what is not allowed is said now."""
        if self._lite:
            database.execute("SAVEPOINT tried")
            self._add(database, staging, [{"attempt": 0, "rows": 0}])
            database.execute("ROLLBACK TO tried")
            return
        with database.transaction(force_rollback=True):
            self._add(database, staging, [{"attempt": 0, "rows": 0}])

    def stage(
        self, staging: Staging, partition: int, attempt: int, batches: Iterator[pa.RecordBatch]
    ) -> Message | None:
        """See `Committer`. One transaction for each batch: nobody waits for a slow task."""
        names = staging.schema.names
        rows = size = 0
        stage = self._stage_of(staging)
        try:
            first = next((batch for batch in batches if batch.num_rows), None)
            if first is None:
                return None
            with self._connected() as database:
                insert = self._inserting(database, stage, names)
                for batch in itertools.chain([first], batches):
                    columns = [batch.column(name).to_pylist() for name in names]
                    with self._within(database):
                        insert([(attempt, *row) for row in zip(*columns, strict=True)])
                    rows += batch.num_rows
                    size += batch.nbytes
        except self._errors() as error:
            raise CommitFailed(
                f"rows for table {self._table} could not be staged: {type(error).__name__}: {error}"
            ) from error
        return {"attempt": attempt, "rows": rows, "bytes": size}

    def _inserting(self, database: Any, stage: str, names: Sequence[str]) -> Callable[[list[tuple[Any, ...]]], None]:
        columns = ", ".join([_ATTEMPT, *map(_quoted, names)])
        if self._lite:
            marks = ", ".join("?" * (len(names) + 1))
            text = f"INSERT INTO {stage} ({columns}) VALUES ({marks})"  # noqa: S608 (checked names)
            return lambda rows: database.executemany(text, rows)

        def copy(rows: list[tuple[Any, ...]]) -> None:
            with database.cursor().copy(f"COPY {stage} ({columns}) FROM STDIN") as into:
                for row in rows:
                    into.write_row(row)

        return copy

    def commit(self, staging: Staging, messages: Sequence[Message]) -> None:
        """See `Committer`."""
        try:
            with self._transaction() as database:
                self._add(database, staging, messages)
        except self._refusals() as error:
            with self._transaction() as database:
                if not self._refuse(database, staging):
                    return  # another driver's commit of the same, which came before
            raise CommitConflict(
                f"table {self._table} does not take the rows: {type(error).__name__}: {error}"
            ) from error

    def _refuse(self, database: Any, staging: Staging) -> bool:
        """Has no driver commit what this run has staged any more. Answers whether that is so; else it is committed."""
        # Each first writes its own and then looks for the other's, at the key: one of two at once waits there for the other.
        self._record(database, *self._refusal(staging))
        return self._is_free(database, staging.commit_id, self._table)

    def _refusal(self, staging: Staging) -> tuple[str, str]:
        # No table is named so.
        return staging.run, f"{self._table} refused"

    def _record(self, database: Any, id_: str, target: str) -> bool:
        """Adds an entry, behind whoever is about to add the same; answers whether it was not there."""
        mark = "?" if self._lite else "%s"
        added = database.execute(
            f"INSERT INTO {_COMMITS} (id, target) VALUES ({mark}, {mark}) ON CONFLICT DO NOTHING",  # noqa: S608
            (id_, target),
        )
        return bool(added.rowcount)

    def _is_free(self, database: Any, id_: str, target: str) -> bool:
        """Whether nobody has added an entry: by adding it and taking it back. A transaction need not see what others have added."""
        database.execute("SAVEPOINT looked")
        free = self._record(database, id_, target)
        database.execute("ROLLBACK TO SAVEPOINT looked")
        return free

    def _add(self, database: Any, staging: Staging, messages: Sequence[Message]) -> None:
        columns = ", ".join(map(_quoted, staging.schema.names))
        mark = "?" if self._lite else "%s"
        # Who comes second waits here for the first, and finds its id. Nothing was changed before.
        if not self._record(database, staging.commit_id, self._table):
            return
        if not self._is_free(database, *self._refusal(staging)):
            raise CommitConflict(f"table {self._table} did not take the rows, as another driver found")
        if staging.mark:
            self._record(database, staging.commit_id, f"{self._marks}{staging.mark}")
        stage = self._stage_of(staging)
        for message in messages:
            moved = database.execute(
                f"INSERT INTO {self._table} ({columns}) SELECT {columns} FROM {stage} WHERE {_ATTEMPT} = {mark}",  # noqa: S608
                (message["attempt"],),
            )
            if moved.rowcount != message["rows"]:
                raise CommitFailed(
                    f"{message['rows']} rows were staged for table {self._table}, and {moved.rowcount} of them are there"
                )

    def done(self, commit_id: str) -> bool:
        """See `Committer`."""
        return self._table in self._targets(commit_id)

    def stored_mark(self, commit_id: str) -> str | None:
        """See `Committer`."""
        marks = [target for target in self._targets(commit_id) if target.startswith(self._marks)]
        return marks[0].removeprefix(self._marks) if marks else None

    @property
    def _marks(self) -> str:
        """The prefix of the entries that hold marks. No table has such a name."""
        return f"{self._table} mark "

    def _targets(self, commit_id: str) -> list[str]:
        """The entries of a commit."""
        mark = "?" if self._lite else "%s"
        try:
            with self._connected() as database:
                self._make_commits(database)
                text = f"SELECT target FROM {_COMMITS} WHERE id = {mark}"  # noqa: S608
                return [target for (target,) in database.execute(text, (commit_id,)).fetchall()]
        except self._errors() as error:
            raise CommitFailed(
                f"the database of table {self._table}{f', {self._file},' if self._lite else ''} cannot be used: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _make_commits(self, database: Any) -> None:
        text = f"CREATE TABLE IF NOT EXISTS {_COMMITS} (id VARCHAR(512), target VARCHAR(512), PRIMARY KEY (id, target))"
        if self._lite:
            database.execute(text)
            return
        from psycopg import errors

        with contextlib.suppress(errors.UniqueViolation, errors.DuplicateTable):  # another makes it at the same time
            database.execute(text)

    def discard(self, staging: Staging, kept: Sequence[Message]) -> None:
        """See `Committer`. What is kept is in the table. On PostgreSQL, tasks that hold on to the other lose their connection."""
        drop = f"DROP TABLE IF EXISTS {self._stage_of(staging)}"
        if self._lite:
            with self._connected() as database:
                try:
                    with self._within(database):
                        database.execute(drop)
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                        raise
                    database.execute("PRAGMA secure_delete = OFF")  # zeros in the place of rows need room
                    with self._within(database):
                        database.execute(drop)
            return
        from psycopg import errors

        with self._connected() as database:
            try:
                with self._within(database):
                    database.execute(f"SET LOCAL lock_timeout = '{_PATIENCE}s'")
                    database.execute(drop)
            except errors.LockNotAvailable:
                database.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE relation = to_regclass(%s) AND pid <> pg_backend_pid() "
                    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
                    (self._stage_of(staging),),
                )
                with self._within(database):
                    database.execute(drop)

    def _stage_of(self, staging: Staging) -> str:
        schema, _, _ = self._table.rpartition(".")
        return f"{schema}{'.' if schema else ''}{_quoted(f'stagecrew_stage_{staging.run}')}"

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Any]:
        if self._lite:
            lite = sqlite3.connect(self._file, timeout=_BUSY, isolation_level=None)
            try:
                yield lite
            finally:
                lite.close()
            return
        import psycopg

        reason: Exception | None = None
        try:
            connection = psycopg.connect(self._url, autocommit=True, **self._bounds())
        except psycopg.Error as error:
            reason = self._without_password(error)
        if reason is not None:  # raised here, so that the error itself is not its context
            raise CommitFailed(
                f"the server of table {self._table} cannot be reached: {type(reason).__name__}: {reason}. Check the server and the url"
            ) from reason
        with connection as database:
            # Nobody waits for a driver that is stopped.
            database.execute(f"SET lock_timeout = '{_BUSY}s'")
            database.execute(f"SET idle_in_transaction_session_timeout = '{_BUSY}s'")
            yield database

    def _without_password(self, error: Exception) -> Exception:
        """The error on one line. Its text may repeat parts of the url."""
        rest = self._url.partition("://")[2]
        password = rest.partition("/")[0].rpartition("@")[0].partition(":")[2]
        if "@" in password:  # to libpq, the host begins after the first @
            return type(error)(f"the url has more than one @: {_ESCAPE}")
        text = " ".join(str(error).split()).rstrip(".")
        query = urllib.parse.parse_qs(rest.partition("?")[2])
        secrets = {password, *query.get("password", ()), *query.get("sslpassword", ())}
        for secret in sorted({*secrets, *map(urllib.parse.unquote, secrets)} - {""}, key=len, reverse=True):
            text = text.replace(secret, "***")
        return type(error)(text)

    def _bounds(self) -> dict[str, Any]:
        """What ends a wait for a host that is gone, where the url does not say so."""
        said = self._parsed()
        bounds = {
            "connect_timeout": _BUSY,
            "tcp_user_timeout": _SILENCE * 1000,
            "keepalives": 1,
            "keepalives_idle": max(_SILENCE // 2, 1),
            "keepalives_interval": max(_SILENCE // 6, 1),
            "keepalives_count": 3,
        }
        return {name: value for name, value in bounds.items() if name not in said}

    @contextlib.contextmanager
    def _within(self, database: Any) -> Iterator[None]:
        """A transaction, which is committed at the end, or rolled back."""
        if not self._lite:
            with database.transaction():
                yield
            return
        database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                database.execute("ROLLBACK")
            raise
        database.execute("COMMIT")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Any]:
        """A connection with one transaction."""
        with self._connected() as database, self._within(database):
            yield database

    def _refusals(self) -> tuple[type[Exception], ...]:
        """What the table will say each time."""
        if self._lite:
            return (sqlite3.IntegrityError,)
        import psycopg

        return (psycopg.IntegrityError, psycopg.DataError)

    def _errors(self) -> tuple[type[Exception], ...]:
        if self._lite:
            return (sqlite3.Error,)
        import psycopg

        return (psycopg.Error,)


def _is_misread(rest: str) -> bool:
    """Whether the server's library would take a part of a password for a port or a database's name, which are shown."""
    authority, _, path = rest.partition("/")
    if "@" in path.partition("?")[0]:
        return True
    ports = re.findall(r":([^:,\]]*)(?:,|$)", authority) if "@" not in authority and not authority.endswith("]") else []
    return "@" in path and not all(port.isdigit() for port in ports)


def _quoted(name: str) -> str:
    """A name as SQL takes it, whatever is in it."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def _strict(kind: str) -> str:
    """The type of a strict table that takes what a column of this type would, as SQLite finds its affinity."""
    kind = kind.upper()
    if "INT" in kind:
        return "INTEGER"
    if any(part in kind for part in ("CHAR", "CLOB", "TEXT")):
        return "TEXT"
    if any(part in kind for part in ("REAL", "FLOA", "DOUB")):
        return "REAL"
    return "ANY"
