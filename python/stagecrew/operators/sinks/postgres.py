"""The PostgreSQL dialect, which uses psycopg."""

from __future__ import annotations

import contextlib
import os
import re
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from stagecrew.errors import CommitFailed, OperatorMisused
from stagecrew.observability.error_summary import error_text
from stagecrew.operators.sinks.dialect import ATTEMPT, BUSY, Transaction, quoted_name

__all__ = ["Postgres"]

#: The sink drops a connection after this many seconds without a packet from the server's host.
_MAX_SILENCE: Final = 60
#: How many seconds to wait for a task that is still staging rows after its commit has ended.
_STAGE_LOCK_TIMEOUT: Final = 5
#: The parts of a url that identify the database. `search_path` is one of the `options`.
_LOCATION: Final = ("service", "host", "hostaddr", "port", "dbname", "search_path")
_SECRETS: Final = ("password", "sslpassword")
_ESCAPE: Final = "in a password, and in names, write / as %2F, @ as %40, ? as %3F and % as %25"


class Postgres:
    """See `Dialect`."""

    placeholder = "%s"
    location_text = ""

    def __init__(self, url: str, table: str) -> None:
        if _is_misread(url.partition("://")[2]):
            raise OperatorMisused(f"the database url for table {table} has an @ in its path: {_ESCAPE}")
        self._url, self._table = url, table

    def location(self) -> str:
        """See `Dialect`."""
        known = self._parts()
        if "service" not in known:
            known = _from_environment() | known
        if "service" not in known:  # a service file can name another database
            known.setdefault("dbname", known.get("user", ""))
        if path := re.search(r"search_path=(\S+)", str(known.get("options", ""))):
            known["search_path"] = path[1]
        return " ".join(f"{name}={known[name]}" for name in _LOCATION if known.get(name))

    def _parts(self) -> dict[str, Any]:
        """The parts of the url, as libpq, PostgreSQL's client library, reads them."""
        import psycopg
        from psycopg.conninfo import conninfo_to_dict

        try:
            return dict(conninfo_to_dict(self._url))
        except psycopg.Error:  # the text of this error contains parts of the url
            raise OperatorMisused(f"the database url for table {self._table} cannot be parsed: {_ESCAPE}") from None

    @contextlib.contextmanager
    def connection(self) -> Iterator[Any]:
        """See `Dialect`."""
        import psycopg

        reason: Exception | None = None
        try:
            connection = psycopg.connect(self._url, autocommit=True, **self._timeouts())
        except psycopg.Error as error:
            reason = self._without_password(error)
        if reason is not None:  # raised outside of the handler, so that the original error is not its context
            raise CommitFailed(
                f"the server of table {self._table} cannot be reached: {error_text(reason)}. Check the "
                "server and the url"
            ) from reason
        with connection as database:
            # A driver waits for a lock for at most BUSY seconds. The server ends a session that is idle in a
            # transaction for longer, for example because its driver is suspended.
            database.execute(f"SET lock_timeout = '{BUSY}s'")
            database.execute(f"SET idle_in_transaction_session_timeout = '{BUSY}s'")
            yield database

    def _without_password(self, error: Exception) -> Exception:
        """Returns the error on one line, without passwords: its text may repeat parts of the url."""
        rest = self._url.partition("://")[2]
        password = rest.partition("/")[0].rpartition("@")[0].partition(":")[2]
        if "@" in password:  # for libpq, the host begins after the first @
            return type(error)(f"the url has more than one @: {_ESCAPE}")
        text = " ".join(str(error).split()).rstrip(".")
        # Not parse_qs: for libpq, a plus sign is not a space.
        query = [pair.partition("=") for pair in rest.partition("?")[2].split("&")]
        secrets = {password, *(value for name, _, value in query if urllib.parse.unquote(name) in _SECRETS)}
        for secret in sorted({*secrets, *map(urllib.parse.unquote, secrets)} - {""}, key=len, reverse=True):
            text = text.replace(secret, "***")
        return type(error)(text)

    def _timeouts(self) -> dict[str, Any]:
        """The settings that limit how long libpq waits for an unreachable host. Those in the url take precedence."""
        given = self._parts()
        timeouts = {
            "connect_timeout": BUSY,
            "tcp_user_timeout": _MAX_SILENCE * 1000,
            "keepalives": 1,
            "keepalives_idle": max(_MAX_SILENCE // 2, 1),
            "keepalives_interval": max(_MAX_SILENCE // 6, 1),
            "keepalives_count": 3,
        }
        return {name: value for name, value in timeouts.items() if name not in given}

    @contextlib.contextmanager
    def transaction(self, connection: Any) -> Iterator[None]:
        """See `Dialect`."""
        with connection.transaction():
            yield

    def rolled_back(self, connection: Any) -> AbstractContextManager[None]:
        """See `Dialect`."""
        rolled_back: AbstractContextManager[None] = connection.transaction(force_rollback=True)
        return rolled_back

    def create_stage(self, connection: Any, stage: str, table: str, columns: Sequence[str]) -> None:
        """See `Dialect`."""
        names = ", ".join(map(quoted_name, columns))
        connection.execute(
            f"CREATE TABLE {stage} AS SELECT CAST(0 AS BIGINT) AS {ATTEMPT}, {names} "  # noqa: S608 (checked names)
            f"FROM {table} WHERE 1 = 0"
        )

    def row_inserter(
        self, connection: Any, stage: str, columns: Sequence[str]
    ) -> Callable[[list[tuple[Any, ...]]], None]:
        """See `Dialect`."""
        names = ", ".join([ATTEMPT, *map(quoted_name, columns)])

        def copy(rows: list[tuple[Any, ...]]) -> None:
            with connection.cursor().copy(f"COPY {stage} ({names}) FROM STDIN") as into:
                for row in rows:
                    into.write_row(row)

        return copy

    def create_commits(self, connection: Any, statement: str) -> None:
        """See `Dialect`."""
        from psycopg import errors

        with contextlib.suppress(errors.UniqueViolation, errors.DuplicateTable):  # another session is creating it
            connection.execute(statement)

    def drop_stage(self, connection: Any, stage: str, transaction: Transaction) -> None:
        """See `Dialect`. If a task's open transaction has written to the table, the task's connection is closed.

        A session that only reads the table, such as `pg_dump`, keeps its connection.
        """
        from psycopg import errors

        def drop() -> None:
            with transaction():
                connection.execute(f"SET LOCAL lock_timeout = '{_STAGE_LOCK_TIMEOUT}s'")
                connection.execute(f"DROP TABLE IF EXISTS {stage}")

        try:
            drop()
        except errors.LockNotAvailable:
            terminated = connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE relation = to_regclass(%s) AND pid <> "
                "pg_backend_pid() AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
                "AND granted AND mode = 'RowExclusiveLock'",
                (stage,),
            )
            if not terminated.rowcount:
                raise
            drop()

    def refusals(self) -> tuple[type[Exception], ...]:
        """See `Dialect`."""
        import psycopg

        return (psycopg.IntegrityError, psycopg.DataError)

    def errors(self) -> tuple[type[Exception], ...]:
        """See `Dialect`."""
        import psycopg

        return (psycopg.Error,)


def _from_environment() -> dict[str, str]:
    """The parts that libpq takes from environment variables, or from the operating system, if the url lacks them."""
    from psycopg.pq import Conninfo

    return {
        name: option.val.decode(errors="surrogateescape")
        for option in Conninfo.get_defaults()
        if (name := option.keyword.decode()) in (*_LOCATION, "user", "options")
        and option.val
        and (name == "user" or (option.envvar and option.envvar.decode() in os.environ))
    }


def _is_misread(rest: str) -> bool:
    """Returns whether libpq would read a part of a password as a port or a database name, which messages show."""
    authority, _, path = rest.partition("/")
    if "@" in path.partition("?")[0]:
        return True
    ports = re.findall(r":([^:,\]]*)(?:,|$)", authority) if "@" not in authority and not authority.endswith("]") else []
    return "@" in path and not all(port.isdigit() for port in ports)
