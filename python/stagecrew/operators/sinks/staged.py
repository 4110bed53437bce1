"""What sinks of Parquet files share: where a run stages, and how a task writes its rows there."""

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


#: In the folder of a run as long as it goes on, with its commit and its schema. Whoever ends the run deletes it first, and then what it
#: finds; whoever stages looks for it last. So what is written meanwhile is found by the one, or taken back by the other.
_OPEN: Final = "_open"
#: Of the small files that sinks write: this one, marks and manifests. One without a number has the same fields.
_FORMAT: Final = 1


def open_folder(filesystem: pyarrow.fs.FileSystem, folder: str, staging: Staging) -> None:
    """Makes the folder of a run."""
    make_folder(filesystem, folder)
    with filesystem.open_output_stream(f"{folder}/{_OPEN}") as stream:
        stream.write(text_of_mark(staging, schema=schema_text(staging.schema)))


def text_of_mark(staging: Staging, **fields: Any) -> bytes:
    """A small file of a sink, which names the commit that it is about."""
    return json.dumps({"format": _FORMAT, "commit": staging.commit_id, **fields}).encode()


def fields_of(data: bytes, path: str) -> dict[str, Any]:
    """What `text_of_mark` made. Raises `CommitFailed` for a later format, and for what stagecrew does not write."""
    try:
        fields = json.loads(data)
        format_ = fields.get("format", _FORMAT)
    except (ValueError, AttributeError) as error:
        raise CommitFailed(
            f"{path} is not as stagecrew writes it ({type(error).__name__}). Put a copy in its place"
        ) from error
    if format_ != _FORMAT:
        raise CommitFailed(
            f"{path} has format {format_!r}, and this version of stagecrew reads {_FORMAT}. Nothing was changed. Use the version that wrote it"
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
    """Makes the folder of a run, in a table that has the schema of what is committed there first. Raises when it has another.

    `below` is the folder in which all runs are, `committed` says which schema is committed. Each run says its own before it looks at
    those of others: of two that begin at once in an empty table one at least sees the other.
    """
    there = committed()
    if there is not None:
        _fit(staging, there, path)
    open_folder(filesystem, folder, staging)
    if there is not None:
        return
    # Those that go on first, and then what is committed: one that ends meanwhile is seen there.
    for file in list_files(filesystem, below):
        if posixpath.basename(file) != _OPEN or (data := read_whole(filesystem, file)) is None:
            continue
        try:
            json.loads(data)
        except ValueError:
            continue  # one that is being written, and looks at ours behind that
        mark = fields_of(data, file)
        if mark["commit"] != staging.commit_id:
            what = f"commit {mark['commit']!r}, which is about to make {path}"
            if (error := differing(staging.schema, schema_of(mark["schema"]), what)) is not None:
                raise CommitFailed(
                    f"{error}. Where its driver is dead, and nobody repeats it with its id, delete {posixpath.dirname(file)}"
                )
    if (there := committed()) is not None:
        _fit(staging, there, path)


def _fit(staging: Staging, there: pa.Schema, what: str) -> None:
    if (error := differing(staging.schema, there, what)) is not None:
        raise error


def schema_text(schema: pa.Schema) -> str:
    """A schema for JSON."""
    return str(schema.serialize().to_pybytes().hex())


def schema_of(text: str) -> pa.Schema:
    """What `schema_text` made."""
    return pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(text)))


def keep_only(filesystem: pyarrow.fs.FileSystem, folder: str, kept: Sequence[str]) -> None:
    """Ends a run: deletes its folder, or all staged files but those of these names."""
    remove_file(filesystem, f"{folder}/{_OPEN}")
    if not kept:
        remove_folder(filesystem, folder)  # and not what is around it: another run may be there
        return
    stay = set(kept)
    # By name: a run's folder has none below, and its path may be listed in another form.
    for file in list_files(filesystem, folder):
        if posixpath.basename(file) not in stay:
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
    """Writes a task's rows as one Parquet file, whole on the disk where that is local; None when there are none.

    Where it raises, nothing is left: not by a run that is over either, whose folder is not there, or has been made anew by the write.
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
        if _take_back(filesystem, folder, path) and isinstance(error, Exception):
            raise CommitFailed(f"{folder} is gone: the commit that this task stages for is over") from error
        raise


def _take_back(filesystem: pyarrow.fs.FileSystem, folder: str, path: str) -> bool:
    """Deletes a file that nobody will commit. Answers whether its run is over: where it cannot, who ends the run does."""
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
    """A file without rows, for readers to know the schema by; whole on the disk where that is local."""
    with filesystem.open_output_stream(path) as stream, pq.ParquetWriter(stream, schema):
        pass
    if is_local(filesystem):
        sync(path)


def differing(schema: pa.Schema, table: pa.Schema, what: str, required: bool = False) -> CommitFailed | None:
    """The error that says how a schema does not fit that of a table; None when it does, in any order of columns.

    `required`: a column that is never null there must not be able to be null here.
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
            f"{name} may be null, there never (coalesce makes a column that is never null)"
            for name in ours
            if required and name in theirs and schema.field(name).nullable and not table.field(name).nullable
        ),
    ]
    if not problems:
        return None
    return CommitFailed(f"the dataset does not fit {what}: {'; '.join(problems)}. Select and cast its columns first")


def _plain(type_: pa.DataType) -> str:
    """Types that differ in how Arrow lays them out only are the same."""
    return str(type_).replace("large_", "")
