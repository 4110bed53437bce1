"""Parquet files in a folder that appears by one rename."""

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
from stagecrew.mounts import mounted
from stagecrew.operators.commit_records import file_of
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

#: In a committed folder: which commit it is. Readers skip names that begin so.
_MARK: Final = "_stagecrew.json"
#: Of a commit without rows.
_EMPTY: Final = "part-empty.parquet"


class ParquetSink:
    """Parquet files on a file system that renames folders at once: local disks, and HDFS through `pyarrow.fs`.

    Readers see all files of a commit or none: its folder appears by one rename, with the commit's id in it.

    * `mode="create"`: `path` is that folder. It must not be there yet, or be an empty folder that is neither a mount point nor a
      symbolic link: else `CommitConflict`.
    * `mode="append"`: `path` is a table of many commits, each in a folder `stagecrew_commit=<id>` of its own, which Spark and Arrow
      read as a partition column.

    Tasks stage beside the folder, in `_stagecrew-…`, which readers skip and which is gone behind the commit. On a local disk what
    is committed has reached the disk.

    `path` is a path, or a URI for `pyarrow.fs`; `filesystem` says where, if it is not in the URI: for HDFS without its native
    library, `pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem("webhdfs", host=…, port=…)))`. `options` are those
    of `pyarrow.parquet.ParquetWriter`, such as `compression`. Raises `OperatorMisused` for another mode, and an object store.

    Source: Spark's FileOutputCommitter, whose rename is one for each file.
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
            raise OperatorMisused("object stores rename no folders: use ObjectSink there")

    @property
    def identity(self) -> str:
        """See `Committer`."""
        return f"<Parquet files, to {self._mode}, in {place(self._filesystem, self._path)}>"

    def __repr__(self) -> str:
        return f"<Parquet files in {self._path}>"

    def begin(self, staging: Staging) -> None:
        """See `Committer`."""
        try:
            self._make_room(staging)
        except (OSError, RuntimeError) as error:  # the second is fsspec's, for what a server says
            raise CommitFailed(f"{self._path} cannot be written: {error}") from error

    def _make_room(self, staging: Staging) -> None:
        folder = self._staged(staging)
        if self._mode == "append":
            open_first(self._filesystem, folder, staging, self._path, self._path, self._schema)
        elif not self._is_free():
            raise self._conflict()
        else:
            open_folder(self._filesystem, folder, staging)

    def _schema(self) -> pa.Schema | None:
        """That of what is committed to a table."""
        for file in list_files(self._filesystem, self._path, hidden=False):
            if file.endswith(".parquet"):
                return pq.read_schema(file, filesystem=self._filesystem)
        return None

    def stage(
        self, staging: Staging, partition: int, attempt: int, batches: Iterator[pa.RecordBatch]
    ) -> Message | None:
        """See `Committer`."""
        folder = self._staged(staging)
        return write_part(self._filesystem, folder, partition, attempt, batches, staging.schema, self._options)

    def commit(self, staging: Staging, messages: Sequence[Message]) -> None:
        """See `Committer`."""
        if self.done(staging.commit_id):
            self._sync_parent(staging)
            return
        # Before anything is brought there: it may be in there already.
        if self._mode == "create" and not self._is_free():
            raise self._conflict()
        names = [file_of(staging.commit_id, message) for message in messages]
        staged, folder = self._staged(staging), self._assembled(staging)
        self._filesystem.create_dir(folder, recursive=False)
        for name in names:
            self._bring(f"{staged}/{name}", f"{folder}/{name}", staging)
        if not names:
            write_empty(self._filesystem, f"{folder}/{_EMPTY}", staging.schema)
        write_whole(self._filesystem, f"{folder}/{_MARK}", text_of_mark(staging, mark=staging.mark))
        self._appear(folder, {_MARK, *(names or [_EMPTY])}, staging)

    def _bring(self, source: str, destination: str, staging: Staging) -> None:
        """Moves a staged file among those that will appear. It may be there already, by a commit that was cut short."""
        try:
            move(self._filesystem, source, destination)
        except OSError:
            if not exists(self._filesystem, destination) and not self.done(staging.commit_id):
                raise

    def _appear(self, folder: str, names: set[str], staging: Staging) -> None:
        target = self._target(staging.commit_id)
        try:
            self._make_exact(folder, names)
            if not is_local(self._filesystem) and exists(self._filesystem, target):
                raise FileExistsError(target)  # where a rename onto a folder moves into it
            move(self._filesystem, folder, target)
        except OSError as error:
            if self.done(staging.commit_id):
                return
            if self._mode == "create" and not self._is_free():
                raise self._conflict() from error
            raise
        self._sync_parent(staging)
        if not self.done(staging.commit_id):  # it was moved into a folder that another made meanwhile
            raise self._conflict()

    def _make_exact(self, folder: str, names: set[str]) -> None:
        """Whoever did the same may have been cut short in a write here, or have taken all away."""
        there = {posixpath.basename(file) for file in list_files(self._filesystem, folder)}
        for name in there - names:
            remove_file(self._filesystem, f"{folder}/{name}")
        if lost := names - there:
            raise FileNotFoundError(f"{folder} has no {min(lost)}")

    def _sync_parent(self, staging: Staging) -> None:
        if is_local(self._filesystem):
            sync(posixpath.dirname(self._target(staging.commit_id)) or ".")

    def done(self, commit_id: str) -> bool:
        """See `Committer`."""
        return self._known(commit_id) is not None

    def stored_mark(self, commit_id: str) -> str | None:
        """See `Committer`."""
        return (self._known(commit_id) or {}).get("mark")

    def _known(self, commit_id: str) -> dict[str, Any] | None:
        """The fields of a commit's mark, if its folder is there."""
        path = f"{self._target(commit_id)}/{_MARK}"
        try:
            data = read_whole(self._filesystem, path)
        except (OSError, RuntimeError) as error:
            raise CommitFailed(f"{self._path} cannot be read: {error}") from error
        fields = None if data is None else fields_of(data, path)
        return fields if fields is not None and fields["commit"] == commit_id else None

    def discard(self, staging: Staging, kept: Sequence[Message]) -> None:
        """See `Committer`."""
        keep_only(self._filesystem, self._staged(staging), ())
        assembled = self._assembled(staging)
        self._take_away(assembled)
        if not is_local(self._filesystem):  # where it may have been moved into a folder that another made
            remove_folder(
                self._filesystem, posixpath.join(self._target(staging.commit_id), posixpath.basename(assembled))
            )

    def _take_away(self, folder: str) -> None:
        """Another driver of the same commit may be about to rename it: that one finds all of it, or nothing."""
        gone = f"{folder}-gone"
        remove_folder(self._filesystem, gone)
        try:
            move(self._filesystem, folder, gone)
        except OSError:
            if exists(self._filesystem, folder):
                raise
            return
        remove_folder(self._filesystem, gone)

    def _target(self, commit_id: str) -> str:
        return self._path if self._mode == "create" else f"{self._path}/stagecrew_commit={quoted(commit_id)}"

    def _staged(self, staging: Staging) -> str:
        # Without the target's name: Spark shows what begins with an underscore where it has a = in it.
        return posixpath.join(posixpath.dirname(self._target(staging.commit_id)), f"_stagecrew-{staging.run}")

    def _assembled(self, staging: Staging) -> str:
        return f"{self._staged(staging)}-whole"

    def _is_free(self) -> bool:
        """Whether nothing is where the folder will be, or an empty one that a rename can replace."""
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
        if is_local(self._filesystem) and (what := _fixed(self._path)):
            return CommitConflict(
                f"{self._path} is {what}, which no folder can be renamed onto: mode 'create' makes the folder itself. Write to a folder "
                f"that is not there yet, such as one in it, or append"
            )
        return CommitConflict(
            f"{self._path} is there already: mode 'create' makes it. Write elsewhere, remove it, or append"
        )


def _fixed(path: str) -> str:
    """Names a mount point or a link at a path of this host: a rename cannot replace it, though it may look like an empty folder."""
    if os.path.islink(path):  # noqa: PTH114
        return "a symbolic link"
    real = os.path.realpath(path)
    return "a mount point" if os.path.ismount(real) or any(point == real for point, _ in mounted()) else ""
