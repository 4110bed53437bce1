"""The commit log keeps the record that decides each commit. This module has the interface and two implementations."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import pathlib
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any, Final, Protocol

import pyarrow.fs

from stagecrew.bounded import Bounded
from stagecrew.errors import CommitFailed, CommitSuperseded, CommitUnknown, OperatorMisused
from stagecrew.files import address, expanded, make_folder, sync
from stagecrew.observability.error_summary import error_text
from stagecrew.operators.commit_records import Record

__all__ = ["CommitLog", "FileCommitLog", "MemoryCommitLog", "commit_log_of"]

#: The states of a record whose commit has ended.
ENDED_STATES: Final = frozenset({"applied", "aborted", "refused"})
#: How many records of ended commits `MemoryCommitLog` keeps.
_MAX_ENDED: Final = 100

_SUFFIX: Final = ".json"
#: The longest file name, in bytes. A longer name is cut to `_PREFIX` characters, and a digest follows.
_MAX_NAME: Final = 255
_PREFIX: Final = 120
#: The file in which a record is written before it gets its name. Only the holder of the lock writes this file.
_DRAFT: Final = ".record.tmp"
#: After these errors, a file was certainly not renamed.
_NOT_RENAMED: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
#: How many seconds a writer waits for the lock.
_LOCK_TIMEOUT: Final = 60.0


class CommitLog(Protocol):
    """Keeps one record for each commit. A record changes only by compare-and-set.

    A write has three outcomes:

    * It returns: the record is stored, and no later failure changes this.
    * It raises `CommitFailed`: the record is not stored and never will be.
    * It raises `CommitUnknown`: the record may or may not be stored. Nothing may be deleted until a repeated write
      succeeds or raises `CommitFailed`.

    `FileCommitLog` and `MemoryCommitLog` implement this interface. A job keeps its commit log in its store.

    Examples:
        >>> log: CommitLog = MemoryCommitLog()
        >>> version = log.write("day-1", {"state": "open"}, 0)
        >>> log.read("day-1") == (version, {"state": "open"})
        True
    """

    def read(self, key: str) -> tuple[int, Record] | None:
        """Reads the record of a commit.

        Args:
            key: The id of the commit.

        Returns:
            The version of the record, and the record. None if the record does not exist.

        Raises:
            CommitUnknown: If the record cannot be read.
        """

    def write(self, key: str, record: Record, version: int) -> int:
        """Replaces the record of a commit, if it has the given version.

        Args:
            key: The id of the commit.
            record: The new record, as JSON values.
            version: The current version of the record, or 0 if it does not exist.

        Returns:
            The version of the new record.

        Raises:
            CommitSuperseded: If the record has another version, because another driver wrote it.
            CommitFailed: If the record is not stored and never will be.
            CommitUnknown: If it is unknown whether the record is stored.
        """


class MemoryCommitLog:
    """A commit log in the memory of the driver. It keeps the last hundred commits that have ended.

    Use it for commits that no other driver repeats.

    Examples:
        >>> MemoryCommitLog().read("day-1") is None
        True

    Not promised: that a repeat of a commit is recognized after a hundred later ones have ended, unless the sink
    remembers it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions = itertools.count(1)  # one count for all records, so that no version is used twice
        self._records: dict[str, tuple[int, str]] = {}
        #: The keys of commits that have ended, in the order in which they ended.
        self._ended: Bounded[str, None] = Bounded(_MAX_ENDED, lambda key, _: self._records.pop(key))

    def read(self, key: str) -> tuple[int, Record] | None:
        """See `CommitLog.read`."""
        with self._lock:
            version, text = self._records.get(key, (0, ""))
        return (version, json.loads(text)) if version else None

    def write(self, key: str, record: Record, version: int) -> int:
        """See `CommitLog.write`."""
        text = json.dumps(record)
        with self._lock:
            current, _ = self._records.get(key, (0, ""))
            if current != version:
                raise CommitSuperseded(_superseded(key))
            self._records[key] = (next(self._versions), text)
            self._ended.pop(key, None)
            if record.get("state") in ENDED_STATES:
                self._ended[key] = None
            return self._records[key][0]


class FileCommitLog:
    """A commit log in a local folder, for the drivers on one host. A record is durable when its write returns.

    A writer holds a file lock, which the kernel releases if the writer dies. The next writer deletes the draft that a
    killed writer left.

    A folder that this class creates has the mode 0700, and all its files have the mode 0600.

    Args:
        folder: The path of the folder. It is created if it does not exist.

    Raises:
        CommitFailed: If the folder cannot be created.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     version = FileCommitLog(folder).write("day-1", {"state": "open"}, 0)
        ...     FileCommitLog(folder).read("day-1")
        (1, {'state': 'open'})

    Not promised: locks and durability on network file systems.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = pathlib.Path(folder)
        try:
            make_folder(pyarrow.fs.LocalFileSystem(), str(self._folder.absolute()), 0o700)
        except OSError as error:
            raise CommitFailed(
                f"the folder of the commit log cannot be created: {error}. Use a folder that this user may write to"
            ) from error

    def read(self, key: str) -> tuple[int, Record] | None:
        """See `CommitLog.read`."""
        path = self._path(key)
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            version, record = stored["version"], stored["record"]
            stored_key = stored.get("key", key)  # early versions did not store the key
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CommitUnknown(
                f"the record of commit {key!r} cannot be read from {path}: {error_text(error)}. Restore "
                "the file, or use another commit id"
            ) from error
        if stored_key != key:
            raise CommitUnknown(
                f"the record of commit {key!r} cannot be read: {path} is the record of commit {stored_key!r}. Use "
                "another commit id"
            )
        return version, record

    def write(self, key: str, record: Record, version: int) -> int:
        """See `CommitLog.write`."""
        with self._locked(key):
            stored = self.read(key)
            if (stored[0] if stored else 0) != version:
                if stored and stored[0] == version + 1 and stored[1] == record:
                    return version + 1  # an earlier call with an unknown outcome wrote this record
                raise CommitSuperseded(_superseded(key))
            self._put(key, json.dumps({"version": version + 1, "key": key, "record": record}))
        return version + 1

    def _put(self, key: str, text: str) -> None:
        draft = self._folder / _DRAFT
        try:
            draft.unlink(missing_ok=True)  # this writer holds the lock, so the writer of the draft was killed
            handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(handle, "w", encoding="utf-8") as file:  # noqa: PTH123 (a descriptor)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except BaseException as error:
            _delete(draft)
            if isinstance(error, OSError):
                raise self._not_written(key, error) from error
            raise
        try:
            os.replace(draft, self._path(key))  # noqa: PTH105
        except OSError as error:
            _delete(draft)
            if error.errno in _NOT_RENAMED:
                raise self._not_written(key, error) from error
            raise CommitUnknown(
                f"it is unknown whether the record of commit {key!r} was written: {error}. {_COMMIT_AGAIN}"
            ) from error
        try:
            sync(self._folder)
        except OSError as error:
            raise CommitUnknown(
                f"the record of commit {key!r} was written, but may not be on the disk: {error}. {_COMMIT_AGAIN}"
            ) from error

    def _not_written(self, key: str, error: OSError) -> CommitFailed:
        return CommitFailed(
            f"the record of commit {key!r} could not be written to {self._folder}, so nothing is decided: {error}. "
            "Free some space, or use another folder for the commit log, and commit again"
        )

    def _path(self, key: str) -> pathlib.Path:
        name = urllib.parse.quote(key, safe="")
        if len(name) + len(_SUFFIX) > _MAX_NAME:
            name = f"{name[:_PREFIX]}={hashlib.sha256(key.encode()).hexdigest()}"  # quoted names have no "="
        return self._folder / f"{name}{_SUFFIX}"

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        try:
            handle = os.open(self._folder / ".lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            lock = open(handle, "wb")  # noqa: PTH123, SIM115 (a descriptor, which is locked)
            with contextlib.suppress(PermissionError):  # another user's file
                os.fchmod(handle, 0o600)  # early versions created it with a mode that let all users lock it
        except OSError as error:
            raise self._not_written(key, error) from error
        with lock:
            deadline = time.monotonic() + _LOCK_TIMEOUT
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise CommitFailed(
                            f"nothing is decided about commit {key!r}: another process has held "
                            f"{self._folder / '.lock'} for {_LOCK_TIMEOUT:g} s. End that process if it is stopped, and "
                            "commit again"
                        ) from None
                    time.sleep(0.01)
                except OSError as error:  # such as a file system without locks
                    raise self._not_written(key, error) from error
            yield


_COMMIT_AGAIN: Final = "Commit with the same id again to resolve this"


def commit_log_of(given: Any) -> CommitLog:
    """Returns the commit log that a user passed as an object or as the path of a folder.

    Raises `OperatorMisused` for anything else.
    """
    if isinstance(given, (str, os.PathLike)):
        given = expanded(os.fsdecode(given))
        if given and "://" not in given:
            return FileCommitLog(given)
    if isinstance(given, type) or not all(callable(getattr(given, name, None)) for name in ("read", "write")):
        shown = address(given) if isinstance(given, str) else given
        raise OperatorMisused(
            f"commit_log={shown!r} is neither a folder on a local disk nor a commit log: pass a path, "
            "FileCommitLog(path), or an object with the methods read and write"
        )
    commit_log: CommitLog = given
    return commit_log


def _delete(draft: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        draft.unlink()


def _superseded(key: str) -> str:
    return (
        f"another driver has written the record of commit {key!r}: the other driver continues the commit, and this one "
        f"changes nothing"
    )
