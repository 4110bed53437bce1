"""Files that live processes have locked: how processes of one host know that another has died, at once and without a clock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
import weakref
from typing import Final

from stagecrew.errors import StoreUnavailable

__all__ = ["SessionFile", "alive", "reap"]

_TRIES: Final = 10


class SessionFile:
    """A file of its own, locked until `release` or the end of this process, however it ends.

    The kernel keeps a lock (flock) as long as any process has the open file: programs that are started do not get it, and
    forks made by Python give it back. A fork made by other means keeps the session alive when its parent has died, until it
    ends itself or starts another program.
    """

    def __init__(self, folder: str) -> None:
        self._descriptor: int | None = None
        for _ in range(_TRIES):
            self.name = uuid.uuid4().hex
            self.path = os.path.join(folder, self.name)  # noqa: PTH118 (paths of descriptors, as below)
            self._descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            _open.add(self)
            with contextlib.suppress(BlockingIOError):  # somebody just looks whether it is an old one
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.held():
                    return
            self.release()
        raise StoreUnavailable(f"no file could be locked in {folder}: somebody deletes them")

    def held(self) -> bool:
        """Whether the file that others find under this name is the one that is locked here."""
        descriptor = self._descriptor
        if descriptor is None:
            return False
        try:
            found, mine = os.stat(self.path), os.fstat(descriptor)  # noqa: PTH116
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)

    def release(self) -> None:
        """Ends it: the file is gone, and whoever looks finds nobody. Repeatable."""
        descriptor = self._descriptor
        if descriptor is None:
            return
        if self.held():
            with contextlib.suppress(OSError):
                os.unlink(self.path)  # noqa: PTH108
        self._descriptor = None
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing does not free it while a fork has it too
        os.close(descriptor)

    def _drop(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_open: weakref.WeakSet[SessionFile] = weakref.WeakSet()


def _forget() -> None:
    """In a fork: the lock is its parent's, and must not outlive it."""
    for file in list(_open):
        file._drop()


os.register_at_fork(after_in_child=_forget)


def alive(folder: str, name: str) -> bool:
    """Whether a process has the file of this name locked."""
    return not _unlocked(folder, name, unlink=False)


def reap(folder: str, name: str) -> None:
    """Deletes the file of this name, unless a process has it locked."""
    _unlocked(folder, name, unlink=True)


def _unlocked(folder: str, name: str, *, unlink: bool) -> bool:
    path = os.path.join(folder, name)  # noqa: PTH118
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        # Shared: two that look at once do not take each other for the owner.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if unlink:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
