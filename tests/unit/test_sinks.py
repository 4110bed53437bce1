"""Sinks by any form of a path, and what they say of what they cannot use."""

from __future__ import annotations

import pickle

import fsspec
import pyarrow.dataset
import pyarrow.fs
import pytest

from sinks import SCHEMA, Tasks, files, sqlite
from stagecrew.operators.commits import Staging, commit
from stagecrew.operators.decisions import MemoryDecisions
from stagecrew.operators.sinks import DatabaseSink, ObjectSink, ParquetSink, read_committed


def land(sink, name):
    """One commit: what its tasks were given."""
    tasks = Tasks(1)
    commit(sink, MemoryDecisions(), name, SCHEMA, lambda staging: tasks.run(sink, staging))
    return tasks.expected


def by_fsspec(protocol, **options):
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem(protocol, **options)))


@pytest.fixture(params=["memory", "file", "dir", "arrow", "tree"])
def store(request, tmp_path, monkeypatch):
    """A file system, and how a path there may be written."""
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
    """A folder of its own, with as many slashes behind it."""
    bare = path.rstrip("/")
    return f"{bare}/{name}{path[len(bare) :]}"


def test_objects_by_any_path(store):
    """What is committed is there, however its path is written, and nothing else is."""
    filesystem, paths = store
    for path in paths:
        where = joined(path, str(paths.index(path)))
        for number, name in enumerate(("one", "other"), 1):
            expected = land(ObjectSink(where, filesystem), name)
            found = read_committed(where, filesystem)
            assert sorted((row["id"], row["text"]) for row in found.to_table().to_pylist()) == sorted(expected * number)
            assert found.count_rows() == number * len(expected), where


@pytest.mark.parametrize("mode", ["create", "append"])
def test_folders_by_any_path(store, mode):
    """The same of folders; a table that has only what another stages is an empty one."""
    filesystem, paths = store
    for path in paths:
        where = joined(path, str(paths.index(path)))
        for number, name in enumerate(("one", "other") if mode == "append" else ("one",), 1):
            expected = land(ParquetSink(where, mode, filesystem), name)
            infos = filesystem.get_file_info(pyarrow.fs.FileSelector(where.rstrip("/"), recursive=True))
            names = [info.path for info in infos if info.type == pyarrow.fs.FileType.File]
            assert all("_stagecrew-" not in name for name in names)
            read = pyarrow.dataset.dataset([name for name in names if name.endswith(".parquet")], filesystem=filesystem)
            assert read.count_rows() == number * len(expected), where


def test_a_table_without_a_commit_by_any_path(store):
    """What another stages there says nothing of its schema; what is committed does."""
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
    """It is that of the process that made the sink, wherever its tasks work."""
    (tmp_path / "driver").mkdir()
    (tmp_path / "task").mkdir()
    monkeypatch.chdir(tmp_path / "driver")
    sink, tasks = make("table"), Tasks(1)

    def run(staging):
        monkeypatch.chdir(tmp_path / "task")
        messages = tasks.run(pickle.loads(pickle.dumps(sink)), staging)
        monkeypatch.chdir(tmp_path / "driver")
        return messages

    assert commit(sink, MemoryDecisions(), "c", SCHEMA, run).rows == 40
    assert files(tmp_path / "task") == []
    assert any(name.endswith(".parquet") for name in files(tmp_path / "driver" / "table"))


def test_a_relative_database_in_tasks(tmp_path, monkeypatch):
    """The same of a file of SQLite; no empty one is made where a task works."""
    for name in ("driver", "task"):
        (tmp_path / name).mkdir()
    trial = sqlite(tmp_path / "driver")
    monkeypatch.chdir(tmp_path / "driver")
    sink, tasks = DatabaseSink("sqlite:///data.db", "target"), Tasks(1)

    def run(staging):
        monkeypatch.chdir(tmp_path / "task")
        return tasks.run(pickle.loads(pickle.dumps(sink)), staging)

    assert commit(sink, MemoryDecisions(), "c", SCHEMA, run).rows == 40
    assert sorted(trial.visible()) == tasks.expected
    assert files(tmp_path / "task") == []
