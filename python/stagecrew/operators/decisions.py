"""What was decided about commits: the record that is written ahead of them. An interface, and two stores behind it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any, Final, Protocol

from stagecrew.errors import CommitSuperseded, CommitUnknown

__all__ = ["Decisions", "FileDecisions", "MemoryDecisions"]

#: A record: what JSON can say.
Record = dict[str, Any]


class Decisions(Protocol):
    """Keeps one record for each commit id, changed by compare-and-set alone.

    A write has three outcomes. It returns: the record is there, whatever fails from now on. `CommitSuperseded`: it is not, as
    another driver wrote meanwhile. `CommitUnknown`: nobody knows; nothing may be deleted, and repeating the write tells.
    """

    def read(self, key: str) -> tuple[int, Record] | None:
        """The version and the record of a commit; None when there is none."""

    def write(self, key: str, record: Record, version: int) -> int:
        """Puts a record in the place of that version (0: there was none), and answers its own."""


class MemoryDecisions:
    """Lives as long as the driver: for commits that nobody repeats."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, tuple[int, str]] = {}

    def read(self, key: str) -> tuple[int, Record] | None:
        """See `Decisions`."""
        with self._lock:
            version, text = self._records.get(key, (0, ""))
        return (version, json.loads(text)) if version else None

    def write(self, key: str, record: Record, version: int) -> int:
        """See `Decisions`."""
        text = json.dumps(record)
        with self._lock:
            current, _ = self._records.get(key, (0, ""))
            if current != version:
                raise CommitSuperseded(_superseded(key))
            self._records[key] = (version + 1, text)
        return version + 1


class FileDecisions:
    """A folder on a local disk, for drivers of one host. A record is whole and on the disk when its write returns.

    Writers take turns by a lock of the operating system, which is free when its holder dies. Not for network file systems.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = pathlib.Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def read(self, key: str) -> tuple[int, Record] | None:
        """See `Decisions`."""
        try:
            text = self._path(key).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        stored = json.loads(text)
        return stored["version"], stored["record"]

    def write(self, key: str, record: Record, version: int) -> int:
        """See `Decisions`."""
        with self._alone():
            known = self.read(key)
            if (known[0] if known else 0) != version:
                if known and known[0] == version + 1 and known[1] == record:
                    return version + 1  # our own write, whose outcome was not known
                raise CommitSuperseded(_superseded(key))
            handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=".", suffix=".tmp")
            try:
                with open(handle, "w", encoding="utf-8") as file:  # noqa: PTH123 (a descriptor)
                    json.dump({"version": version + 1, "record": record}, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self._path(key))  # noqa: PTH105
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)  # noqa: PTH108
                raise
            try:
                sync(self._folder)
            except OSError as error:
                raise CommitUnknown(
                    f"the record of commit {key!r} was written, but may not be on the disk: {error}"
                ) from error
        return version + 1

    def _path(self, key: str) -> pathlib.Path:
        return self._folder / f"{urllib.parse.quote(key, safe='')}{_SUFFIX}"

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with open(self._folder / ".lock", "ab") as lock:  # noqa: PTH123 (its descriptor is locked)
            due = time.monotonic() + _LOCK
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > due:
                        raise CommitUnknown(
                            f"nothing was written: for {_LOCK:g} s another process has held {self._folder / '.lock'}; is it stopped?"
                        ) from None
                    time.sleep(0.01)
            yield


_SUFFIX: Final = ".json"
#: How long one waits for another's write, in seconds.
_LOCK: Final = 60.0


def sync(path: str | os.PathLike[str]) -> None:
    """What is written of a local file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _superseded(key: str) -> str:
    return (
        f"another driver has written the record of commit {key!r} meanwhile: that one goes on, this one changes nothing"
    )
