"""The part of a database sink that differs between databases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

__all__ = ["ATTEMPT", "BUSY", "Dialect", "Transaction", "quoted_name"]

#: The column of a stage table that contains the id of the task attempt.
ATTEMPT: Final = "stagecrew_attempt"
#: How many seconds a statement waits at most for another transaction.
BUSY: Final = 60

#: Opens a transaction on a connection. The transaction commits at the end, or rolls back after an error.
Transaction = Callable[[], AbstractContextManager[None]]


class Dialect(Protocol):
    """One kind of database. Pickled to tasks as part of its sink."""

    #: The placeholder of a parameter in SQL.
    placeholder: str
    #: How messages name the database, between commas. Empty if the table's name is sufficient.
    location_text: str

    def location(self) -> str:
        """The location of the database, without secrets."""

    def connection(self) -> AbstractContextManager[Any]:
        """A connection, which is closed at the end. Statements outside of `transaction` are committed automatically."""

    def transaction(self, connection: Any) -> AbstractContextManager[None]:
        """A transaction, which is committed at the end, or rolled back after an error."""

    def rolled_back(self, connection: Any) -> AbstractContextManager[None]:
        """A part of a transaction that is rolled back at the end."""

    def create_stage(self, connection: Any, stage: str, table: str, columns: Sequence[str]) -> None:
        """Creates a stage table, with the types of the target table's columns."""

    def row_inserter(
        self, connection: Any, stage: str, columns: Sequence[str]
    ) -> Callable[[list[tuple[Any, ...]]], None]:
        """Returns a function that inserts rows into a stage table. Each row begins with the id of the task attempt."""

    def create_commits(self, connection: Any, statement: str) -> None:
        """Executes `CREATE TABLE IF NOT EXISTS` for the table of commits, even if others do so at the same time."""

    def drop_stage(self, connection: Any, stage: str, transaction: Transaction) -> None:
        """Deletes a stage table, even if a task is still using it or the disk is full."""

    def refusals(self) -> tuple[type[Exception], ...]:
        """The errors that mean that the table refuses the rows, so that a retry with the same rows would fail again."""

    def errors(self) -> tuple[type[Exception], ...]:
        """All errors of the database."""


def quoted_name(name: str) -> str:
    """Quotes a name for SQL. The name may contain any characters."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'
