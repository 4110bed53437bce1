"""Staged files and folders: late and failed tasks, and the renamed folder."""

from __future__ import annotations

import shutil
import threading

import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from stagecrew.errors import CommitConflict, CommitFailed, CommitPending, CommitSuperseded
from stagecrew.files import exists, list_files, remove_folder
from stagecrew.operators.commits import Staging, commit, resume
from stagecrew.operators.sinks import ObjectSink, ParquetSink
from stagecrew.operators.sinks import parquet as parquet_module
from support.commit_schedules import late_task_at_each_moment
from support.commit_trials import SCHEMA, Driver, Tasks
from support.commits import CallsBefore, trials_in
from support.local_sinks import SINKS, files, like_hdfs, parquet


@pytest.fixture(params=SINKS, ids=lambda make: make.__name__)
def make(request, tmp_path):
    """Makes trials of every sink."""
    return trials_in(request.param, tmp_path)


def test_a_late_task_creates_no_folder(tmp_path):
    """A task attempt that stages rows for a run that has ended fails and leaves no file."""
    sink, staging = ParquetSink(tmp_path / "t"), Staging("c", "r", SCHEMA)
    sink.begin(staging)
    sink.discard(staging, ())
    with pytest.raises(CommitFailed, match="the commit that this task stages for has ended"):
        sink.stage(staging, 0, 1, iter([pa.record_batch({"id": [1], "text": ["a"]}, schema=SCHEMA)]))
    assert files(tmp_path) == []


def test_a_late_task_leaves_nothing(make):
    """A task that pauses at any of its writes until the commit has ended adds no visible row and leaves no file."""
    late_task_at_each_moment(make)


def test_a_failed_task_removes_only_its_own_file(tmp_path):
    """A failed task deletes only its own file, and raises its own error."""
    sink, staging = ObjectSink(tmp_path / "t"), Staging("c", "r", SCHEMA)
    sink.begin(staging)
    assert sink.stage(staging, 0, 1, Tasks.batches([(1, "a")]))

    def broken():
        yield from Tasks.batches([(2, "b")])
        raise FileNotFoundError("something else does not exist")

    with pytest.raises(FileNotFoundError, match="something else"):
        sink.stage(staging, 0, 2, broken())
    assert [name.rsplit("/", 1)[1] for name in files(tmp_path)] == ["_open", "part-00000-1.parquet"]


def test_a_parquet_commit_is_an_ordinary_folder_of_parquet_files(tmp_path):
    """PyArrow reads a commit of ParquetSink without stagecrew."""
    ParquetSink(tmp_path / "t", compression="zstd")
    trial = parquet(tmp_path)
    trial.drive(Driver(), Tasks(1))
    table = pq.read_table(tmp_path / "out" / "table")
    assert table.num_rows == 40
    assert table.schema.equals(SCHEMA)


@pytest.mark.parametrize("filesystem", [pyarrow.fs.LocalFileSystem(), like_hdfs()], ids=["local", "like hdfs"])
def test_a_refused_folder_is_never_visible_in_part(tmp_path, monkeypatch, filesystem):
    """After a refusal, a driver deletes its folder while another driver of the same commit renames that folder.

    The half-deleted folder must not become visible.
    """
    trial, tasks, target = parquet(tmp_path), Tasks(1), tmp_path / "out" / "table"
    trial.make_sink = lambda: ParquetSink(str(target), filesystem=filesystem)
    entered, released, outcome = threading.Event(), threading.Event(), []
    move = parquet_module.move

    def pausing_move(on, source, destination):
        if threading.current_thread() is other and destination == str(target):
            entered.set()
            assert released.wait(30)
        move(on, source, destination)

    def run():
        try:
            outcome.append(resume(trial.make_sink(), trial.commit_log, "c", sleep=lambda _: None))
        except (CommitFailed, CommitPending) as error:
            outcome.append(error)

    other = threading.Thread(target=run)

    def start_other():
        other.start()
        assert entered.wait(30)
        target.mkdir()
        (target / "theirs").touch()

    def remove_slowly(on, folder):
        """After the first file is deleted, the conflicting folder disappears and the other driver continues."""
        if entered.is_set() and not released.is_set() and "-whole" in folder and exists(on, folder):
            on.delete_file(next(file for file in list_files(on, folder) if file.endswith(".parquet")))
            shutil.rmtree(target)
            released.set()
            other.join(30)
        remove_folder(on, folder)

    monkeypatch.setattr(parquet_module, "move", pausing_move)
    monkeypatch.setattr(parquet_module, "remove_folder", remove_slowly)
    with pytest.raises(CommitConflict):
        commit(
            CallsBefore(trial.make_sink(), commit=start_other), trial.commit_log, "c", SCHEMA,
            lambda staging: tasks.run(trial.make_sink(), staging), sleep=lambda _: None,
        )  # fmt: skip
    assert not other.is_alive()
    assert isinstance(outcome[0], CommitSuperseded)
    assert trial.visible() == []
    assert trial.leftovers() == []
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


def test_discard_leaves_other_runs_alone(tmp_path):
    """`discard` deletes only the files of its own run, even if another run has begun but staged nothing yet."""
    sink = ObjectSink(tmp_path / "t")
    for run in ("one", "other"):
        sink.begin(Staging("c", run, SCHEMA))
    sink.discard(Staging("c", "one", SCHEMA), ())
    assert sink.stage(
        Staging("c", "other", SCHEMA), 0, 1, iter([pa.record_batch({"id": [1], "text": ["a"]}, schema=SCHEMA)])
    )


def test_spark_ignores_staged_files(tmp_path):
    """The names of staging folders begin with an underscore and contain no `=`, so Spark ignores them."""
    for sink in (ParquetSink(tmp_path / "t", mode="append"), ParquetSink(tmp_path / "t" / "day=1")):
        sink.begin(Staging("c", "r", SCHEMA))
        (staged,) = [path.name for path in (tmp_path / "t").iterdir() if path.name.startswith("_")]
        assert "=" not in staged
        sink.discard(Staging("c", "r", SCHEMA), ())
