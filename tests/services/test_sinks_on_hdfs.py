"""ParquetSink on a real HDFS.

On HDFS, a rename onto an existing directory moves the source into that directory, and a rename may fail silently.
"""

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
def hdfs_filesystem(tmp_path_factory):
    """A file system on an HDFS that the tests start."""
    with hdfs(tmp_path_factory.mktemp("hdfs")) as filesystem:
        yield filesystem


def hdfs_trial(hdfs_filesystem, folder, number, mode="append"):
    """A trial with the table `t` in a directory of its own."""
    path = f"/{folder.name}/{number}"
    table = f"{path}/t"

    def names(directory):
        return [
            info.path
            for info in hdfs_filesystem.get_file_info(
                pyarrow.fs.FileSelector(directory, recursive=True, allow_not_found=True)
            )
        ]

    def visible():
        found = [name for name in names(table) if name.endswith(".parquet") and "/_" not in name]
        return [
            (row["id"], row["text"])
            for one in found
            for row in pq.read_table(one, filesystem=hdfs_filesystem).to_pylist()
        ]

    def left():
        """The files outside of the committed directories, without the marks of commits."""
        committed_prefix = table if mode == "create" else f"{table}/stagecrew_commit="
        return [name for name in names(path) if name != table and not name.startswith(committed_prefix)] + [
            name for name in names(table) if "/_" in name and not name.endswith("/_stagecrew.json")
        ]

    commit_log, state = FileCommitLog(folder / f"log-{number}"), lambda: files_below(hdfs_filesystem, path)
    return Trial(lambda: ParquetSink(table, mode, hdfs_filesystem), commit_log, visible, left, watch_files, state)


@pytest.fixture(params=["append", pytest.param("create", marks=pytest.mark.long)])
def make_trial(request, hdfs_filesystem, tmp_path):
    """Creates trials by name, in the mode of the parameter."""
    return lambda name: hdfs_trial(hdfs_filesystem, tmp_path, name, request.param)


def test_a_repeated_commit_changes_nothing(make_trial):
    """After a commit all rows are visible once. A repeat of the commit changes nothing."""
    trial, tasks = make_trial(0), Tasks(1)
    assert trial.drive(Driver(), tasks).rows == 40
    assert sorted(trial.visible()) == tasks.expected
    assert trial.drive(Driver(), Tasks(2)).repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


@pytest.mark.long
def test_a_commit_survives_random_faults(make_trial):
    """Commits stay all or nothing when drivers die, pause and resume at random, and tasks write too late."""
    count = len(moments_without_faults(make_trial("undisturbed")))
    for seed in range(100, 200):
        random_history(make_trial(seed), seed, count)


@pytest.mark.long
def test_two_concurrent_commits_both_succeed(hdfs_filesystem, tmp_path):
    """Two commits with staged rows run at the same time, and both succeed."""
    assert concurrent_commits(hdfs_trial(hdfs_filesystem, tmp_path, 0), "staged") == []


@pytest.mark.long
def test_of_two_decided_commits_both_succeed_or_one_conflicts(make_trial, request):
    """Two decided commits run at the same time. Both succeed, or one raises a conflict and leaves nothing."""
    for number in range(3):
        assert len(concurrent_commits(make_trial(number), "before commit")) == (
            request.node.callspec.params["make_trial"] == "create"
        )


@pytest.mark.parametrize("moments", [(2,), pytest.param((), marks=pytest.mark.long)], ids=["one", "all"])
def test_rows_of_a_late_task_are_never_visible(make_trial, moments):
    """If a late task writes to a deleted directory, HDFS recreates it. The commit still removes the task's rows."""
    late_task_at_each_moment(make_trial, moments)


@pytest.mark.parametrize("every_nth", [25, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
def test_a_commit_survives_the_death_of_its_driver_at_each_moment(make_trial, every_nth):
    """If the driver dies before or after any write, readers see all rows or none.

    The next driver completes the commit once.
    """
    killed_at_each_moment(make_trial, every_nth)


@pytest.mark.long
def test_a_commit_survives_one_failing_write_at_each_moment(make_trial):
    """If a write fails once before the decision, the commit fails. If it fails after, the same driver retries."""
    failing_at_each_moment(make_trial)


@pytest.mark.long
def test_a_driver_that_resumes_after_another_has_finished_changes_nothing(make_trial):
    """A driver that pauses at any write, and resumes after another has committed or aborted, changes nothing."""
    resume_at_each_moment(make_trial, 1)


@pytest.mark.long
def test_a_commit_that_raises_is_retried(make_trial):
    """A commit that raises before or after its effect is retried. If it always raises, a later driver resumes it."""
    commit_that_raises(make_trial)


@pytest.mark.parametrize(
    "moment", ["meanwhile", *(pytest.param(moment, marks=pytest.mark.long) for moment in ("there", "empty"))]
)
def test_an_existing_table_directory_is_a_conflict(hdfs_filesystem, tmp_path, moment, monkeypatch):
    """If the table's directory already exists, the commit raises a conflict, no matter when it was created."""
    trial = hdfs_trial(hdfs_filesystem, tmp_path, 0, "create")
    sink = trial.make_sink()
    other = f"/{tmp_path.name}/0/t"

    def make_other():
        if moment == "empty":
            hdfs_filesystem.create_dir(other)
            return
        with hdfs_filesystem.open_output_stream(f"{other}/theirs.txt") as stream:
            stream.write(b"theirs")

    def run(staging):
        assert moment == "meanwhile", "the conflict must be raised before anything runs"
        return Tasks(1).run(trial.make_sink(), staging)

    if moment == "meanwhile":  # after the check that it does not exist
        move = parquet.move

        def make_other_then_move(filesystem, source, destination):
            if destination == other:
                make_other()
            move(filesystem, source, destination)

        monkeypatch.setattr(parquet, "move", make_other_then_move)
    else:
        make_other()
    with pytest.raises(CommitConflict, match="already exists"):
        commit(sink, trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
    names = hdfs_filesystem.get_file_info(pyarrow.fs.FileSelector(f"/{tmp_path.name}/0", recursive=True))
    assert [info.path for info in names] == [other, *([f"{other}/theirs.txt"] if moment != "empty" else [])]


def test_files_moved_into_another_directory_are_removed(hdfs_filesystem, tmp_path):
    """If a driver dies after a rename into another directory, a repeat removes its files from that directory."""

    def make_trial(name):
        (tmp_path / name).mkdir()
        trial = hdfs_trial(hdfs_filesystem, tmp_path, 0, "create")
        trial.commit_log = FileCommitLog(tmp_path / name)
        return trial

    rename_into_existing_folder(hdfs_filesystem, f"/{tmp_path.name}/0/t", make_trial)


@pytest.mark.parametrize("moments", [(4,), pytest.param(range(1, 60), marks=pytest.mark.long)], ids=["one", "all"])
def test_of_two_first_commits_with_different_schemas_one_fails(hdfs_filesystem, tmp_path, moments):
    """If two first commits have different schemas, one succeeds. The other raises an error that names the first."""
    first_commits_of_two_schemas(lambda number: hdfs_trial(hdfs_filesystem, tmp_path, number), moments)


def test_a_mismatched_schema_is_reported_before_anything_runs(hdfs_filesystem, tmp_path):
    """If the schema does not match the table's, an error names the columns before anything runs."""
    mismatched_schemas(hdfs_trial(hdfs_filesystem, tmp_path, 0))


@pytest.mark.parametrize(
    "moments", [(30,), pytest.param(range(1, 300, 3), marks=pytest.mark.long)], ids=["one", "some"]
)
def test_lost_connections_never_leave_a_partial_commit(hdfs_filesystem, tmp_path, moments):
    """If a connection is lost at any call, the error is clear, and no commit is partial.

    A repeat completes a decided commit.
    """
    with Proxy(urllib.parse.urlsplit(hdfs_filesystem.handler.fs.url).port) as proxy:
        host, _, port = proxy.hosts.partition(":")
        web = WebHDFS(host, int(port), user="root", skip_instance_cache=True)
        proxied = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(web))

        def make_trial(number):
            trial = hdfs_trial(hdfs_filesystem, tmp_path, number, "create" if number % 2 else "append")
            sink = trial.make_sink()
            trial.make_sink = lambda: ParquetSink(sink._path, sink._mode, proxied)
            return trial

        with contextlib.closing(web.session):
            lost_connections(make_trial, proxy, moments)
            gc.collect()  # abandoned files are written when they are garbage-collected, which needs the server


def test_an_unwritable_path_is_reported_before_anything_runs(hdfs_filesystem, tmp_path):
    """If the path cannot be written, or there is no server, `CommitFailed` is raised before anything runs."""
    with hdfs_filesystem.open_output_stream(f"/{tmp_path.name}/file") as stream:
        stream.write(b"no folder")
    sink = ParquetSink(f"/{tmp_path.name}/file/t", filesystem=hdfs_filesystem)
    with pytest.raises(CommitFailed, match="cannot be written: "):
        commit(sink, FileCommitLog(tmp_path), "c", SCHEMA, lambda staging: 1 / 0)
    nowhere = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem("webhdfs", host="127.0.0.1", port=1)))
    sink = ParquetSink("/t", filesystem=nowhere)
    with pytest.raises(CommitFailed, match="/t cannot be read: .*Connection refused"):
        commit(sink, FileCommitLog(tmp_path), "d", SCHEMA, lambda staging: 1 / 0)
