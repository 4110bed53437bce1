"""The sink for Parquet objects with manifests, for object stores, which cannot rename."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs

from stagecrew.errors import CommitFailed
from stagecrew.files import file_system, list_files, make_folder, place, quoted, read_whole, write_whole
from stagecrew.operators.commit_records import file_of
from stagecrew.operators.schemas import nullable_schema
from stagecrew.operators.sinks.staged import (
    fields_of,
    keep_only,
    open_first,
    schema_of,
    schema_text,
    text_of_mark,
    write_part,
)

if TYPE_CHECKING:
    from stagecrew.operators.committer import Message, Staging

__all__ = ["ObjectSink", "read_committed"]

_MANIFESTS: Final = "_stagecrew"
#: A file that a manifest may name, relative to the folder of all commits.
_FILE: Final = re.compile(r"data(/(?!\.{1,2}(/|$))[A-Za-z0-9._-]+)+")


class ObjectSink:
    """Parquet objects with a manifest for each commit. `read_committed` reads all rows of a commit or none.

    Use it for object stores, which cannot rename. A single write creates the manifest, which makes the commit visible.
    A `path` contains many commits: objects are in `data/<commit id>/<run>/`, manifests in `_stagecrew/`.

    Args:
        path: A URI for `pyarrow.fs`, or a path on `filesystem`. Each process uses its own credentials for `pyarrow.fs`;
            credentials in a URI are pickled to tasks.
        filesystem: The file system of the path, by default that of the URI, or the local disk.
        options: Options of `pyarrow.parquet.ParquetWriter`, such as `compression`.

    Examples:
        >>> ObjectSink("/data/flights")
        <objects in /data/flights>
        >>> topology.commit(dataset, ObjectSink("s3://bucket/flights"))  # doctest: +SKIP

    Not promised: that readers who list objects see all of a commit or nothing. They may see a part of a commit, and
    objects of failed attempts until these are deleted.

    Source: Flink's two-phase sinks (FLIP-143).
    """

    def __init__(self, path: Any, filesystem: pyarrow.fs.FileSystem | None = None, **options: Any) -> None:
        self._options = options
        self._filesystem, self._path = file_system(path, filesystem)

    def __repr__(self) -> str:
        return f"<objects in {self._path}>"

    @property
    def identity(self) -> str:
        """The path and its store, without secrets."""
        return f"<objects in {place(self._filesystem, self._path)}>"

    def begin(self, staging: Staging) -> None:
        """See `Committer.begin`."""
        try:
            folder, below = self._folder(staging), f"{self._path}/data"
            open_first(
                self._filesystem, folder, staging, self._path, below, lambda: _schema(self._filesystem, self._path)
            )
            make_folder(self._filesystem, f"{self._path}/{_MANIFESTS}")
        except (OSError, RuntimeError) as error:  # fsspec raises RuntimeError for errors of a server
            raise CommitFailed(
                f"{self._path} cannot be written: {error}. Check the path and its permissions"
            ) from error

    def stage(
        self, staging: Staging, partition: int, attempt: int, batches: Iterator[pa.RecordBatch]
    ) -> Message | None:
        """See `Committer.stage`."""
        folder = self._folder(staging)
        return write_part(
            self._filesystem, folder, partition, attempt, batches, nullable_schema(staging.schema), self._options
        )

    def commit(self, staging: Staging, messages: Sequence[Message]) -> None:
        """See `Committer.commit`. Every driver that finishes this commit writes the same manifest."""
        if self.done(staging.commit_id):
            return
        folder = self._folder(staging)
        base = folder.removeprefix(f"{self._path}/")
        files = [f"{base}/{file_of(staging.commit_id, message)}" for message in messages]
        manifest = text_of_mark(
            staging, schema=schema_text(nullable_schema(staging.schema)), files=files, mark=staging.mark
        )
        write_whole(self._filesystem, self._manifest(staging.commit_id), manifest, drafts=folder)

    def done(self, commit_id: str) -> bool:
        """See `Committer.done`."""
        return self._stored(commit_id) is not None

    def stored_mark(self, commit_id: str) -> str | None:
        """Returns the mark of a visible commit. See `Committer`."""
        return (self._stored(commit_id) or {}).get("mark")

    def _stored(self, commit_id: str) -> dict[str, Any] | None:
        """The manifest of a commit, if it exists."""
        path = self._manifest(commit_id)
        try:
            data = read_whole(self._filesystem, path)
        except (OSError, RuntimeError) as error:
            raise CommitFailed(f"{self._path} cannot be read: {error}. Check the path and its permissions") from error
        fields = None if data is None else fields_of(data, path)
        return fields if fields is not None and fields["commit"] == commit_id else None

    def discard(self, staging: Staging, kept: Sequence[Message]) -> None:
        """See `Committer.discard`."""
        keep_only(self._filesystem, self._folder(staging), [file_of(staging.commit_id, message) for message in kept])

    def _folder(self, staging: Staging) -> str:
        return f"{self._path}/data/{quoted(staging.commit_id)}/{staging.run}"

    def _manifest(self, commit_id: str) -> str:
        return f"{self._path}/{_MANIFESTS}/{quoted(commit_id)}.json"


def read_committed(path: Any, filesystem: pyarrow.fs.FileSystem | None = None) -> pyarrow.dataset.Dataset:
    """Returns the commits of an `ObjectSink` as an Arrow dataset, which contains all rows of a commit or none.

    This also holds for a commit that becomes visible while this call runs.

    Args:
        path: The path of the sink.
        filesystem: The file system of the path, by default that of the URI, or the local disk.

    Returns:
        A dataset with the rows of all commits at the path.

    Raises:
        FileNotFoundError: If nothing was ever committed there.
        CommitFailed: If a manifest was not written by stagecrew, or has the format of a later version.

    Examples:
        >>> import tempfile
        >>> from stagecrew.operators import Staging
        >>> folder = tempfile.TemporaryDirectory()
        >>> sink, run = ObjectSink(folder.name), Staging("day-1", "0" * 32, pa.schema([("id", pa.int64())]))
        >>> sink.begin(run)
        >>> message = sink.stage(run, 0, 0, iter([pa.record_batch({"id": [1, 2]})]))
        >>> sink.commit(run, [message])
        >>> read_committed(folder.name).to_table().num_rows
        2
        >>> folder.cleanup()
    """
    found, inner = file_system(path, filesystem)
    manifests = list(_manifests(found, inner))
    if not manifests:
        raise FileNotFoundError(f"no commit was found in {inner}. Check the path, or commit with an ObjectSink first")
    schema = nullable_schema(schema_of(manifests[0]["schema"]))
    files = [f"{inner}/{file}" for manifest in manifests for file in manifest["files"]]
    return pyarrow.dataset.dataset(files, schema=schema, filesystem=found, format="parquet")


def _schema(filesystem: pyarrow.fs.FileSystem, path: str) -> pa.Schema | None:
    return next((schema_of(manifest["schema"]) for manifest in _manifests(filesystem, path)), None)


def _manifests(filesystem: pyarrow.fs.FileSystem, path: str) -> Iterator[dict[str, Any]]:
    for file in sorted(list_files(filesystem, f"{path}/{_MANIFESTS}")):
        if not file.endswith(".json"):  # a manifest that is being written
            continue
        with filesystem.open_input_stream(file) as stream:
            manifest = fields_of(stream.read(), file)
        for name in manifest["files"]:
            if not isinstance(name, str) or not _FILE.fullmatch(name):
                raise CommitFailed(
                    f"{file} names {name!r}, which is not an object of a commit. Restore {file} from a backup"
                )
        yield manifest
