"""The commit protocol, without Spark: whatever fails or pauses, a sink shows all rows once or none and leaves no file."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pathlib
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading

import fsspec
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

import stagecrew.operators.commit_log
import stagecrew.operators.commits
from schedules import (
    at_once,
    failing_at_each_moment,
    going_on_at_each_moment,
    going_on_behind_a_refusal,
    killed_at_each_moment,
    raising_once,
)
from sinks import (
    SCHEMA,
    SEED,
    SINKS,
    Around,
    Driver,
    Killed,
    Tasks,
    appended,
    files,
    first_commits_of_two_schemas,
    iceberg,
    late_at_each_moment,
    like_hdfs,
    looked_at_within,
    moved_into_another,
    objects,
    other_schemas,
    parquet,
    remount,
    seeded,
    small_disk,
    sqlite,
    undisturbed,
)
from stagecrew.errors import (
    CommitConflict,
    CommitFailed,
    CommitPending,
    CommitSuperseded,
    CommitUnknown,
    OperatorMisused,
)
from stagecrew.files import exists, list_files, remove_folder
from stagecrew.operators.commit_log import FileCommitLog, MemoryCommitLog
from stagecrew.operators.commits import Staging, abandon, commit, resume
from stagecrew.operators.sinks import DatabaseSink, IcebergSink, ObjectSink, ParquetSink
from stagecrew.operators.sinks import parquet as parquet_module


def trials_in(make, tmp_path):
    """Returns a function that makes trials, each in a folder of the given name."""

    def make_trial(name):
        (tmp_path / name).mkdir()
        return make(tmp_path / name)

    return make_trial


LONG = [pytest.param(make, marks=pytest.mark.long) for make in (appended, objects, iceberg)]


@pytest.fixture(params=[parquet, sqlite, *LONG], ids=lambda make: make.__name__)
def make_slowly(request, tmp_path):
    """Makes trials for slow tests. Three of the sinks run in `make test-long` only."""
    return trials_in(request.param, tmp_path)


@pytest.fixture(params=SINKS, ids=lambda make: make.__name__)
def make(request, tmp_path):
    """Makes trials of every sink."""
    return trials_in(request.param, tmp_path)


@pytest.fixture(params=SINKS, ids=lambda make: make.__name__)
def trial(request, tmp_path):
    return request.param(tmp_path)


class RefusingSink(Around):
    """A sink that always refuses the rows."""

    def commit(self, staging, messages):
        raise CommitConflict("never")


class StepBefore(Around):
    """A sink that runs a given function once before its method of the same name."""

    def __init__(self, sink, **steps):
        super().__init__(sink)
        self._steps = steps

    def __getattr__(self, name):
        method, step = getattr(self._sink, name), self._steps.pop(name, None)

        def step_then_call(*args):
            if step is not None:
                step()
            return method(*args)

        return method if step is None else step_then_call


class FailingLog:
    """A commit log that raises an error instead of writing one of the given states."""

    def __init__(self, commit_log, error, *states):
        self._log, self._error, self._states, self.read = commit_log, error, states, commit_log.read

    def write(self, key, record, version):
        if record["state"] in self._states:
            raise self._error
        return self._log.write(key, record, version)


def test_a_commit_writes_every_row_once(trial):
    """Failed, speculative and late attempts add nothing. A repeat runs no task and changes nothing."""
    tasks = Tasks(1)
    report = trial.drive(Driver(), tasks)
    assert sorted(trial.visible()) == tasks.expected
    assert (report.rows, report.parts, report.repeated) == (40, 4, False)
    assert report.bytes > 0
    for zombie in tasks.zombies:
        with contextlib.suppress(Exception):
            zombie()
    assert trial.left() == []
    repeat = trial.drive(Driver(), Tasks(2))
    assert repeat.repeated
    assert (repeat.rows, repeat.parts) == (40, 4)
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


def test_a_dataset_without_rows_is_committed(trial):
    """A repeat finds it done."""
    tasks = Tasks(1, rows=0)
    assert trial.drive(Driver(), tasks).rows == 0
    assert trial.visible() == []
    assert trial.drive(Driver(), tasks).repeated
    assert trial.left() == []


#: Which moments of a driver are tested. They come in pairs, before and after a write, so the step is odd to meet both.
MOMENTS = pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])


@MOMENTS
def test_a_driver_can_be_killed_at_any_moment(make_slowly, every):
    """Before or after each write. Readers see all rows or none. The next driver commits all rows and leaves no file."""
    killed_at_each_moment(make_slowly, every)


@MOMENTS
def test_a_write_can_fail_at_any_moment(make_slowly, every):
    """Once, before or after its effect. It is an error before the decision. After the decision the driver retries."""
    failing_at_each_moment(make_slowly, every)


@pytest.fixture(scope="module")
def moments(tmp_path_factory):
    """The number of moments of an undisturbed driver, for each sink."""
    counted = {}

    def count(name, make):
        if name not in counted:
            counted[name] = len(undisturbed(make("undisturbed")))
        return counted[name]

    return count


@pytest.mark.parametrize("seed", range(4))
def test_random_faults(request, make_slowly, seed, moments):
    """Drivers die, pause and continue at random, and tasks write late."""
    seeded(make_slowly("seeded"), seed, moments(request.node.callspec.id.split("-")[0], make_slowly))


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(n, n + 20) for n in range(100, 220, 20)], ids=lambda seeds: f"from-{seeds[0]}")
def test_many_random_faults(make, seeds):
    """At least a hundred seeds for each sink."""
    count = len(undisturbed(make("undisturbed")))
    for seed in seeds:
        seeded(make(str(seed)), seed, count)


def test_two_commits_at_once_both_succeed_or_one_conflicts(trial):
    """A commit that conflicts leaves no file."""
    conflicts = at_once(trial, "staged")
    if trial.make_sink.__qualname__.startswith("parquet"):
        assert len(conflicts) == 1
        assert "is there already" in str(conflicts[0])
    else:
        assert not conflicts


def test_a_folder_moved_into_an_existing_one_is_cleaned_up_by_a_repeat(tmp_path):
    """HDFS moves a folder into an existing target. A driver that dies then leaves its files in the other's folder."""
    filesystem, target = like_hdfs(), str(tmp_path / "out" / "table")

    def make(name):
        trial = parquet(tmp_path)
        trial.make_sink, trial.commit_log = (
            lambda: ParquetSink(target, filesystem=filesystem),
            FileCommitLog(tmp_path / name),
        )
        return trial

    moved_into_another(filesystem, target, make)


def test_two_decided_commits_both_succeed_or_one_conflicts(make):
    """Both have been decided before either is applied. A commit that conflicts leaves no file."""
    for number in range(3):
        trial = make(f"two-{number}")
        expected_conflicts = trial.make_sink.__qualname__.startswith("parquet")
        assert len(at_once(trial, "before commit")) == expected_conflicts


@MOMENTS
def test_a_paused_driver_that_continues_changes_nothing(make_slowly, every):
    """It pauses before or after any write and continues after another driver has committed or aborted."""
    going_on_at_each_moment(make_slowly, every)


@pytest.mark.parametrize("exists_later", [pytest.param(True, marks=pytest.mark.long), False], ids=["exists", "removed"])
def test_a_driver_paused_during_a_refusal_leaves_nothing(tmp_path, exists_later):
    """It pauses in its commit until another driver was refused because the folder exists. It reports this and leaves no
    file, whether the folder still exists or was removed."""

    def refuse(trial):
        folder = pathlib.Path(trial.make_sink()._path)
        folder.mkdir()
        (folder / "theirs").touch()
        return lambda: shutil.rmtree(folder)

    going_on_behind_a_refusal(trials_in(parquet, tmp_path), refuse, exists_later)


@pytest.mark.parametrize("exists_later", [pytest.param(True, marks=pytest.mark.long), False], ids=["exists", "removed"])
def test_a_driver_paused_during_a_refusal_of_a_table_leaves_nothing(tmp_path, exists_later):
    """The same as for a folder, for a row with a key that exists."""

    def unique(folder):
        trial = sqlite(folder)
        change(trial, "CREATE UNIQUE INDEX one ON target (id)")
        return trial

    def change(trial, text):
        path = pathlib.Path(trial.make_sink()._url.removeprefix("sqlite:///"))
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute(text)
            database.commit()

    def refuse(trial):
        change(trial, "INSERT INTO target VALUES (7, 'there')")
        return lambda: change(trial, "DELETE FROM target WHERE text = 'there'")

    going_on_behind_a_refusal(trials_in(unique, tmp_path), refuse, exists_later)


def test_a_refusal_is_final_although_the_table_accepts_the_rows_again(tmp_path):
    """A row conflicts with one driver. The row is removed before the refusal is written, and another driver resumes."""
    trial, tasks = sqlite(tmp_path), Tasks(1)
    outcome = []

    def change(*texts):
        with contextlib.closing(sqlite3.connect(tmp_path / "data.db")) as database:
            for text in texts:
                database.execute(text)
            database.commit()

    change("CREATE UNIQUE INDEX one ON target (id)")

    killed = FailingLog(trial.commit_log, CommitUnknown("it was killed"), "refused", "applied")

    class Watching(StepBefore):
        def done(self, commit_id):
            is_done = self._sink.done(commit_id)
            if trial.commit_log.read("c") and not outcome:
                change("DELETE FROM target")
                try:
                    outcome.append(resume(trial.make_sink(), killed, "c", sleep=lambda _: None))
                except (CommitUnknown, CommitFailed) as error:
                    outcome.append(error)
            return is_done

    def run(staging):
        change("INSERT INTO target VALUES (7, 'there')")
        return tasks.run(trial.make_sink(), staging)

    with pytest.raises(CommitConflict, match="does not take the rows: IntegrityError"):
        commit(Watching(trial.make_sink()), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
    assert isinstance(outcome[0], CommitUnknown), "the other driver must not know whether the commit is refused"
    assert trial.visible() == []
    assert trial.commit_log.read("c")[1]["state"] == "refused"
    assert trial.left() == []
    assert not trial.drive(Driver(), tasks, "c").repeated
    assert sorted(trial.visible()) == tasks.expected
    trial.repeat_changes_nothing("c")


def test_a_failed_job_aborts_its_commit(trial):
    """The job's exception is raised, nothing is visible and no file is left. The same id can be used again."""
    tasks = Tasks(1)

    def fails(staging):
        tasks.run(trial.make_sink(), staging)
        raise ValueError("the job failed")

    with pytest.raises(ValueError, match="the job failed"):
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, fails)
    assert trial.visible() == []
    assert trial.left() == []
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected


def test_a_commit_that_raises_is_retried(make):
    """Before or after its effect. If it keeps raising, a later driver completes it from the staged rows."""
    raising_once(make)


@pytest.mark.parametrize("make", [appended, objects, sqlite, iceberg], ids=lambda make: make.__name__)
def test_a_schema_that_does_not_fit_is_refused(make, tmp_path):
    """The error names the columns, and no task runs."""
    other_schemas(make(tmp_path), {sqlite: "", iceberg: "long|int64"}.get(make, "int64"))


def test_the_order_of_columns_does_not_matter(tmp_path):
    """Neither does Arrow's memory layout of a column."""
    trial = appended(tmp_path)
    trial.drive(Driver(), Tasks(1), "first")
    other, sink = pa.schema([("text", pa.large_string()), ("id", pa.int64())]), trial.make_sink()
    batch = pa.record_batch({"text": ["a"], "id": [7]}, schema=other)
    commit(sink, trial.commit_log, "c", other, lambda staging: [sink.stage(staging, 0, 1, iter([batch]))])
    assert (7, "a") in trial.visible()


@pytest.mark.parametrize("nullable", [True, False])
def test_a_nullable_column_for_a_required_one_is_refused(tmp_path, nullable):
    """The error is raised before any task runs. A column that is never null is accepted."""
    from pyiceberg.catalog import load_catalog

    trial = iceberg(tmp_path)
    sink = trial.make_sink()
    with load_catalog("default", **sink._properties).load_table("db.target").update_schema(True) as update:
        update.update_column("id", required=True)
    schema = pa.schema([pa.field("id", pa.int64(), nullable), ("text", pa.string())])
    batch = pa.record_batch({"id": [7], "text": ["a"]}, schema=schema)

    def run(staging):
        assert not nullable, "a task ran"
        return [sink.stage(staging, 0, 1, iter([batch]))]

    with (
        pytest.raises(CommitFailed, match="id may be null, there never.*coalesce")
        if nullable
        else contextlib.nullcontext()
    ):
        commit(sink, trial.commit_log, "c", schema, run)
    assert trial.visible() == ([] if nullable else [(7, "a")])
    assert trial.left() == []


def test_text_in_an_integer_column_is_refused(tmp_path):
    """SQLite would store it. The sink checks the types while it stages, and no row is left."""
    trial = sqlite(tmp_path)
    sink = trial.make_sink()

    def stage(staging):
        return [sink.stage(staging, 0, 1, iter([pa.record_batch({"id": ["one"], "text": ["a"]})]))]

    with pytest.raises(
        CommitFailed,
        match="rows for table target could not be staged: IntegrityError: cannot store TEXT value in INTEGER",
    ):
        commit(sink, trial.commit_log, "c", SCHEMA, stage)
    assert trial.visible() == []
    assert trial.left() == []


def test_another_connection_sees_no_row_before_the_last_transaction_ends(tmp_path):
    """It reads before the end of each of the sink's transactions."""
    looked_at_within(sqlite(tmp_path))


def test_a_reader_sees_no_row_before_the_catalogue_commits(tmp_path, monkeypatch):
    """A reader looks before and after each write to the table's folder, and before the catalogue's commit."""
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.io.pyarrow import PyArrowFile

    trial, tasks, seen = iceberg(tmp_path), Tasks(1), []
    sink = trial.make_sink()

    def observed(function):
        def call(*args, **kwargs):
            seen.append(trial.visible())
            result = function(*args, **kwargs)
            if function is not commit_table:
                seen.append(trial.visible())
            return result

        return call

    commit_table = SqlCatalog.commit_table

    def run(staging):
        messages = tasks.run(trial.make_sink(), staging)
        monkeypatch.setattr(PyArrowFile, "create", observed(PyArrowFile.create))
        monkeypatch.setattr(SqlCatalog, "_write_metadata", staticmethod(observed(SqlCatalog._write_metadata)))
        monkeypatch.setattr(SqlCatalog, "commit_table", observed(commit_table))
        return messages

    commit(sink, trial.commit_log, "c", SCHEMA, run)
    assert len(seen) > 4
    assert not any(seen)
    assert sorted(trial.visible()) == tasks.expected


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("make", [appended, objects], ids=lambda make: make.__name__)
def test_concurrent_first_commits_with_two_schemas_conflict(make, tmp_path, step):
    """Both find an empty target. At most one succeeds. The other's error names the commit with another schema."""

    def make_trial(number):
        (tmp_path / str(number)).mkdir()
        return make(tmp_path / str(number))

    first_commits_of_two_schemas(make_trial, itertools.count(2, step))


@pytest.mark.parametrize("make", [appended, objects], ids=lambda make: make.__name__)
def test_a_first_commit_fails_while_another_one_with_another_schema_runs(make, tmp_path):
    """The error names the running commit. After that commit has failed, the other schema is accepted."""
    trial = make(tmp_path)
    other_schema = pa.schema([("id", pa.int64())])

    def run(staging):
        with pytest.raises(
            CommitFailed, match="does not fit commit 'one', which is about to make .*: text is missing. Select and cast"
        ):
            commit(trial.make_sink(), trial.commit_log, "other", other_schema, lambda staging: [])
        raise ValueError("given up")

    with pytest.raises(ValueError, match="given up"):
        commit(trial.make_sink(), trial.commit_log, "one", SCHEMA, run)
    assert not commit(trial.make_sink(), trial.commit_log, "other", other_schema, lambda staging: []).repeated
    assert trial.left() == []


def test_a_commit_log_compares_versions(tmp_path):
    """A write with an old version is refused. A file log accepts the repeat of its own successful write."""
    for make in (MemoryCommitLog, lambda: FileCommitLog(tmp_path / "log")):
        commit_log = make()
        assert commit_log.read("a/b") is None
        assert commit_log.write("a/b", {"state": "open"}, 0) == 1
        assert commit_log.read("a/b") == (1, {"state": "open"})
        with pytest.raises(CommitSuperseded, match="another driver has written the record of commit 'a/b'"):
            commit_log.write("a/b", {"state": "other"}, 0)
        assert commit_log.write("a/b", {"state": "decided"}, 1) == 2
    assert commit_log.write("a/b", {"state": "decided"}, 1) == 2
    assert FileCommitLog(tmp_path / "log").read("a/b") == (2, {"state": "decided"})


@pytest.mark.parametrize("key", ["ä" * 200, " " * 84, "\U0001f600" * 200, "a" * 250, "a" * 251, "a/" * 100])
def test_a_commit_log_accepts_ids_of_any_length(tmp_path, key):
    """Each id has its own record, also if two ids differ only in their last character."""
    commit_log = FileCommitLog(tmp_path)
    for one in (key, f"{key[:-1]}b"):
        assert commit_log.read(one) is None
        assert commit_log.write(one, {"id": one}, 0) == 1
    assert [commit_log.read(one) for one in (key, f"{key[:-1]}b")] == [
        (1, {"id": key}),
        (1, {"id": f"{key[:-1]}b"}),
    ]


def test_a_commit_log_reads_records_of_older_versions(tmp_path):
    """The file of an id that differs only in case is not mistaken for its record."""
    (tmp_path / "a%2Fb.json").write_text('{"version": 3, "record": {"state": "decided"}}')
    commit_log = FileCommitLog(tmp_path)
    assert commit_log.read("a/b") == (3, {"state": "decided"})
    assert commit_log.write("a/b", {"state": "applied"}, 3) == 4
    (tmp_path / "a%2Fb.json").rename(tmp_path / "A%2Fb.json")
    with pytest.raises(CommitUnknown, match="A%2Fb.json is the record of commit 'a/b'. Give it another id"):
        commit_log.read("A/b")


def test_one_of_many_concurrent_writers_wins(tmp_path):
    """The others get `CommitSuperseded`, and no temporary file is left."""
    won = []

    def write(number):
        try:
            FileCommitLog(tmp_path).write("c", {"by": number}, 0)
        except CommitSuperseded:
            return
        won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert FileCommitLog(tmp_path).read("c") == (1, {"by": won[0]})
    assert [path.name for path in tmp_path.iterdir()] == [".lock", "c.json"] or sorted(files(tmp_path)) == [
        ".lock",
        "c.json",
    ]


@pytest.fixture
def synced(monkeypatch):
    """The names of the files and folders that were fsynced, at the time of the call."""
    names, fsync = [], os.fsync

    def record(descriptor):
        names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return names


@pytest.mark.parametrize("rows", [0, 40])
@pytest.mark.parametrize("mode", ["create", "append"])
def test_a_commit_is_fsynced(tmp_path, synced, mode, rows):
    """That is each file, the folder that is renamed, and the parent of each new folder."""
    target, tasks = tmp_path / "new" / "er" / "table", Tasks(1, rows=rows)
    sink = ParquetSink(target, mode)
    commit(sink, MemoryCommitLog(), "c", SCHEMA, lambda staging: tasks.run(sink, staging))
    folder = target if mode == "create" else target / "stagecrew_commit=c"
    moved = {name.rpartition("/")[2].partition(".json.")[0] for name in synced}
    assert {path.name.removesuffix(".json") for path in folder.iterdir()} <= moved
    assert [name for name in synced if name.endswith("-whole")]
    for created in (tmp_path / "new", tmp_path / "new" / "er", target, folder):
        assert str(created.parent) in synced


def test_the_folder_of_a_commit_log_is_fsynced(tmp_path, synced):
    """So are its new parent folders."""
    FileCommitLog(tmp_path / "new" / "er").write("c", {}, 0)
    assert {str(tmp_path), str(tmp_path / "new"), str(tmp_path / "new" / "er")} <= set(synced)


def test_a_late_task_creates_no_folder(tmp_path):
    """An attempt that stages for a run that has ended fails and leaves no file."""
    sink, staging = ParquetSink(tmp_path / "t"), Staging("c", "r", SCHEMA)
    sink.begin(staging)
    sink.discard(staging, ())
    with pytest.raises(CommitFailed, match="the commit that this task stages for is over"):
        sink.stage(staging, 0, 1, iter([pa.record_batch({"id": [1], "text": ["a"]}, schema=SCHEMA)]))
    assert files(tmp_path) == []


def test_a_late_task_leaves_nothing(make):
    """It pauses while it writes until the commit is done or abandoned. Nothing of it is visible or left."""
    late_at_each_moment(make)


def test_a_failed_task_removes_only_its_own_file(tmp_path):
    """Its error is not replaced."""
    sink, staging = ObjectSink(tmp_path / "t"), Staging("c", "r", SCHEMA)
    sink.begin(staging)
    assert sink.stage(staging, 0, 1, Tasks.batches([(1, "a")]))

    def broken():
        yield from Tasks.batches([(2, "b")])
        raise FileNotFoundError("something else does not exist")

    with pytest.raises(FileNotFoundError, match="something else"):
        sink.stage(staging, 0, 2, broken())
    assert [name.rsplit("/", 1)[1] for name in files(tmp_path)] == ["_open", "part-00000-1.parquet"]


class DiskFault:
    """A system call of the commit log that fails once, at its n-th call."""

    def __init__(self, monkeypatch, part, number, code):
        self.remaining, self.code = number, code
        module, name = {"open": (os, "open"), "fsync": (os, "fsync"), "replace": (os, "replace")}.get(
            part, (stagecrew.operators.commit_log, "sync")
        )
        self.real = getattr(module, name)
        monkeypatch.setattr(module, name, self)

    def __call__(self, *args, **kwargs):
        if sys._getframe(1).f_globals["__name__"] == "stagecrew.operators.commit_log":
            self.remaining -= 1
            if self.remaining == 0:
                raise OSError(self.code, os.strerror(self.code))
        return self.real(*args, **kwargs)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("part", ["open", "fsync", "replace", "sync"])
def test_a_disk_that_fails_under_the_commit_log(tmp_path, part, number, code):
    """A write that did not happen and an unknown outcome are different errors. A repeat completes the commit."""
    trial, tasks = sqlite(tmp_path), Tasks(1)
    with pytest.MonkeyPatch.context() as patch:
        fault = DiskFault(patch, part, number, code)
        unknown = part == "sync" or (part == "replace" and code == errno.EIO)
        try:
            report = commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, lambda s: tasks.run(trial.make_sink(), s))
        except CommitUnknown:
            assert unknown
        except CommitFailed as error:
            message = str(error)
            assert not unknown
            assert "could not be written" in message
            assert os.strerror(code) in message
            assert trial.visible() == []
            assert trial.left() == []
        else:
            assert number == 3  # only the record that it is applied could not be written
            assert report.rows == 40
        assert fault.remaining <= 0
    assert not list((tmp_path / "log").glob(".*.tmp"))
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


def test_a_killed_writer_of_the_commit_log_changes_no_record(tmp_path):
    """Its unfinished file is never read. The next writer deletes it."""
    commit_log = FileCommitLog(tmp_path)
    commit_log.write("c", {"state": "open"}, 0)
    for moment in ("os.fsync", "os.replace"):
        code = f"""
import os, signal, stagecrew
{moment} = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
stagecrew.FileCommitLog({str(tmp_path)!r}).write("c", {{"state": "decided"}}, 1)
"""
        killed = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
        assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) > 2
    assert commit_log.read("c") == (1, {"state": "open"})
    commit_log.write("other", {"state": "open"}, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "c.json", "other.json"]
    assert (tmp_path / "other.json").stat().st_mode & 0o77 == 0


def test_a_failed_job_is_cleaned_up_if_its_abort_cannot_be_written(tmp_path, monkeypatch):
    """No other driver can decide for this run, so the staged rows are deleted. The error is the job's."""
    trial = sqlite(tmp_path)

    def fails(staging):
        Tasks(1).run(trial.make_sink(), staging)
        DiskFault(monkeypatch, "open", 1, errno.ENOSPC)
        raise ValueError("the job failed")

    with pytest.raises(ValueError, match="the job failed"):
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, fails)
    assert trial.left() == []


def test_a_refusal_that_cannot_be_written_is_pending(tmp_path, monkeypatch):
    """The record still says decided. The staged rows stay, and a repeat completes the commit."""
    trial, tasks = sqlite(tmp_path), Tasks(1)
    accepting = trial.make_sink()
    refusing = StepBefore(RefusingSink(accepting), commit=lambda: DiskFault(monkeypatch, "open", 1, errno.ENOSPC))
    with pytest.raises(
        CommitPending, match="the sink refuses it: never. That could not be written down.*No space left"
    ):
        commit(refusing, trial.commit_log, "c", SCHEMA, lambda staging: tasks.run(accepting, staging))
    assert trial.left() != []
    monkeypatch.undo()
    assert trial.drive(Driver(), Tasks(2), "c").repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


@pytest.fixture
def disk(tmp_path):
    """A disk of 64 KiB."""
    with small_disk(tmp_path / "small", "64k") as folder:
        yield folder


@pytest.mark.long
def test_a_commit_log_on_a_full_disk_fails_the_commit(tmp_path, disk):
    """Nothing is visible and no file is left. When the disk has room again, the same commit succeeds."""
    trial, tasks = sqlite(tmp_path), Tasks(1)
    trial.commit_log = FileCommitLog(disk)

    def fills(staging):
        messages = tasks.run(trial.make_sink(), staging)
        with contextlib.suppress(OSError):
            (disk / "large").write_bytes(bytes(1 << 20))
        return messages

    with pytest.raises(CommitFailed, match="record of commit 'c' could not be written.*No space left on device"):
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, fills)
    assert trial.visible() == []
    assert trial.left() == []
    (disk / "large").unlink()
    assert sorted(path.name for path in disk.iterdir()) == [".lock", "c.json"]
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected


@pytest.mark.long
def test_a_commit_log_on_a_read_only_disk_fails_the_commit(tmp_path, disk):
    """No task runs. Existing records are read."""
    trial, tasks = sqlite(tmp_path), Tasks(1)
    trial.commit_log = FileCommitLog(disk)
    trial.drive(Driver(), tasks, "c")
    remount(disk, "ro")
    assert trial.drive(Driver(), tasks, "c").repeated
    with pytest.raises(CommitFailed, match="record of commit 'd' could not be written.*Read-only file system"):
        commit(trial.make_sink(), trial.commit_log, "d", SCHEMA, lambda staging: 1 / 0)
    with pytest.raises(CommitFailed, match="the folder of decisions cannot be made.*Read-only file system"):
        FileCommitLog(disk / "below")


def test_an_unreadable_record_fails_the_commit(tmp_path):
    """The decision is unknown, so no task runs. The error names the file."""
    trial = sqlite(tmp_path)
    (tmp_path / "log" / "c.json").write_text('{"version": 1')
    with pytest.raises(CommitUnknown, match="about commit 'c' cannot be read from .*c.json: JSONDecodeError"):
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0)


def test_the_memory_log_forgets_only_ended_commits():
    """It keeps the latest ended ones. A driver of a forgotten commit cannot overwrite a later record of the same id."""
    commit_log = MemoryCommitLog()
    old = commit_log.write("c", {"state": "open"}, 0)
    commit_log.write("pending", {"state": "decided"}, 0)
    commit_log.write("c", {"state": "aborted"}, old)
    for number in range(100):
        commit_log.write(f"c{number}", {"state": "applied"}, 0)
    assert commit_log.read("c") is None
    assert commit_log.read("c0") is not None
    assert commit_log.read("pending") is not None
    commit_log.write("c", {"state": "open"}, 0)
    with pytest.raises(CommitSuperseded):
        commit_log.write("c", {"state": "decided"}, old)


def test_a_partitioned_table_is_refused(tmp_path):
    """No task runs, and the error names an alternative."""
    from pyiceberg.catalog import load_catalog

    trial = iceberg(tmp_path)
    sink = trial.make_sink()
    table = load_catalog("default", **sink._properties).load_table("db.target")
    with table.update_spec() as update:
        update.add_identity("text")
    with pytest.raises(
        CommitFailed, match="db.target is partitioned.*unpartitioned tables only: Spark's own writer for"
    ):
        commit(sink, trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0)
    assert files(tmp_path / "warehouse") == [name for name in files(tmp_path / "warehouse") if "metadata" in name]


def test_object_stores_of_fsspec_are_recognized():
    """They cannot rename folders, so ParquetSink refuses them."""

    class Store(fsspec.AbstractFileSystem):
        protocol = ("s3", "s3a")

    through = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(Store()))
    with pytest.raises(OperatorMisused, match="use ObjectSink there"):
        ParquetSink("bucket/t", filesystem=through)


def test_invalid_arguments_of_sinks_are_refused(tmp_path):
    """Each error says what is accepted."""
    with pytest.raises(OperatorMisused, match="mode is 'create' or 'append', not 'overwrite'"):
        ParquetSink(tmp_path, mode="overwrite")
    with pytest.raises(OperatorMisused, match="sqlite:///file or postgresql"):
        DatabaseSink("mysql://x", "t")
    with pytest.raises(OperatorMisused, match="a table is a name"):
        DatabaseSink("sqlite:///x", "t; DROP TABLE t")


def test_a_database_sink_does_not_show_its_password():
    """No text of the sink contains it."""
    sink = DatabaseSink("postgresql://user:secret@host/db", "t")
    assert "secret" not in repr(sink)
    assert "secret" not in str(sink)
    assert sink.identity == "<table t of postgresql> in host=host dbname=db"


def test_a_parquet_commit_is_an_ordinary_folder_of_parquet_files(tmp_path):
    """PyArrow reads it without stagecrew."""
    ParquetSink(tmp_path / "t", compression="zstd")
    trial = parquet(tmp_path)
    trial.drive(Driver(), Tasks(1))
    table = pq.read_table(tmp_path / "out" / "table")
    assert table.num_rows == 40
    assert table.schema.equals(SCHEMA)


def test_iceberg_adds_nothing_twice_if_another_driver_commits_first(tmp_path):
    """Another driver applies the same commit just before this one, so the catalogue refuses this one."""
    from pyiceberg.table import Table

    trial, tasks = iceberg(tmp_path), Tasks(1)
    sink = trial.make_sink()
    do_commit = Table._do_commit
    other_drivers = []

    def after_another_driver(self, *args, **kwargs):
        if not other_drivers:
            other_drivers.append(1)
            trial.make_sink().commit(*committing)
        return do_commit(self, *args, **kwargs)

    class Recording(Around):
        """Records the arguments of `commit` for the other driver."""

        def commit(self, staging, messages):
            committing[:] = staging, messages
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Table, "_do_commit", after_another_driver)
                sink.commit(staging, messages)

    committing = []
    commit(Recording(sink), trial.commit_log, "c", SCHEMA, lambda staging: tasks.run(trial.make_sink(), staging))
    assert other_drivers
    assert sorted(trial.visible()) == tasks.expected


def rename(sink, old, new):
    """Renames a column, so that the table refuses the rows, or accepts them again."""
    from pyiceberg.catalog import load_catalog

    with load_catalog("default", **sink._properties).load_table("db.target").update_schema() as update:
        update.rename_column(old, new)


@pytest.mark.parametrize("filesystem", [pyarrow.fs.LocalFileSystem(), like_hdfs()], ids=["local", "like hdfs"])
def test_a_refused_folder_is_never_visible_in_part(tmp_path, monkeypatch, filesystem):
    """Another driver of the same commit renames the folder that this driver, which was refused, is deleting."""
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
            StepBefore(trial.make_sink(), commit=start_other), trial.commit_log, "c", SCHEMA,
            lambda staging: tasks.run(trial.make_sink(), staging), sleep=lambda _: None,
        )  # fmt: skip
    assert not other.is_alive()
    assert isinstance(outcome[0], CommitSuperseded)
    assert trial.visible() == []
    assert trial.left() == []
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


@pytest.mark.parametrize("last", ["the other", "this one"])
def test_iceberg_never_deletes_visible_files_on_a_refusal(tmp_path, last):
    """The table refuses the rows of one driver and accepts those of another driver of the same commit."""
    from pyiceberg.table import Table

    trial, tasks = iceberg(tmp_path), Tasks(1)
    slow, entered, released, outcome = trial.make_sink(), threading.Event(), threading.Event(), []

    def run():
        """Resumes from the record and pauses just before the catalogue's commit."""
        try:
            outcome.append(resume(slow, killed, "c", sleep=lambda _: None))
        except (CommitFailed, CommitPending) as error:
            outcome.append(error)

    killed = FailingLog(trial.commit_log, CommitUnknown("it was killed"), "applied")
    other = threading.Thread(target=run)
    do_commit = Table._do_commit

    def pausing_commit(self, *args, **kwargs):
        if threading.current_thread() is other and not entered.is_set():
            entered.set()
            assert released.wait(30)
        return do_commit(self, *args, **kwargs)

    def start_other():
        other.start()
        assert entered.wait(30)
        rename(slow, "text", "other")

    def release_other():
        rename(slow, "other", "text")
        released.set()
        other.join(30)

    # The other driver continues after this one's check whether the commit is done, or after its refused `discard`.
    steps = {"commit": start_other}

    class Watching(StepBefore):
        def done(self, commit_id):
            is_done = self._sink.done(commit_id)
            if entered.is_set() and last == "this one":
                release_other()
            return is_done

        def discard(self, staging, kept):
            self._sink.discard(staging, kept)
            if entered.is_set() and last == "the other":
                release_other()

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(CommitFailed):
        patch.setattr(Table, "_do_commit", pausing_commit)
        commit(
            Watching(trial.make_sink(), **steps), trial.commit_log, "c", SCHEMA,
            lambda staging: tasks.run(trial.make_sink(), staging), sleep=lambda _: None,
        )  # fmt: skip
    assert outcome
    assert not other.is_alive()
    assert sorted(trial.visible()) in ([], tasks.expected)
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


def expire(trial, commit_id):
    """Expires the snapshot of a commit after a later commit, as the table's maintenance does."""
    from pyiceberg.catalog import load_catalog

    trial.drive(Driver(), Tasks(2), "later")
    with contextlib.closing(load_catalog("default", **trial.make_sink()._properties)) as catalog:
        table = catalog.load_table("db.target")
        (id_,) = [
            snapshot.snapshot_id
            for snapshot in table.snapshots()
            if snapshot.summary.additional_properties["stagecrew.commit-id"] == commit_id
        ]
        table.maintenance.expire_snapshots().by_id(id_).commit()
    assert not trial.make_sink().done(commit_id)


@pytest.mark.parametrize("fits", [True, False], ids=["same schema", "changed schema"])
def test_an_iceberg_commit_is_found_done_after_its_snapshot_expired(tmp_path, fits):
    """A driver dies after the catalogue's commit, before it writes the record. The table's own files show that the commit
    is done."""
    trial, make = iceberg(tmp_path), trials_in(iceberg, tmp_path)
    dies = Driver(dies_at=undisturbed(make("undisturbed")).index("after commit") + 1)
    with pytest.raises(Killed):
        trial.drive(dies, Tasks(SEED, zombies=False), "c")
    expire(trial, "c")
    if not fits:
        rename(trial.make_sink(), "text", "other")
    assert trial.drive(Driver(), Tasks(1), "c").repeated
    assert trial.commit_log.read("c")[1]["state"] == "applied"
    if not fits:
        rename(trial.make_sink(), "other", "text")
    assert sorted(trial.visible()) == sorted(Tasks(1).expected * 2)
    assert trial.left() == []


def test_abandon_keeps_the_files_of_an_expired_iceberg_snapshot(tmp_path):
    """The commit log is an older copy and the snapshot is gone, but the table still shows the files."""
    trial = iceberg(tmp_path)
    commit_and_restore_old_log(trial, Tasks(1))
    expire(trial, "c")
    abandon(trial.make_sink(), trial.commit_log, "c")
    assert sorted(trial.visible()) == sorted(Tasks(1).expected * 2)


@pytest.mark.parametrize("effect", ["before", "after"])
def test_an_unreadable_response_of_the_catalogue_is_retried(tmp_path, monkeypatch, effect):
    """It is not a refusal, because the outcome is unknown."""
    from pydantic import TypeAdapter
    from pyiceberg.catalog.sql import SqlCatalog

    trial, tasks, commit_table = iceberg(tmp_path), Tasks(1), SqlCatalog.commit_table

    def unreadable(self, *args):
        monkeypatch.undo()
        if effect == "after":
            commit_table(self, *args)
        TypeAdapter(int).validate_json("<html>")

    def run(staging):
        messages = tasks.run(trial.make_sink(), staging)
        monkeypatch.setattr(SqlCatalog, "commit_table", unreadable)
        return messages

    assert commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None).rows == 40
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


def test_a_refusal_with_an_unknown_outcome_deletes_nothing(trial):
    """If it is unknown whether the refusal was written, the staged rows stay, because another driver may complete it."""
    tasks = Tasks(1)

    commit_log = FailingLog(trial.commit_log, CommitUnknown("no answer"), "refused")
    with pytest.raises(CommitUnknown):
        commit(
            RefusingSink(trial.make_sink()),
            commit_log,
            "c",
            SCHEMA,
            lambda staging: tasks.run(trial.make_sink(), staging),
        )
    assert trial.drive(Driver(), Tasks(2), "c").repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


def commit_and_restore_old_log(trial, tasks):
    """Commits, then replaces the log by a copy from before the decision. Returns what the sink shows."""
    copy = MemoryCommitLog()

    def run(staging):
        version, record = trial.commit_log.read("c")
        for number in range(version):
            copy.write("c", record, number)
        return tasks.run(trial.make_sink(), staging)

    commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, run)
    trial.commit_log = copy
    return sorted(trial.visible()), trial.state()


@pytest.mark.parametrize("repeated", [True, False], ids=["after a repeat", "at once"])
def test_abandon_keeps_a_commit_that_is_done(trial, repeated):
    """The log is a copy from before the decision. The sink's rows stay, and the record becomes applied."""
    before = commit_and_restore_old_log(trial, Tasks(1))
    if repeated:
        assert trial.drive(Driver(), Tasks(2), "c").repeated
        assert trial.commit_log.read("c")[1]["state"] == "applied"
    for _ in range(2):
        abandon(trial.make_sink(), trial.commit_log, "c")
        assert trial.commit_log.read("c")[1]["state"] == "applied"
        assert resume(trial.make_sink(), trial.commit_log, "c")
        assert (sorted(trial.visible()), trial.state()) == before
    assert before[0] == Tasks(1).expected
    trial.repeat_changes_nothing("c")


def test_a_done_commit_whose_restored_record_is_refused(tmp_path):
    """The sink shows a later run's rows, so the numbers of the refused run are not reported."""
    trial = sqlite(tmp_path)
    commit_and_restore_old_log(trial, Tasks(1))
    version, record = trial.commit_log.read("c")
    trial.commit_log.write("c", record | {"state": "refused", "messages": [{"attempt": 1, "rows": 7}]}, version)
    for _ in range(2):
        report = trial.drive(Driver(), Tasks(1), "c")
        assert (report.repeated, report.rows, report.parts) == (True, 0, 0)
        assert trial.commit_log.read("c")[1]["state"] == "applied"


@pytest.mark.parametrize("repeats", [1, 2])
def test_rows_staged_by_earlier_runs_are_deleted_with_a_restored_log(tmp_path, monkeypatch, repeats):
    """A repeat that finds the commit done deletes the rows that earlier runs staged. A later repeat does so too."""
    trial, runs, delete = sqlite(tmp_path), [], DatabaseSink.discard

    def fails(staging):
        runs.append(staging.run)
        raise RuntimeError("no rows")

    def discard(sink, staging, kept):
        if staging.run in runs:
            raise OSError("no route")
        delete(sink, staging, kept)

    with monkeypatch.context() as patch:
        patch.setattr(DatabaseSink, "discard", discard)
        with pytest.raises(RuntimeError):
            commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, fails, sleep=lambda _: None)
        commit_and_restore_old_log(trial, Tasks(1))
        for _ in range(repeats - 1):
            assert trial.drive(Driver(), Tasks(2), "c").repeated
        assert len(trial.left()) == 1
    assert trial.drive(Driver(), Tasks(2), "c").repeated
    assert (trial.left(), sorted(trial.visible())) == ([], Tasks(1).expected)


def test_the_folder_of_a_commit_log_may_contain_links(tmp_path, monkeypatch):
    """The path is resolved as the operating system does."""
    (tmp_path / "far" / "in").mkdir(parents=True)
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "link").symlink_to(tmp_path / "far" / "in")
    monkeypatch.chdir(tmp_path / "near")
    commit_log = FileCommitLog("link/../log")
    assert commit_log.write("c", {"state": "open"}, 0) == 1
    assert [folder.name for folder in (tmp_path / "far").iterdir()] != ["in"]
    assert [folder.name for folder in (tmp_path / "near").iterdir()] == ["link"]


def test_abandon_deletes_nothing_if_the_sink_is_unreachable(trial):
    """The record becomes aborted so that the job can end. When the sink is reachable again, it becomes applied."""
    before = commit_and_restore_old_log(trial, Tasks(1))

    def unreachable(*_):
        raise CommitFailed("it is unreachable")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(trial.make_sink()), "done", unreachable)
        for _ in range(2):
            abandon(trial.make_sink(), trial.commit_log, "c")
    assert trial.commit_log.read("c")[1]["state"] == "aborted"
    assert (sorted(trial.visible()), trial.state()) == before
    abandon(trial.make_sink(), trial.commit_log, "c")
    assert trial.commit_log.read("c")[1]["state"] == "applied"
    assert (sorted(trial.visible()), trial.state()) == before


def test_a_refusal_by_a_driver_without_a_session_is_pending(trial):
    """The record stays decided, so the staged rows stay and a repeat completes the commit."""
    tasks = Tasks(1)
    lost = FailingLog(trial.commit_log, CommitSuperseded("the session is lost"), "refused")
    with pytest.raises(CommitPending, match="the sink refuses it: never. That could not be written down: the session"):
        commit(
            RefusingSink(trial.make_sink()), lost, "c", SCHEMA, lambda staging: tasks.run(trial.make_sink(), staging)
        )
    assert trial.commit_log.read("c")[1]["state"] == "decided"
    assert trial.drive(Driver(), Tasks(2), "c").repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


def test_a_conflict_is_pending_if_the_sink_becomes_unreachable(tmp_path):
    """After the decision it is unknown whether the commit is done, so the staged rows stay for a repeat."""
    trial, tasks = sqlite(tmp_path), Tasks(1)
    reachable, decided = trial.make_sink(), []

    class Unreachable(Around):
        def commit(self, staging, messages):
            decided.append(1)
            raise CommitConflict("is there already")

        def done(self, commit_id):
            if decided:
                raise CommitFailed("the server is gone")
            return reachable.done(commit_id)

    with pytest.raises(CommitPending, match="the sink does not say whether it is done: the server is gone"):
        commit(Unreachable(reachable), trial.commit_log, "c", SCHEMA, lambda staging: tasks.run(reachable, staging))
    assert trial.drive(Driver(), Tasks(2), "c").repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


class FailingDiscard(Around):
    """A sink whose first calls of `discard` fail."""

    def __init__(self, sink, times):
        super().__init__(sink)
        self._times = times

    def discard(self, staging, kept):
        if self._times:
            self._times -= 1
            raise CommitFailed("the server is gone")
        self._sink.discard(staging, kept)


@pytest.mark.parametrize("succeeds", [True, False], ids=["done", "failed"])
def test_cleanup_is_retried(trial, succeeds):
    """As often as a commit, so nothing is left if the sink is unreachable only for a moment."""
    tasks, pauses = Tasks(SEED), []

    def run(staging):
        messages = tasks.run(trial.make_sink(), staging)
        if not succeeds:
            raise ValueError("the job failed")
        return messages

    with contextlib.nullcontext() if succeeds else pytest.raises(ValueError, match="the job failed"):
        commit(FailingDiscard(trial.make_sink(), 3), trial.commit_log, "c", SCHEMA, run, sleep=pauses.append)
    assert pauses == [0.2, 0.4, 0.8]
    assert sorted(trial.visible()) == (tasks.expected if succeeds else [])
    assert trial.left() == []


@pytest.mark.parametrize("succeeds", [True, False], ids=["done", "failed"])
def test_a_failed_cleanup_is_logged(tmp_path, caplog, succeeds):
    """The warning says what is left and how to delete it. Only invisible rows may be deleted by hand. A repeat of the
    commit deletes them."""
    trial, tasks, runs = sqlite(tmp_path), Tasks(SEED), []

    def run(staging):
        runs.append(staging.run)
        messages = tasks.run(trial.make_sink(), staging)
        if not succeeds:
            raise ValueError("the job failed")
        return messages

    with contextlib.nullcontext() if succeeds else pytest.raises(ValueError, match="the job failed"):
        commit(FailingDiscard(trial.make_sink(), 9), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
    assert trial.left() == [f"stagecrew_stage_{runs[0]}"]
    [warning] = [record.message for record in caplog.records if "could not be deleted" in record.message]
    assert f"commit 'c' has staged for <table target of sqlite> in {tmp_path}" in warning
    assert runs[0] in warning
    assert ("delete them when the sink is back" in warning) is not succeeds
    trial.drive(Driver(), Tasks(1), "c")
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


def test_cleanup_is_not_retried_after_a_long_call(tmp_path, monkeypatch):
    """A host that does not respond would delay the driver again."""
    trial, pauses = sqlite(tmp_path), []
    sink = FailingDiscard(trial.make_sink(), 9)
    monkeypatch.setattr(stagecrew.operators.commits, "_BRIEF", -1.0)
    commit(
        sink, trial.commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(trial.make_sink(), staging), sleep=pauses.append
    )  # fmt: skip
    assert (pauses, sink._times) == ([], 8)


def test_a_commit_id_cannot_be_used_for_two_tables(tmp_path):
    """The commit log refuses it. Without the log, a table does not find the other table's commit."""
    (tmp_path / "one").mkdir()
    trial = sqlite(tmp_path / "one")
    trial.drive(Driver(), Tasks(1), "c")
    with contextlib.closing(sqlite3.connect(tmp_path / "one" / "data.db")) as database:
        database.execute('CREATE TABLE other (id INTEGER, "text" TEXT)')
    other = DatabaseSink(f"sqlite:///{tmp_path}/one/data.db", "other")
    with pytest.raises(
        OperatorMisused, match="commit 'c' is known for <table target of sqlite> in .*data.db, not for <table other"
    ):
        commit(other, trial.commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(other, staging))
    report = commit(other, MemoryCommitLog(), "c", SCHEMA, lambda staging: Tasks(1).run(other, staging))
    assert not report.repeated
    with contextlib.closing(sqlite3.connect(tmp_path / "one" / "data.db")) as database:
        assert database.execute("SELECT count(*) FROM other").fetchone() == (40,)


def s3_at(endpoint):
    return pyarrow.fs.S3FileSystem(
        access_key="very-secret", secret_key="very-secret", endpoint_override=endpoint, region="us-east-1"
    )


def webhdfs_at(host):
    files = fsspec.filesystem("webhdfs", host=host, port=1, user="me", password="very-secret", skip_instance_cache=True)
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(files))


def iceberg_at(catalog="default", **properties):
    return IcebergSink("db.target", catalog, properties)


SECRET = "://me:very-secret@"


@pytest.mark.parametrize(
    "sinks",
    [
        lambda: [ObjectSink("bucket/t", s3_at(f"http{SECRET}{host}:9?password=very-secret")) for host in "ab"],
        lambda: [
            ObjectSink(f"s3{SECRET}bucket/t?endpoint_override=http%3A%2F%2F{host}&region=us-east-1") for host in "ab"
        ],
        lambda: [ObjectSink("bucket/t", s3_at("")), ObjectSink("bucket/t", s3_at("a"))],
        lambda: [ParquetSink("/t", mode, webhdfs_at(host)) for host in "ab" for mode in ("create", "append")],
        lambda: [iceberg_at(name, uri="sqlite:///c.db", **{"s3.secret-access-key": "very-secret"}) for name in "ab"],
        lambda: [iceberg_at(uri=f"postgresql+psycopg2{SECRET}{host}/c?password=very-secret") for host in "ab"],
        lambda: [iceberg_at(uri="https://c", warehouse=name, token="very-secret") for name in "ab"],
        lambda: [
            DatabaseSink(f"postgresql{SECRET}{address}", "t")
            for address in (
                "a/db",
                "b/db",
                "a/other",
                "a:1/db",
                "a/db?options=-csearch_path%3Dx&sslpassword=very-secret",
            )
        ],
        lambda: [
            DatabaseSink("postgresql:///?" + query, "t") for query in ("host=a&password=very-secret", "service=x")
        ],
    ],
    ids=["s3", "s3-uri", "aws", "webhdfs", "names", "catalogues", "warehouses", "postgresql", "queries"],
)
def test_the_identity_of_a_sink_includes_its_server(sinks):
    """Sinks with the same name in another store, catalogue or server are different. An identity contains no secret."""
    identities = [sink.identity for sink in sinks()]
    assert len(set(identities)) == len(identities) > 1
    assert identities == [sink.identity for sink in sinks()]
    assert "very-secret" not in f"{identities} {[repr(sink) for sink in sinks()]}"


def test_a_commit_id_cannot_be_used_in_two_catalogues(tmp_path):
    """The table's name and the commit log are the same, but the commit is not found done in the second catalogue."""
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    one, two = iceberg(tmp_path / "one"), iceberg(tmp_path / "two")
    one.drive(Driver(), Tasks(1), "c")
    two.commit_log = one.commit_log
    with pytest.raises(OperatorMisused, match="commit 'c' is known for .*/one/catalog.db.*, not for .*/two/catalog.db"):
        two.drive(Driver(), Tasks(1), "c")
    assert two.visible() == []


def test_a_relative_path_is_resolved_in_the_working_directory(tmp_path, monkeypatch):
    """The same relative path in another working directory is another sink."""
    commit_log, tasks = MemoryCommitLog(), Tasks(1)
    for make in (
        lambda: ParquetSink("t"),
        lambda: ObjectSink("o"),
        lambda: DatabaseSink("sqlite:///data.db", "target"),
    ):
        for name in ("one", "two"):
            (tmp_path / name).mkdir(exist_ok=True)
            if not (tmp_path / name / "data.db").exists():
                sqlite(tmp_path / name)
            monkeypatch.chdir(tmp_path / name)
            sink = make()
            with pytest.raises(OperatorMisused, match="is known for") if name == "two" else contextlib.nullcontext():
                commit(
                    sink, commit_log, type(sink).__name__, SCHEMA, lambda staging, sink=sink: tasks.run(sink, staging)
                )


def test_a_pickled_iceberg_sink_reaches_its_catalogue(tmp_path):
    """Another driver can use it. What tasks receive contains no credentials."""
    trial, tasks = iceberg(tmp_path), Tasks(1)
    sink = trial.make_sink()
    sink._properties["token"] = "very-secret"
    sent = pickle.dumps(sink.in_tasks())
    assert b"very-secret" not in sent
    commit(
        sink,
        trial.commit_log,
        "c",
        SCHEMA,
        lambda staging: tasks.run(pickle.loads(pickle.dumps(sink.in_tasks())), staging),
    )
    assert pickle.loads(pickle.dumps(sink)).done("c")


def test_a_commit_id_cannot_be_used_for_two_sinks_without_identity(tmp_path):
    """The commit is not found done in the second sink."""
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    commit_log = MemoryCommitLog()

    class Anonymous(Around):
        def __getattr__(self, name):
            if name == "identity":
                raise AttributeError(name)
            return getattr(self._sink, name)

    one, two = (Anonymous(sqlite(tmp_path / name).make_sink()) for name in ("one", "two"))
    commit(one, commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(one, staging))
    assert commit(one, commit_log, "c", SCHEMA, lambda staging: 1 / 0).repeated
    with pytest.raises(
        OperatorMisused, match="commit 'c' is done, but not in this sink: give each sink ids of its own"
    ):
        commit(two, commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(two, staging))


def test_rows_that_the_table_refuses_are_a_conflict(tmp_path):
    """The commit is refused after its decision and no staged row is left. A repeat tries again."""
    path = tmp_path / "data.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute('CREATE TABLE target (id INTEGER PRIMARY KEY, "text" TEXT)')
        database.execute("INSERT INTO target VALUES (7, 'there')")
        database.commit()
    sink, commit_log = DatabaseSink(f"sqlite:///{path}", "target"), MemoryCommitLog()
    for _ in range(2):
        with pytest.raises(CommitConflict, match="does not take the rows: IntegrityError"):
            commit(sink, commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(sink, staging))
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM target").fetchone() == (1,)
        assert not database.execute("SELECT name FROM sqlite_master WHERE name LIKE 'stagecrew_stage%'").fetchall()
        database.execute("DELETE FROM target")
        database.commit()
    assert commit(sink, commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(sink, staging)).rows == 40


@pytest.mark.parametrize("kind", ["view", "generated column"])
def test_a_table_that_cannot_be_written_is_refused(tmp_path, kind):
    """The error is raised before any task runs, and no file is left."""
    trial = sqlite(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "data.db")) as database:
        if kind == "view":
            database.execute("CREATE VIEW other AS SELECT * FROM target")
        else:
            database.execute("CREATE TABLE other (id INTEGER, \"text\" TEXT AS ('text ' || id))")
    sink = DatabaseSink(f"sqlite:///{tmp_path}/data.db", "other")
    with pytest.raises(CommitFailed, match=f"table other cannot be written: OperationalError: cannot .* {kind}"):
        commit(sink, trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0)
    assert trial.left() == []


def test_lost_staged_rows_make_the_commit_pending(tmp_path):
    """The sink counts the staged rows when it adds them. If there are fewer, it adds none."""
    trial = sqlite(tmp_path)
    sink = trial.make_sink()

    def run_and_lose_a_row(staging):
        messages = Tasks(1).run(sink, staging)
        with contextlib.closing(sqlite3.connect(tmp_path / "data.db")) as database:
            database.execute(f"DELETE FROM stagecrew_stage_{staging.run} WHERE id = 3")
            database.commit()
        return messages

    with pytest.raises(CommitPending, match="10 rows were staged for table target, and 9 of them are there"):
        commit(sink, trial.commit_log, "c", SCHEMA, run_and_lose_a_row, sleep=lambda _: None)
    assert trial.visible() == []


def test_discard_leaves_other_runs_alone(tmp_path):
    """A run deletes only its own files, even if another run of the commit has begun and staged nothing yet."""
    sink = ObjectSink(tmp_path / "t")
    for run in ("one", "other"):
        sink.begin(Staging("c", run, SCHEMA))
    sink.discard(Staging("c", "one", SCHEMA), ())
    assert sink.stage(
        Staging("c", "other", SCHEMA), 0, 1, iter([pa.record_batch({"id": [1], "text": ["a"]}, schema=SCHEMA)])
    )


def test_spark_ignores_staged_files(tmp_path):
    """Spark ignores names that begin with an underscore and contain no `=`."""
    for sink in (ParquetSink(tmp_path / "t", mode="append"), ParquetSink(tmp_path / "t" / "day=1")):
        sink.begin(Staging("c", "r", SCHEMA))
        (staged,) = [path.name for path in (tmp_path / "t").iterdir() if path.name.startswith("_")]
        assert "=" not in staged
        sink.discard(Staging("c", "r", SCHEMA), ())
