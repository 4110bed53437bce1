"""The state storage: the bytes of states on any file system that `pyarrow.fs` supports.

The references to the states are in the coordination store.
"""

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

from stagecrew.errors import ConfigurationError, StateCorrupt, StateStorageError
from stagecrew.files import address, expanded, file_system, is_local, is_store, quoted, sync

__all__ = ["Reference", "StateStorage", "StoredState"]


@dataclasses.dataclass(frozen=True)
class Reference:
    """The name of a stored state, with its length and SHA-256, which prove that the state is complete."""

    #: Relative to the folder of the storage, so it stays valid when the storage is moved or copied.
    name: str
    length: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class StoredState:
    """A file of the storage.

    `modified` is a time of the storage's own clock, or None if the storage does not report it.
    """

    name: str
    length: int
    modified: float | None


class StateStorage:
    """Stores states at a path or URI (`/path`, `file://`, `s3://`, `gs://`, `hdfs://`), or in a given file system.

    Guarantees:

    * When `write` returns, the state's file is complete and closed; on a local disk, it is also synced. The file never
      changes after that.
    * `read` returns exactly the bytes that were written.
    * Only `discard` deletes states.

    Not promised: that a failed `write` leaves no file. A sweep deletes such a file.

    Files and folders on a local disk are readable only by their owner. Elsewhere, the access control of the storage
    decides who can read states. A local folder must exist, so that an unmounted disk is not mistaken for an empty
    storage.
    """

    def __init__(self, uri: str | os.PathLike[str], filesystem: pyarrow.fs.FileSystem | None = None) -> None:
        text = expanded(os.fspath(uri))
        self._where = address(text) if "://" in text else text
        if not text:
            raise ConfigurationError(
                "the address of the state storage is empty: use a path, or a URI such as s3://bucket/folder"
            )
        try:
            self._filesystem, path = file_system(text, filesystem)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError):
            # The cause is not shown, because it repeats the URI, which can contain a secret.
            raise ConfigurationError(
                f"{self._where} is not the address of a state storage: use a path, or a URI of file, s3, gs or hdfs "
                "with its special characters quoted"
            ) from None
        except (OSError, pa.ArrowException) as error:
            raise StateStorageError(
                f"the file system of {self._where} cannot be opened ({error}): check its address and its credentials"
            ) from error
        while isinstance(self._filesystem, pyarrow.fs.SubTreeFileSystem):
            path = posixpath.join(self._filesystem.base_path, path)
            self._filesystem = self._filesystem.base_fs
        self._local = is_local(self._filesystem)
        self._folder = os.path.abspath(path or "/") if self._local else path  # noqa: PTH100 (no links are followed)
        self._synced_folders: set[str] = set()
        if self._local and not os.path.isdir(self._folder):  # noqa: PTH112
            raise StateStorageError(
                f"the state storage {self._where} is not an existing folder: create it, or mount its disk"
            )

    def __repr__(self) -> str:
        return f"StateStorage({self._where!r})"

    def write(self, hint: str, data: bytes, folder: str = "") -> Reference:
        """Writes a state under a new unique name that contains the hint, in a folder of the storage.

        Raises `StateStorageError`.
        """
        folder = _checked(folder) if folder else ""
        name = posixpath.join(folder, f"{quoted(hint)}-{uuid.uuid4().hex}")
        path = self._path(name)
        with self._translated_errors(f"state {name} could not be written to"):
            try:
                if self._local:
                    self._create_folder(folder)
                    _write_local(path, data)
                else:
                    if not is_store(self._filesystem):
                        self._filesystem.create_dir(posixpath.dirname(path), recursive=True)
                    with self._filesystem.open_output_stream(path) as stream:
                        stream.write(data)
            except BaseException:
                with contextlib.suppress(OSError, pa.ArrowException):
                    self._filesystem.delete_file(path)  # the name is unique, so no other process wrote this file
                raise
        return Reference(name, len(data), hashlib.sha256(data).hexdigest())

    def read(self, reference: Reference) -> bytes:
        """Returns the state.

        Raises `StateCorrupt` if the state is missing or has changed since it was written, and `StateStorageError` if it
        cannot be read.
        """
        name = _checked(reference.name)
        try:
            with (
                self._translated_errors(f"state {name} could not be read from"),
                self._filesystem.open_input_stream(self._path(name)) as stream,
            ):
                data: bytes = stream.read(reference.length + 1)
        except StateStorageError as error:
            if isinstance(error.__cause__, FileNotFoundError) and self._folder_exists():
                raise StateCorrupt(
                    f"state {name} in {self._where} no longer exists: restore a copy, or remove its handle"
                ) from error
            raise
        if len(data) != reference.length:
            raise StateCorrupt(
                f"state {name} in {self._where} is "
                f"{'longer' if len(data) > reference.length else f'{len(data)} bytes'}, but {reference.length} bytes "
                "were written. It was not deleted: restore a copy, or remove its handle"
            )
        if hashlib.sha256(data).hexdigest() != reference.sha256:
            raise StateCorrupt(
                f"the SHA-256 of state {name} in {self._where} has changed since it was written. It was not deleted: "
                "restore a copy, or remove its handle"
            )
        return data

    def discard(self, state: Reference | StoredState) -> None:
        """Deletes a state if it exists. After a `StateStorageError`, this can be called again."""
        name = _checked(state.name)
        with (
            self._translated_errors(f"state {name} could not be deleted from"),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
        ):
            self._filesystem.delete_file(self._path(name))

    def names(self, folder: str) -> list[StoredState]:
        """Returns the states of a folder, sorted by name; empty if the folder does not exist."""
        path = self._path(_checked(folder))
        with self._translated_errors(f"states could not be listed in {folder} of"):
            infos = self._filesystem.get_file_info(pyarrow.fs.FileSelector(path, allow_not_found=True))
        return [
            StoredState(f"{folder}/{info.base_name}", info.size or 0, _modified(info))
            for info in sorted(infos, key=lambda info: str(info.base_name))
            if info.type == pyarrow.fs.FileType.File
        ]

    def now(self, folder: str) -> float:
        """Returns the time of the storage's own clock, which dates its files. To read it, this writes a file."""
        probe = self.write("clock", b"", folder)
        try:
            with self._translated_errors("the time could not be read from"):
                modified = _modified(self._filesystem.get_file_info(self._path(probe.name)))
        finally:
            self.discard(probe)
        if modified is None:
            raise StateStorageError(
                f"{self._where} does not report when its files were written, so their age is unknown: delete old "
                "states by hand"
            )
        return modified

    def _path(self, name: str) -> str:
        return posixpath.join(self._folder, name)

    def _create_folder(self, folder: str) -> None:
        """Creates and syncs a local folder that only its owner can access."""
        path = self._folder
        for part in [part for part in folder.split("/") if part]:
            parent, path = path, posixpath.join(path, part)
            if path in self._synced_folders:
                continue
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)  # noqa: PTH102
            sync(parent)
            self._synced_folders.add(path)

    def _folder_exists(self) -> bool:
        """Returns whether the folder of the storage exists. While its disk is not mounted, it does not."""
        with contextlib.suppress(OSError, pa.ArrowException):
            return bool(self._filesystem.get_file_info(self._folder).type == pyarrow.fs.FileType.Directory)
        return False

    @contextlib.contextmanager
    def _translated_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            hint = _REMEDIES.get(getattr(error, "errno", None) or 0, "")
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
    """Returns the name if it stays inside the storage's folder. A damaged reference can contain any name."""
    if not all(part not in ("", ".", "..") and part.isprintable() and "\\" not in part for part in name.split("/")):
        raise StateCorrupt(f"{name!r} is not the name of a state: the reference to it is damaged; remove its handle")
    return name


_REMEDIES: Final = {
    errno.ENOSPC: ". No space is left: free some",
    errno.EDQUOT: ". The quota is used up: free some space, or raise the quota",
    errno.EROFS: ". It is read-only: use a storage that this user can write to",
    errno.EACCES: ". This user has no permission: use a storage that this user can write to",
    errno.EPERM: ". This user has no permission: use a storage that this user can write to",
}
