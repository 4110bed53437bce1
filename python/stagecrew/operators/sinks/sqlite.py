"""The dialect of SQLite, for one host."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stagecrew.operators.sinks.dialect import ATTEMPT, BUSY, Transaction, quoted_name

__all__ = ["Sqlite"]


class Sqlite:
    """See `Dialect`."""

    placeholder = "?"

    def __init__(self, url: str) -> None:
        # Resolve the path now, because the working directories of tasks differ.
        self._file = os.path.abspath(urllib.parse.unquote(url.partition("sqlite:///")[2]))  # noqa: PTH100
        self.location_text = f", {self._file},"

    def location(self) -> str:
        """See `Dialect`."""
        return self._file

    @contextlib.contextmanager
    def connection(self) -> Iterator[Any]:
        """See `Dialect`."""
        connection = sqlite3.connect(self._file, timeout=BUSY, isolation_level=None)
        try:
            yield connection
        finally:
            connection.close()

    @contextlib.contextmanager
    def transaction(self, connection: Any) -> Iterator[None]:
        """See `Dialect`."""
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")

    @contextlib.contextmanager
    def rolled_back(self, connection: Any) -> Iterator[None]:
        """See `Dialect`."""
        connection.execute("SAVEPOINT tried")
        yield
        connection.execute("ROLLBACK TO tried")

    def create_stage(self, connection: Any, stage: str, table: str, columns: Sequence[str]) -> None:
        """See `Dialect`. The stage is a strict table, so that SQLite does not store text in a column of numbers."""
        schema, dot, name = table.rpartition(".")
        types = {row[1]: row[2] for row in connection.execute(f"PRAGMA {schema}{dot}table_xinfo({name})")}
        typed = ", ".join(f"{quoted_name(column)} {_strict_type(types[column])}" for column in columns)
        connection.execute(f"CREATE TABLE {stage} ({ATTEMPT} INTEGER, {typed}) STRICT")

    def row_inserter(
        self, connection: Any, stage: str, columns: Sequence[str]
    ) -> Callable[[list[tuple[Any, ...]]], None]:
        """See `Dialect`."""
        names = ", ".join([ATTEMPT, *map(quoted_name, columns)])
        marks = ", ".join("?" * (len(columns) + 1))
        text = f"INSERT INTO {stage} ({names}) VALUES ({marks})"  # noqa: S608 (checked names)
        return lambda rows: connection.executemany(text, rows)

    def create_commits(self, connection: Any, statement: str) -> None:
        """See `Dialect`."""
        connection.execute(statement)

    def drop_stage(self, connection: Any, stage: str, transaction: Transaction) -> None:
        """See `Dialect`."""
        drop = f"DROP TABLE IF EXISTS {stage}"
        try:
            with transaction():
                connection.execute(drop)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            connection.execute("PRAGMA secure_delete = OFF")  # overwriting deleted rows with zeros needs disk space
            with transaction():
                connection.execute(drop)

    def refusals(self) -> tuple[type[Exception], ...]:
        """See `Dialect`."""
        return (sqlite3.IntegrityError,)

    def errors(self) -> tuple[type[Exception], ...]:
        """See `Dialect`."""
        return (sqlite3.Error,)


def _strict_type(declared: str) -> str:
    """The column type of a strict table that takes the same values as the declared type, by SQLite's affinity rules."""
    declared = declared.upper()
    if "INT" in declared:
        return "INTEGER"
    if any(part in declared for part in ("CHAR", "CLOB", "TEXT")):
        return "TEXT"
    if any(part in declared for part in ("REAL", "FLOA", "DOUB")):
        return "REAL"
    return "ANY"
