"""Commits whose outcome is unknown: refusals that cannot be recorded, old copies of the log, unreachable sinks."""

from __future__ import annotations

import contextlib

import pytest

import stagecrew.operators.commit_log
import stagecrew.operators.commit_rollforward
from stagecrew.errors import CommitConflict, CommitFailed, CommitPending, CommitSuperseded, CommitUnknown
from stagecrew.operators.commits import abandon, commit, resume
from stagecrew.operators.sinks import DatabaseSink
from support.commit_trials import SCHEMA, SEED, Driver, SinkWrapper, Tasks
from support.commits import FailingLog, RefusingSink, commit_and_restore_old_log
from support.local_sinks import SINKS, sqlite


@pytest.fixture(params=SINKS, ids=lambda make: make.__name__)
def trial(request, tmp_path):
    return request.param(tmp_path)


def test_a_refusal_with_an_unknown_outcome_deletes_nothing(trial):
    """A refusal whose record may not have been written deletes no staged rows, because another driver can use them."""
    tasks = Tasks(1)

    commit_log = FailingLog(trial.commit_log, CommitUnknown("no response"), "refused")
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
    assert trial.leftovers() == []


@pytest.mark.parametrize("repeated", [True, False], ids=["after a repeat", "immediately"])
def test_abandon_keeps_a_commit_that_is_done(trial, repeated):
    """`abandon` with a copy of the log from before the decision keeps the sink's rows. The record becomes applied."""
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
    """If a restored record is refused but the sink says that the commit is done, the record's numbers are not reported.

    The sink shows the rows of a later run.
    """
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
    """A repeat that finds the commit done deletes rows that earlier runs staged, even if earlier repeats could not."""
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
        assert len(trial.leftovers()) == 1
    assert trial.drive(Driver(), Tasks(2), "c").repeated
    assert (trial.leftovers(), sorted(trial.visible())) == ([], Tasks(1).expected)


def test_abandon_deletes_nothing_if_the_sink_is_unreachable(trial):
    """If the sink is unreachable, `abandon` deletes nothing and marks the record as aborted, so that the job can end.

    When the sink is reachable again, `abandon` marks the record as applied.
    """
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
    """If a driver cannot record a refusal because its session is lost, the commit stays decided, and so is pending.

    The staged rows stay, and a repeat completes the commit.
    """
    tasks = Tasks(1)
    lost = FailingLog(trial.commit_log, CommitSuperseded("the session is lost"), "refused")
    with pytest.raises(
        CommitPending,
        match="the sink refuses it: this sink refuses every commit. The refusal could not be recorded: the session",
    ):
        commit(
            RefusingSink(trial.make_sink()), lost, "c", SCHEMA, lambda staging: tasks.run(trial.make_sink(), staging)
        )
    assert trial.commit_log.read("c")[1]["state"] == "decided"
    assert trial.drive(Driver(), Tasks(2), "c").repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


def test_a_conflict_is_pending_if_the_sink_becomes_unreachable(tmp_path):
    """If the sink becomes unreachable after a conflict, the commit is pending, because it may be done.

    The staged rows stay for a repeat.
    """
    trial, tasks = sqlite(tmp_path), Tasks(1)
    reachable, decided = trial.make_sink(), []

    class Unreachable(SinkWrapper):
        def commit(self, staging, messages):
            decided.append(1)
            raise CommitConflict("already exists")

        def done(self, commit_id):
            if decided:
                raise CommitFailed("the server is gone")
            return reachable.done(commit_id)

    with pytest.raises(CommitPending, match="the sink could not report whether it is visible: the server is gone"):
        commit(Unreachable(reachable), trial.commit_log, "c", SCHEMA, lambda staging: tasks.run(reachable, staging))
    assert trial.drive(Driver(), Tasks(2), "c").repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


class FailingDiscard(SinkWrapper):
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
    """Cleanup is retried as often as a commit, so nothing is left if the sink is unreachable only for a short time."""
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
    assert trial.leftovers() == []


@pytest.mark.parametrize("succeeds", [True, False], ids=["done", "failed"])
def test_a_failed_cleanup_is_logged(tmp_path, caplog, succeeds):
    """If cleanup fails, a warning names the leftover data, and suggests manual deletion only if the commit failed.

    A repeat of the commit deletes the leftover data.
    """
    trial, tasks, runs = sqlite(tmp_path), Tasks(SEED), []

    def run(staging):
        runs.append(staging.run)
        messages = tasks.run(trial.make_sink(), staging)
        if not succeeds:
            raise ValueError("the job failed")
        return messages

    with contextlib.nullcontext() if succeeds else pytest.raises(ValueError, match="the job failed"):
        commit(FailingDiscard(trial.make_sink(), 9), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
    assert trial.leftovers() == [f"stagecrew_stage_{runs[0]}"]
    [warning] = [record.message for record in caplog.records if "could not be deleted" in record.message]
    assert "commit 'c'" in warning
    assert f"has staged for <table target of sqlite> in {tmp_path}" in warning
    assert runs[0] in warning
    assert ("delete them when the sink is available again" in warning) is not succeeds
    trial.drive(Driver(), Tasks(1), "c")
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


def test_cleanup_is_not_retried_after_a_long_call(tmp_path, monkeypatch):
    """Cleanup that took too long is not retried, because a host that does not respond would delay the driver again."""
    trial, pauses = sqlite(tmp_path), []
    sink = FailingDiscard(trial.make_sink(), 9)
    monkeypatch.setattr(stagecrew.operators.commit_rollforward, "_RETRY_LIMIT", -1.0)

    def run(staging):
        return Tasks(1).run(trial.make_sink(), staging)

    commit(sink, trial.commit_log, "c", SCHEMA, run, sleep=pauses.append)
    assert (pauses, sink._times) == ([], 8)
