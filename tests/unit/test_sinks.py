"""Sinks with paths in any form, and the errors of sinks that cannot be used."""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pytest

from stagecrew.errors import CommitFailed, OperatorMisused
from stagecrew.operators.commit_log import MemoryCommitLog
from stagecrew.operators.commits import Staging, commit
from stagecrew.operators.sinks import DatabaseSink, ObjectSink, ParquetSink, read_committed
from support.commit_trials import SCHEMA, SEED, Driver, Killed, Tasks, moments_without_faults
from support.local_sinks import files, iceberg, sqlite


def commit_rows(sink, name):
    """Commits the rows of `Tasks(1)`, and returns them."""
    tasks = Tasks(1)
    commit(sink, MemoryCommitLog(), name, SCHEMA, lambda staging: tasks.run(sink, staging))
    return tasks.expected


def by_fsspec(protocol, **options):
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem(protocol, **options)))


@pytest.fixture(params=["memory", "file", "dir", "arrow", "tree"])
def store(request, tmp_path, monkeypatch):
    """A file system, and several forms of one path in it."""
    monkeypatch.chdir(tmp_path)
    if request.param == "memory":
        yield by_fsspec("memory"), ["memory://m", "m", "/m", "m/", "/m//", "memory://m/", "memory:///m"]
        memory = fsspec.filesystem("memory")
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]
    elif request.param == "dir":
        there = {"path": str(tmp_path), "fs": fsspec.filesystem("file", auto_mkdir=True)}
        yield by_fsspec("dir", **there), ["m", "m/", "m/n", "m//n"]
    elif request.param == "file":
        disk = by_fsspec("file", auto_mkdir=True)
        yield disk, [f"file://{tmp_path}/m", f"{tmp_path}/m/", f"{tmp_path}//m", "m", "./m", "m/../m"]
    elif request.param == "arrow":
        yield pyarrow.fs.LocalFileSystem(), [f"{tmp_path}/m/", f"{tmp_path}//m", "m", "./m", "m/../m"]
    else:
        tree = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
        yield tree, ["m", "/m", "m/"]


def joined(path, name):
    """Returns the folder `name` below a path, with the same trailing slashes as the path."""
    bare = path.rstrip("/")
    return f"{bare}/{name}{path[len(bare) :]}"


def test_objects_by_any_path(store):
    """The committed objects are found with any form of the sink's path."""
    filesystem, paths = store
    for path in paths:
        where = joined(path, str(paths.index(path)))
        for number, name in enumerate(("one", "other"), 1):
            expected = commit_rows(ObjectSink(where, filesystem), name)
            found = read_committed(where, filesystem)
            assert sorted((row["id"], row["text"]) for row in found.to_table().to_pylist()) == sorted(expected * number)
            assert found.count_rows() == number * len(expected), where


@pytest.mark.parametrize("url", ["sqlite://data.db", "sqlite://", "mysql://h/db", "data.db"])
def test_a_url_that_names_no_database_is_refused(url):
    """A url that is neither PostgreSQL's nor a path after three slashes is refused when the sink is created."""
    with pytest.raises(OperatorMisused, match="sqlite:///"):
        DatabaseSink(url, "t")


@pytest.mark.parametrize("mode", ["create", "append"])
def test_folders_by_any_path(store, mode):
    """A committed table is found with any form of its path, and contains no staged files."""
    filesystem, paths = store
    for path in paths:
        where = joined(path, str(paths.index(path)))
        for number, name in enumerate(("one", "other") if mode == "append" else ("one",), 1):
            expected = commit_rows(ParquetSink(where, mode, filesystem), name)
            infos = filesystem.get_file_info(pyarrow.fs.FileSelector(where.rstrip("/"), recursive=True))
            names = [info.path for info in infos if info.type == pyarrow.fs.FileType.File]
            assert all("_stagecrew-" not in name for name in names)
            read = pyarrow.dataset.dataset([name for name in names if name.endswith(".parquet")], filesystem=filesystem)
            assert read.count_rows() == number * len(expected), where


def test_a_table_without_commits_by_any_path(store):
    """Committed files determine a table's schema, and files that another driver only staged do not."""
    filesystem, paths = store
    for number, path in enumerate(paths):
        sink, tasks = ParquetSink(joined(path, f"_t{number}"), "append", filesystem), Tasks(1)
        staging = Staging("c", "run", SCHEMA)
        sink.begin(staging)
        messages = tasks.run(sink, staging)
        assert sink._schema() is None, path
        sink.commit(staging, messages)
        assert sink._schema() == SCHEMA, path


@pytest.mark.parametrize("make", [ObjectSink, ParquetSink, lambda path: ParquetSink(path, "append")])
def test_a_relative_path_in_tasks(tmp_path, monkeypatch, make):
    """A sink's relative path refers to the working folder of the process that created the sink, wherever tasks run."""
    (tmp_path / "driver").mkdir()
    (tmp_path / "task").mkdir()
    monkeypatch.chdir(tmp_path / "driver")
    sink, tasks = make("table"), Tasks(1)

    def run(staging):
        monkeypatch.chdir(tmp_path / "task")
        messages = tasks.run(pickle.loads(pickle.dumps(sink)), staging)
        monkeypatch.chdir(tmp_path / "driver")
        return messages

    assert commit(sink, MemoryCommitLog(), "c", SCHEMA, run).rows == 40
    assert files(tmp_path / "task") == []
    assert any(name.endswith(".parquet") for name in files(tmp_path / "driver" / "table"))


def test_a_relative_database_in_tasks(tmp_path, monkeypatch):
    """A relative SQLite path refers to the working folder of the process that created the sink. Tasks create no empty
    file in their own folder."""
    for name in ("driver", "task"):
        (tmp_path / name).mkdir()
    trial = sqlite(tmp_path / "driver")
    monkeypatch.chdir(tmp_path / "driver")
    sink, tasks = DatabaseSink("sqlite:///data.db", "target"), Tasks(1)

    def run(staging):
        monkeypatch.chdir(tmp_path / "task")
        return tasks.run(pickle.loads(pickle.dumps(sink)), staging)

    assert commit(sink, MemoryCommitLog(), "c", SCHEMA, run).rows == 40
    assert sorted(trial.visible()) == tasks.expected
    assert files(tmp_path / "task") == []


@pytest.mark.parametrize("make", [ObjectSink, lambda path: ParquetSink(path, "append")], ids=["objects", "appended"])
def test_a_driver_that_was_killed_in_an_empty_table(tmp_path, make):
    """If a killed driver left an empty table, the error of a commit with another schema says which folder to delete,
    and when. Once the folder is deleted, the commit succeeds."""
    dead = Staging("unfinished", "run", pa.schema([("other", pa.int64())]))
    make(tmp_path / "t").begin(dead)
    with pytest.raises(CommitFailed, match="commit 'unfinished', which is about to create") as raised:
        commit_rows(make(tmp_path / "t"), "c")
    folder = re.search(r"its driver has ended and it is not repeated, delete (\S+)$", str(raised.value))[1]
    assert files(tmp_path) == [f"{folder}/_open".removeprefix(f"{tmp_path}/")]
    shutil.rmtree(folder)
    commit_rows(make(tmp_path / "t"), "c")


def test_a_table_at_an_invalid_location(tmp_path):
    """A commit to an Iceberg table whose location contains a space fails before any task runs, and the error names the
    location."""
    (tmp_path / "a b").mkdir()
    trial = iceberg(tmp_path / "a b")
    with pytest.raises(CommitFailed, match="a b/warehouse/db/target/data/.* cannot be written: .*URI"):
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0)
    assert trial.visible() == []
    assert trial.leftovers() == []


def test_a_table_named_with_its_schema(tmp_path):
    """A table name can include its schema: SQLite's `main.target` is the same table as `target`."""
    trial, tasks = sqlite(tmp_path), Tasks(1)
    trial.make_sink = lambda: DatabaseSink(f"sqlite:///{tmp_path}/data.db", "main.target")
    assert trial.drive(Driver(), tasks).rows == 40
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []
    trial.repeat_changes_nothing()


def unreferenced_metadata(trial):
    """Returns the files in an Iceberg table's metadata folder that the table does not refer to."""
    with trial.make_sink()._table() as table:
        known = {table.metadata_location, *(entry.metadata_file for entry in table.metadata.metadata_log)}
        for snapshot in table.snapshots():
            known |= {snapshot.manifest_list, *(one.manifest_path for one in snapshot.manifests(table.io))}
        folder = Path(table.location().removeprefix("file://"))
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and f"file://{path}" not in known and path.parent.name == "metadata"
    ]


def test_unreferenced_metadata_of_an_iceberg_table(tmp_path):
    """A driver that is killed before it updates the catalogue leaves unreferenced metadata files.

    The table does not need these files, so they can be deleted (see the guide).
    """
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
    names = moments_without_faults(calm := iceberg(tmp_path / "undisturbed"))
    assert unreferenced_metadata(calm) == []
    trial, tasks = iceberg(tmp_path / "killed"), Tasks(SEED, zombies=False)
    with pytest.raises(Killed):
        trial.drive(Driver(dies_at=names.index("before the update") + 1), tasks)
    assert trial.drive(Driver(), tasks).repeated
    leftover_files = unreferenced_metadata(trial)
    assert {"".join(path.suffixes[-2:]) for path in leftover_files} <= {".avro", ".metadata.json"}
    assert 1 <= len(leftover_files) <= 3
    for path in leftover_files:
        path.unlink()
    trial.drive(Driver(), Tasks(2), "other")
    assert sorted(trial.visible()) == sorted(tasks.expected * 2)
    assert trial.leftovers() == []
