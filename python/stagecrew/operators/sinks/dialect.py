"""The part of a database sink that differs from one database to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

__all__ = ["ATTEMPT", "BUSY", "Dialect", "Transaction", "quoted_name"]

#: The column of a stage table with the id of the task attempt.
ATTEMPT: Final = "stagecrew_attempt"
#: How many seconds a statement waits for another transaction.
BUSY: Final = 60

#: Opens a transaction on a connection. It commits at the end, or rolls back after an error.
Transaction = Callable[[], AbstractContextManager[None]]


class Dialect(Protocol):
    """One kind of database. It is pickled to tasks with its sink."""

    #: The placeholder of a parameter in SQL.
    placeholder: str
    #: The database in messages, between commas. Empty if the table's name is sufficient.
    described: str

    def place(self) -> str:
        """The location of the database, without secrets."""

    def connection(self) -> AbstractContextManager[Any]:
        """A connection, which is closed at the end. Each statement outside of `transaction` commits by itself."""

    def transaction(self, connection: Any) -> AbstractContextManager[None]:
        """A transaction, which is committed at the end, or rolled back after an error."""

    def undone(self, connection: Any) -> AbstractContextManager[None]:
        """A part of a transaction that is rolled back at the end."""

    def create_stage(self, connection: Any, stage: str, table: str, columns: Sequence[str]) -> None:
        """Creates a stage table, with the types of the target table's columns."""

    def inserting(self, connection: Any, stage: str, columns: Sequence[str]) -> Callable[[list[tuple[Any, ...]]], None]:
        """A function that inserts rows into a stage table. Each row begins with the id of the task attempt."""

    def create_commits(self, connection: Any, statement: str) -> None:
        """Executes `CREATE TABLE IF NOT EXISTS` for the table of commits, which others may create at the same time."""

    def drop_stage(self, connection: Any, stage: str, transaction: Transaction) -> None:
        """Deletes a stage table, even if a task still uses it or the disk is full."""

    def refusals(self) -> tuple[type[Exception], ...]:
        """The errors that a retry with the same rows would raise again."""

    def errors(self) -> tuple[type[Exception], ...]:
        """All errors of the database."""


def quoted_name(name: str) -> str:
    """Quotes a name for SQL. It may contain any characters."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'
