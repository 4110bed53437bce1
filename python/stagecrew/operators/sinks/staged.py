"""The staging folder of a run, and the Parquet files that tasks write there: shared by all sinks of Parquet files."""

from __future__ import annotations

import contextlib
import json
import posixpath
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from stagecrew.errors import CommitFailed
from stagecrew.files import exists, is_local, list_files, make_folder, read_whole, remove_file, remove_folder, sync

if TYPE_CHECKING:
    from stagecrew.operators.committer import Message, Staging

__all__ = [
    "differing",
    "fields_of",
    "keep_only",
    "open_first",
    "open_folder",
    "schema_of",
    "schema_text",
    "text_of_mark",
    "write_empty",
    "write_part",
]


#: The file in a run's folder that exists until the run ends. It has the commit's id and the schema. The driver that
#: ends the run deletes this file first and the staged files after it. A task checks for it after it has written. So a
#: file that is written meanwhile is deleted by the driver or by the task.
_OPEN: Final = "_open"
#: The format of the small files of sinks: open files, marks and manifests. A file without a number has the same fields.
_FORMAT: Final = 1


def open_folder(filesystem: pyarrow.fs.FileSystem, folder: str, staging: Staging) -> None:
    """Creates the folder of a run."""
    make_folder(filesystem, folder)
    with filesystem.open_output_stream(f"{folder}/{_OPEN}") as stream:
        stream.write(text_of_mark(staging, schema=schema_text(staging.schema)))


def text_of_mark(staging: Staging, **fields: Any) -> bytes:
    """The content of a small file of a sink, with the id of its commit."""
    return json.dumps({"format": _FORMAT, "commit": staging.commit_id, **fields}).encode()


def fields_of(data: bytes, path: str) -> dict[str, Any]:
    """The inverse of `text_of_mark`.

    Raises `CommitFailed` for a later format, or a file that stagecrew did not write.
    """
    try:
        fields = json.loads(data)
        format_ = fields.get("format", _FORMAT)
    except (ValueError, AttributeError) as error:
        raise CommitFailed(
            f"{path} is not as stagecrew writes it ({type(error).__name__}). Put a copy in its place"
        ) from error
    if format_ != _FORMAT:
        raise CommitFailed(
            f"{path} has format {format_!r}, and this version of stagecrew reads {_FORMAT}. Nothing was changed. Use "
            "the version that wrote it"
        )
    if not isinstance(fields.get("commit"), str):
        raise CommitFailed(f"{path} is not as stagecrew writes it: it names no commit. Put a copy in its place")
    return dict(fields)


def open_first(
    filesystem: pyarrow.fs.FileSystem,
    folder: str,
    staging: Staging,
    path: str,
    below: str,
    committed: Callable[[], pa.Schema | None],
) -> None:
    """Creates the folder of a run in a table whose first commit sets the schema.

    Raises `CommitFailed` for another schema.
    `below` is the folder of all runs. `committed` returns the schema of the committed rows. A run writes its own schema
    before it reads those of others. So if two runs begin at the same time in an empty table, at least one sees the
    other.
    """
    schema = committed()
    if schema is not None:
        _require_fit(staging, schema, path)
    open_folder(filesystem, folder, staging)
    if schema is not None:
        return
    # Read the open runs first and the committed rows after them: a run that ends meanwhile is found there.
    for file in list_files(filesystem, below):
        if posixpath.basename(file) != _OPEN or (data := read_whole(filesystem, file)) is None:
            continue
        try:
            json.loads(data)
        except ValueError:
            continue  # it is being written, and its run will read ours after that
        mark = fields_of(data, file)
        if mark["commit"] != staging.commit_id:
            other = f"commit {mark['commit']!r}, which is about to make {path}"
            if (error := differing(staging.schema, schema_of(mark["schema"]), other)) is not None:
                raise CommitFailed(
                    f"{error}. If its driver has ended and it is not repeated, delete {posixpath.dirname(file)}"
                )
    if (schema := committed()) is not None:
        _require_fit(staging, schema, path)


def _require_fit(staging: Staging, schema: pa.Schema, table: str) -> None:
    if (error := differing(staging.schema, schema, table)) is not None:
        raise error


def schema_text(schema: pa.Schema) -> str:
    """A schema as text, for JSON."""
    return str(schema.serialize().to_pybytes().hex())


def schema_of(text: str) -> pa.Schema:
    """The inverse of `schema_text`."""
    return pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(text)))


def keep_only(filesystem: pyarrow.fs.FileSystem, folder: str, kept: Sequence[str]) -> None:
    """Ends a run: deletes its folder, or all staged files except the kept ones, given by name."""
    remove_file(filesystem, f"{folder}/{_OPEN}")
    if not kept:
        remove_folder(filesystem, folder)  # not its parent, which may have the folder of another run
        return
    names = set(kept)
    # Compare names, not paths, which the file system may list in another form. A run's folder has no subfolders.
    for file in list_files(filesystem, folder):
        if posixpath.basename(file) not in names:
            remove_file(filesystem, file)


def write_part(
    filesystem: pyarrow.fs.FileSystem,
    folder: str,
    partition: int,
    attempt: int,
    batches: Iterator[pa.RecordBatch],
    schema: pa.Schema,
    options: dict[str, Any],
) -> Message | None:
    """Writes a task's rows as one Parquet file, durable on a local disk. Returns None if there are no rows.

    After an error, nothing is left. That is also true if the run has ended and its folder was deleted, even if this
    write has created the folder again.
    """
    name = f"part-{partition:05d}-{attempt}.parquet"
    path = f"{folder}/{name}"
    rows = 0
    writer: pq.ParquetWriter | None = None
    try:
        with contextlib.ExitStack() as open_:
            for batch in batches:
                if batch.num_rows == 0:
                    continue
                if writer is None:
                    stream = open_.enter_context(filesystem.open_output_stream(path))
                    writer = open_.enter_context(pq.ParquetWriter(stream, schema, **options))
                writer.write_batch(batch.cast(schema))
                rows += batch.num_rows
        if writer is None:
            return None
        if is_local(filesystem):
            sync(path)
            sync(folder)
        message = {"file": name, "rows": rows, "bytes": filesystem.get_file_info(path).size}
        if not exists(filesystem, f"{folder}/{_OPEN}"):
            raise FileNotFoundError(f"{folder}/{_OPEN}")
        return message
    except BaseException as error:
        if _undo_write(filesystem, folder, path) and isinstance(error, Exception):
            raise CommitFailed(f"{folder} was deleted: the commit that this task stages for has ended") from error
        raise


def _undo_write(filesystem: pyarrow.fs.FileSystem, folder: str, path: str) -> bool:
    """Deletes a file that will not be committed. Returns whether its run has ended, or False if it cannot tell."""
    try:
        remove_file(filesystem, path)
        if exists(filesystem, f"{folder}/{_OPEN}"):
            return False
        if not list_files(filesystem, folder):
            remove_folder(filesystem, folder)
    except Exception:
        return False
    return True


def write_empty(filesystem: pyarrow.fs.FileSystem, path: str, schema: pa.Schema) -> None:
    """Writes a file without rows, so that readers find the schema. Durable on a local disk."""
    with filesystem.open_output_stream(path) as stream, pq.ParquetWriter(stream, schema):
        pass
    if is_local(filesystem):
        sync(path)


def differing(schema: pa.Schema, table: pa.Schema, what: str, required: bool = False) -> CommitFailed | None:
    """The error that describes how a schema does not fit that of `what`, or None if it fits, in any order of columns.

    If `required`, a column that is never null in the table must not be nullable in the schema.
    """
    ours, theirs = ({field.name: _plain(field.type) for field in one} for one in (schema, table))
    problems: Sequence[str] = [
        *(f"{name} is not there" for name in ours if name not in theirs),
        *(f"{name} is missing" for name in theirs if name not in ours),
        *(
            f"{name} is {ours[name]}, there {theirs[name]}"
            for name in ours
            if name in theirs and ours[name] != theirs[name]
        ),
        *(
            f"{name} may be null, but the table requires a value (coalesce makes a column that is never null)"
            for name in ours
            if required and name in theirs and schema.field(name).nullable and not table.field(name).nullable
        ),
    ]
    if not problems:
        return None
    return CommitFailed(f"the dataset does not fit {what}: {'; '.join(problems)}. Select and cast its columns first")


def _plain(type_: pa.DataType) -> str:
    """A type as text, without the differences that are only Arrow's memory layout."""
    return str(type_).replace("large_", "")
