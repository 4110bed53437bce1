"""A store for the processes of one host: a SQLite database, and next to it a locked file for each session."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from stagecrew.errors import ConfigurationError, SessionLost, StoreError, StoreUnavailable, StoreUnsupported
from stagecrew.mounts import filesystem, shared
from stagecrew.recovery.stores.contract import Check, Create, Delete, Entry, Operation, Replace, checked_key
from stagecrew.recovery.stores.sqlite.database import Database, Transaction, TranslatedErrors
from stagecrew.recovery.stores.sqlite.session_files import SessionFile, is_alive, reap
from stagecrew.recovery.stores.validation import check_transaction, conflict_error, ensure_entries

__all__ = ["SQLiteStore"]

_T = TypeVar("_T")

# Each operation is one statement, unless it must check whether another session is alive, or has a conflict.
_CREATE: Final = """INSERT OR IGNORE INTO entries (parent, name, value, version, session) SELECT ?1, ?2, ?3, 0, ?4
    WHERE ?1 = '' OR EXISTS (SELECT 1 FROM entries WHERE parent = ?5 AND name = ?6 AND session IS NULL)"""
_REPLACE: Final = """UPDATE entries SET value = ?, version = version + 1
    WHERE parent = ? AND name = ? AND version = ? AND session IS NULL"""
_UPDATE: Final = "UPDATE entries SET value = ?, version = version + 1 WHERE parent = ? AND name = ?"
_DELETE: Final = "DELETE FROM entries WHERE parent = ? AND name = ?"
_CHILD_SESSIONS: Final = "SELECT session FROM entries WHERE parent = ?"
_SESSION: Final = "SELECT 1 FROM sessions WHERE name = ?"
# These also read the row of this session in the same statement, because the data can be stale if the session has ended.
_READ_LIVE: Final = """SELECT value, version, session FROM sessions LEFT JOIN
    (SELECT value, version, session FROM entries WHERE parent = ? AND name = ?) WHERE sessions.name = ?"""
_CHILDREN_LIVE: Final = """SELECT child, session FROM sessions LEFT JOIN
    (SELECT name AS child, session FROM entries WHERE parent = ?) WHERE sessions.name = ? ORDER BY child"""

_CLOSED: Final = "the session is closed: open the store again"
#: How many seconds `close` waits for transactions of other sessions.
_CLOSE_TIMEOUT: Final = 3.0


class SQLiteStore:
    """A `Store` in a SQLite database on a local disk. All processes that use it must run on the host of this disk.

    While a session is alive, it locks a file next to the database. So it ends only when its process ends, or by
    `close`. A suspended process (SIGSTOP) is alive. If a session finds an entry of a dead session, it deletes all
    entries of the dead session.

    Not promised: that the session ends with its process, if that process has started a child without Python's fork: the
    child can keep the session alive (see `SessionFile`).
    """

    timeout = None

    def __init__(self, path: str | os.PathLike[str], *, call_timeout: float = 10.0) -> None:
        """Opens a session, and creates the database if it does not exist. Its folder must exist.

        `call_timeout` is how many seconds a call waits for other transactions.
        """
        self._path = os.path.realpath(path)
        self._folder = f"{self._path}.sessions"
        self._call_timeout = call_timeout
        self._process = os.getpid()
        self._lock = threading.Lock()
        #: Why the session has ended; None while it is alive.
        self._ended: str | None = None
        kind = filesystem(os.path.dirname(self._path))  # noqa: PTH120
        if shared(kind):
            raise StoreUnsupported(
                f"{self._path} is on {kind}, where the locks and the shared memory of SQLite do not work: use a local "
                "disk, or zookeeper://host:port/chroot for several hosts"
            )
        with contextlib.ExitStack() as undo:
            self._database = Database(self._path, call_timeout)
            self._connection = self._database.connection
            undo.callback(self._connection.close)
            with TranslatedErrors(self._database):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._folder, 0o700)  # noqa: PTH102
                self._file = SessionFile(self._folder)
                undo.callback(self._file.release)
                self.session = self._file.name
                self._identity = self._database.identity()
                with Transaction(self._database, StoreUnavailable):
                    self._connection.execute("INSERT INTO sessions VALUES (?)", (self.session,))
                self._remove_dead_sessions()
            undo.pop_all()

    def __repr__(self) -> str:
        return f"SQLiteStore({self._path!r})"

    # -- The contract

    @property
    def suspended(self) -> bool:
        """See `Store`."""
        return self._ended is not None or not self._file.is_held()

    def ensure(self, *keys: str) -> None:
        """See `Store`."""
        ensure_entries(self, keys)

    def read(self, key: str) -> Entry | None:
        """See `Store`."""
        checked_key(key)
        with _ExclusiveUse(self):
            return self._without_dead_sessions(lambda: self._entry(key))

    def children(self, key: str) -> list[str]:
        """See `Store`."""
        checked_key(key)
        with _ExclusiveUse(self):
            return self._without_dead_sessions(lambda: self._children(key))

    def transact(self, *operations: Operation) -> list[int | None]:
        """See `Store`."""
        check_transaction(operations)
        with _ExclusiveUse(self):
            return self._without_dead_sessions(lambda: self._transact(operations))

    def close(self) -> None:
        """See `Store`."""
        if os.getpid() != self._process:
            return
        locked = self._lock.acquire(timeout=self._call_timeout)
        try:
            if self._ended == _CLOSED:
                return
            if locked and self._ended is None:
                with contextlib.suppress(sqlite3.Error, OSError, StoreError):
                    milliseconds = int(min(self._call_timeout, _CLOSE_TIMEOUT) * 1000)
                    self._connection.execute(f"PRAGMA busy_timeout = {milliseconds}")
                    self._remove_session(self.session)
            self._ended = _CLOSED
            self._file.release()  # other sessions then see that this session is dead, and delete any remaining entries
            if locked:
                self._connection.close()
        finally:
            if locked:
                self._lock.release()

    # -- Entries (the caller has exclusive use of the session)

    def _entry(self, key: str) -> Entry | None:
        row = self._row(_parent_and_name(key))
        if row is None:
            return None
        self._require_alive(row[2])
        return Entry(*row)

    def _row(self, row_key: tuple[str, str]) -> tuple[bytes, int, str | None] | None:
        row = self._connection.execute(_READ_LIVE, (*row_key, self.session)).fetchone()
        if row is None:
            raise self._session_lost()
        return None if row[1] is None else row

    def _children(self, key: str) -> list[str]:
        rows = self._connection.execute(_CHILDREN_LIVE, (key, self.session)).fetchall()
        if not rows:
            raise self._session_lost()
        for session in {session for _, session in rows}:
            self._require_alive(session)
        return [name for name, _ in rows if name is not None]

    def _transact(self, operations: Sequence[Operation]) -> list[int | None]:
        with Transaction(self._database):
            # If the first operation is a check, such as a leader's fence, its statement also reads the session.
            first = operations[0] if operations else None
            if type(first) is not Check and self._connection.execute(_SESSION, (self.session,)).fetchone() is None:
                raise self._session_lost()
            return [self._apply(operations, index) for index in range(len(operations))]

    def _apply(self, operations: Sequence[Operation], index: int) -> int | None:
        operation, execute = operations[index], self._connection.execute
        row_key = _parent_and_name(operation.key)
        if isinstance(operation, Create):
            owner = self.session if operation.ephemeral else None
            if execute(_CREATE, (*row_key, operation.value, owner, *_parent_and_name(row_key[0]))).rowcount:
                return 0
        if (
            isinstance(operation, Replace)
            and execute(_REPLACE, (operation.value, *row_key, operation.version)).rowcount
        ):
            return operation.version + 1
        row = self._row(row_key)
        if row is not None:
            self._require_alive(row[2])
        if isinstance(operation, Create):
            raise conflict_error(operations, index, "exists" if row is not None else "no parent")
        if row is None:
            raise conflict_error(operations, index, "missing")
        version = row[1]
        if operation.version not in (None, version):
            raise conflict_error(operations, index, "version")
        if isinstance(operation, Check):
            return version
        if isinstance(operation, Delete):
            for (session,) in execute(_CHILD_SESSIONS, (operation.key,)):
                self._require_alive(session)
                raise conflict_error(operations, index, "not empty")
            execute(_DELETE, row_key)
            return None
        execute(_UPDATE, (operation.value, *row_key))
        return version + 1

    # -- Sessions

    def _require_alive(self, session: str | None) -> None:
        if session is not None and session != self.session and not is_alive(self._folder, session):
            raise _DeadSessionError(session)

    def _without_dead_sessions(self, work: Callable[[], _T]) -> _T:
        """Runs `work`. If `work` finds an entry of a dead session, deletes that session's entries and runs it again."""
        while True:
            try:
                return work()
            except _DeadSessionError as dead:
                self._remove_session(dead.session)

    def _remove_session(self, session: str) -> None:
        with Transaction(self._database, StoreUnavailable):
            self._connection.execute("DELETE FROM entries WHERE session = ?", (session,))
            self._connection.execute("DELETE FROM sessions WHERE name = ?", (session,))
        reap(self._folder, session)

    def _remove_dead_sessions(self) -> None:
        registered = {name for (name,) in self._connection.execute("SELECT name FROM sessions")}
        for name in registered - {self.session}:
            if not is_alive(self._folder, name):
                self._remove_session(name)
        for name in set(os.listdir(self._folder)) - registered:  # noqa: PTH208
            reap(self._folder, name)  # the file is from a process that died before it registered its session

    def _session_lost(self) -> SessionLost:
        self._ended = (
            f"session {self.session} at {self._path} has ended, because its file or its row was deleted: "
            "open the store again"
        )
        return SessionLost(self._ended)

    def _acquire(self) -> None:
        if os.getpid() != self._process:
            raise ConfigurationError(
                f"the session at {self._path} belongs to process {self._process}, but this is a fork of it: open the "
                "store again in this process"
            )
        if not self._lock.acquire(timeout=self._call_timeout):
            raise StoreUnavailable(
                f"other threads have used the session at {self._path} for {self._call_timeout:g} s: nothing was "
                "changed; try again"
            )

    def _require_open(self) -> None:
        if self._ended is None and self._database.identity() != self._identity:
            self._ended = (
                f"{self._path} was deleted or replaced, so the session has ended and its writes are gone: "
                "open the store again"
            )
        if self._ended is not None:
            raise SessionLost(self._ended)


class _ExclusiveUse(TranslatedErrors):
    """Lets one thread use the session for a call. Raises `SessionLost` if the session is known to have ended."""

    __slots__ = ("_store",)

    def __init__(self, store: SQLiteStore) -> None:
        super().__init__(store._database)
        self._store = store

    def __enter__(self) -> None:
        self._store._acquire()
        try:
            self._store._require_open()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._store._lock.release()
        if error is not None:
            super().__exit__(kind, error, trace)


class _DeadSessionError(Exception):
    """The work found an entry of a dead session."""

    def __init__(self, session: str) -> None:
        super().__init__(session)
        self.session = session


def _parent_and_name(key: str) -> tuple[str, str]:
    parent, _, name = key.rpartition("/")
    return parent, name
