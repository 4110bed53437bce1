"""What was decided about commits: the record that is written ahead of them. An interface, and two stores behind it."""

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

from stagecrew.errors import CommitFailed, CommitSuperseded, CommitUnknown, OperatorMisused
from stagecrew.files import make_folder, sync
from stagecrew.operators.commit_records import Record

__all__ = ["CommitLog", "FileCommitLog", "MemoryCommitLog", "commit_log_of"]


class CommitLog(Protocol):
    """Keeps one record for each commit id, changed by compare-and-set alone.

    A write returns: the record is there, whatever fails from now on. Or it raises `CommitFailed`: it is not, and never will be;
    `CommitSuperseded`: likewise, as another driver wrote meanwhile. Or `CommitUnknown`: nobody knows; nothing may be deleted, and
    repeating the write tells.
    """

    def read(self, key: str) -> tuple[int, Record] | None:
        """The version and the record of a commit; None when there is none. Raises `CommitUnknown` when it cannot be read."""

    def write(self, key: str, record: Record, version: int) -> int:
        """Puts a record in the place of that version (0: there was none), and answers its own."""


class MemoryCommitLog:
    """Lives as long as the driver: for commits that no other one repeats. Of those that are over it knows the last hundred."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions = itertools.count(1)  # of all records: none comes again when its record was forgotten
        self._records: dict[str, tuple[int, str]] = {}
        self._over: dict[str, None] = {}  # in the order in which they ended

    def read(self, key: str) -> tuple[int, Record] | None:
        """See `CommitLog`."""
        with self._lock:
            version, text = self._records.get(key, (0, ""))
        return (version, json.loads(text)) if version else None

    def write(self, key: str, record: Record, version: int) -> int:
        """See `CommitLog`."""
        text = json.dumps(record)
        with self._lock:
            current, _ = self._records.get(key, (0, ""))
            if current != version:
                raise CommitSuperseded(_superseded(key))
            self._records[key] = (next(self._versions), text)
            self._over.pop(key, None)
            if record.get("state") in OVER:
                self._over[key] = None
                if len(self._over) > _KEPT:
                    forgotten = next(iter(self._over))
                    del self._over[forgotten], self._records[forgotten]
            return self._records[key][0]


class FileCommitLog:
    """A folder on a local disk, for drivers of one host. A record is whole and on the disk when its write returns.

    Writers take turns by a lock of the operating system, which is free when its holder dies; what a writer that was killed has left is
    taken away by the next. Not for network file systems.

    A folder that this makes has the mode 0700, and all files in it have the mode 0600.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = pathlib.Path(folder)
        try:
            make_folder(pyarrow.fs.LocalFileSystem(), str(self._folder.absolute()), 0o700)
        except OSError as error:
            raise CommitFailed(f"the folder of decisions cannot be made: {error}") from error

    def read(self, key: str) -> tuple[int, Record] | None:
        """See `CommitLog`."""
        path = self._path(key)
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            version, record, of = stored["version"], stored["record"], stored.get("key", key)  # older ones do not say
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CommitUnknown(
                f"what was decided about commit {key!r} cannot be read from {path}: {type(error).__name__}: {error}"
            ) from error
        if of != key:
            raise CommitUnknown(
                f"what was decided about commit {key!r} is not known: {path} is the record of commit {of!r}. Give it another id"
            )
        return version, record

    def write(self, key: str, record: Record, version: int) -> int:
        """See `CommitLog`."""
        with self._alone(key):
            known = self.read(key)
            if (known[0] if known else 0) != version:
                if known and known[0] == version + 1 and known[1] == record:
                    return version + 1  # our own write, whose outcome was not known
                raise CommitSuperseded(_superseded(key))
            self._put(key, json.dumps({"version": version + 1, "key": key, "record": record}))
        return version + 1

    def _put(self, key: str, text: str) -> None:
        temporary = self._folder / _DRAFT
        try:
            temporary.unlink(missing_ok=True)  # one writes at a time: whoever wrote this one was killed
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(handle, "w", encoding="utf-8") as file:  # noqa: PTH123 (a descriptor)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except BaseException as error:
            _forget(temporary)
            if isinstance(error, OSError):
                raise self._not_written(key, error) from error
            raise
        try:
            os.replace(temporary, self._path(key))  # noqa: PTH105
        except OSError as error:
            _forget(temporary)
            if error.errno in _REFUSED:
                raise self._not_written(key, error) from error
            raise CommitUnknown(f"nobody knows whether the record of commit {key!r} was written: {error}") from error
        try:
            sync(self._folder)
        except OSError as error:
            raise CommitUnknown(
                f"the record of commit {key!r} was written, but may not be on the disk: {error}"
            ) from error

    def _not_written(self, key: str, error: OSError) -> CommitFailed:
        return CommitFailed(
            f"the record of commit {key!r} could not be written to {self._folder}, so that nothing is decided: {error}. Make room, or "
            f"keep decisions elsewhere, and commit again"
        )

    def _path(self, key: str) -> pathlib.Path:
        name = urllib.parse.quote(key, safe="")
        if len(name) + len(_SUFFIX) > _LONGEST:
            name = f"{name[:_SHOWN]}={hashlib.sha256(key.encode()).hexdigest()}"  # no other name has a = in it
        return self._folder / f"{name}{_SUFFIX}"

    @contextlib.contextmanager
    def _alone(self, key: str) -> Iterator[None]:
        try:
            handle = os.open(self._folder / ".lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            lock = open(handle, "wb")  # noqa: PTH123, SIM115 (a descriptor, which is locked)
            with contextlib.suppress(PermissionError):  # it is another user's
                os.fchmod(handle, 0o600)  # an earlier version has made it for all to lock
        except OSError as error:
            raise self._not_written(key, error) from error
        with lock:
            due = time.monotonic() + _LOCK
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > due:
                        raise CommitFailed(
                            f"nothing is decided about commit {key!r}: for {_LOCK:g} s another process has held "
                            f"{self._folder / '.lock'}; is it stopped?"
                        ) from None
                    time.sleep(0.01)
            yield


def commit_log_of(given: Any) -> CommitLog:
    """The decisions that a caller gives: an object that keeps records, or the path of a folder. Raises `OperatorMisused`."""
    if isinstance(given, (str, os.PathLike)) and os.fspath(given) and "://" not in os.fsdecode(given):
        return FileCommitLog(os.fsdecode(given))
    if isinstance(given, type) or not all(callable(getattr(given, name, None)) for name in ("read", "write")):
        raise OperatorMisused(
            f"commit_log={given!r} is no folder on a local disk and keeps no records: give a path, FileCommitLog(path), or an "
            f"object with read and write"
        )
    found: CommitLog = given
    return found


_SUFFIX: Final = ".json"
#: How long the name of a file may be, in bytes, and how much of a name is shown that is longer.
_LONGEST: Final = 255
_SHOWN: Final = 120
#: A record that is being written, by whoever holds the lock.
_DRAFT: Final = ".record.tmp"
#: The states of a record behind which nothing is left to do, and how many of them are kept in memory.
OVER: Final = frozenset({"applied", "aborted", "refused"})
_KEPT: Final = 100
#: What a system says that has renamed nothing.
_REFUSED: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
#: How long one waits for another's write, in seconds.
_LOCK: Final = 60.0


def _forget(temporary: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        temporary.unlink()


def _superseded(key: str) -> str:
    return (
        f"another driver has written the record of commit {key!r} meanwhile: that one goes on, this one changes nothing"
    )
