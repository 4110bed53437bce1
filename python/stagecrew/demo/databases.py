"""The two databases of the demo: they look up rows, and count the connections to them.

Workers import this module. It needs only the standard library, and psycopg for PostgreSQL.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import sqlite3
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from stagecrew.errors import ConfigurationError

__all__ = ["Database", "PostgreSQL", "SQLite", "Table", "database_of"]


@dataclasses.dataclass(frozen=True)
class Table:
    """The content of one table: column names with SQLite types, and rows. The first column is the key."""

    columns: Mapping[str, str]
    rows: list[tuple[Any, ...]]


class Database(Protocol):
    """A database with the tables of the demo. It is pickled for the tasks, and never shows its password."""

    counted_by: str

    def build(self, tables: Mapping[str, Table]) -> str:
        """Creates the tables, on the driver. Returns a description of the database for messages."""

    def connect(self) -> Any:
        """Opens a connection, for a task."""

    def pool(self) -> contextlib.AbstractContextManager[Any]:
        """Opens a connection pool, for a worker. Its `connection()` lends a connection."""

    def lookup(
        self, connection: Any, table: str, key: str, columns: Sequence[str], keys: list[str]
    ) -> list[tuple[Any, ...]]:
        """Returns the key and the columns of all rows with one of these keys."""

    def connections(self) -> int:
        """Returns the number of connections that were opened so far, except the driver's own."""

    def remove(self) -> None:
        """Removes everything that the demo created in the database, except the SQLite file itself."""


class SQLite:
    """An SQLite file. No server counts the connections, so each open appends a line to a second file."""

    counted_by = "the number of file opens"

    def __init__(self, file: Path, opens: Path) -> None:
        self._file, self._opens = str(file), str(opens)

    def build(self, tables: Mapping[str, Table]) -> str:
        Path(self._file).unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(self._file)) as connection, connection:
            for name, table in tables.items():
                columns = ", ".join(f"{column} {kind}" for column, kind in table.columns.items())
                connection.execute(f"CREATE TABLE {name} ({columns}, PRIMARY KEY ({next(iter(table.columns))}))")
                places = ", ".join("?" * len(table.columns))
                connection.executemany(f"INSERT INTO {name} VALUES ({places})", table.rows)  # noqa: S608 (constants)
        Path(self._opens).touch()
        return f"SQLite {sqlite3.sqlite_version}, {os.path.relpath(self._file)}"

    def connect(self) -> sqlite3.Connection:
        if not Path(self._file).exists():
            raise ConfigurationError(
                f"this executor has no SQLite file {self._file}: if executors run on other hosts, set --output to a "
                f"folder that all hosts share, or use --database postgresql://..."
            )
        # check_same_thread: the worker's main thread opens the connection of a pool, and another thread may use it.
        connection = sqlite3.connect(f"{Path(self._file).as_uri()}?mode=ro", uri=True, check_same_thread=False)
        opens = os.open(self._opens, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(opens, b"%d\n" % os.getpid())  # O_APPEND makes one short write atomic between processes
        finally:
            os.close(opens)
        return connection

    def pool(self) -> contextlib.AbstractContextManager[Any]:
        return _SQLitePool(self)

    def lookup(
        self, connection: Any, table: str, key: str, columns: Sequence[str], keys: list[str]
    ) -> list[tuple[Any, ...]]:
        names = ", ".join([key, *columns])
        text = f"SELECT {names} FROM {table} WHERE {key} IN (SELECT value FROM json_each(?))"  # noqa: S608 (constants)
        return connection.execute(text, (json.dumps(keys),)).fetchall()  # type: ignore[no-any-return]

    def connections(self) -> int:
        return Path(self._opens).read_bytes().count(b"\n")

    def remove(self) -> None:
        Path(self._opens).unlink(missing_ok=True)


class _SQLitePool(contextlib.AbstractContextManager["_SQLitePool"]):
    """A pool of one connection, because a Python worker runs one task at a time."""

    def __init__(self, database: SQLite) -> None:
        self._free: queue.Queue[sqlite3.Connection] = queue.Queue(1)
        self._free.put(database.connect())

    @contextlib.contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        connection = self._free.get(timeout=30)
        try:
            yield connection
        finally:
            self._free.put(connection)

    def __exit__(self, *_: object) -> None:
        self._free.get(timeout=30).close()


class PostgreSQL:
    """A PostgreSQL server. The demo uses its own schema and drops it at the end. The server counts the connections."""

    counted_by = "pg_stat_database.sessions"

    #: How long to wait until the server's count of sessions is stable, in seconds.
    SETTLE_TIMEOUT: Final = 15.0

    def __init__(self, url: str) -> None:
        self._url = url
        run = uuid.uuid4().hex[:8]
        self._schema, self._application = f"stagecrew_demo_{run}", f"stagecrew demo {run}"
        self._own: Any = None  # the driver's connection; it is not pickled
        self._own_sessions = 0
        self._password: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own": None, "_password": None}

    def __repr__(self) -> str:
        return f"<PostgreSQL {self._schema}>"  # the URL may contain a password

    def build(self, tables: Mapping[str, Table]) -> str:
        psycopg = _psycopg()
        try:
            parameters = psycopg.conninfo.conninfo_to_dict(self._url)
        except psycopg.Error:
            # The parser's message quotes parts of the URL, so it is neither shown nor chained.
            raise ConfigurationError(
                "--database cannot be read as a URL: write postgresql://user:password@host:5432/name, with special "
                "characters as %XX (`python3 -c 'import urllib.parse as u; print(u.quote(input()))'` converts them)"
            ) from None
        self._password = str(parameters["password"]) if parameters.get("password") else None
        try:
            self._own = psycopg.connect(
                self._url, application_name=f"{self._application} driver", autocommit=True, connect_timeout=10
            )
            if self._own.info.server_version < 140000:
                raise ConfigurationError(
                    f"the demo needs PostgreSQL 14 or newer, which counts its sessions: this server has version "
                    f"{self._own.info.parameter_status('server_version')}"
                )
            self._load(psycopg.sql, tables)
        except psycopg.Error as error:
            where = " ".join(
                f"{key}={parameters[key]}" for key in ("host", "port", "user", "dbname") if parameters.get(key)
            )
            raise ConfigurationError(
                f"PostgreSQL ({where or 'the default server'}) refused the demo: {self._redacted(error)}. Check that "
                f"it runs, and that the user may connect to this database and create a schema in it"
            ) from None
        info = self._own.info
        return (
            f"PostgreSQL {info.parameter_status('server_version')}, database {info.dbname} on {info.host}:{info.port}"
        )

    def _redacted(self, error: Exception) -> str:
        text = " ".join(str(error).split()).rstrip(".")
        return text.replace(self._password, "***") if self._password else text

    def _load(self, sql: Any, tables: Mapping[str, Table]) -> None:
        kinds = {"TEXT": "text", "REAL": "double precision", "INTEGER": "bigint"}
        self._own.execute(f"CREATE SCHEMA {self._schema}")
        for name, table in tables.items():
            columns = ", ".join(f"{column} {kinds[kind]}" for column, kind in table.columns.items())
            self._own.execute(
                f"CREATE TABLE {self._schema}.{name} ({columns}, PRIMARY KEY ({next(iter(table.columns))}))"
            )
            with self._own.cursor() as cursor, cursor.copy(f"COPY {self._schema}.{name} FROM STDIN") as copy:
                for row in table.rows:
                    copy.write_row(row)
            self._own.execute(f"ANALYZE {self._schema}.{name}")
        self._own_sessions = self._sessions()

    def connect(self) -> Any:
        return _psycopg().connect(self._url, application_name=self._application, autocommit=True)

    def pool(self) -> contextlib.AbstractContextManager[Any]:
        _psycopg()
        from psycopg_pool import ConnectionPool

        settings = {"application_name": self._application, "autocommit": True}
        pool = ConnectionPool(self._url, min_size=1, max_size=4, kwargs=settings, open=False, timeout=30)
        pool.open(wait=True, timeout=30)
        return contextlib.closing(pool)

    def lookup(
        self, connection: Any, table: str, key: str, columns: Sequence[str], keys: list[str]
    ) -> list[tuple[Any, ...]]:
        names = ", ".join([key, *columns])
        text = f"SELECT {names} FROM {self._schema}.{table} WHERE {key} = ANY(%s)"  # noqa: S608 (constants)
        return connection.execute(text, (keys,)).fetchall()  # type: ignore[no-any-return]

    def connections(self) -> int:
        return self._sessions() - self._own_sessions

    def _sessions(self) -> int:
        """Returns the server's count for this database, after the demo's other sessions ended and the count is stable.

        A backend counts its session when it flushes its statistics, at the latest when the session ends, so the count
        may be late. Sessions of other users of the same database are counted too.
        """
        can_force = self._own.info.server_version >= 150000
        deadline = time.monotonic() + self.SETTLE_TIMEOUT
        before = -1
        while True:
            if can_force:
                self._own.execute("SELECT pg_stat_force_next_flush()")
            alive, sessions = self._own.execute(
                "SELECT (SELECT count(*) FROM pg_stat_activity WHERE application_name = %s), sessions "
                "FROM pg_stat_database WHERE datname = current_database()",
                (self._application,),
            ).fetchone()
            if (alive == 0 and sessions == before) or time.monotonic() > deadline:
                return int(sessions)
            before = sessions
            time.sleep(0.2 if can_force else 1.0)  # PostgreSQL 14 sends statistics every 0.5 s

    def remove(self) -> None:
        if self._own is None:
            return
        own, self._own = self._own, None
        with contextlib.closing(own), contextlib.suppress(_psycopg().Error):
            own.execute(f"DROP SCHEMA IF EXISTS {self._schema} CASCADE")


def _psycopg() -> Any:
    try:
        import psycopg
        import psycopg.sql
        import psycopg_pool  # noqa: F401 one message names both packages
    except ImportError as error:
        raise ConfigurationError(
            f"--database postgresql://... needs psycopg and its pool ({error}): pip install 'stagecrew[postgres]'"
        ) from None
    return psycopg


def database_of(url: str | None, folder: Path, scratch: Path) -> Database:
    """Returns the database for `--database`. Raises `ConfigurationError`, whose message does not repeat the URL."""
    if url is None:
        return SQLite(folder / "flights.sqlite", scratch / "opens")
    scheme = url.split("://", 1)[0] if "://" in url else ""
    if scheme not in ("postgresql", "postgres"):
        given = f", not {scheme}://" if scheme.isalpha() else ""
        raise ConfigurationError(
            f"--database takes postgresql://user@host:5432/name{given}: correct it, or omit --database to use SQLite"
        )
    _psycopg()
    return PostgreSQL(url)
