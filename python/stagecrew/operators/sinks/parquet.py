"""The sink for Parquet files. One rename makes the folder of a commit visible."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from stagecrew.errors import CommitConflict, CommitFailed, OperatorMisused
from stagecrew.files import (
    exists,
    file_system,
    is_local,
    is_store,
    list_files,
    move,
    place,
    quoted,
    read_whole,
    remove_file,
    remove_folder,
    sync,
    write_whole,
)
from stagecrew.operating_system import mount_points
from stagecrew.operators.commit_records import file_of
from stagecrew.operators.schemas import nullable_schema
from stagecrew.operators.sinks.staged import (
    fields_of,
    keep_only,
    open_first,
    open_folder,
    text_of_mark,
    write_empty,
    write_part,
)

if TYPE_CHECKING:
    from stagecrew.operators.committer import Message, Staging

__all__ = ["ParquetSink"]

#: The file in a committed folder that names the commit. Readers skip names that begin with an underscore.
_MARK: Final = "_stagecrew.json"
#: The file of a commit without rows.
_EMPTY: Final = "part-empty.parquet"


class ParquetSink:
    """Parquet files on a local disk or HDFS. Readers see all files of a commit or none.

    The file system must rename folders atomically. One rename makes the folder of a commit visible. The
    folder contains the commit's id. On a local disk, committed files are durable.

    * `mode="create"`: `path` is that folder. It must not exist, or be an empty folder on a local disk that is neither a
      mount point nor a symbolic link. Otherwise the commit raises `CommitConflict`.
    * `mode="append"`: `path` is a table of many commits. Each commit has its own folder `stagecrew_commit=<id>`, which
      Spark and Arrow read as a partition column.

    Tasks stage their rows in a folder `_stagecrew-…` with the same parent. Readers skip this folder, and it is deleted
    after the commit.

    Args:
        path: A path, or a URI for `pyarrow.fs`.
        mode: `"create"` or `"append"`.
        filesystem: The file system of the path, by default that of the URI, or the local disk. For HDFS without its
            native library: `pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem("webhdfs", host=…,
            port=…)))`.
        options: Options of `pyarrow.parquet.ParquetWriter`, such as `compression`.

    Raises:
        OperatorMisused: If the mode is unknown, or the path is in an object store, which cannot rename.

    Examples:
        >>> ParquetSink("/data/flights", mode="append", compression="zstd")
        <Parquet files in /data/flights>
        >>> topology.commit(dataset, ParquetSink("/data/flights/2024-06-01"))  # doctest: +SKIP

    Source: Spark's FileOutputCommitter, which renames each file.
    """

    def __init__(
        self,
        path: Any,
        mode: Literal["create", "append"] = "create",
        filesystem: pyarrow.fs.FileSystem | None = None,
        **options: Any,
    ) -> None:
        if mode not in ("create", "append"):
            raise OperatorMisused(f"mode is 'create' or 'append', not {mode!r}")
        self._mode, self._options = mode, options
        self._filesystem, self._path = file_system(path, filesystem)
        if is_store(self._filesystem):
            raise OperatorMisused("object stores cannot rename folders: use ObjectSink there")

    @property
    def identity(self) -> str:
        """The path, its file system and the mode, without secrets."""
        return f"<Parquet files, to {self._mode}, in {place(self._filesystem, self._path)}>"

    def __repr__(self) -> str:
        return f"<Parquet files in {self._path}>"

    def begin(self, staging: Staging) -> None:
        """See `Committer.begin`."""
        try:
            self._open(staging)
        except (OSError, RuntimeError) as error:  # fsspec raises RuntimeError for errors of a server
            raise CommitFailed(
                f"{self._path} cannot be written: {error}. Check the path and its permissions"
            ) from error

    def _open(self, staging: Staging) -> None:
        folder = self._staged(staging)
        if self._mode == "append":
            open_first(self._filesystem, folder, staging, self._path, self._path, self._schema)
        elif not self._is_free():
            raise self._conflict()
        else:
            open_folder(self._filesystem, folder, staging)

    def _schema(self) -> pa.Schema | None:
        """The schema of the files that are already committed to the table, or None if no file exists."""
        for file in list_files(self._filesystem, self._path, hidden=False):
            if file.endswith(".parquet"):
                return pq.read_schema(file, filesystem=self._filesystem)
        return None

    def stage(
        self, staging: Staging, partition: int, attempt: int, batches: Iterator[pa.RecordBatch]
    ) -> Message | None:
        """See `Committer.stage`."""
        folder = self._staged(staging)
        return write_part(
            self._filesystem, folder, partition, attempt, batches, nullable_schema(staging.schema), self._options
        )

    def commit(self, staging: Staging, messages: Sequence[Message]) -> None:
        """See `Committer.commit`."""
        if self.done(staging.commit_id):
            self._sync_parent(staging)
            return
        # Check before any file is moved, because an earlier try may already have renamed the folder.
        if self._mode == "create" and not self._is_free():
            raise self._conflict()
        names = [file_of(staging.commit_id, message) for message in messages]
        staged, folder = self._staged(staging), self._assembled(staging)
        self._filesystem.create_dir(folder, recursive=False)
        for name in names:
            self._move_in(f"{staged}/{name}", f"{folder}/{name}", staging)
        if not names:
            write_empty(self._filesystem, f"{folder}/{_EMPTY}", nullable_schema(staging.schema))
        write_whole(self._filesystem, f"{folder}/{_MARK}", text_of_mark(staging, mark=staging.mark))
        self._make_visible(folder, {_MARK, *(names or [_EMPTY])}, staging)

    def _move_in(self, source: str, destination: str, staging: Staging) -> None:
        """Moves a staged file into the folder that is renamed later.

        An earlier try that was interrupted may already have moved the file.
        """
        try:
            move(self._filesystem, source, destination)
        except OSError:
            if not exists(self._filesystem, destination) and not self.done(staging.commit_id):
                raise

    def _make_visible(self, folder: str, names: set[str], staging: Staging) -> None:
        target = self._target(staging.commit_id)
        try:
            self._make_exact(folder, names)
            if not is_local(self._filesystem) and exists(self._filesystem, target):
                raise FileExistsError(target)  # such a file system would move the folder into the existing one
            move(self._filesystem, folder, target)
        except OSError as error:
            if self.done(staging.commit_id):
                return
            if self._mode == "create" and not self._is_free():
                raise self._conflict() from error
            raise
        self._sync_parent(staging)
        if not self.done(staging.commit_id):  # the rename moved it into a folder that another process has just created
            raise self._conflict()

    def _make_exact(self, folder: str, names: set[str]) -> None:
        """Deletes files that are not part of the commit.

        Another driver may have been interrupted while it wrote, or may have discarded files.
        """
        found = {posixpath.basename(file) for file in list_files(self._filesystem, folder)}
        for name in found - names:
            remove_file(self._filesystem, f"{folder}/{name}")
        if lost := names - found:
            raise FileNotFoundError(f"{folder} has no {min(lost)}")

    def _sync_parent(self, staging: Staging) -> None:
        if is_local(self._filesystem):
            sync(posixpath.dirname(self._target(staging.commit_id)) or ".")

    def done(self, commit_id: str) -> bool:
        """See `Committer.done`."""
        return self._stored(commit_id) is not None

    def stored_mark(self, commit_id: str) -> str | None:
        """Returns the mark of a visible commit. See `Committer`."""
        return (self._stored(commit_id) or {}).get("mark")

    def _stored(self, commit_id: str) -> dict[str, Any] | None:
        """The fields of a commit's mark, if its folder exists."""
        path = f"{self._target(commit_id)}/{_MARK}"
        try:
            data = read_whole(self._filesystem, path)
        except (OSError, RuntimeError) as error:
            raise CommitFailed(f"{self._path} cannot be read: {error}. Check the path and its permissions") from error
        fields = None if data is None else fields_of(data, path)
        return fields if fields is not None and fields["commit"] == commit_id else None

    def discard(self, staging: Staging, kept: Sequence[Message]) -> None:
        """See `Committer.discard`."""
        keep_only(self._filesystem, self._staged(staging), ())
        assembled = self._assembled(staging)
        self._remove_at_once(assembled)
        if not is_local(self._filesystem):  # a rename may have moved it into a folder that another process created
            remove_folder(
                self._filesystem, posixpath.join(self._target(staging.commit_id), posixpath.basename(assembled))
            )

    def _remove_at_once(self, folder: str) -> None:
        """Renames the folder, and then deletes it.

        So another driver that is about to rename the folder finds either the complete folder or no folder.
        """
        renamed = f"{folder}-gone"
        remove_folder(self._filesystem, renamed)
        try:
            move(self._filesystem, folder, renamed)
        except OSError:
            if exists(self._filesystem, folder):
                raise
            return
        remove_folder(self._filesystem, renamed)

    def _target(self, commit_id: str) -> str:
        return self._path if self._mode == "create" else f"{self._path}/stagecrew_commit={quoted(commit_id)}"

    def _staged(self, staging: Staging) -> str:
        # Without the target's name, which has a "=" in append mode: Spark reads such folders despite the underscore.
        return posixpath.join(posixpath.dirname(self._target(staging.commit_id)), f"_stagecrew-{staging.run}")

    def _assembled(self, staging: Staging) -> str:
        return f"{self._staged(staging)}-whole"

    def _is_free(self) -> bool:
        """Whether the target does not exist, or is an empty folder that a rename can replace."""
        if is_local(self._filesystem) and _fixed(self._path):
            return False
        info = self._filesystem.get_file_info(self._path)
        if info.type == pyarrow.fs.FileType.NotFound:
            return True
        return (
            info.type == pyarrow.fs.FileType.Directory
            and is_local(self._filesystem)
            and not self._filesystem.get_file_info(pyarrow.fs.FileSelector(self._path))
        )

    def _conflict(self) -> CommitConflict:
        if is_local(self._filesystem) and (kind := _fixed(self._path)):
            return CommitConflict(
                f"{self._path} is {kind}, which a rename cannot replace, and mode 'create' must create the folder. "
                "Write to a folder that does not exist yet, such as one in it, or use mode 'append'"
            )
        return CommitConflict(
            f"{self._path} already exists, and mode 'create' must create it. Write elsewhere, remove it, or use mode "
            "'append'"
        )


def _fixed(path: str) -> str:
    """Returns "a mount point" or "a symbolic link" if a rename cannot replace this path, else an empty string."""
    if os.path.islink(path):  # noqa: PTH114
        return "a symbolic link"
    real = os.path.realpath(path)
    is_mounted = os.path.ismount(real) or any(point == real for point, _ in mount_points() or ())
    return "a mount point" if is_mounted else ""
