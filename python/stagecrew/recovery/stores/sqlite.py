"""A store for processes of one host: a SQLite database, and a locked file for each session beside it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from stagecrew.errors import (
    PossiblyInconsistentError,
    RecoveryMisused,
    SessionLost,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    StoreUnsupported,
)
from stagecrew.mounts import MOUNTS, filesystem, shared
from stagecrew.recovery.stores.contract import FORMAT, Check, Create, Delete, Entry, Operation, Replace, checked_key
from stagecrew.recovery.stores.requests import checked, conflict, ensured, other_format
from stagecrew.recovery.stores.sessionfiles import SessionFile, alive, reap

__all__ = ["SQLiteStore"]

_T = TypeVar("_T")

#: Whose database it is, in its header. The format is there too, as `user_version`.
_APPLICATION: Final = 0x63726577  # "crew"

_TABLES: Final = (
    "CREATE TABLE sessions (name TEXT PRIMARY KEY) WITHOUT ROWID",
    """CREATE TABLE entries (parent TEXT, name TEXT, value BLOB NOT NULL, version INTEGER NOT NULL, session TEXT,
       PRIMARY KEY (parent, name)) WITHOUT ROWID""",
    "CREATE INDEX ephemerals ON entries (session) WHERE session IS NOT NULL",
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {FORMAT}",
)
_ANYTHING: Final = "SELECT 1 FROM sqlite_master LIMIT 1"
# The usual case, where no other session has to be looked at, takes one statement.
_CREATE: Final = """INSERT OR IGNORE INTO entries (parent, name, value, version, session) SELECT ?1, ?2, ?3, 0, ?4
    WHERE ?1 = '' OR EXISTS (SELECT 1 FROM entries WHERE parent = ?5 AND name = ?6 AND session IS NULL)"""
_REPLACE: Final = """UPDATE entries SET value = ?, version = version + 1
    WHERE parent = ? AND name = ? AND version = ? AND session IS NULL"""
_UPDATE: Final = "UPDATE entries SET value = ?, version = version + 1 WHERE parent = ? AND name = ?"
_DELETE: Final = "DELETE FROM entries WHERE parent = ? AND name = ?"
_BELOW: Final = "SELECT session FROM entries WHERE parent = ?"
_SESSION: Final = "SELECT 1 FROM sessions WHERE name = ?"
# With the session in the same statement: what a session reads that is over could be old.
_READ_LIVE: Final = """SELECT value, version, session FROM sessions LEFT JOIN
    (SELECT value, version, session FROM entries WHERE parent = ? AND name = ?) WHERE sessions.name = ?"""
_CHILDREN_LIVE: Final = """SELECT below, session FROM sessions LEFT JOIN
    (SELECT name AS below, session FROM entries WHERE parent = ?) WHERE sessions.name = ? ORDER BY below"""


class SQLiteStore:
    """See `Store`. All processes that use it must run on one host, which has the database on a disk of its own.

    A session ends with its process and with nothing else: each has a file beside the database that is locked while it lives.
    A process that is stopped (SIGSTOP) lives. Who dies leaves entries that the next who looks at them takes away.

    Not promised: that a session ends with its process when a fork of it lives that was not made by Python (see `SessionFile`).
    """

    timeout = None

    def __init__(self, path: str | os.PathLike[str], *, patience: float = 10.0, mounts: str = MOUNTS) -> None:
        """Opens a session; makes the database where there is none, in a folder that is there.

        `patience`: how many seconds one waits for transactions of others. `mounts`: where the system lists what is mounted.
        """
        self._path = os.path.realpath(path)
        self._folder = f"{self._path}.sessions"
        self._patience = patience
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._over: str | None = None
        kind = filesystem(os.path.dirname(self._path), mounts)  # noqa: PTH120
        if shared(kind):
            raise StoreUnsupported(
                f"{self._path} is on {kind}, where locks and shared memory of SQLite do not hold: use a disk of this host, or "
                f"zookeeper://host:port/chroot for several hosts"
            )
        with contextlib.ExitStack() as undo, _Translating(self):
            self._make_file()
            self._check_log()
            self._connection = sqlite3.connect(
                self._path, timeout=patience, isolation_level=None, check_same_thread=False, cached_statements=32
            )
            undo.callback(self._connection.close)
            self._prepare()
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._folder, 0o700)  # noqa: PTH102
            self._file = SessionFile(self._folder)
            undo.callback(self._file.release)
            self.session = self._file.name
            self._identity = self._found()
            with _Transaction(self, StoreUnavailable):
                self._connection.execute("INSERT INTO sessions VALUES (?)", (self.session,))
            self._sweep()
            undo.pop_all()

    def __repr__(self) -> str:
        return f"SQLiteStore({self._path!r})"

    # -- The contract

    @property
    def suspended(self) -> bool:
        """See `Store`."""
        return self._over is not None or not self._file.held()

    def ensure(self, *keys: str) -> None:
        """See `Store`."""
        ensured(self, keys)

    def read(self, key: str) -> Entry | None:
        """See `Store`."""
        checked_key(key)
        with _Turn(self):
            return self._without_dead(lambda: self._entry(key))

    def children(self, key: str) -> list[str]:
        """See `Store`."""
        checked_key(key)
        with _Turn(self):
            return self._without_dead(lambda: self._children(key))

    def transact(self, *operations: Operation) -> list[int | None]:
        """See `Store`."""
        checked(operations)
        with _Turn(self):
            return self._without_dead(lambda: self._transact(operations))

    def close(self) -> None:
        """See `Store`."""
        if os.getpid() != self._process:
            return
        taken = self._lock.acquire(timeout=self._patience)
        try:
            if self._over == _CLOSED:
                return
            if taken and self._over is None:
                with contextlib.suppress(sqlite3.Error, OSError, StoreError):
                    self._connection.execute(f"PRAGMA busy_timeout = {int(min(self._patience, _CLOSING) * 1000)}")
                    self._bury(self.session)
            self._over = _CLOSED
            self._file.release()  # whatever was left: others see that it is dead, and take away what it had
            if taken:
                self._connection.close()
        finally:
            if taken:
                self._lock.release()

    # -- Under the lock

    def _entry(self, key: str) -> Entry | None:
        row = self._row(_place(key))
        if row is None:
            return None
        self._look_at(row[2])
        return Entry(*row)

    def _row(self, place: tuple[str, str]) -> tuple[bytes, int, str | None] | None:
        row = self._connection.execute(_READ_LIVE, (*place, self.session)).fetchone()
        if row is None:
            raise self._lost()
        return None if row[1] is None else row

    def _children(self, key: str) -> list[str]:
        rows = self._connection.execute(_CHILDREN_LIVE, (key, self.session)).fetchall()
        if not rows:
            raise self._lost()
        for session in {session for _, session in rows}:
            self._look_at(session)
        return [name for name, _ in rows if name is not None]

    def _transact(self, operations: Sequence[Operation]) -> list[int | None]:
        with _Transaction(self):
            # A check that comes first, as that of a leader's term does, reads the session in its own statement.
            first = operations[0] if operations else None
            if type(first) is not Check and self._connection.execute(_SESSION, (self.session,)).fetchone() is None:
                raise self._lost()
            return [self._apply(operations, index) for index in range(len(operations))]

    def _apply(self, operations: Sequence[Operation], index: int) -> int | None:
        operation, execute = operations[index], self._connection.execute
        place = _place(operation.key)
        if isinstance(operation, Create):
            owner = self.session if operation.ephemeral else None
            if execute(_CREATE, (*place, operation.value, owner, *_place(place[0]))).rowcount:
                return 0
        if isinstance(operation, Replace) and execute(_REPLACE, (operation.value, *place, operation.version)).rowcount:
            return operation.version + 1
        known = self._row(place)
        if known is not None:
            self._look_at(known[2])
        if isinstance(operation, Create):
            raise conflict(operations, index, "exists" if known is not None else "no parent")
        if known is None:
            raise conflict(operations, index, "missing")
        version = known[1]
        if operation.version not in (None, version):
            raise conflict(operations, index, "version")
        if isinstance(operation, Check):
            return version
        if isinstance(operation, Delete):
            for (session,) in execute(_BELOW, (operation.key,)):
                self._look_at(session)
                raise conflict(operations, index, "not empty")
            execute(_DELETE, place)
            return None
        execute(_UPDATE, (operation.value, *place))
        return version + 1

    def _look_at(self, session: str | None) -> None:
        if session is not None and session != self.session and not alive(self._folder, session):
            raise _DeadError(session)

    def _without_dead(self, work: Callable[[], _T]) -> _T:
        while True:
            try:
                return work()
            except _DeadError as dead:
                self._bury(dead.session)

    def _bury(self, session: str) -> None:
        with _Transaction(self, StoreUnavailable):
            self._connection.execute("DELETE FROM entries WHERE session = ?", (session,))
            self._connection.execute("DELETE FROM sessions WHERE name = ?", (session,))
        reap(self._folder, session)

    def _sweep(self) -> None:
        known = {name for (name,) in self._connection.execute("SELECT name FROM sessions")}
        for name in known - {self.session}:
            if not alive(self._folder, name):
                self._bury(name)
        for name in set(os.listdir(self._folder)) - known:  # noqa: PTH208
            reap(self._folder, name)  # of one that died before it was known

    def _lost(self) -> SessionLost:
        self._over = f"session {self.session} at {self._path} is over: somebody deleted its file or its row"
        return SessionLost(self._over)

    # -- SQLite's own

    def _enter(self) -> None:
        if os.getpid() != self._process:
            raise RecoveryMisused(
                f"the session at {self._path} is process {self._process}'s, and this is a fork of it: open a store here"
            )
        if not self._lock.acquire(timeout=self._patience):
            raise StoreUnavailable(
                f"for {self._patience:g} s other threads have used the session at {self._path}: nothing was done"
            )

    def _look(self) -> None:
        if self._over is None and self._found() != self._identity:
            self._over = (
                f"{self._path} was deleted or replaced: the session is over, and what it wrote is there no more"
            )
        if self._over is not None:
            raise SessionLost(self._over)

    def _commit(self, unknown: type[StoreError]) -> None:
        try:
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._rollback()
            if _code(error) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY):  # before the page that makes it valid
                raise
            raise unknown(f"{self._path}: nobody knows whether the transaction is on the disk: {error}") from error

    def _rollback(self) -> None:
        if self._connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")

    def _translated(self, error: sqlite3.Error | OSError) -> StoreError | RecoveryMisused:
        if isinstance(error, FileNotFoundError):
            return RecoveryMisused(f"there is no folder for {self._path}: make it")
        if isinstance(error, OSError):
            kind = StoreRefused if isinstance(error, PermissionError) or error.errno in _REFUSING else StoreUnavailable
            return kind(f"{self._path} cannot be used: {error}; nothing was done")
        code = _code(error)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreUnavailable(
                f"for {self._patience:g} s another process has held {self._path}: nothing was done; is it stopped?"
            )
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return StoreUnsupported(
                f"{self._path} is damaged, or no database ({error}): it was left as it is; put a backup in its place"
            )
        if code == sqlite3.SQLITE_FULL:
            return StoreRefused(f"there is no room for {self._path} ({error}): nothing was done")
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH):
            return StoreRefused(f"{self._path} and its folder cannot be written ({error}): nothing was done")
        return StoreUnavailable(f"{self._path} cannot be used: {error}; nothing was done")

    def _found(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)  # noqa: PTH116
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _make_file(self) -> None:
        """Linked, not opened: closing a file of a database takes the locks away that other sessions of the process have."""
        if self._found() is not None:
            return
        handle, temporary = tempfile.mkstemp(prefix=".", dir=os.path.dirname(self._path))  # noqa: PTH120
        try:
            os.close(handle)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, self._path)
        finally:
            os.unlink(temporary)  # noqa: PTH108

    def _prepare(self) -> None:
        due = time.monotonic() + self._patience
        while True:
            self._is_new(self._connection)  # or it is refused, as it was found
            try:
                (mode,) = self._connection.execute("PRAGMA journal_mode = WAL").fetchone()
                break
            except sqlite3.OperationalError as error:
                # SQLite does not wait by itself for others who make the same change.
                if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > due:
                    raise
                time.sleep(0.01)
        if mode != "wal":
            raise StoreUnsupported(
                f"{self._path} cannot have a write-ahead log (SQLite says {mode!r}): use a local disk"
            )
        self._connection.execute("PRAGMA synchronous = FULL")
        if self._is_new(self._connection):
            with _Transaction(self, StoreUnavailable):
                for statement in _TABLES if self._is_new(self._connection) else ():
                    self._connection.execute(statement)

    def _check_log(self) -> None:
        """Refuses a store of another format whose write-ahead log has transactions, before an ordinary connection opens it.

        The last ordinary connection that closes copies the log into the database, and deletes the log. A read-only one does not.
        """
        with contextlib.suppress(FileNotFoundError):
            if os.stat(f"{self._path}-wal").st_size:  # noqa: PTH116
                address = f"file:{urllib.parse.quote(self._path)}?mode=ro"
                connected = sqlite3.connect(address, timeout=self._patience, isolation_level=None, uri=True)
                with contextlib.closing(connected) as reader:
                    self._is_new(reader)

    def _is_new(self, connection: sqlite3.Connection) -> bool:
        # As of one moment: another may be making the tables.
        outside = not connection.in_transaction
        if outside:
            connection.execute("BEGIN")
        try:
            anything = connection.execute(_ANYTHING).fetchone()
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
        finally:
            if outside:
                connection.execute("ROLLBACK")
        if application == version == 0 and anything is None:
            return True
        if application != _APPLICATION:
            raise StoreUnsupported(f"{self._path} is a database of another program: it was left as it is")
        if version != FORMAT:
            raise other_format(self._path, str(version))
        return False


# Context managers as classes: a generator's own time would be seen in each transaction.


class _Translating:
    """Errors of SQLite and of the disk leave as those of a store."""

    __slots__ = ("_store",)

    def __init__(self, store: SQLiteStore) -> None:
        self._store = store

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, sqlite3.Error | OSError):
            raise self._store._translated(error) from error


class _Turn(_Translating):
    """One thread has the session, which is not known to be over."""

    __slots__ = ()

    def __enter__(self) -> None:
        self._store._enter()
        try:
            self._store._look()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._store._lock.release()
        if error is not None:
            super().__exit__(kind, error, trace)


class _Transaction:
    """Before its end nothing is done; an error of the end itself leaves that open, and is raised as `unknown`."""

    __slots__ = ("_store", "_unknown")

    def __init__(self, store: SQLiteStore, unknown: type[StoreError] = PossiblyInconsistentError) -> None:
        self._store, self._unknown = store, unknown

    def __enter__(self) -> None:
        try:
            self._store._connection.execute("BEGIN IMMEDIATE")
        except BaseException:
            self._store._rollback()
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._store._commit(self._unknown)
        else:
            self._store._rollback()


class _DeadError(Exception):
    """An entry in the way is of a session that is dead."""

    def __init__(self, session: str) -> None:
        super().__init__(session)
        self.session = session


_CLOSED: Final = "the session is closed: open a store"
#: How many seconds `close` waits for transactions of others.
_CLOSING: Final = 3.0
_REFUSING: Final = frozenset({13, 28, 30, 122})  # EACCES, ENOSPC, EROFS, EDQUOT


def _place(key: str) -> tuple[str, str]:
    parent, _, name = key.rpartition("/")
    return parent, name


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
