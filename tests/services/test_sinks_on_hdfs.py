"""ParquetSink on a real HDFS, whose renames move into folders that are there, and fail without a word."""

from __future__ import annotations

import contextlib
import gc
import urllib.parse

import fsspec
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.webhdfs import WebHDFS

from stagecrew.errors import CommitConflict, CommitFailed
from stagecrew.operators.commit_log import FileCommitLog
from stagecrew.operators.commits import commit
from stagecrew.operators.sinks import ParquetSink, parquet
from support.commit_schedules import (
    commit_that_raises,
    concurrent_commits,
    failing_at_each_moment,
    first_commits_of_two_schemas,
    killed_at_each_moment,
    late_task_at_each_moment,
    lost_connections,
    mismatched_schemas,
    random_history,
    rename_into_existing_folder,
    resume_at_each_moment,
)
from support.commit_trials import SCHEMA, Driver, Tasks, Trial, files_below, moments_without_faults, watch_files
from support.hdfs import hdfs
from support.tcp_proxy import Proxy


@pytest.fixture(scope="module")
def dfs(tmp_path_factory):
    """An HDFS of the tests' own."""
    with hdfs(tmp_path_factory.mktemp("hdfs")) as found:
        yield found


def at_hdfs(dfs, folder, number, mode="append"):
    """A folder of its own, with the table `t` in it."""
    path = f"/{folder.name}/{number}"
    table = f"{path}/t"

    def names(below):
        return [
            info.path
            for info in dfs.get_file_info(pyarrow.fs.FileSelector(below, recursive=True, allow_not_found=True))
        ]

    def visible():
        found = [name for name in names(table) if name.endswith(".parquet") and "/_" not in name]
        return [(row["id"], row["text"]) for one in found for row in pq.read_table(one, filesystem=dfs).to_pylist()]

    def left():
        """What is in no committed folder, but for their marks."""
        one = table if mode == "create" else f"{table}/stagecrew_commit="
        return [name for name in names(path) if name != table and not name.startswith(one)] + [
            name for name in names(table) if "/_" in name and not name.endswith("/_stagecrew.json")
        ]

    commit_log, state = FileCommitLog(folder / f"log-{number}"), lambda: files_below(dfs, path)
    return Trial(lambda: ParquetSink(table, mode, dfs), commit_log, visible, left, watch_files, state)


@pytest.fixture(params=["append", pytest.param("create", marks=pytest.mark.long)])
def make(request, dfs, tmp_path):
    """Makes trials of each mode."""
    return lambda name: at_hdfs(dfs, tmp_path, name, request.param)


def test_once(make):
    """All rows are there once, and a repeat changes nothing."""
    trial, tasks = make(0), Tasks(1)
    assert trial.drive(Driver(), tasks).rows == 40
    assert sorted(trial.visible()) == tasks.expected
    assert trial.drive(Driver(), Tasks(2)).repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


@pytest.mark.long
def test_random_faults(make):
    """Drivers die, pause and go on at random, tasks write when nobody needs them: a hundred for each mode."""
    count = len(moments_without_faults(make("undisturbed")))
    for seed in range(100, 200):
        random_history(make(seed), seed, count)


@pytest.mark.long
def test_two_at_once(dfs, tmp_path):
    """Both land."""
    assert concurrent_commits(at_hdfs(dfs, tmp_path, 0), "staged") == []


@pytest.mark.long
def test_two_that_have_decided(make, request):
    """Both land, or one says that it cannot, and leaves nothing."""
    for number in range(3):
        assert len(concurrent_commits(make(number), "before commit")) == (
            request.node.callspec.params["make"] == "create"
        )


@pytest.mark.parametrize("moments", [(2,), pytest.param((), marks=pytest.mark.long)], ids=["one", "all"])
def test_a_task_that_is_late(make, moments):
    """HDFS makes the folder anew in which it writes; it is gone behind that too."""
    late_task_at_each_moment(make, moments)


@pytest.mark.parametrize("every", [25, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
def test_the_driver_is_killed_at_each_moment(make, every):
    """Before and after every write: readers see all rows or none, and the next driver brings all, once, and leaves nothing."""
    killed_at_each_moment(make, every)


@pytest.mark.long
def test_a_write_that_fails_at_each_moment(make):
    """Once, before or after its effect: an error before the decision; behind it the driver goes on by itself."""
    failing_at_each_moment(make)


@pytest.mark.long
def test_an_old_driver_goes_on(make):
    """One that pauses before or after any write, and goes on when another has committed or aborted, changes nothing."""
    resume_at_each_moment(make, 1)


@pytest.mark.long
def test_a_commit_that_raises_once(make):
    """Before or after its effect; it is tried again. When it raises for good, a later driver goes on with what was staged."""
    commit_that_raises(make)


@pytest.mark.parametrize("at", ["meanwhile", *(pytest.param(at, marks=pytest.mark.long) for at in ("there", "empty"))])
def test_a_folder_that_is_there(dfs, tmp_path, at, monkeypatch):
    """A rename onto it would move into it: it is a conflict, before anything runs, or when another makes it meanwhile."""
    trial = at_hdfs(dfs, tmp_path, 0, "create")
    sink = trial.make_sink()
    other = f"/{tmp_path.name}/0/t"

    def make_other():
        if at == "empty":
            dfs.create_dir(other)
            return
        with dfs.open_output_stream(f"{other}/theirs.txt") as stream:
            stream.write(b"theirs")

    def run(staging):
        assert at == "meanwhile", "it is said before anything runs"
        return Tasks(1).run(trial.make_sink(), staging)

    if at == "meanwhile":  # behind the look whether it is there
        move = parquet.move

        def behind(filesystem, source, destination):
            if destination == other:
                make_other()
            move(filesystem, source, destination)

        monkeypatch.setattr(parquet, "move", behind)
    else:
        make_other()
    with pytest.raises(CommitConflict, match="is there already"):
        commit(sink, trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
    names = dfs.get_file_info(pyarrow.fs.FileSelector(f"/{tmp_path.name}/0", recursive=True))
    assert [info.path for info in names] == [other, *([f"{other}/theirs.txt"] if at != "empty" else [])]


def test_a_folder_that_is_moved_into_another(dfs, tmp_path):
    """A driver that dies there has left its files in the other's folder: a repeat takes them away."""

    def make(name):
        (tmp_path / name).mkdir()
        made = at_hdfs(dfs, tmp_path, 0, "create")
        made.commit_log = FileCommitLog(tmp_path / name)
        return made

    rename_into_existing_folder(dfs, f"/{tmp_path.name}/0/t", make)


@pytest.mark.parametrize("moments", [(4,), pytest.param(range(1, 60), marks=pytest.mark.long)], ids=["one", "all"])
def test_first_commits_of_two_schemas(dfs, tmp_path, moments):
    """Both find nothing there: one lands, the other is told which commit has another schema."""
    first_commits_of_two_schemas(lambda number: at_hdfs(dfs, tmp_path, number), moments)


def test_a_schema_that_does_not_fit(dfs, tmp_path):
    """It is said by the columns, before anything runs."""
    mismatched_schemas(at_hdfs(dfs, tmp_path, 0))


@pytest.mark.parametrize(
    "moments", [(30,), pytest.param(range(1, 300, 3), marks=pytest.mark.long)], ids=["one", "some"]
)
def test_connections_that_are_lost(dfs, tmp_path, moments):
    """At any call: a clear error, and never half is visible; a repeat finishes what was decided, and leaves nothing."""
    with Proxy(urllib.parse.urlsplit(dfs.handler.fs.url).port) as proxy:
        host, _, port = proxy.hosts.partition(":")
        web = WebHDFS(host, int(port), user="root", skip_instance_cache=True)
        through = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(web))

        def make(number):
            made = at_hdfs(dfs, tmp_path, number, "create" if number % 2 else "append")
            sink = made.make_sink()
            made.make_sink = lambda: ParquetSink(sink._path, sink._mode, through)
            return made

        with contextlib.closing(web.session):
            lost_connections(make, proxy, moments)
            gc.collect()  # files that were given up are written when they are collected: while there is a server


def test_where_nothing_can_be_written(dfs, tmp_path):
    """What its server says, or that it is not there, comes as our error, before anything runs."""
    with dfs.open_output_stream(f"/{tmp_path.name}/file") as stream:
        stream.write(b"no folder")
    sink = ParquetSink(f"/{tmp_path.name}/file/t", filesystem=dfs)
    with pytest.raises(CommitFailed, match="cannot be written: "):
        commit(sink, FileCommitLog(tmp_path), "c", SCHEMA, lambda staging: 1 / 0)
    nowhere = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem("webhdfs", host="127.0.0.1", port=1)))
    sink = ParquetSink("/t", filesystem=nowhere)
    with pytest.raises(CommitFailed, match="/t cannot be read: .*Connection refused"):
        commit(sink, FileCommitLog(tmp_path), "d", SCHEMA, lambda staging: 1 / 0)
