"""Rules of recovery, each met by the schedule that it closes: two drivers over one store in memory, one of them paused at a write."""

import threading
import time

import pytest

from jobsim import SCHEMA, Killed, MemorySink, SimDriver, SimProcess, World, check
from modelstore import ModelServer
from stagecrew.errors import (
    CheckpointFailed,
    CheckpointTimeout,
    CommitConflict,
    CommitPending,
    CommitSuperseded,
    JobError,
    StateCorrupt,
    StateStorageError,
)
from stagecrew.operators import commits
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


class Two:
    """Two drivers' sights of one job's commits, and a sink that both write to."""

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

    def before_the_next_write(self, name, do):
        """Does this right before that session's next write of the record: who writes it was paused there."""

        def fault(session, operations, moment):
            if (session, moment) == (name, "before") and any(
                isinstance(one, Replace) and one.key == "commits/c" for one in operations
            ):
                self.server.fault = lambda *_: None
                do()

        self.server.fault = fault


@pytest.fixture
def two(tmp_path):
    return Two(tmp_path)


def test_a_decision_that_comes_behind_an_abort(two):
    """Who is paused before it decides, and goes on behind another's abort, decides nothing: nothing is visible, and nothing left."""
    two.before_the_next_write(two.name, lambda: finish_commits(two.other, ending=True))
    with pytest.raises(CommitSuperseded):
        two.commit(two.one)
    assert (two.sink.visible, two.sink.staged) == ({}, {})
    assert two.commit(two.other).rows == 1


def test_an_abort_that_comes_behind_a_decision(two, monkeypatch):
    """Who aborts what is decided meanwhile deletes nothing, and its job does not end behind that: what was decided is done first."""
    staged, goes_on, raised = threading.Event(), threading.Event(), []

    def stage(staging):
        staged.set()
        assert goes_on.wait(30)
        return two.stage(staging)

    def decide():
        with monkeypatch.context() as patch:
            patch.setattr(two.sink, "commit", lambda *_: 1 / 0)  # it is decided, and not done
            goes_on.set()
            thread.join(30)

    def run():
        try:
            two.commit(two.one, stage)
        except CommitPending as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert staged.wait(30)
    two.before_the_next_write(two.other._store.session, decide)
    with pytest.raises(CommitSuperseded):
        finish_commits(two.other, ending=True)
    assert (len(raised), two.sink.visible, len(two.sink.staged)) == (1, {}, 1)
    finish_commits(two.other, ending=True)
    assert (two.sink.visible, two.sink.staged) == ({"c": ["row"]}, {})


@pytest.mark.parametrize("away", ["the sink", "the storage", "for ever", "corrupt"])
def test_a_run_waits_for_what_is_away(two, monkeypatch, away):
    """What is decided is done by the run that finds its sink or its storage away, when that is back; what is corrupt is not waited for."""
    monkeypatch.setattr(commits, "_TRIES", 1)
    waits = []
    monkeypatch.setattr(retry, "_PAUSE", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(two.sink, "commit", lambda *_: 1 / 0)
        with pytest.raises(CommitPending):
            two.commit(two.one)
    real = two.sink.commit if away in ("the sink", "for ever") else StateStorage.read

    def fails(*arguments):
        waits.append(1)
        if away == "corrupt":
            raise StateCorrupt("it was truncated")
        if len(waits) < 7 or away == "for ever":
            raise OSError("no route") if away in ("the sink", "for ever") else StateStorageError("no route")
        return real(*arguments)

    if away in ("the sink", "for ever"):
        two.sink.commit = fails
    else:
        monkeypatch.setattr(StateStorage, "read", fails)
    if away in ("the sink", "the storage"):
        finish_commits(two.other, ending=True, retry_timeout=60.0)
        assert (two.sink.visible, two.sink.staged, len(waits) >= 7) == ({"c": ["row"]}, {}, True)
    else:
        with pytest.raises(CommitPending if away == "for ever" else StateCorrupt):
            finish_commits(two.other, ending=True, retry_timeout=0.5 if away == "for ever" else 60.0)
        assert (len(waits) > 2) == (away == "for ever")
        assert len(two.sink.staged) == 1


@pytest.mark.parametrize("back", [True, False])
def test_an_abort_waits_for_its_sink(two, monkeypatch, caplog, back):
    """What was staged for a commit that is aborted is deleted when its sink is back in time; else the log says what stays, of which runs."""
    monkeypatch.setattr(retry, "_PAUSE", 0.0)
    runs, asked = [], []

    def dies(staging):
        two.stage(staging)
        runs.append(staging.run)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(two.sink, "discard", lambda *_: 1 / 0)
        for _ in range(2):
            with pytest.raises(Killed):
                two.commit(two.one, dies)
    assert len(two.sink.staged) == 2
    done = two.sink.done

    def away(commit_id):
        asked.append(1)
        if len(asked) < 5 or not back:
            if not back:
                time.sleep(0.3)  # longer than is waited: it is asked once more, for the last time
            raise OSError("no route")
        return done(commit_id)

    two.sink.done = away
    finish_commits(two.other, ending=True, retry_timeout=60.0 if back else 0.2)
    state = two.other.get("c").data.decode()
    assert '"aborted"' in state
    assert (len(asked), len(two.sink.staged)) == ((5, 0) if back else (2, 2))
    said = [record.getMessage() for record in caplog.records if "is aborted, and nobody" in record.getMessage()]
    assert len(said) == (not back)
    assert all(run in text for text in said for run in runs)


def test_a_session_that_is_lost_at_a_refusal(two, monkeypatch):
    """Who is refused by the sink, and loses its session before that is written, deletes nothing: the next driver brings all."""

    def refuses(*_):
        two.before_the_next_write(two.name, lambda: two.server.expire(two.name))
        raise CommitConflict("never")

    with monkeypatch.context() as patch:
        patch.setattr(two.sink, "commit", refuses)
        with pytest.raises(CommitPending, match="the sink refuses it: never"):
            two.commit(two.one)
    assert (two.sink.visible, len(two.sink.staged)) == ({}, 1)
    finish_commits(two.other, ending=True)
    assert (two.sink.visible, two.sink.staged) == ({"c": ["row"]}, {})


# -- Of whole jobs


SPEC = JobSpec("job-0.py", (), {}, {}, b"", 2)


def begun(seed, spec=SPEC):
    """A job, and a driver that has begun its first run."""
    world = World(seed, jobs=1, faults=0)
    world.sink.visible.clear()
    Jobs(world.server.session(), world.storage, lambda: world.clock).submit(spec, "job-0")
    driver = SimDriver(world)
    world.drivers.append(driver)
    driver.act()
    return world, driver


def goes_on(world, driver, turns):
    """The driver looks, and what it has begun runs."""
    for _ in range(turns):
        world.turn(driver, 60.0)


def test_a_run_sees_what_was_decided_before(monkeypatch):
    """What a run before has decided is done when the next run's own code begins, and not only when it comes to that commit."""
    world, driver = begun(20)
    real, seen = world.sink.commit, []

    def killed(*_):
        world.current.killed = True
        raise Killed

    program = SimProcess._program

    def seeing(self, job):
        seen.append(dict(world.sink.visible))
        return program(self, job)

    monkeypatch.setattr(SimProcess, "_program", seeing)
    world.sink.commit = killed
    world.processes[0].act()
    world.sink.commit = real
    goes_on(world, driver, 3)
    assert seen == [{}, {"job-0/write/sink": ["make by run 1"]}]
    check(world, driver.jobs)


@pytest.mark.parametrize("how", ["is given up", "raises", "returns"])
def test_an_end_behind_a_decision(monkeypatch, how):
    """A job whose decided commit cannot be done, as the sink is away, has no result, and nothing of it is deleted, though all its runs were
    lost, though its code raises, and though it returns; when the sink is back it ends, with its rows there."""
    monkeypatch.setattr(commits, "_TRIES", 1)
    world, driver = begun(21, JobSpec("job-0.py", (), {}, {}, b"", 3 if how == "is given up" else 50))
    world.patience = 0.0

    def program(self, job):
        def execute(staging):
            world.sink.staged[staging.run].append("row")
            return [{"text": "row", "rows": 1}]

        try:
            commit(world.sink, job.commit_log(world.sink), job.commit_id("sink"), SCHEMA, execute)
        except CommitPending:
            if how == "is given up":
                raise
        if how == "raises":
            raise ValueError("as its code says")
        return 1

    monkeypatch.setattr(SimProcess, "_program", program)
    real, world.sink.commit = world.sink.commit, lambda *_: 1 / 0
    for _ in range(12):
        goes_on(world, driver, 1)
        record, _ = driver.jobs.read("job-0")
        assert not record.state.is_terminal
        assert (len(world.sink.staged), world.sink.visible) == (1, {})
        assert {"specs/job-0", "jobs/job-0/commits/job-0%2Fsink"} <= set(world.server.entries)
    assert (record.state == "ending") == (how == "is given up")
    world.sink.commit = real
    goes_on(world, driver, 5)
    assert world.sink.visible == {"job-0/sink": ["row"]}
    ended = {"is given up": "failed", "raises": "failed", "returns": "succeeded"}
    assert driver.jobs.result("job-0").state == ended[how]
    assert (driver.jobs.read("job-0")[0].clean, world.sink.staged) == (True, {})


@pytest.mark.parametrize(
    ("error", "run_number", "state"), [(CheckpointTimeout, 2, "succeeded"), (CheckpointFailed, 1, "failed")]
)
def test_a_checkpoint_that_is_not_taken(monkeypatch, error, run_number, state):
    """A checkpoint that is late loses the run, and the next run ends the job. A checkpoint that is declined fails the job at once."""
    world, driver = begun(28)
    program, raised = SimProcess._program, []

    def once(self, job):
        if not raised:
            raised.append(job.step("make", lambda: self._step(job, "make")))
            self.stored("make")
            raise error("at the end of a step")
        return program(self, job)

    monkeypatch.setattr(SimProcess, "_program", once)
    monkeypatch.setattr(World, "fails", staticmethod(lambda job: False))
    goes_on(world, driver, 4)
    record, _ = driver.jobs.read("job-0")
    assert (record.run, record.state, record.clean) == (run_number, state, True)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_job_with_a_record_of_an_earlier_version(caplog, cancelled):
    """A job with such a record of a commit, which may be cancelled, calls none of its code and does not end; the record stays as it is."""
    world, driver = begun(28)
    handles = Jobs(world.server.session(), world.storage).handles("job-0", "commits")
    StoredCommitLog(handles, world.sink).write("job-0/sink", {"state": "open", "run": "0" * 32}, 0)
    before = handles.get("job-0/sink")
    if cancelled:
        world.cancelled.add("job-0")
        Jobs(world.server.session(), world.storage).cancel("job-0")
    goes_on(world, driver, 20)
    assert not driver.jobs.read("job-0")[0].state.is_terminal
    assert handles.get("job-0/sink") == before
    assert world.ran == []
    assert "an earlier version of stagecrew wrote the record of commit 'job-0/sink'" in caplog.text
    handles.remove("job-0/sink")
    goes_on(world, driver, 5)
    assert driver.jobs.read("job-0")[0].state == ("cancelled" if cancelled else "succeeded")


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_job_that_cannot_be_tended_for_long(cancelled):
    """However often a job cannot be tended, the leader goes on: what runs is not ended by that, and a job that comes later is begun."""
    world, driver = begun(24)
    [beside] = world.processes
    jobs = Jobs(world.server.session(), world.storage, lambda: world.clock)
    jobs.submit(JobSpec("bad.py", (), {}, {}, b"", 2), "bad")
    asked = []

    def prepare(spec, job):
        if job == "bad":
            asked.append(job)
            raise JobError("there is no room for its files")

    driver.prepare = prepare
    if cancelled:
        jobs.cancel("bad")
    for _ in range(1100):
        world.clock += 60.0
        driver.act()
    assert not driver.dead
    assert len(asked) > 1090
    jobs.submit(JobSpec("late.py", (), {}, {}, b"", 2), "late")
    driver.act()
    assert [(one.run.job, one.run.number, one.dead) for one in world.processes] == [
        ("job-0", 1, False), ("late", 1, False),
    ]  # fmt: skip
    assert not beside.dead


def looks(world, driver, seconds, how_often=5):
    """The driver looks so often a second, and what it has begun runs. Answers how many processes that were."""
    before = len(world.processes)
    for _ in range(int(seconds * how_often)):
        world.clock += 1.0 / how_often
        driver.act()
        for process in world.processes:
            if not process.dead:
                process.act()
    return len(world.processes) - before


def test_a_cancelled_job_that_cannot_be_finished(monkeypatch):
    """A cancel is done at once, also in a pause behind a run that was lost. What ends and cannot be finished, as the sink is away, is tried
    again with the pauses of any job, and not at each look; when the sink is back it is finished."""
    monkeypatch.setattr(commits, "_TRIES", 1)
    world, driver = begun(25, JobSpec("job-0.py", (), {}, {}, b"", 50))
    world.patience = 0.0
    real, world.sink.commit = world.sink.commit, lambda *_: 1 / 0
    assert 5 <= looks(world, driver, 62) <= 7  # behind 1, 2, 4, 8, 16 and 31 s
    jobs = Jobs(world.server.session(), world.storage, lambda: world.clock)
    jobs.cancel("job-0")
    driver.act()
    assert driver.jobs.read("job-0")[0].state == "ending"
    # A process that only finishes makes room for others soon, however long a run waits.
    world.patience = retry.RETRY_TIMEOUT
    monkeypatch.setattr(execution, "_FINISH_TIMEOUT", 0.0)
    assert 5 <= looks(world, driver, 62) <= 8
    assert all(process.finishing for process in world.processes[-5:])
    assert driver.jobs.read("job-0")[0].state == "ending"
    world.sink.commit = real
    assert looks(world, driver, 60) == 1
    assert world.sink.visible == {"job-0/write/sink": ["make by run 1"]}
    assert (driver.jobs.result("job-0").state, driver.jobs.read("job-0")[0].clean) == ("cancelled", True)


def test_a_cancel_of_a_run(caplog):
    """Behind the cancel of a job that runs there is no pause: its run is ended, what it has decided is finished, and it is clean, a look each."""
    world, driver = begun(27)
    world.cancelled.add("job-0")
    [process] = world.processes
    FencedJobs(process.session, world.storage).claim_run(
        process.run, {"pid": 7, "host": "here"}
    )  # and it is in the middle of something
    process.busy = True
    Jobs(world.server.session(), world.storage, lambda: world.clock).cancel("job-0")
    for _ in range(5):
        world.clock += 0.2
        driver.act()
        for one in world.processes:
            if not one.dead and not one.busy:
                one.act()
        while world.doomed:
            world.server.expire(world.doomed.pop())
    assert [one.finishing for one in world.processes] == [False, True]
    assert "tried again" not in caplog.text
    check(world, driver.jobs)


def test_a_cancelled_job_whose_state_cannot_be_deleted(monkeypatch):
    """What a cancelled job held, and the storage does not delete, is tried with pauses too, and gone when that can be done."""
    world, driver = begun(26)
    world.cancelled.add("job-0")
    Jobs(world.server.session(), world.storage, lambda: world.clock).cancel("job-0")
    real, tried = driver.jobs.clean_up, []

    def clean(job):
        tried.append(job)
        raise StateStorageError("access denied")

    monkeypatch.setattr(driver.jobs, "clean_up", clean)
    looks(world, driver, 62)
    assert driver.jobs.read("job-0")[0].state == "cancelled"
    assert 5 <= len(tried) <= 8
    monkeypatch.setattr(driver.jobs, "clean_up", real)
    looks(world, driver, 60)
    check(world, driver.jobs)


def test_a_successor_waits_for_the_process_before():
    """A leader begins no run of a job whose process of before holds its session, which may only be paused, and goes on with others; when
    that session is over, it begins the next."""
    world, old = begun(22)
    [process] = world.processes
    jobs = Jobs(world.server.session(), world.storage, lambda: world.clock)
    known = FencedJobs(FencedStore(process.session, fence(1)), world.storage)
    known.claim_run(process.run, {"pid": 7, "host": "here"})  # and it is paused there
    process.busy = True
    old.die()
    world.server.expire(world.doomed.pop())
    jobs.submit(JobSpec("other.py", (), {}, {}, b"", 2), "other")
    new = SimDriver(world)
    for _ in range(5):
        world.clock += 60.0
        new.act()
    assert [(one.run.job, one.run.number) for one in world.processes] == [("job-0", 1), ("other", 1)]
    assert jobs.read("job-0")[0].run == 1
    world.server.expire(process.session.session)
    goes_on(world, new, 1)
    assert [(one.run.job, one.run.number) for one in world.processes][2:] == [("job-0", 2)]
    process.dead = True


@pytest.mark.parametrize("paused", [True, False])
def test_a_run_is_claimed_once(paused):
    """Of two processes that were started for one run, one runs the job; the other finds the run taken, runs nothing and changes nothing:
    also when it was about to claim it."""
    world, driver = begun(23)
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
    goes_on(world, driver, 3)
    check(world, driver.jobs)
