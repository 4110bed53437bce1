"""Rules of recovery, each tested with a schedule that would break it.

In many of the schedules, two drivers use one store, and one of them is paused at a write.
"""

import threading
import time

import pytest

from stagecrew.errors import (
    CheckpointFailed,
    CheckpointTimeout,
    CommitConflict,
    CommitPending,
    CommitSuperseded,
    JobError,
    StateCorrupt,
    StateStorageError,
    StoreConflict,
)
from stagecrew.operators import commit_rollforward
from stagecrew.operators.commits import commit
from stagecrew.recovery import retry
from stagecrew.recovery.jobs.commit_log import StoredCommitLog, finish_commits
from stagecrew.recovery.jobs.fenced import FencedJobs
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.recovery.jobs.store import Jobs
from stagecrew.recovery.leadership.fencing import FencedStore, fence
from stagecrew.recovery.run import execution
from stagecrew.recovery.state.handles import StateHandleStore
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.recovery.stores.contract import Replace
from support.model_store import ModelServer
from support.simulated_jobs import SCHEMA, Killed, MemorySink, SimDriver, SimProcess, World, assert_final_state


class TwoDrivers:
    """The commit handles of two drivers for one job, and the sink to which both drivers write."""

    def __init__(self, tmp_path):
        self.server = ModelServer()
        storage = StateStorage(tmp_path)
        sessions = self.server.session(), self.server.session()
        sessions[0].ensure("commits")
        self.one, self.other = (StateHandleStore(session, storage, "commits") for session in sessions)
        self.name = sessions[0].session
        self.sink = MemorySink(str(tmp_path))

    def stage(self, staging):
        self.sink.staged[staging.run].append("row")
        return [{"text": "row", "rows": 1}]

    def commit(self, handles, execute=None):
        commit_log = StoredCommitLog(handles, self.sink)
        return commit(self.sink, commit_log, "c", SCHEMA, execute or self.stage, sleep=lambda _: None)

    def before_the_next_write(self, name, action):
        """Runs an action right before the session `name` next writes the record, as if its driver were paused there."""

        def fault(session, operations, moment):
            if (session, moment) == (name, "before") and any(
                isinstance(operation, Replace) and operation.key == "commits/c" for operation in operations
            ):
                self.server.fault = lambda *_: None
                action()

        self.server.fault = fault


@pytest.fixture
def drivers(tmp_path):
    return TwoDrivers(tmp_path)


def test_a_decision_after_an_abort_is_refused(drivers):
    """If another driver aborts a commit while its driver is paused before the decision, the decision is refused. No
    rows become visible, and none stay staged."""
    drivers.before_the_next_write(drivers.name, lambda: finish_commits(drivers.other, ending=True))
    with pytest.raises(CommitSuperseded):
        drivers.commit(drivers.one)
    assert (drivers.sink.visible, drivers.sink.staged) == ({}, {})
    assert drivers.commit(drivers.other).rows == 1


def test_an_abort_after_a_decision_is_refused(drivers, monkeypatch):
    """A driver that aborts a commit that was already decided deletes nothing. The job cannot end until the decided
    commit is applied."""
    staged, released, raised = threading.Event(), threading.Event(), []

    def stage(staging):
        staged.set()
        assert released.wait(30)
        return drivers.stage(staging)

    def decide():
        with monkeypatch.context() as patch:
            patch.setattr(drivers.sink, "commit", lambda *_: 1 / 0)  # decided but not applied
            released.set()
            thread.join(30)

    def run():
        try:
            drivers.commit(drivers.one, stage)
        except CommitPending as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert staged.wait(30)
    drivers.before_the_next_write(drivers.other._store.session, decide)
    with pytest.raises(CommitSuperseded):
        finish_commits(drivers.other, ending=True)
    assert (len(raised), drivers.sink.visible, len(drivers.sink.staged)) == (1, {}, 1)
    finish_commits(drivers.other, ending=True)
    assert (drivers.sink.visible, drivers.sink.staged) == ({"c": ["row"]}, {})


@pytest.mark.parametrize("problem", ["sink away for a while", "storage away for a while", "sink away", "corrupt state"])
def test_a_run_waits_for_its_sink_and_storage(drivers, monkeypatch, problem):
    """A run applies its decided commit as soon as its sink and its storage are available again. A corrupt state raises
    an error without a wait."""
    monkeypatch.setattr(commit_rollforward, "_TRIES", 1)
    waits = []
    monkeypatch.setattr(retry, "_PAUSE", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(drivers.sink, "commit", lambda *_: 1 / 0)
        with pytest.raises(CommitPending):
            drivers.commit(drivers.one)
    sink_is_away = problem in ("sink away for a while", "sink away")
    real = drivers.sink.commit if sink_is_away else StateStorage.read

    def fail(*arguments):
        waits.append(1)
        if problem == "corrupt state":
            raise StateCorrupt("it was truncated")
        if len(waits) < 7 or problem == "sink away":
            raise OSError("no route") if sink_is_away else StateStorageError("no route")
        return real(*arguments)

    if sink_is_away:
        drivers.sink.commit = fail
    else:
        monkeypatch.setattr(StateStorage, "read", fail)
    if problem in ("sink away for a while", "storage away for a while"):
        finish_commits(drivers.other, ending=True, retry_timeout=60.0)
        assert (drivers.sink.visible, drivers.sink.staged, len(waits) >= 7) == ({"c": ["row"]}, {}, True)
    else:
        with pytest.raises(CommitPending if problem == "sink away" else StateCorrupt):
            finish_commits(drivers.other, ending=True, retry_timeout=0.5 if problem == "sink away" else 60.0)
        assert (len(waits) > 2) == (problem == "sink away")
        assert len(drivers.sink.staged) == 1


@pytest.mark.parametrize("recovers", [True, False])
def test_an_abort_waits_for_its_sink(drivers, monkeypatch, caplog, recovers):
    """Staged rows of an aborted commit are deleted if the sink recovers within the retry timeout. Otherwise the log
    names the runs that staged them."""
    monkeypatch.setattr(retry, "_PAUSE", 0.0)
    runs, calls = [], []

    def stage_and_die(staging):
        drivers.stage(staging)
        runs.append(staging.run)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(drivers.sink, "discard", lambda *_: 1 / 0)
        for _ in range(2):
            with pytest.raises(Killed):
                drivers.commit(drivers.one, stage_and_die)
    assert len(drivers.sink.staged) == 2
    done = drivers.sink.done

    def unavailable(commit_id):
        calls.append(1)
        if len(calls) < 5 or not recovers:
            if not recovers:
                time.sleep(0.3)  # longer than the retry timeout, after which there is one last call
            raise OSError("no route")
        return done(commit_id)

    drivers.sink.done = unavailable
    finish_commits(drivers.other, ending=True, retry_timeout=60.0 if recovers else 0.2)
    state = drivers.other.get("c").data.decode()
    assert '"aborted"' in state
    assert (len(calls), len(drivers.sink.staged)) == ((5, 0) if recovers else (2, 2))
    messages = [record.getMessage() for record in caplog.records if "is aborted, and will never" in record.getMessage()]
    assert len(messages) == (not recovers)
    assert all(run in text for text in messages for run in runs)


def test_a_refusal_that_cannot_be_written_deletes_nothing(drivers, monkeypatch):
    """If a driver loses its session before it writes the sink's refusal, it deletes nothing, and the next driver
    applies the commit."""

    def refuse(*_):
        drivers.before_the_next_write(drivers.name, lambda: drivers.server.expire(drivers.name))
        raise CommitConflict("never")

    with monkeypatch.context() as patch:
        patch.setattr(drivers.sink, "commit", refuse)
        with pytest.raises(CommitPending, match="the sink refuses it: never"):
            drivers.commit(drivers.one)
    assert (drivers.sink.visible, len(drivers.sink.staged)) == ({}, 1)
    finish_commits(drivers.other, ending=True)
    assert (drivers.sink.visible, drivers.sink.staged) == ({"c": ["row"]}, {})


# -- Whole jobs


SPEC = JobSpec("job-0.py", (), {}, {}, b"", 2)


def submitted_job(seed, spec=SPEC):
    """A world with a job, and the driver that leads and has not read the job yet."""
    world = World(seed, jobs=1, faults=0)
    world.sink.visible.clear()
    Jobs(world.server.session(), world.storage, lambda: world.clock).submit(spec, "job-0")
    driver = SimDriver(world)
    world.drivers.append(driver)
    driver.become_leader(driver.campaign())
    return world, driver


def started_job(seed, spec=SPEC):
    """A world with a job, and the driver that has started the job's first run."""
    world, driver = submitted_job(seed, spec)
    driver.act()
    return world, driver


def take_turns(world, driver, turns):
    """In each turn, the driver reconciles its jobs, and the processes that it has started run."""
    for _ in range(turns):
        world.turn(driver, 60.0)


def test_decided_commits_are_applied_before_a_run_begins(monkeypatch):
    """The code of a later run sees the rows of decided commits from its start, not only when it reaches the commit."""
    world, driver = started_job(20)
    real, seen = world.sink.commit, []

    def killed(*_):
        world.current.killed = True
        raise Killed

    program = SimProcess._program

    def record_visible(self, job):
        seen.append(dict(world.sink.visible))
        return program(self, job)

    monkeypatch.setattr(SimProcess, "_program", record_visible)
    world.sink.commit = killed
    world.processes[0].act()
    world.sink.commit = real
    take_turns(world, driver, 3)
    assert seen == [{}, {"job-0/write/sink": ["make by run 1"]}]
    assert_final_state(world, driver.jobs)


@pytest.mark.parametrize("outcome", ["is given up", "raises", "returns"])
def test_a_job_does_not_end_before_its_decided_commit_is_applied(monkeypatch, outcome):
    """While the sink is unavailable, a job with a decided commit gets no result and keeps all its state, whether all
    its runs are lost, its code raises, or its code returns. When the sink recovers, the job ends and its rows are
    visible."""
    monkeypatch.setattr(commit_rollforward, "_TRIES", 1)
    world, driver = started_job(21, JobSpec("job-0.py", (), {}, {}, b"", 3 if outcome == "is given up" else 50))
    world.patience = 0.0

    def program(self, job):
        def execute(staging):
            world.sink.staged[staging.run].append("row")
            return [{"text": "row", "rows": 1}]

        try:
            commit(world.sink, job.commit_log(world.sink), job.commit_id("sink"), SCHEMA, execute)
        except CommitPending:
            if outcome == "is given up":
                raise
        if outcome == "raises":
            raise ValueError("from the job's code")
        return 1

    monkeypatch.setattr(SimProcess, "_program", program)
    real, world.sink.commit = world.sink.commit, lambda *_: 1 / 0
    for _ in range(12):
        take_turns(world, driver, 1)
        record, _ = driver.jobs.read("job-0")
        assert not record.state.is_terminal
        assert (len(world.sink.staged), world.sink.visible) == (1, {})
        assert {"specs/job-0", "jobs/job-0/commits/job-0%2Fsink"} <= set(world.server.entries)
    assert (record.state == "ending") == (outcome == "is given up")
    world.sink.commit = real
    take_turns(world, driver, 5)
    assert world.sink.visible == {"job-0/sink": ["row"]}
    states = {"is given up": "failed", "raises": "failed", "returns": "succeeded"}
    assert driver.jobs.result("job-0").state == states[outcome]
    assert (driver.jobs.read("job-0")[0].clean, world.sink.staged) == (True, {})


@pytest.mark.parametrize(
    ("error", "run_number", "state"), [(CheckpointTimeout, 2, "succeeded"), (CheckpointFailed, 1, "failed")]
)
def test_a_checkpoint_that_times_out_loses_the_run(monkeypatch, error, run_number, state):
    """After a checkpoint that timed out, the run is lost and the next run ends the job. A declined checkpoint fails the
    job immediately."""
    world, driver = started_job(28)
    program, raised = SimProcess._program, []

    def fail_once(self, job):
        if not raised:
            raised.append(job.step("make", lambda: self._step(job, "make")))
            self.stored("make")
            raise error("at the end of a step")
        return program(self, job)

    monkeypatch.setattr(SimProcess, "_program", fail_once)
    monkeypatch.setattr(World, "fails", staticmethod(lambda job: False))
    take_turns(world, driver, 4)
    record, _ = driver.jobs.read("job-0")
    assert (record.run, record.state, record.clean) == (run_number, state, True)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_job_with_a_commit_record_of_an_earlier_version_does_not_run(caplog, cancelled):
    """A job with a commit record of an earlier version does not run its code and does not end, even if it is cancelled.
    The record does not change."""
    world, driver = started_job(28)
    handles = Jobs(world.server.session(), world.storage).handles("job-0", "commits")
    StoredCommitLog(handles, world.sink).write("job-0/sink", {"state": "open", "run": "0" * 32}, 0)
    before = handles.get("job-0/sink")
    if cancelled:
        world.cancelled.add("job-0")
        Jobs(world.server.session(), world.storage).cancel("job-0")
    take_turns(world, driver, 20)
    assert not driver.jobs.read("job-0")[0].state.is_terminal
    assert handles.get("job-0/sink") == before
    assert world.ran == []
    assert "an earlier version of stagecrew wrote the record of commit 'job-0/sink'" in caplog.text
    handles.remove("job-0/sink")
    take_turns(world, driver, 5)
    assert driver.jobs.read("job-0")[0].state == ("cancelled" if cancelled else "succeeded")


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_job_that_cannot_be_started_does_not_stop_the_leader(cancelled):
    """However often the start of one job fails, running jobs continue and a later job is started."""
    world, driver = started_job(24)
    [running] = world.processes
    jobs = Jobs(world.server.session(), world.storage, lambda: world.clock)
    jobs.submit(JobSpec("bad.py", (), {}, {}, b"", 2), "bad")
    attempts = []

    def prepare(spec, job):
        if job == "bad":
            attempts.append(job)
            raise JobError("no room for its files")

    driver.prepare = prepare
    if cancelled:
        jobs.cancel("bad")
    for _ in range(1100):
        world.clock += 60.0
        driver.act()
    assert not driver.dead
    assert len(attempts) > 1090
    jobs.submit(JobSpec("late.py", (), {}, {}, b"", 2), "late")
    driver.act()
    assert [(process.run.job, process.run.number, process.dead) for process in world.processes] == [
        ("job-0", 1, False), ("late", 1, False),
    ]  # fmt: skip
    assert not running.dead


def test_a_process_that_cannot_be_started_is_not_a_lost_run():
    """However often the process of a run cannot be started, the job's `max_attempts` are left for later runs.

    A process that was started after all cannot claim the run.
    """
    world, driver = submitted_job(29)
    started = []

    def start(folder, run, term, finish):
        started.append(run)
        raise JobError("no process can be started")

    driver.start = start
    poll(world, driver, 62)
    assert len(started) > 4
    record, _ = driver.jobs.read("job-0")
    assert (record.state, record.run) == ("submitted", 0)
    for run in started:
        with pytest.raises(StoreConflict):
            FencedJobs(world.server.session(), world.storage).claim_run(run, {"pid": 7, "host": "here"})
    del driver.start
    poll(world, driver, 62)
    record, _ = driver.jobs.read("job-0")
    assert (record.state, record.run) == ("succeeded", 1)


def test_a_process_that_was_started_and_claimed_is_counted():
    """If the leader gets an error although the process of a run was started and has claimed the run, the run counts."""
    world, driver = submitted_job(30)

    def start(folder, run, term, finish):
        FencedJobs(world.server.session(), world.storage).claim_run(run, {"pid": 7, "host": "here"})
        raise JobError("interrupted")

    driver.start = start
    driver.act()
    record, _ = driver.jobs.read("job-0")
    assert (record.state, record.run) == ("running", 1)


def test_the_job_that_was_submitted_first_starts_first():
    """If there is no room for all jobs, the jobs that were submitted first start first, whatever their ids are.

    Processes that finish the commits of ending jobs come before them.
    """
    world, driver = submitted_job(31)
    jobs = Jobs(world.server.session(), world.storage, lambda: world.clock)
    driver.reconciler._at_once = 1
    for job in ("z", "a", "b"):
        world.clock += 1.0
        jobs.submit(JobSpec(f"{job}.py", (), {}, {}, b"", 2), job)
    begun = []

    def start(folder, run, term, finish):
        begun.append((run.job, finish))
        return SimProcess(world, run, term, finish)

    driver.start = start
    driver.act()
    jobs.cancel("b")
    for _ in range(3):
        driver.act()
        driver.reconciler.processes[begun[-1][0]].die()
        driver.act()  # a job whose process was lost is paused for a second
    assert begun == [("job-0", False), ("b", True), ("z", False), ("a", False)]


def poll(world, driver, seconds, polls_per_second=5):
    """Lets the driver poll and its processes run for some simulated seconds. Returns the number of new processes."""
    before = len(world.processes)
    for _ in range(int(seconds * polls_per_second)):
        world.clock += 1.0 / polls_per_second
        driver.act()
        for process in world.processes:
            if not process.dead:
                process.act()
    return len(world.processes) - before


def test_a_cancelled_job_that_cannot_be_finished_is_retried_with_pauses(monkeypatch):
    """A cancel takes effect immediately, even in the pause after a lost run. While the sink is unavailable, a cancelled
    job is retried with a job's usual pauses and not at each poll. When the sink recovers, the job ends."""
    monkeypatch.setattr(commit_rollforward, "_TRIES", 1)
    world, driver = started_job(25, JobSpec("job-0.py", (), {}, {}, b"", 50))
    world.patience = 0.0
    real, world.sink.commit = world.sink.commit, lambda *_: 1 / 0
    assert 5 <= poll(world, driver, 62) <= 7  # after 1, 2, 4, 8, 16 and 31 s
    jobs = Jobs(world.server.session(), world.storage, lambda: world.clock)
    jobs.cancel("job-0")
    driver.act()
    assert driver.jobs.read("job-0")[0].state == "ending"
    # A process that only finishes a job gives up early, to make room for others. A run would wait for the full timeout.
    world.patience = retry.RETRY_TIMEOUT
    monkeypatch.setattr(execution, "_FINISH_TIMEOUT", 0.0)
    assert 5 <= poll(world, driver, 62) <= 8
    assert all(process.finishing for process in world.processes[-5:])
    assert driver.jobs.read("job-0")[0].state == "ending"
    world.sink.commit = real
    assert poll(world, driver, 60) == 1
    assert world.sink.visible == {"job-0/write/sink": ["make by run 1"]}
    assert (driver.jobs.result("job-0").state, driver.jobs.read("job-0")[0].clean) == ("cancelled", True)


def test_a_cancelled_run_ends_without_pauses(caplog):
    """After a cancel, it takes one poll to end the run, one to finish the decided commits, and one to clean the job."""
    world, driver = started_job(27)
    world.cancelled.add("job-0")
    [process] = world.processes
    FencedJobs(process.session, world.storage).claim_run(process.run, {"pid": 7, "host": "here"})
    process.busy = True  # it is still working
    Jobs(world.server.session(), world.storage, lambda: world.clock).cancel("job-0")
    for _ in range(5):
        world.clock += 0.2
        driver.act()
        for living in world.processes:
            if not living.dead and not living.busy:
                living.act()
        while world.dead_sessions:
            world.server.expire(world.dead_sessions.pop())
    assert [process.finishing for process in world.processes] == [False, True]
    assert "tried again" not in caplog.text
    assert_final_state(world, driver.jobs)


def test_a_cancelled_job_whose_state_cannot_be_deleted_is_retried_with_pauses(monkeypatch):
    """While the state of a cancelled job cannot be deleted, its cleanup is retried with pauses. When the storage
    recovers, the job is cleaned."""
    world, driver = started_job(26)
    world.cancelled.add("job-0")
    Jobs(world.server.session(), world.storage, lambda: world.clock).cancel("job-0")
    real, tried = driver.jobs.clean_up, []

    def clean(job):
        tried.append(job)
        raise StateStorageError("access denied")

    monkeypatch.setattr(driver.jobs, "clean_up", clean)
    poll(world, driver, 62)
    assert driver.jobs.read("job-0")[0].state == "cancelled"
    assert 5 <= len(tried) <= 8
    monkeypatch.setattr(driver.jobs, "clean_up", real)
    poll(world, driver, 60)
    assert_final_state(world, driver.jobs)


def test_a_successor_waits_for_the_previous_process_of_a_job():
    """While the previous process of a job (which may only be paused) has its session, the new leader starts no run of
    that job but runs others. After the session has ended, it starts the job's next run."""
    world, old = started_job(22)
    [process] = world.processes
    jobs = Jobs(world.server.session(), world.storage, lambda: world.clock)
    known = FencedJobs(FencedStore(process.session, fence(1)), world.storage)
    known.claim_run(process.run, {"pid": 7, "host": "here"})
    process.busy = True  # it is paused
    old.die()
    world.server.expire(world.dead_sessions.pop())
    jobs.submit(JobSpec("other.py", (), {}, {}, b"", 2), "other")
    new = SimDriver(world)
    for _ in range(5):
        world.clock += 60.0
        new.act()
    assert [(process.run.job, process.run.number) for process in world.processes] == [("job-0", 1), ("other", 1)]
    assert jobs.read("job-0")[0].run == 1
    world.server.expire(process.session.session)
    take_turns(world, new, 1)
    assert [(process.run.job, process.run.number) for process in world.processes][2:] == [("job-0", 2)]
    process.dead = True


@pytest.mark.parametrize("paused", [True, False])
def test_a_run_is_claimed_once(paused):
    """Of two processes that are started for one run, only one runs the job. The other finds the run claimed and changes
    nothing, even if it was about to claim the run itself."""
    world, driver = started_job(23)
    [first] = world.processes
    second = SimProcess(world, first.run, first.term, False)
    seen = []

    def meanwhile(session, operations, moment):
        if paused and session == first.session.session and not seen:
            seen.append(second)
            second.act()

    world.server.fault = meanwhile
    first.act()
    second.act()
    assert (first.code, second.code) == ((75, 0) if paused else (0, 75))
    assert [run for _, _, run in world.ran] == [1, 1, 1]
    take_turns(world, driver, 3)
    assert_final_state(world, driver.jobs)
