"""The staging folder of a run, and the Parquet files that tasks write there. All sinks that write Parquet use this."""

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
from stagecrew.operators.schemas import may_lack_value, type_text

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


#: The file in a run's folder that exists until the run ends. It contains the commit's id and the schema. The driver
#: that ends the run first deletes this file, and then the staged files. A task writes its file, and then checks that
#: this file exists. So either the driver or the task deletes a file that is written while the run ends.
_OPEN: Final = "_open"
#: The format of the small files of sinks: open files, marks and manifests. A file without a format number has the same
#: fields.
_FORMAT: Final = 1


def open_folder(filesystem: pyarrow.fs.FileSystem, folder: str, staging: Staging) -> None:
    """Creates the folder of a run."""
    make_folder(filesystem, folder)
    with filesystem.open_output_stream(f"{folder}/{_OPEN}") as stream:
        stream.write(text_of_mark(staging, schema=schema_text(staging.schema)))


def text_of_mark(staging: Staging, **fields: Any) -> bytes:
    """Returns the content of a small file of a sink, with the id of its commit."""
    return json.dumps({"format": _FORMAT, "commit": staging.commit_id, **fields}).encode()


def fields_of(data: bytes, path: str) -> dict[str, Any]:
    """Reads the content that `text_of_mark` returned.

    Raises `CommitFailed` if the file has another format, or is not a file of stagecrew.
    """
    try:
        fields = json.loads(data)
        format_ = fields.get("format", _FORMAT)
    except (ValueError, AttributeError) as error:
        raise CommitFailed(
            f"{path} is not a valid file of stagecrew ({type(error).__name__}). Restore it from a backup"
        ) from error
    if format_ != _FORMAT:
        raise CommitFailed(
            f"{path} has format {format_!r}, and this version of stagecrew reads {_FORMAT}. Nothing was changed. Use "
            "the version that wrote it"
        )
    if not isinstance(fields.get("commit"), str):
        raise CommitFailed(f"{path} is not a valid file of stagecrew: it names no commit. Restore it from a backup")
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

    Raises `CommitFailed` if the schema of the run differs from the schema of the table. `below` is the folder of all
    runs. `committed` returns the schema of the committed rows. A run writes its own schema before it reads the schemas
    of other runs. So if two runs begin at the same time in an empty table, at least one of them notices the other.
    """
    schema = committed()
    if schema is not None:
        _require_fit(staging, schema, path)
    open_folder(filesystem, folder, staging)
    if schema is not None:
        return
    # Read the open runs before the committed rows, so that a run that commits in between is found among the rows.
    for file in list_files(filesystem, below):
        if posixpath.basename(file) != _OPEN or (data := read_whole(filesystem, file)) is None:
            continue
        try:
            json.loads(data)
        except ValueError:
            continue  # the other run is still writing this file, and will then read ours
        mark = fields_of(data, file)
        if mark["commit"] != staging.commit_id:
            other = f"commit {mark['commit']!r}, which is about to create {path}"
            if (error := differing(staging.schema, schema_of(mark["schema"]), other)) is not None:
                raise CommitFailed(
                    f"{error}. If its driver has ended and it is not repeated, delete {posixpath.dirname(file)}"
                )
    if (schema := committed()) is not None:
        _require_fit(staging, schema, path)


def _require_fit(staging: Staging, schema: pa.Schema, table: str) -> None:
    # A column may be null. A reader could not combine files whose nested fields differ in this.
    columns = pa.schema([field.with_nullable(False) for field in staging.schema])
    if (error := differing(columns, schema, table, required=True)) is not None:
        raise error


def schema_text(schema: pa.Schema) -> str:
    """Returns a schema as a text, for JSON."""
    return str(schema.serialize().to_pybytes().hex())


def schema_of(text: str) -> pa.Schema:
    """Reads the text that `schema_text` returned."""
    return pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(text)))


def keep_only(filesystem: pyarrow.fs.FileSystem, folder: str, kept: Sequence[str]) -> None:
    """Ends a run. Deletes its folder, or, if some names are kept, all staged files with other names."""
    remove_file(filesystem, f"{folder}/{_OPEN}")
    if not kept:
        remove_folder(filesystem, folder)  # not its parent, which may contain the folder of another run
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
    """Writes a task's rows as one Parquet file with this schema. Returns None if there are no rows.

    On a local disk the file is durable. After an error, the file is deleted, even if the run had ended and this
    write has created the deleted folder again.
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
    """Deletes a file that will not be committed. Returns whether its run has ended, or False if this is unknown."""
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
    """Returns an error that describes why a schema does not fit that of `what`, or None if it fits.

    The order of columns does not matter. If `required`, a column or nested field that the table requires must not be
    nullable in the schema.
    """
    ours, theirs = ({field.name: type_text(field.type) for field in one} for one in (schema, table))
    problems: Sequence[str] = [
        *(f"{name} does not exist there" for name in ours if name not in theirs),
        *(f"{name} is missing" for name in theirs if name not in ours),
        *(
            f"{name} is {ours[name]}, expected {theirs[name]}"
            for name in ours
            if name in theirs and ours[name] != theirs[name]
        ),
        *(
            f"{name} {_lacking(schema.field(name), table.field(name))}"
            for name in ours
            if required and ours[name] == theirs.get(name) and may_lack_value(schema.field(name), table.field(name))
        ),
    ]
    if not problems:
        return None
    return CommitFailed(f"the dataset does not fit {what}: {'; '.join(problems)}. Select and cast its columns first")


def _lacking(field: pa.Field, required: pa.Field) -> str:
    if field.nullable and not required.nullable:
        return "may be null, but the table requires a value (coalesce makes a column that is never null)"
    return "may contain nulls in nested fields, where the table requires values (transform can replace them)"
