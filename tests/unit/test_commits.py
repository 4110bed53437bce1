"""The commit protocol, without Spark. Whatever fails or pauses, a sink shows all rows once or none."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import sqlite3

import pytest

from stagecrew.errors import CommitConflict, CommitFailed, CommitUnknown
from stagecrew.operators.commit_log import FileCommitLog
from stagecrew.operators.commits import commit, resume
from stagecrew.operators.sinks import ParquetSink
from support.commit_schedules import (
    commit_that_raises,
    concurrent_commits,
    failing_at_each_moment,
    killed_at_each_moment,
    random_history,
    rename_into_existing_folder,
    resume_after_refusal,
    resume_at_each_moment,
    rows_appear_at_once,
)
from support.commit_trials import SCHEMA, Driver, Tasks, moments_without_faults
from support.commits import FailingLog, StepBefore, trials_in
from support.local_sinks import SINKS, appended, iceberg, like_hdfs, objects, parquet, sqlite

LONG = [pytest.param(make, marks=pytest.mark.long) for make in (appended, objects, iceberg)]


@pytest.fixture(params=[parquet, sqlite, *LONG], ids=lambda make: make.__name__)
def make_for_slow_tests(request, tmp_path):
    """Makes trials for slow tests. Three of the sinks run in `make test-long` only."""
    return trials_in(request.param, tmp_path)


@pytest.fixture(params=SINKS, ids=lambda make: make.__name__)
def make(request, tmp_path):
    """Makes trials of every sink."""
    return trials_in(request.param, tmp_path)


@pytest.fixture(params=SINKS, ids=lambda make: make.__name__)
def trial(request, tmp_path):
    return request.param(tmp_path)


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
    assert trial.leftovers() == []
    repeat = trial.drive(Driver(), Tasks(2))
    assert repeat.repeated
    assert (repeat.rows, repeat.parts) == (40, 4)
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


def test_a_dataset_without_rows_is_committed(trial):
    """A repeat finds it done."""
    tasks = Tasks(1, rows=0)
    assert trial.drive(Driver(), tasks).rows == 0
    assert trial.visible() == []
    assert trial.drive(Driver(), tasks).repeated
    assert trial.leftovers() == []


#: Which moments of a driver are tested. They come in pairs, before and after a write, so the step is odd to meet both.
MOMENTS = pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])


@MOMENTS
def test_a_driver_can_be_killed_at_any_moment(make_for_slow_tests, every):
    """Before or after each write. Readers see all rows or none. The next driver commits all rows and leaves no file."""
    killed_at_each_moment(make_for_slow_tests, every)


@MOMENTS
def test_a_write_can_fail_at_any_moment(make_for_slow_tests, every):
    """Once, before or after its effect. It is an error before the decision. After the decision the driver retries."""
    failing_at_each_moment(make_for_slow_tests, every)


@pytest.fixture(scope="module")
def moments(tmp_path_factory):
    """The number of moments of an moments_without_faults driver, for each sink."""
    counted = {}

    def count(name, make):
        if name not in counted:
            counted[name] = len(moments_without_faults(make("moments_without_faults")))
        return counted[name]

    return count


@pytest.mark.parametrize("seed", range(4))
def test_random_faults(request, make_for_slow_tests, seed, moments):
    """Drivers die, pause and continue at random, and tasks write late."""
    random_history(
        make_for_slow_tests("seeded"), seed, moments(request.node.callspec.id.split("-")[0], make_for_slow_tests)
    )


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(n, n + 20) for n in range(100, 220, 20)], ids=lambda seeds: f"from-{seeds[0]}")
def test_many_random_faults(make, seeds):
    """At least a hundred seeds for each sink."""
    count = len(moments_without_faults(make("moments_without_faults")))
    for seed in seeds:
        random_history(make(str(seed)), seed, count)


def test_two_commits_at_once_both_succeed_or_one_conflicts(trial):
    """A commit that conflicts leaves no file."""
    conflicts = concurrent_commits(trial, "staged")
    if trial.make_sink.__qualname__.startswith("parquet"):
        assert len(conflicts) == 1
        assert "already exists" in str(conflicts[0])
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

    rename_into_existing_folder(filesystem, target, make)


def test_two_decided_commits_both_succeed_or_one_conflicts(make):
    """Both have been decided before either is applied. A commit that conflicts leaves no file."""
    for number in range(3):
        trial = make(f"two-{number}")
        expected_conflicts = trial.make_sink.__qualname__.startswith("parquet")
        assert len(concurrent_commits(trial, "before commit")) == expected_conflicts


@MOMENTS
def test_a_paused_driver_that_continues_changes_nothing(make_for_slow_tests, every):
    """It pauses before or after any write and continues after another driver has committed or aborted."""
    resume_at_each_moment(make_for_slow_tests, every)


@pytest.mark.parametrize("exists_later", [pytest.param(True, marks=pytest.mark.long), False], ids=["exists", "removed"])
def test_a_driver_paused_during_a_refusal_leaves_nothing(tmp_path, exists_later):
    """It pauses in its commit until another driver was refused because the folder exists. It reports this and leaves no
    file, whether the folder still exists or was removed."""

    def refuse(trial):
        folder = pathlib.Path(trial.make_sink()._path)
        folder.mkdir()
        (folder / "theirs").touch()
        return lambda: shutil.rmtree(folder)

    resume_after_refusal(trials_in(parquet, tmp_path), refuse, exists_later)


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

    resume_after_refusal(trials_in(unique, tmp_path), refuse, exists_later)


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

    with pytest.raises(CommitConflict, match="refuses the rows: IntegrityError"):
        commit(Watching(trial.make_sink()), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
    assert isinstance(outcome[0], CommitUnknown), "the other driver must not know whether the commit is refused"
    assert trial.visible() == []
    assert trial.commit_log.read("c")[1]["state"] == "refused"
    assert trial.leftovers() == []
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
    assert trial.leftovers() == []
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected


def test_a_commit_that_raises_is_retried(make):
    """Before or after its effect. If it keeps raising, a later driver completes it from the staged rows."""
    commit_that_raises(make)


def test_another_connection_sees_no_row_before_the_last_transaction_ends(tmp_path):
    """It reads before the end of each of the sink's transactions."""
    rows_appear_at_once(sqlite(tmp_path))
