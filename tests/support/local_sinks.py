"""Trials of the sinks that can write to a local disk."""

from __future__ import annotations

import contextlib
import gc
import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pyarrow.fs
from fsspec.implementations.local import LocalFileSystem

from stagecrew.operators.commit_log import FileCommitLog
from stagecrew.operators.sinks import DatabaseSink, IcebergSink, ObjectSink, ParquetSink, read_committed
from support.commit_trials import SCHEMA, Trial, files_below, watch_files, watch_iceberg, watch_transactions


class _LikeHdfs(LocalFileSystem):
    """A file system whose renames behave like those of HDFS.

    A rename to an existing folder moves the source into this folder. A rename to an existing file does nothing and
    raises no error.
    """

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if os.path.isdir(path2):
            path2 = os.path.join(path2, os.path.basename(path1))
        if os.path.exists(path1) and not os.path.exists(path2):
            os.rename(path1, path2)


def like_hdfs() -> pyarrow.fs.FileSystem:
    """Returns a local file system whose renames behave like those of HDFS."""
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(_LikeHdfs(auto_mkdir=True, skip_instance_cache=True)))


def files(folder: Path) -> list[str]:
    """Returns the paths of all files below a folder, relative to it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def file_lister(folder: Path) -> Callable[[], list[tuple[str, int | None]]]:
    """Returns a function that lists the files and folders below a folder, with their sizes."""
    return lambda: files_below(pyarrow.fs.LocalFileSystem(), str(folder))


def rows_of(dataset: Any) -> list[tuple[int, str]]:
    return [(row["id"], row["text"]) for row in dataset.to_table().to_pylist()]


def parquet(tmp_path: Path) -> Trial:
    target = tmp_path / "out" / "table"

    def visible():
        if not target.exists():
            return []
        assert (target / "_stagecrew.json").exists(), "the folder exists, but is incomplete"
        return rows_of(pyarrow.dataset.dataset(str(target), exclude_invalid_files=True))

    def leftovers():
        return [name for name in files(tmp_path / "out") if not name.startswith("table/")] + [
            path.name for path in (tmp_path / "out").glob("_stagecrew-*")
        ]

    state = file_lister(tmp_path / "out")
    return Trial(lambda: ParquetSink(target), FileCommitLog(tmp_path / "log"), visible, leftovers, watch_files, state)


def appended(tmp_path: Path) -> Trial:
    target = tmp_path / "table"

    def visible():
        if not any(target.rglob("*.parquet")):
            return []
        return rows_of(pyarrow.dataset.dataset(str(target), partitioning="hive"))

    def leftovers():
        return [name for name in files(target) if not name.startswith("stagecrew_commit=")] + [
            path.name for path in target.glob("_*")
        ]

    make = lambda: ParquetSink(target, mode="append")  # noqa: E731
    return Trial(make, FileCommitLog(tmp_path / "log"), visible, leftovers, watch_files, file_lister(target))


def objects(tmp_path: Path) -> Trial:
    target = tmp_path / "objects"

    def visible():
        try:
            return rows_of(read_committed(target))
        except FileNotFoundError:
            return []

    def leftovers():
        try:
            known = {str(file)[len(str(target)) + 1 :] for file in read_committed(target).files}
        except FileNotFoundError:
            known = set()
        return [name for name in files(target) if name not in known and not name.startswith("_stagecrew/")]

    commit_log, state = FileCommitLog(tmp_path / "log"), file_lister(target)
    return Trial(lambda: ObjectSink(target), commit_log, visible, leftovers, watch_files, state)


def sqlite(tmp_path: Path) -> Trial:
    path = tmp_path / "data.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute('CREATE TABLE target (id INTEGER, "text" TEXT)')

    def query(text):
        with contextlib.closing(sqlite3.connect(path)) as database:
            return database.execute(text).fetchall()

    def state():
        with contextlib.closing(sqlite3.connect(path)) as database:
            return list(database.iterdump())

    return Trial(
        lambda: DatabaseSink(f"sqlite:///{path}", "target"),
        FileCommitLog(tmp_path / "log"),
        lambda: query("SELECT id, text FROM target"),
        lambda: [name for (name,) in query("SELECT name FROM sqlite_master WHERE name LIKE 'stagecrew_stage%'")],
        watch_transactions,
        state,
    )


@contextlib.contextmanager
def iceberg_table(properties: dict[str, str]) -> Iterator[Any]:
    """The table of an Iceberg trial. Its catalogue is open until the end, and then closed."""
    from pyiceberg.catalog import load_catalog

    with contextlib.closing(load_catalog("default", **properties)) as catalog:
        yield catalog.load_table("db.target")


def iceberg(tmp_path: Path, uri: str = "") -> Trial:
    from pyiceberg.catalog import load_catalog

    properties = {
        "type": "sql",
        "uri": uri or f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"file://{tmp_path}/warehouse",
    }
    with contextlib.closing(load_catalog("default", **properties)) as catalog:
        catalog.create_namespace_if_not_exists("db")
        catalog.create_table("db.target", SCHEMA)

    def state() -> Any:
        with iceberg_table(properties) as table:
            return table.metadata_location, file_lister(tmp_path / "warehouse" / "db" / "target" / "data")()

    def visible() -> list[tuple[int, str]]:
        with iceberg_table(properties) as table:
            return [(row["id"], row["text"]) for row in table.scan().to_arrow().to_pylist()]

    def leftovers() -> list[str]:
        with iceberg_table(properties) as table:
            known = {task.file.file_path.removeprefix("file://") for task in table.scan().plan_files()}
        return [
            name
            for name in files(tmp_path / "warehouse")
            if "stagecrew-" in name and not any(one.endswith(name) for one in known)
        ]

    return Trial(
        lambda: IcebergSink("db.target", properties=properties),
        FileCommitLog(tmp_path / "log"),
        visible,
        leftovers,
        watch_iceberg,
        state,
    )


SINKS = [parquet, appended, objects, sqlite, iceberg]


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mounts a file system of the given size on `folder`. Needs root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        gc.collect()  # closes connections that tests left open, because otherwise umount fails
        subprocess.run(["umount", str(folder)], check=True)


def remount(folder: Path, mode: str) -> None:
    """Remounts a file system read-only ("ro") or read-write ("rw")."""
    gc.collect()
    subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], check=True)
