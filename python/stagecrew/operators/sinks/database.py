"""The sink for a database table.

Tasks stage rows in another table. One transaction copies the rows into the target table, and records the commit's id.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from stagecrew.errors import CommitConflict, CommitFailed, OperatorMisused
from stagecrew.observability.error_summary import error_text
from stagecrew.operators.sinks.dialect import ATTEMPT, Dialect, quoted_name
from stagecrew.operators.sinks.postgres import Postgres
from stagecrew.operators.sinks.sqlite import Sqlite

if TYPE_CHECKING:
    from stagecrew.operators.committer import Message, Staging

__all__ = ["DatabaseSink"]

#: The table that records commits.
_COMMITS: Final = "stagecrew_commits"


class _RowsSkippedError(Exception):
    """The table has not added all rows, although all of them are staged."""


class DatabaseSink:
    """An existing table in SQLite or PostgreSQL. Readers see all rows of a commit or none.

    One transaction adds the rows to the table, and the commit's id to the table `stagecrew_commits`. Two concurrent
    commits to one table both succeed. The dataset must have the table's columns, in any order.

    Tasks stage the rows of a run in a table `stagecrew_stage_…`, which is deleted after the commit. If the table
    refuses the rows, the sink adds an entry to `stagecrew_commits` whose target ends with ` refused`. After that, no
    other driver can commit these rows.

    If the host of a server becomes unreachable, the sink gives up after 60 seconds, unless the url has
    `tcp_user_timeout` or `keepalives…`. The sink does not read these settings from a service file.

    Args:
        url: `sqlite:///relative.db` (relative to the current working directory), `sqlite:////absolute.db` (a file that
            all executors can open, on one host), or `postgresql://…` (needs `stagecrew[postgres]`). It is
            pickled to tasks and never logged. Keep passwords in `PGPASSFILE` or a service file rather than in the url.
        table: The name of the table, or `schema.table`.

    Raises:
        OperatorMisused: If the url or the name of the table is not valid.

    Examples:
        >>> DatabaseSink("sqlite:////data/flights.db", "flights")
        <table flights of sqlite>
        >>> topology.commit(dataset, DatabaseSink("postgresql://server/db", "public.flights"))  # doctest: +SKIP

    Not promised: a time limit for a server that hangs on a host that still responds.

    Source: Flink's two-phase sinks (FLIP-143).
    """

    def __init__(self, url: str, table: str) -> None:
        scheme, separator, path = url.partition("://")
        if not separator or scheme not in ("sqlite", "postgresql", "postgres"):
            raise OperatorMisused(
                f"a database is sqlite:///file or postgresql://..., not {scheme if separator else 'a url without ://'}"
            )
        if scheme == "sqlite" and not path.startswith("/"):
            raise OperatorMisused(
                "the url of a SQLite database has three or four slashes: sqlite:///relative.db, or sqlite:////absolute.db"
            )
        dialect: Dialect = Sqlite(url) if scheme == "sqlite" else Postgres(url, table)
        if not re.fullmatch(r"\w+(\.\w+)?", table):
            raise OperatorMisused(f"a table is a name, or schema.name, not {table!r}")
        self._url, self._table, self._dialect = url, table, dialect

    def __repr__(self) -> str:
        return f"<table {self._table} of {self._url.partition('://')[0]}>"

    @property
    def identity(self) -> str:
        """The table and its database, without secrets."""
        return f"{self!r} in {self._dialect.location()}"

    def begin(self, staging: Staging) -> None:
        """See `Committer.begin`."""
        try:
            with self._transaction() as database:
                self._require_columns(database, staging)
                self._dialect.create_stage(database, self._stage_of(staging), self._table, staging.schema.names)
                # Try a commit without rows, so that a missing permission is an error now, before tasks run.
                with self._dialect.rolled_back(database):
                    self._add(database, staging, [{"attempt": 0, "rows": 0}])
        except self._dialect.errors() as error:
            raise CommitFailed(
                f"table {self._table} cannot be written: {error_text(error)}. Check the table and its permissions"
            ) from error

    def _require_columns(self, database: Any, staging: Staging) -> None:
        cursor = database.execute(f"SELECT * FROM {self._table} WHERE 1 = 0")  # noqa: S608 (a checked name)
        theirs = {column[0] for column in cursor.description}
        ours = set(staging.schema.names)
        if ours != theirs:
            different = [f"{name} does not exist there" for name in sorted(ours - theirs)]
            different += [f"{name} is missing" for name in sorted(theirs - ours)]
            raise CommitFailed(
                f"the dataset does not fit table {self._table}: {'; '.join(different)}. Select and cast its columns "
                "first"
            )

    def stage(
        self, staging: Staging, partition: int, attempt: int, batches: Iterator[pa.RecordBatch]
    ) -> Message | None:
        """See `Committer.stage`. Each batch is one transaction, so that no session waits for a slow task."""
        names = staging.schema.names
        rows = size = 0
        try:
            first = next((batch for batch in batches if batch.num_rows), None)
            if first is None:
                return None
            with self._connected() as database:
                insert = self._row_inserter(database, self._stage_of(staging), names)
                for batch in itertools.chain([first], batches):
                    columns = [_values(batch.column(name)) for name in names]
                    with self._within(database):
                        insert([(attempt, *row) for row in zip(*columns, strict=True)])
                    rows += batch.num_rows
                    size += batch.nbytes
        except self._dialect.errors() as error:
            raise CommitFailed(f"rows for table {self._table} could not be staged: {error_text(error)}") from error
        return {"attempt": attempt, "rows": rows, "bytes": size}

    def _row_inserter(self, database: Any, stage: str, names: Sequence[str]) -> Callable[[list[tuple[Any, ...]]], None]:
        return self._dialect.row_inserter(database, stage, names)

    def commit(self, staging: Staging, messages: Sequence[Message]) -> None:
        """See `Committer.commit`."""
        refusals: tuple[type[Exception], ...] = (*self._dialect.refusals(), _RowsSkippedError)
        try:
            with self._transaction() as database:
                self._add(database, staging, messages)
        except refusals as error:
            with self._transaction() as database:
                if not self._refuse(database, staging):
                    return  # another driver has committed the same rows
            reason = str(error) if isinstance(error, _RowsSkippedError) else error_text(error)
            raise CommitConflict(
                f"table {self._table} refuses the rows: {reason}. Fix the rows or the table, and commit again"
            ) from error

    def _refuse(self, database: Any, staging: Staging) -> bool:
        """Prevents all drivers from committing this run. Returns False if a driver has already committed it."""
        # A driver that refuses and a driver that commits each add their own entry first, and then check for the other's
        # entry by its primary key. So one of them waits for the transaction of the other.
        self._record(database, *self._refusal(staging))
        return self._is_free(database, staging.commit_id, self._table)

    def _refusal(self, staging: Staging) -> tuple[str, str]:
        return staging.run, f"{self._table} refused"  # no table has a space in its name

    def _record(self, database: Any, id_: str, target: str) -> bool:
        """Adds an entry. Waits if another session is adding the same entry. Returns False if the entry exists."""
        mark = self._dialect.placeholder
        added = database.execute(
            f"INSERT INTO {_COMMITS} (id, target) VALUES ({mark}, {mark}) ON CONFLICT DO NOTHING",  # noqa: S608
            (id_, target),
        )
        return bool(added.rowcount)

    def _is_free(self, database: Any, id_: str, target: str) -> bool:
        """Whether an entry does not exist.

        Tries to add the entry, because a transaction may not see the entries of other transactions.
        """
        database.execute("SAVEPOINT looked")
        is_free = self._record(database, id_, target)
        database.execute("ROLLBACK TO SAVEPOINT looked")
        return is_free

    def _add(self, database: Any, staging: Staging, messages: Sequence[Message]) -> None:
        # If two drivers commit at the same time, the second one waits here for the first, and then finds the entry.
        if not self._record(database, staging.commit_id, self._table):
            return
        if not self._is_free(database, *self._refusal(staging)):
            raise CommitConflict(
                f"table {self._table} refused the rows when another driver committed them. Fix the rows or the "
                "table, and commit again"
            )
        if staging.mark:
            self._record(database, staging.commit_id, f"{self._mark_prefix}{staging.mark}")
        columns = ", ".join(map(quoted_name, staging.schema.names))
        stage = self._stage_of(staging)
        of_attempt = f"FROM {stage} WHERE {ATTEMPT} = "
        insert = f"INSERT INTO {self._table} ({columns}) SELECT {columns} {of_attempt}"
        if "%" in self._dialect.placeholder:
            insert = insert.replace("%", "%%")  # for psycopg a percent sign begins a placeholder, also inside a name
        insert += self._dialect.placeholder
        for message in messages:
            attempt, rows = (message["attempt"],), message["rows"]
            added = database.execute(insert, attempt).rowcount
            if added == rows:
                continue
            count = f"SELECT count(*) {of_attempt}{self._dialect.placeholder}"
            (staged,) = database.execute(count, attempt).fetchone()
            if staged == rows:
                raise _RowsSkippedError(
                    f"it added {added} of {rows} rows without an error. Look for a trigger or a rule"
                )
            raise CommitFailed(
                f"{rows} rows were staged for table {self._table}, but its staging table has {staged} of them: find "
                "out what else changes the staging table"
            )

    def done(self, commit_id: str) -> bool:
        """See `Committer.done`."""
        return self._table in self._targets(commit_id)

    def stored_mark(self, commit_id: str) -> str | None:
        """Returns the mark of a visible commit. See `Committer`."""
        marks = [target for target in self._targets(commit_id) if target.startswith(self._mark_prefix)]
        return marks[0].removeprefix(self._mark_prefix) if marks else None

    @property
    def _mark_prefix(self) -> str:
        """The beginning of the targets that contain marks. No table has such a name."""
        return f"{self._table} mark "

    def _targets(self, commit_id: str) -> list[str]:
        """The targets of a commit's entries."""
        try:
            with self._connected() as database:
                self._dialect.create_commits(
                    database,
                    f"CREATE TABLE IF NOT EXISTS {_COMMITS} "
                    f"(id VARCHAR(512), target VARCHAR(512), PRIMARY KEY (id, target))",
                )
                text = f"SELECT target FROM {_COMMITS} WHERE id = {self._dialect.placeholder}"  # noqa: S608
                return [target for (target,) in database.execute(text, (commit_id,)).fetchall()]
        except self._dialect.errors() as error:
            raise CommitFailed(
                f"the database of table {self._table}{self._dialect.location_text} cannot be used: "
                f"{error_text(error)}. Check that it exists, and its permissions"
            ) from error

    def discard(self, staging: Staging, kept: Sequence[Message]) -> None:
        """See `Committer.discard`. Kept rows are already in the target table."""
        with self._connected() as database:
            self._dialect.drop_stage(database, self._stage_of(staging), lambda: self._within(database))

    def _stage_of(self, staging: Staging) -> str:
        schema, _, _ = self._table.rpartition(".")
        return f"{schema}{'.' if schema else ''}{quoted_name(f'stagecrew_stage_{staging.run}')}"

    def _connected(self) -> AbstractContextManager[Any]:
        return self._dialect.connection()

    def _within(self, database: Any) -> AbstractContextManager[None]:
        return self._dialect.transaction(database)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Any]:
        """Opens a connection and a transaction on it."""
        with self._connected() as database, self._within(database):
            yield database


def _values(column: pa.Array) -> list[Any]:
    """The values of a column. Instants are in UTC: Spark's have the time zone of the session."""
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        column = column.cast(pa.timestamp(column.type.unit, "UTC"))
    values: list[Any] = column.to_pylist()
    return values
