"""Files on this host, on HDFS and in object stores, for sinks and for state storage."""

from __future__ import annotations

import hashlib
import os
import pathlib
import posixpath
import re
import uuid
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs

__all__ = [
    "address",
    "exists",
    "expanded",
    "file_system",
    "is_local",
    "is_store",
    "list_files",
    "make_folder",
    "move",
    "place",
    "quoted",
    "read_whole",
    "remove_file",
    "remove_folder",
    "sync",
    "write_whole",
]

_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}")
_UNFIT: Final = re.compile(r"[^A-Za-z0-9._-]")
_STORES: Final = tuple(
    getattr(pyarrow.fs, name)
    for name in ("S3FileSystem", "GcsFileSystem", "AzureFileSystem")
    if hasattr(pyarrow.fs, name)
)
#: The names of object stores in fsspec.
_PROTOCOLS: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci"})
#: The settings that locate an Azure account.
_AZURE: Final = ("blob_storage_authority", "dfs_storage_authority")


def file_system(path: Any, filesystem: pyarrow.fs.FileSystem | None) -> tuple[pyarrow.fs.FileSystem, str]:
    """The file system of a URI or path, and the path as that file system writes it. A local path becomes absolute."""
    text = str(path)
    if filesystem is None:
        text = expanded(text)
        try:
            filesystem, text = (
                pyarrow.fs.FileSystem.from_uri(text) if "://" in text else (pyarrow.fs.LocalFileSystem(), text)
            )
        except pa.ArrowInvalid as error:  # its text repeats the URI, which may have secrets
            raise pa.ArrowInvalid(str(error).replace(text, address(text))) from None
    handler = getattr(filesystem, "handler", None)
    if isinstance(handler, pyarrow.fs.FSSpecHandler):
        text = handler.fs._strip_protocol(text)
    elif isinstance(filesystem, pyarrow.fs.SubTreeFileSystem):
        text = text.lstrip("/")
    elif is_local(filesystem) and "://" not in text:
        text = os.path.abspath(text)  # noqa: PTH100 (pathlib would follow links)
        return filesystem, text.rstrip("/") or "/"
    return filesystem, text.rstrip("/")


def expanded(text: str) -> str:
    """Expands ~. Converts a URI with one slash, as Hadoop writes local ones: file:/data."""
    if text.startswith("~"):
        return os.path.expanduser(text)  # noqa: PTH111 (pathlib raises for a user that does not exist)
    return re.sub(r"^([a-z][a-z0-9+.-]+):/(?!/)", r"\1:///", text)


def place(filesystem: pyarrow.fs.FileSystem, path: str) -> str:
    """Describes where a path is: the path with its store or cluster, without secrets.

    Processes with the same settings get the same text.
    """
    if is_local(filesystem):
        return os.path.abspath(path)  # noqa: PTH100 (pathlib would follow links)
    if isinstance(filesystem, pyarrow.fs.SubTreeFileSystem):
        return place(filesystem.base_fs, posixpath.join(filesystem.base_path, path))
    handler = getattr(filesystem, "handler", None)
    if isinstance(handler, pyarrow.fs.FSSpecHandler):
        options = handler.fs.storage_options
        details = {
            "url": getattr(handler.fs, "url", None),
            **{name: options.get(name) for name in ("endpoint_url", "account_name", "host", "port")},
            "client": (options.get("client_kwargs") or {}).get("endpoint_url"),
        }
        protocol = handler.fs.protocol
        kind = protocol if isinstance(protocol, str) else protocol[0]
    else:
        reduced = filesystem.__reduce__()[1]
        options = reduced[0] if reduced and isinstance(reduced[0], dict) else {}
        details = {name: options.get(name) for name in ("host", "port", "endpoint_override", "account_name", *_AZURE)}
        kind = filesystem.type_name
    where = " ".join(address(str(value)) for value in details.values() if isinstance(value, str | int) and value)
    return f"{path} at {kind} {where}".rstrip()


def address(text: str) -> str:
    """Removes the parts of a URI that may contain secrets: everything up to the last @, and the query.

    Everything up to the last @ is removed, because keys may contain slashes and question marks. A `file` or `sqlite`
    URI of a local path keeps its @, because it contains no credentials.

    >>> address("s3://KEY:SEC/RET@bucket/folder?region=x")
    's3://bucket/folder'
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        return text.rpartition("@")[2]
    if scheme not in ("file", "sqlite") or not rest.startswith("/"):
        rest = rest.rpartition("@")[2]
    return f"{scheme}://{re.split('[?#]', rest, maxsplit=1)[0]}"


def quoted(text: str) -> str:
    """Converts a commit's id to a text that is safe as the name of a file and as a part of a URI."""
    if _PLAIN.fullmatch(text):
        return text
    return f"{_UNFIT.sub('_', text)[:60]}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


def exists(filesystem: pyarrow.fs.FileSystem, path: str) -> bool:
    """Whether a file or folder exists at the path."""
    return bool(filesystem.get_file_info(path).type != pyarrow.fs.FileType.NotFound)


def is_local(filesystem: pyarrow.fs.FileSystem) -> bool:
    """Whether the file system is the disk of this host."""
    return isinstance(filesystem, pyarrow.fs.LocalFileSystem)


def is_store(filesystem: pyarrow.fs.FileSystem) -> bool:
    """Whether the file system is an object store, which cannot rename folders."""
    if isinstance(filesystem, _STORES):
        return True
    handler = getattr(filesystem, "handler", None)
    if not isinstance(handler, pyarrow.fs.FSSpecHandler):
        return False
    protocol = handler.fs.protocol
    return not _PROTOCOLS.isdisjoint([protocol] if isinstance(protocol, str) else protocol)


def make_folder(filesystem: pyarrow.fs.FileSystem, path: str, mode: int | None = None) -> None:
    """Creates a folder and its parents. On a local disk, new folders are durable when this returns.

    `mode` is the mode of the folder itself, if this call creates it on a local disk.
    """
    folder = pathlib.Path(path)
    missing = [one for one in (folder, *folder.parents) if not one.exists()] if is_local(filesystem) else []
    if mode is not None and folder in missing:
        filesystem.create_dir(str(folder.parent))
        folder.mkdir(mode, exist_ok=True)
    filesystem.create_dir(path)
    for one in missing:
        sync(one.parent)


def remove_folder(filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """Deletes a folder with its contents, even while another process also deletes it or is still writing there."""
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


def list_files(filesystem: pyarrow.fs.FileSystem, folder: str, hidden: bool = True) -> list[str]:
    """The paths of all files in a folder, as the file system writes them. Empty if the folder does not exist.

    Files in subfolders whose names begin with an underscore, which readers skip, are listed only if `hidden` is True.
    """
    selector = pyarrow.fs.FileSelector(folder, recursive=True, allow_not_found=True)
    try:
        infos = filesystem.get_file_info(selector)
    except NotADirectoryError:  # fsspec's handler checks twice, and the folder was created in between
        infos = filesystem.get_file_info(selector)
    if not infos:
        exists(filesystem, folder)  # fsspec also lists nothing if it cannot reach the server; this call raises then
    found = [info.path for info in infos if info.type == pyarrow.fs.FileType.File]
    skipped = {
        pathlib.PurePosixPath(info.path)
        for info in infos
        if not hidden and info.type == pyarrow.fs.FileType.Directory and info.base_name.startswith("_")
    }
    return [file for file in found if not skipped or skipped.isdisjoint(pathlib.PurePosixPath(file).parents)]


def read_whole(filesystem: pyarrow.fs.FileSystem, path: str) -> bytes | None:
    """The bytes of a small file, or None if it does not exist."""
    for _ in range(2):
        try:
            with filesystem.open_input_stream(path) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            # fsspec also reports "not found" if it cannot reach the server. Then `exists` raises.
            if not exists(filesystem, path):
                return None
    raise OSError(f"{path} exists, but cannot be read")


def remove_file(filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """Deletes a file, even while another process also deletes it."""
    try:
        filesystem.delete_file(path)
    except OSError:
        if exists(filesystem, path):
            raise


def move(filesystem: pyarrow.fs.FileSystem, source: str, destination: str) -> None:
    """Moves a file or a folder to a path that does not exist. Raises `OSError` even where HDFS fails silently."""
    try:
        filesystem.move(source, destination)
    except RuntimeError as error:  # fsspec raises it for server errors
        raise OSError(str(error)) from error
    if not is_local(filesystem) and (exists(filesystem, source) or not exists(filesystem, destination)):
        raise OSError(f"{source} could not be renamed to {destination}")


def write_whole(filesystem: pyarrow.fs.FileSystem, path: str, data: bytes, drafts: str | None = None) -> None:
    """Writes a small file atomically: writes a draft, in the file's folder or in the folder `drafts`, and renames it.

    Object stores cannot rename, so there the draft is copied. It stays until its folder is deleted.
    """
    draft = f"{path}.{uuid.uuid4().hex}" if drafts is None else f"{drafts}/draft-{uuid.uuid4().hex}"
    # A draft is needed for object stores too: a stream that an exception or the garbage collector closes stores a
    # partial file.
    with filesystem.open_output_stream(draft) as stream:
        stream.write(data)
    if is_store(filesystem):
        filesystem.copy_file(draft, path)
        return
    if is_local(filesystem):
        sync(draft)
    try:
        move(filesystem, draft, path)
    except OSError:
        if not exists(filesystem, path):
            raise
        remove_file(filesystem, draft)  # on HDFS, a rename does not replace a file: another driver has written it
    if is_local(filesystem):
        sync(posixpath.dirname(path) or ".")


def sync(path: str | os.PathLike[str]) -> None:
    """Flushes a local file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
