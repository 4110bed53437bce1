"""The database file of a SQLite store: creates and checks it, runs transactions, and translates errors."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import tempfile
import urllib.parse
from typing import Final

from stagecrew.errors import (
    ConfigurationError,
    PossiblyInconsistentError,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    StoreUnsupported,
)
from stagecrew.recovery.retry import retry_when
from stagecrew.recovery.stores.contract import FORMAT
from stagecrew.recovery.stores.validation import format_error

__all__ = ["Database", "Transaction", "TranslatedErrors"]

#: Identifies stagecrew's databases, in the header of the file. The header also contains the format, as `user_version`.
_APPLICATION_ID: Final = 0x63726577  # "crew"

_SCHEMA: Final = (
    "CREATE TABLE sessions (name TEXT PRIMARY KEY) WITHOUT ROWID",
    """CREATE TABLE entries (parent TEXT, name TEXT, value BLOB NOT NULL, version INTEGER NOT NULL, session TEXT,
       PRIMARY KEY (parent, name)) WITHOUT ROWID""",
    "CREATE INDEX ephemerals ON entries (session) WHERE session IS NOT NULL",
    f"PRAGMA application_id = {_APPLICATION_ID}",
    f"PRAGMA user_version = {FORMAT}",
)
_ANY_TABLE: Final = "SELECT 1 FROM sqlite_master LIMIT 1"
#: How often a new connection tries to switch to the write-ahead log while another connection does the same, in seconds.
_BUSY_PAUSE: Final = 0.01
#: Operating system errors that do not go away by themselves.
_REFUSED_ERRNOS: Final = frozenset({errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EDQUOT})


class Database:
    """A connection to the database at a path, which is created if it does not exist.

    `call_timeout` is how many seconds a statement waits for transactions of other connections.
    """

    def __init__(self, path: str, call_timeout: float) -> None:
        self.path, self.call_timeout = path, call_timeout
        with contextlib.ExitStack() as undo, TranslatedErrors(self):
            self._create_file()
            self._check_write_ahead_log()
            self.connection = sqlite3.connect(
                path, timeout=call_timeout, isolation_level=None, check_same_thread=False, cached_statements=32
            )
            undo.callback(self.connection.close)
            self._prepare()
            undo.pop_all()

    def identity(self) -> tuple[int, int] | None:
        """Returns the device and inode of the file at the path, or None if it does not exist."""
        try:
            found = os.stat(self.path)  # noqa: PTH116
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def commit(self, unknown: type[StoreError]) -> None:
        """Commits. Raises `unknown` if SQLite cannot tell whether the transaction is on the disk."""
        try:
            self.connection.execute("COMMIT")
        except sqlite3.Error as error:
            self.rollback()
            # SQLite raises these two before it writes the page that makes the transaction valid.
            if _code(error) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY):
                raise
            raise unknown(
                f"{self.path}: it is unknown whether the transaction is on the disk ({error}): repeat it to find out"
            ) from error

    def rollback(self) -> None:
        """Rolls back the open transaction, if one is open."""
        if self.connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self.connection.execute("ROLLBACK")

    def translate(self, error: sqlite3.Error | OSError) -> StoreError | ConfigurationError:
        """Translates an error of SQLite or of the disk into the error that a store raises."""
        if isinstance(error, FileNotFoundError):
            return ConfigurationError(f"the folder of {self.path} does not exist: create it")
        if isinstance(error, OSError):
            refused = isinstance(error, PermissionError) or error.errno in _REFUSED_ERRNOS
            kind = StoreRefused if refused else StoreUnavailable
            return kind(
                f"{self.path} cannot be used ({error}): nothing was changed; check the disk and the permissions"
            )
        code = _code(error)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreUnavailable(
                f"another process has held {self.path} for {self.call_timeout:g} s: nothing was changed; check "
                "whether that process is suspended"
            )
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return StoreUnsupported(
                f"{self.path} is damaged or not a database ({error}): it was not changed; replace it with a backup"
            )
        if code == sqlite3.SQLITE_FULL:
            return StoreRefused(f"no room is left for {self.path} ({error}): nothing was changed; free disk space")
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH):
            return StoreRefused(
                f"{self.path} and its folder cannot be written ({error}): nothing was changed; give this user write "
                "access"
            )
        return StoreUnavailable(f"{self.path} cannot be used ({error}): nothing was changed; try again")

    def _create_file(self) -> None:
        """Creates the file as a link to an empty temporary file.

        To open and close the database file itself would release the locks of this process's other sessions.
        """
        if self.identity() is not None:
            return
        handle, temporary = tempfile.mkstemp(prefix=".", dir=os.path.dirname(self.path))  # noqa: PTH120
        try:
            os.close(handle)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, self.path)
        finally:
            os.unlink(temporary)  # noqa: PTH108

    def _check_write_ahead_log(self) -> None:
        """Refuses a database of another format before a normal connection opens its write-ahead log.

        When the last normal connection closes, it copies the log into the database and deletes the log. A read-only
        connection does not.
        """
        with contextlib.suppress(FileNotFoundError):
            if os.stat(f"{self.path}-wal").st_size:  # noqa: PTH116
                address = f"file:{urllib.parse.quote(self.path)}?mode=ro"
                connection = sqlite3.connect(address, timeout=self.call_timeout, isolation_level=None, uri=True)
                with contextlib.closing(connection) as reader:
                    self._is_new(reader)

    def _prepare(self) -> None:
        """Switches to the write-ahead log and creates the tables of a new database."""
        # SQLite itself does not wait for another connection that makes the same change.
        mode = retry_when(
            self._use_write_ahead_log,
            lambda error: isinstance(error, sqlite3.OperationalError) and _code(error) == sqlite3.SQLITE_BUSY,
            _BUSY_PAUSE,
            self.call_timeout,
        )
        if mode != "wal":
            raise StoreUnsupported(
                f"{self.path} cannot have a write-ahead log (SQLite uses the mode {mode!r}): use a local disk"
            )
        self.connection.execute("PRAGMA synchronous = FULL")
        if self._is_new(self.connection):
            with Transaction(self, StoreUnavailable):
                for statement in _SCHEMA if self._is_new(self.connection) else ():
                    self.connection.execute(statement)

    def _use_write_ahead_log(self) -> str:
        self._is_new(self.connection)  # refuses another program's database before it is changed
        (mode,) = self.connection.execute("PRAGMA journal_mode = WAL").fetchone()
        return str(mode)

    def _is_new(self, connection: sqlite3.Connection) -> bool:
        """Returns whether the database has no tables.

        Raises `StoreUnsupported` if it belongs to another program or has another format.
        """
        # The three statements share one transaction, because another process can be creating the tables.
        own_transaction = not connection.in_transaction
        if own_transaction:
            connection.execute("BEGIN")
        try:
            any_table = connection.execute(_ANY_TABLE).fetchone()
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
        finally:
            if own_transaction:
                connection.execute("ROLLBACK")
        if application == version == 0 and any_table is None:
            return True
        if application != _APPLICATION_ID:
            raise StoreUnsupported(
                f"{self.path} is a database of another program: it was not changed; use another path"
            )
        if version != FORMAT:
            raise format_error(self.path, str(version))
        return False


# These context managers are classes, because generators would measurably slow down each transaction.


class TranslatedErrors:
    """Translates errors of SQLite and of the disk into errors of a store. See `Database.translate`."""

    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, sqlite3.Error | OSError):
            raise self._database.translate(error) from error


class Transaction:
    """A write transaction: committed at the end of the block, rolled back after an exception.

    `unknown` is the type of error to raise if a failed commit leaves its outcome unknown.
    """

    __slots__ = ("_database", "_unknown")

    def __init__(self, database: Database, unknown: type[StoreError] = PossiblyInconsistentError) -> None:
        self._database, self._unknown = database, unknown

    def __enter__(self) -> None:
        try:
            self._database.connection.execute("BEGIN IMMEDIATE")
        except BaseException:
            self._database.rollback()
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._database.commit(self._unknown)
        else:
            self._database.rollback()


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
