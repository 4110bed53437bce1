"""Each session holds a lock on a file of its own.

When its process dies, the kernel drops the lock, so other processes on this host notice immediately.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
import weakref
from typing import Final

from stagecrew.errors import StoreUnavailable
from stagecrew.recovery.retry import retry_if_none

__all__ = ["SessionFile", "is_alive", "reap"]

#: How many times a session tries to create and lock a file.
_TRIES: Final = 10


class SessionFile:
    """A file that stays locked until `release` or until this process ends, however it ends.

    A session lasts as long as its file is locked. The kernel holds the lock (flock) while any process has this file
    description open. Programs that this process starts do not inherit the description, and forks made by Python close
    it. A fork made by other means (in C) keeps the session alive after its parent has died, until the fork exits or
    calls exec.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._descriptor: int | None = None
        self.name, self.path = "", ""
        if not retry_if_none(self._try_lock, _TRIES):
            raise StoreUnavailable(
                f"could not lock a file in {folder} after {_TRIES} tries, because another process keeps deleting or "
                "locking the files there: stop that process"
            )

    def _try_lock(self) -> bool | None:
        self.name = uuid.uuid4().hex
        self.path = os.path.join(self._folder, self.name)  # noqa: PTH118
        self._descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        _open_files.add(self)
        with contextlib.suppress(BlockingIOError):  # another process can be checking whether this file is stale
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.is_held():
                return True
        self.release()
        return None

    def is_held(self) -> bool:
        """Returns whether `path` still refers to the file that this object has locked, not to a replacement."""
        descriptor = self._descriptor
        if descriptor is None:
            return False
        try:
            found, mine = os.stat(self.path), os.fstat(descriptor)  # noqa: PTH116
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)

    def release(self) -> None:
        """Deletes and unlocks the file, so that the session counts as dead. Idempotent."""
        descriptor = self._descriptor
        if descriptor is None:
            return
        if self.is_held():
            with contextlib.suppress(OSError):
                os.unlink(self.path)  # noqa: PTH108
        self._descriptor = None
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing would not unlock the file while a fork has it open too
        os.close(descriptor)

    def _close_in_fork(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_open_files: weakref.WeakSet[SessionFile] = weakref.WeakSet()


def _close_all_in_fork() -> None:
    """Closes the files in a fork, because the locks belong to the parent and must not outlive it."""
    for file in list(_open_files):
        file._close_in_fork()


os.register_at_fork(after_in_child=_close_all_in_fork)


def is_alive(folder: str, name: str) -> bool:
    """Returns whether a process has the file with this name locked."""
    return not _probe_lock(folder, name, delete_if_unlocked=False)


def reap(folder: str, name: str) -> None:
    """Deletes the file with this name unless a process has it locked."""
    _probe_lock(folder, name, delete_if_unlocked=True)


def _probe_lock(folder: str, name: str, *, delete_if_unlocked: bool) -> bool:
    """Returns whether no process has the file locked, for example because the file does not exist."""
    path = os.path.join(folder, name)  # noqa: PTH118
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        # The lock is shared, so that two processes that check at the same time do not mistake each other for the owner.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if delete_if_unlocked:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
