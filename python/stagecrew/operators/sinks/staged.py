"""What sinks of Parquet files share: where a run stages, and how a task writes its rows there."""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from stagecrew.errors import CommitFailed
from stagecrew.operators.decisions import sync

if TYPE_CHECKING:
    from stagecrew.operators.commits import Message

__all__ = [
    "differing",
    "exists",
    "file_system",
    "is_local",
    "is_store",
    "keep_only",
    "list_files",
    "move",
    "open_folder",
    "quoted",
    "read_whole",
    "remove_folder",
    "write_empty",
    "write_part",
    "write_whole",
]


#: In the folder of a run as long as it goes on. Whoever ends the run deletes it first, and then what it finds; whoever stages looks
#: for it last. So what is written meanwhile is found by the one, or taken back by the other.
_OPEN: Final = "_open"

_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}")
_UNFIT: Final = re.compile(r"[^A-Za-z0-9._-]")


def file_system(path: Any, filesystem: pyarrow.fs.FileSystem | None) -> tuple[pyarrow.fs.FileSystem, str]:
    """The file system and the path on it, of a URI or a local path."""
    if filesystem is not None:
        return filesystem, str(path).rstrip("/")
    found, inner = (
        pyarrow.fs.FileSystem.from_uri(str(path)) if "://" in str(path) else (pyarrow.fs.LocalFileSystem(), str(path))
    )
    return found, inner.rstrip("/")


def quoted(text: str) -> str:
    """A commit's id as the name of a file, or as part of a URI."""
    if _PLAIN.fullmatch(text):
        return text
    return f"{_UNFIT.sub('_', text)[:60]}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


def exists(filesystem: pyarrow.fs.FileSystem, path: str) -> bool:
    """Whether there is a file or a folder."""
    return bool(filesystem.get_file_info(path).type != pyarrow.fs.FileType.NotFound)


def is_local(filesystem: pyarrow.fs.FileSystem) -> bool:
    """Whether it is the disk of this host."""
    return isinstance(filesystem, pyarrow.fs.LocalFileSystem)


def is_store(filesystem: pyarrow.fs.FileSystem) -> bool:
    """Whether it is an object store, which has no folders to rename."""
    if isinstance(filesystem, _STORES):
        return True
    handler = getattr(filesystem, "handler", None)
    if not isinstance(handler, pyarrow.fs.FSSpecHandler):
        return False
    protocol = handler.fs.protocol
    return not _PROTOCOLS.isdisjoint([protocol] if isinstance(protocol, str) else protocol)


def remove_folder(filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """Deletes a folder with all that is in it, also while somebody else does the same, or still writes there."""
    for _ in range(5):
        try:
            filesystem.delete_dir(path)
        except FileNotFoundError:
            return
        except OSError:
            if not exists(filesystem, path):
                return
        else:
            return
    filesystem.delete_dir(path)


def list_files(filesystem: pyarrow.fs.FileSystem, folder: str) -> list[str]:
    """The files of a folder; none when there is no such folder."""
    selector = pyarrow.fs.FileSelector(folder, recursive=True, allow_not_found=True)
    try:
        infos = filesystem.get_file_info(selector)
    except NotADirectoryError:  # fsspec's handler looks twice: the folder came in between
        infos = filesystem.get_file_info(selector)
    if not infos:
        exists(filesystem, folder)  # fsspec's shows nothing, too, of what it cannot reach; this raises
    return [info.path for info in infos if info.type == pyarrow.fs.FileType.File]


def read_whole(filesystem: pyarrow.fs.FileSystem, path: str) -> bytes | None:
    """The bytes of a small file; None when there is none."""
    for _ in range(2):
        try:
            with filesystem.open_input_stream(path) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            if not exists(filesystem, path):  # which raises; fsspec says so, too, of what it cannot reach
                return None
    raise OSError(f"{path} is there, and cannot be read")


def remove_file(filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """Deletes a file, also while somebody else does the same."""
    try:
        filesystem.delete_file(path)
    except OSError:
        if exists(filesystem, path):
            raise


def move(filesystem: pyarrow.fs.FileSystem, source: str, destination: str) -> None:
    """Moves a file or a folder to where nothing is. HDFS says nothing, to some, when it has not."""
    try:
        filesystem.move(source, destination)
    except RuntimeError as error:  # fsspec's, for what the server says
        raise OSError(str(error)) from error
    if not is_local(filesystem) and (exists(filesystem, source) or not exists(filesystem, destination)):
        raise OSError(f"{source} could not be renamed to {destination}")


def open_folder(filesystem: pyarrow.fs.FileSystem, folder: str) -> None:
    """Makes the folder of a run."""
    filesystem.create_dir(folder)
    with filesystem.open_output_stream(f"{folder}/{_OPEN}") as stream:
        stream.write(b"a run that goes on")


def keep_only(filesystem: pyarrow.fs.FileSystem, folder: str, kept: Sequence[Message]) -> None:
    """Ends a run: deletes its folder, or what is staged in it but for what these messages name."""
    remove_file(filesystem, f"{folder}/{_OPEN}")
    if not kept:
        remove_folder(filesystem, folder)  # and not what is around it: another run may be there
        return
    stay = {f"{folder}/{message['file']}" for message in kept}
    for file in list_files(filesystem, folder):
        if file not in stay:
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


def write_whole(filesystem: pyarrow.fs.FileSystem, path: str, data: bytes) -> None:
    """A small file that is there with all of its bytes, or not: on object stores a write does that, elsewhere a rename."""
    if is_store(filesystem):
        with filesystem.open_output_stream(path) as stream:
            stream.write(data)
        return
    temporary = f"{path}.{uuid.uuid4().hex}"
    with filesystem.open_output_stream(temporary) as stream:
        stream.write(data)
    if is_local(filesystem):
        sync(temporary)
    try:
        move(filesystem, temporary, path)
    except OSError:
        if not exists(filesystem, path):
            raise
        remove_file(filesystem, temporary)  # HDFS puts nothing in the place of a file
    if is_local(filesystem):
        sync(posixpath.dirname(path) or ".")


_STORES: Final = tuple(
    getattr(pyarrow.fs, name)
    for name in ("S3FileSystem", "GcsFileSystem", "AzureFileSystem")
    if hasattr(pyarrow.fs, name)
)
#: What fsspec calls them.
_PROTOCOLS: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci"})


def write_empty(filesystem: pyarrow.fs.FileSystem, path: str, schema: pa.Schema) -> None:
    """A file without rows, for readers to know the schema by."""
    with filesystem.open_output_stream(path) as stream, pq.ParquetWriter(stream, schema):
        pass


def differing(schema: pa.Schema, table: pa.Schema, what: str) -> CommitFailed | None:
    """The error that says how a schema does not fit that of a table; None when it does, in any order of columns."""
    ours, theirs = ({field.name: _plain(field.type) for field in one} for one in (schema, table))
    problems: Sequence[str] = [
        *(f"{name} is not there" for name in ours if name not in theirs),
        *(f"{name} is missing" for name in theirs if name not in ours),
        *(
            f"{name} is {ours[name]}, there {theirs[name]}"
            for name in ours
            if name in theirs and ours[name] != theirs[name]
        ),
    ]
    if not problems:
        return None
    return CommitFailed(f"the dataset does not fit {what}: {'; '.join(problems)}. Select and cast its columns first")


def _plain(type_: pa.DataType) -> str:
    """Types that differ in how Arrow lays them out only are the same."""
    return str(type_).replace("large_", "")
