"""Where the bytes of states lie: any file system that `pyarrow.fs` knows. What refers to them is kept elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import posixpath
import uuid
from collections.abc import Iterator
from typing import Final

import pyarrow as pa
import pyarrow.fs

from stagecrew.errors import RecoveryMisused, StateCorrupt, StateStorageError
from stagecrew.files import address, file_system, is_local, is_store, quoted, sync

__all__ = ["Reference", "StateStorage", "Stored"]


@dataclasses.dataclass(frozen=True)
class Reference:
    """Names a state that was written, and says how it is known to be whole."""

    #: Below the folder of the storage: the same when that is moved or copied elsewhere.
    name: str
    length: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Stored:
    """A file of the storage. `modified` is when it was written, by the storage's own clock; None where that does not tell."""

    name: str
    length: int
    modified: float | None


class StateStorage:
    """States at a path or URI: `/path`, `file://`, `s3://`, `gs://`, `hdfs://`; or in a folder of a given file system.

    Guarantees:

    * A state is whole, closed, and on the disk where that is this host's, when `write` returns. It never changes from then on.
    * What `read` returns is what was written.
    * Nothing is deleted but what `discard` was called for.

    Not promised: that nothing is left of a `write` that failed; `sweep` takes it away. Files and folders on a local disk are for
    their owner alone; elsewhere, the access that the storage gives decides who can read states. A local folder must be there,
    so that a disk which is not mounted is not taken for an empty storage.
    """

    def __init__(self, uri: str | os.PathLike[str], filesystem: pyarrow.fs.FileSystem | None = None) -> None:
        text = os.fspath(uri)
        self._where = address(text) if "://" in text else text
        if not text:
            raise RecoveryMisused("a state storage needs a folder: a path, or a URI such as s3://bucket/folder")
        try:
            self._filesystem, path = file_system(text, filesystem)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError):
            # The cause is not shown: it repeats the URI, and there may be a secret in it.
            raise RecoveryMisused(
                f"{self._where} is no place for states: give a path, or a URI of file, s3, gs or hdfs with its special "
                "characters quoted"
            ) from None
        except (OSError, pa.ArrowException) as error:
            raise StateStorageError(f"the file system of {self._where} cannot be opened: {error}") from error
        while isinstance(self._filesystem, pyarrow.fs.SubTreeFileSystem):
            path = posixpath.join(self._filesystem.base_path, path)
            self._filesystem = self._filesystem.base_fs
        self._local = is_local(self._filesystem)
        self._folder = os.path.abspath(path or "/") if self._local else path  # noqa: PTH100 (no links are followed)
        self._made: set[str] = set()
        if self._local and not os.path.isdir(self._folder):  # noqa: PTH112
            raise StateStorageError(
                f"the state storage {self._where} is no folder that is there: make it, or mount its disk"
            )

    def __repr__(self) -> str:
        return f"StateStorage({self._where!r})"

    def write(self, hint: str, data: bytes, folder: str = "") -> Reference:
        """Keeps a state, under a fresh name with the hint in it, in a folder of the storage. Raises `StateStorageError`."""
        folder = _checked(folder) if folder else ""
        name = posixpath.join(folder, f"{quoted(hint)}-{uuid.uuid4().hex}")
        path = self._path(name)
        with self._failing(f"state {name} could not be written to"):
            try:
                if self._local:
                    self._make(folder)
                    _write_local(path, data)
                else:
                    if not is_store(self._filesystem):
                        self._filesystem.create_dir(posixpath.dirname(path), recursive=True)
                    with self._filesystem.open_output_stream(path) as stream:
                        stream.write(data)
            except BaseException:
                with contextlib.suppress(OSError, pa.ArrowException):
                    self._filesystem.delete_file(path)  # under this name, it is nobody else's
                raise
        return Reference(name, len(data), hashlib.sha256(data).hexdigest())

    def read(self, reference: Reference) -> bytes:
        """The state. Raises `StateCorrupt` when it is not as it was written, `StateStorageError` when it could not be read."""
        name = _checked(reference.name)
        try:
            with (
                self._failing(f"state {name} could not be read from"),
                self._filesystem.open_input_stream(self._path(name)) as stream,
            ):
                data: bytes = stream.read(reference.length + 1)
        except StateStorageError as error:
            if isinstance(error.__cause__, FileNotFoundError) and self._is_there():
                raise StateCorrupt(
                    f"state {name} in {self._where} is not there any more. Put a copy in its place, or remove its handle"
                ) from error
            raise
        if len(data) != reference.length:
            raise StateCorrupt(
                f"state {name} in {self._where} is {'longer' if len(data) > reference.length else f'{len(data)} bytes'}, "
                f"but {reference.length} bytes were written. It is not deleted: put a copy in its place, or remove its handle"
            )
        if hashlib.sha256(data).hexdigest() != reference.sha256:
            raise StateCorrupt(
                f"state {name} in {self._where} has another SHA-256 than when it was written. It is not deleted: put a copy in "
                "its place, or remove its handle"
            )
        return data

    def discard(self, state: Reference | Stored) -> None:
        """Deletes a state; one that is gone is fine. Raises `StateStorageError`: call it again then."""
        name = _checked(state.name)
        with (
            self._failing(f"state {name} could not be deleted from"),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
        ):
            self._filesystem.delete_file(self._path(name))

    def names(self, folder: str) -> list[Stored]:
        """The states of a folder, sorted; none when there is no such folder."""
        path = self._path(_checked(folder))
        with self._failing(f"states could not be listed in {folder} of"):
            infos = self._filesystem.get_file_info(pyarrow.fs.FileSelector(path, allow_not_found=True))
        return [
            Stored(f"{folder}/{info.base_name}", info.size or 0, _modified(info))
            for info in sorted(infos, key=lambda info: str(info.base_name))
            if info.type == pyarrow.fs.FileType.File
        ]

    def now(self, folder: str) -> float:
        """What time it is by the clock that dates the files of this storage. A file is written to learn it."""
        probe = self.write("clock", b"", folder)
        try:
            with self._failing("the time could not be learned from"):
                modified = _modified(self._filesystem.get_file_info(self._path(probe.name)))
        finally:
            self.discard(probe)
        if modified is None:
            raise StateStorageError(f"{self._where} does not tell when its files were written")
        return modified

    def _path(self, name: str) -> str:
        return posixpath.join(self._folder, name)

    def _make(self, folder: str) -> None:
        """The folder is there, and on the disk, for its owner alone."""
        path = self._folder
        for part in [part for part in folder.split("/") if part]:
            above, path = path, posixpath.join(path, part)
            if path in self._made:
                continue
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)  # noqa: PTH102
            sync(above)
            self._made.add(path)

    def _is_there(self) -> bool:
        """Whether the storage itself is; not where its disk is not mounted."""
        with contextlib.suppress(OSError, pa.ArrowException):
            return bool(self._filesystem.get_file_info(self._folder).type == pyarrow.fs.FileType.Directory)
        return False

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            hint = _HINTS.get(getattr(error, "errno", None) or 0, "")
            raise StateStorageError(f"{what} {self._where}: {error}{hint}") from error


def _modified(info: pyarrow.fs.FileInfo) -> float | None:
    return None if info.mtime_ns is None else info.mtime_ns / 1e9


def _write_local(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:  # noqa: PTH123 (a descriptor)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync(posixpath.dirname(path))


def _checked(name: str) -> str:
    """A name that stays in the storage's folder, whatever wrote it."""
    if not all(part not in ("", ".", "..") and part.isprintable() and "\\" not in part for part in name.split("/")):
        raise StateCorrupt(f"{name!r} is no name of a state")
    return name


_HINTS: Final = {
    errno.ENOSPC: ". There is no room left: make room",
    errno.EDQUOT: ". The quota is used up: make room",
    errno.EROFS: ". It is read-only: give this user a storage that it may write to",
    errno.EACCES: ". This user may not: give it a storage that it may write to",
    errno.EPERM: ". This user may not: give it a storage that it may write to",
}
