"""Parquet objects and manifests, for stores that cannot rename."""

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
#: A file that a manifest names: below the folder of all commits.
_FILE: Final = re.compile(r"data(/(?!\.{1,2}(/|$))[A-Za-z0-9._-]+)+")


class ObjectSink:
    """Parquet objects, each commit's named by a manifest that is written at once: for object stores, where nothing is renamed.

    Readers that use `read_committed(path)` see all of a commit or nothing of it. Others, which list objects, may see part of one,
    and what failed attempts left until it is deleted. A `path` holds many commits.

    Objects lie below `data/<commit id>/<run>/`, manifests below `_stagecrew/`. `path` is a URI for `pyarrow.fs`, or comes with a
    `filesystem`; `options` are those of `pyarrow.parquet.ParquetWriter`. The credentials are those of `pyarrow.fs` in each process:
    what is in a URI travels with tasks.
    """

    def __init__(self, path: Any, filesystem: pyarrow.fs.FileSystem | None = None, **options: Any) -> None:
        self._options = options
        self._filesystem, self._path = file_system(path, filesystem)

    def __repr__(self) -> str:
        return f"<objects in {self._path}>"

    @property
    def identity(self) -> str:
        """See `Committer`."""
        return f"<objects in {place(self._filesystem, self._path)}>"

    def begin(self, staging: Staging) -> None:
        """See `Committer`."""
        try:
            folder, below = self._folder(staging), f"{self._path}/data"
            open_first(
                self._filesystem, folder, staging, self._path, below, lambda: _schema(self._filesystem, self._path)
            )
            make_folder(self._filesystem, f"{self._path}/{_MANIFESTS}")
        except (OSError, RuntimeError) as error:  # the second is fsspec's, for what a server says
            raise CommitFailed(f"{self._path} cannot be written: {error}") from error

    def stage(
        self, staging: Staging, partition: int, attempt: int, batches: Iterator[pa.RecordBatch]
    ) -> Message | None:
        """See `Committer`."""
        folder = self._folder(staging)
        return write_part(self._filesystem, folder, partition, attempt, batches, staging.schema, self._options)

    def commit(self, staging: Staging, messages: Sequence[Message]) -> None:
        """See `Committer`. Each run that decided writes the same manifest."""
        if self.done(staging.commit_id):
            return
        folder = self._folder(staging)
        base = folder.removeprefix(f"{self._path}/")
        files = [f"{base}/{file_of(staging.commit_id, message)}" for message in messages]
        manifest = text_of_mark(staging, schema=schema_text(staging.schema), files=files, mark=staging.mark)
        write_whole(self._filesystem, self._manifest(staging.commit_id), manifest, drafts=folder)

    def done(self, commit_id: str) -> bool:
        """See `Committer`."""
        return self._known(commit_id) is not None

    def stored_mark(self, commit_id: str) -> str | None:
        """See `Committer`."""
        return (self._known(commit_id) or {}).get("mark")

    def _known(self, commit_id: str) -> dict[str, Any] | None:
        """The manifest of a commit, if it is there."""
        path = self._manifest(commit_id)
        try:
            data = read_whole(self._filesystem, path)
        except (OSError, RuntimeError) as error:
            raise CommitFailed(f"{self._path} cannot be read: {error}") from error
        fields = None if data is None else fields_of(data, path)
        return fields if fields is not None and fields["commit"] == commit_id else None

    def discard(self, staging: Staging, kept: Sequence[Message]) -> None:
        """See `Committer`."""
        keep_only(self._filesystem, self._folder(staging), [file_of(staging.commit_id, message) for message in kept])

    def _folder(self, staging: Staging) -> str:
        return f"{self._path}/data/{quoted(staging.commit_id)}/{staging.run}"

    def _manifest(self, commit_id: str) -> str:
        return f"{self._path}/{_MANIFESTS}/{quoted(commit_id)}.json"


def read_committed(path: Any, filesystem: pyarrow.fs.FileSystem | None = None) -> pyarrow.dataset.Dataset:
    """What is committed at a path, as an Arrow dataset; of commits that end meanwhile all or nothing.

    Raises `FileNotFoundError` when nothing was ever committed there; `CommitFailed` for a manifest that stagecrew did not write, or of the
    format of a later version.
    """
    found, inner = file_system(path, filesystem)
    manifests = list(_manifests(found, inner))
    if not manifests:
        raise FileNotFoundError(f"{inner}: nothing is committed there")
    schema = schema_of(manifests[0]["schema"])
    files = [f"{inner}/{file}" for manifest in manifests for file in manifest["files"]]
    return pyarrow.dataset.dataset(files, schema=schema, filesystem=found, format="parquet")


def _schema(filesystem: pyarrow.fs.FileSystem, path: str) -> pa.Schema | None:
    return next((schema_of(manifest["schema"]) for manifest in _manifests(filesystem, path)), None)


def _manifests(filesystem: pyarrow.fs.FileSystem, path: str) -> Iterator[dict[str, Any]]:
    for file in sorted(list_files(filesystem, f"{path}/{_MANIFESTS}")):
        if not file.endswith(".json"):  # one that is being written
            continue
        with filesystem.open_input_stream(file) as stream:
            manifest = fields_of(stream.read(), file)
        for name in manifest["files"]:
            if not isinstance(name, str) or not _FILE.fullmatch(name):
                raise CommitFailed(f"{file} names {name!r}, which is no object of a commit. Put a copy in its place")
        yield manifest
