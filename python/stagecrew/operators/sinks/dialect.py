"""The part of a database sink that differs from one database to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

__all__ = ["ATTEMPT", "BUSY", "Dialect", "Transaction", "quoted_name"]

#: The column of a stage table that holds the id of the task attempt.
ATTEMPT: Final = "stagecrew_attempt"
#: How many seconds a statement waits for another transaction.
BUSY: Final = 60

#: Opens a transaction on a connection. It commits at the end, or rolls back after an error.
Transaction = Callable[[], AbstractContextManager[None]]


class Dialect(Protocol):
    """One kind of database. It is pickled to tasks with its sink."""

    #: The mark of a parameter in SQL.
    placeholder: str
    #: The database in messages, between commas; empty if the table's name says enough.
    described: str

    def place(self) -> str:
        """Where the database is, without secrets."""

    def connection(self) -> AbstractContextManager[Any]:
        """A connection, which is closed at the end. Each statement outside of `transaction` commits by itself."""

    def transaction(self, connection: Any) -> AbstractContextManager[None]:
        """A transaction, which is committed at the end, or rolled back after an error."""

    def undone(self, connection: Any) -> AbstractContextManager[None]:
        """A part of a transaction, which is undone at the end."""

    def create_stage(self, connection: Any, stage: str, table: str, columns: Sequence[str]) -> None:
        """Creates a stage table, with the types of the target table's columns."""

    def inserting(self, connection: Any, stage: str, columns: Sequence[str]) -> Callable[[list[tuple[Any, ...]]], None]:
        """A function that inserts rows into a stage table. Each row begins with the id of the task attempt."""

    def create_commits(self, connection: Any, statement: str) -> None:
        """Executes `CREATE TABLE IF NOT EXISTS` for the table of commits, which others may create at the same time."""

    def drop_stage(self, connection: Any, stage: str, transaction: Transaction) -> None:
        """Deletes a stage table, even if a task still holds it or the disk is full."""

    def refusals(self) -> tuple[type[Exception], ...]:
        """The errors that the table raises each time for the same rows."""

    def errors(self) -> tuple[type[Exception], ...]:
        """All errors of the database."""


def quoted_name(name: str) -> str:
    """A name as SQL takes it, whatever characters it has."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'
