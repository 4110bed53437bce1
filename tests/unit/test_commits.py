"""The commit protocol without Spark: whatever fails or pauses, a sink shows all rows once or none."""

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
from support.commits import CallsBefore, FailingLog, trials_in
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
    """A commit writes every row once, despite failed, speculative and late attempts. A repeat changes nothing."""
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
    """A dataset without rows is committed, so a repeat finds the commit done."""
    tasks = Tasks(1, rows=0)
    assert trial.drive(Driver(), tasks).rows == 0
    assert trial.visible() == []
    assert trial.drive(Driver(), tasks).repeated
    assert trial.leftovers() == []


#: Which moments of a driver are tested. They come in pairs (before and after a write), and an odd step hits both kinds.
MOMENTS = pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])


@MOMENTS
def test_a_driver_can_be_killed_at_any_moment(make_for_slow_tests, every):
    """If a driver is killed before or after any write, readers see all rows or none.

    The next driver commits all rows and leaves no file.
    """
    killed_at_each_moment(make_for_slow_tests, every)


@MOMENTS
def test_a_write_can_fail_at_any_moment(make_for_slow_tests, every):
    """A write that fails once, before or after its effect, fails the commit before the decision.

    After the decision, the driver retries.
    """
    failing_at_each_moment(make_for_slow_tests, every)


@pytest.fixture(scope="module")
def moments(tmp_path_factory):
    """A function that returns the number of moments of a driver without faults, for each sink."""
    counted = {}

    def count(name, make):
        if name not in counted:
            counted[name] = len(moments_without_faults(make("undisturbed")))
        return counted[name]

    return count


@pytest.mark.parametrize("seed", range(4))
def test_random_faults(request, make_for_slow_tests, seed, moments):
    """All rows are committed once, although drivers die, fail, pause and resume at random, and tasks write late."""
    random_history(
        make_for_slow_tests("seeded"), seed, moments(request.node.callspec.id.split("-")[0], make_for_slow_tests)
    )


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(n, n + 20) for n in range(100, 220, 20)], ids=lambda seeds: f"from-{seeds[0]}")
def test_many_random_faults(make, seeds):
    """All rows are committed once with more than a hundred random histories for each sink."""
    count = len(moments_without_faults(make("undisturbed")))
    for seed in seeds:
        random_history(make(str(seed)), seed, count)


def test_two_concurrent_commits_both_succeed_or_one_conflicts(trial):
    """Two concurrent commits both succeed, or one of them conflicts and leaves no file."""
    conflicts = concurrent_commits(trial, "staged")
    if trial.make_sink.__qualname__.startswith("parquet"):
        assert len(conflicts) == 1
        assert "already exists" in str(conflicts[0])
    else:
        assert not conflicts


def test_a_folder_moved_into_an_existing_one_is_cleaned_up_by_a_repeat(tmp_path):
    """On HDFS, a rename to an existing folder moves the source into this folder.

    A driver that dies afterwards leaves its files in another commit's folder. A repeat of its commit deletes them.
    """
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
    """Two commits that are both decided before either is applied both succeed, or one conflicts and leaves no file."""
    for number in range(3):
        trial = make(f"two-{number}")
        expected_conflicts = trial.make_sink.__qualname__.startswith("parquet")
        assert len(concurrent_commits(trial, "before commit")) == expected_conflicts


@MOMENTS
def test_a_paused_driver_that_resumes_changes_nothing(make_for_slow_tests, every):
    """A driver that pauses before or after any write changes nothing if another driver has committed or aborted."""
    resume_at_each_moment(make_for_slow_tests, every)


@pytest.mark.parametrize("exists_later", [pytest.param(True, marks=pytest.mark.long), False], ids=["exists", "removed"])
def test_a_driver_paused_during_a_refusal_leaves_nothing(tmp_path, exists_later):
    """A driver pauses within its commit until another driver has been refused because the folder exists.

    The paused driver then fails and leaves no file, whether the folder still exists or was removed.
    """

    def refuse(trial):
        folder = pathlib.Path(trial.make_sink()._path)
        folder.mkdir()
        (folder / "theirs").touch()
        return lambda: shutil.rmtree(folder)

    resume_after_refusal(trials_in(parquet, tmp_path), refuse, exists_later)


@pytest.mark.parametrize("exists_later", [pytest.param(True, marks=pytest.mark.long), False], ids=["exists", "removed"])
def test_a_driver_paused_during_a_refusal_of_a_table_leaves_nothing(tmp_path, exists_later):
    """A driver pauses within its commit until another driver has been refused because a row with the same key exists.

    The paused driver then fails and leaves no row, whether that row still exists or was removed.
    """

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
    """A refusal stays final if the conflicting row is removed before the refusal is recorded.

    Another driver that resumes the commit in between must not make the rows visible.
    """
    trial, tasks = sqlite(tmp_path), Tasks(1)
    outcome = []

    def change(*texts):
        with contextlib.closing(sqlite3.connect(tmp_path / "data.db")) as database:
            for text in texts:
                database.execute(text)
            database.commit()

    change("CREATE UNIQUE INDEX one ON target (id)")

    killed = FailingLog(trial.commit_log, CommitUnknown("it was killed"), "refused", "applied")

    class Watching(CallsBefore):
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
    """If the job fails, its exception is raised, and nothing is visible or left. The same id can be used again."""
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
    """A sink's `commit` that raises before or after its effect is retried.

    If it keeps raising, a later driver completes the commit from the staged rows.
    """
    commit_that_raises(make)


def test_another_connection_sees_no_row_before_the_last_transaction_ends(tmp_path):
    """Another connection sees no row before the end of the transaction that makes the rows visible."""
    rows_appear_at_once(sqlite(tmp_path))
