"""A job survives the death of a process, or a lost reply, before or after each write to the store.

Further tests run particular schedules of leaders, runs, submits and cancels.
"""

import contextlib
import itertools

import pytest

from stagecrew.errors import (
    JobExists,
    LeadershipLost,
    PossiblyInconsistentError,
    RecordUnreadable,
    SessionLost,
    StagecrewError,
    StateStorageError,
    StoreRefused,
    StoreUnavailable,
)
from stagecrew.recovery.jobs.fenced import FencedJobs
from stagecrew.recovery.jobs.record import JobState
from stagecrew.recovery.jobs.result import Result
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.recovery.leadership.fencing import HOLDER, TERM
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.recovery.stores.contract import Check, Create, Replace
from support.simulated_jobs import Killed, SimDriver, World, assert_consistent, assert_final_state

pytestmark = pytest.mark.slow

SPEC = JobSpec("job-0.py", (), {}, {}, b"", 50)


class FaultAt:
    """Injects one fault before or after the transaction with the given number.

    - "killed": the process that writes is killed.
    - "lost": the reply is lost.
    - "session": the reply is lost, and the session of the process expires.
    - "term": the reply is lost, and another process becomes leader.
    """

    def __init__(self, world, number, moment, fault):
        self.world, self.number, self.moment, self.fault = world, number, moment, fault
        self.seen = 0
        self.operations = None

    def __call__(self, session, operations, moment):
        if moment == "before":
            self.seen += 1
        if self.seen != self.number or moment != self.moment or self.operations is not None:
            return
        self.operations = operations
        if self.fault == "killed":
            if self.world.current is not None:
                self.world.current.killed = True
            raise Killed
        if self.fault == "session":
            self.world.server.expire(session)
        elif self.fault == "term" and (term := self.world.server.entries.get(TERM)):
            self.world.server.entries.pop(HOLDER, None)
            self.world.server.session().transact(Replace(TERM, b"another", term.version))
        raise PossiblyInconsistentError("the reply was lost")


def new_jobs(world):
    return FencedJobs(world.server.session(), world.storage, lambda: world.clock)


def run_job(world, cancel):
    """Submits, runs and cleans up one job. With `cancel`, the job is cancelled after the driver's first turn."""
    try:
        new_jobs(world).submit(SPEC, "job-0")
    except (Killed, StagecrewError):
        return
    driver = SimDriver(world)
    world.drivers.append(driver)
    for turn in range(8):
        world.clock += 30.0
        driver.act()
        if cancel and turn == 0:
            world.cancelled.add("job-0")
            with contextlib.suppress(Killed, StagecrewError):
                new_jobs(world).cancel("job-0")
        for process in world.processes:
            if not process.dead:
                process.act()


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize(
    ("moment", "fault"),
    [(moment, fault) for fault in ("killed", "lost", "session", "term") for moment in ("before", "after")],
)
def test_a_job_survives_a_fault_at_each_write(moment, fault, cancel):
    """After one fault at any write, the store is consistent, and another driver finishes the job."""
    reached = 0
    for number in itertools.count(1):
        world = World(0, jobs=1, faults=0)
        world.sink.visible.clear()
        injected = world.server.fault = FaultAt(world, number, moment, fault)
        run_job(world, cancel)
        world.server.fault = lambda session, operations, moment: None
        if injected.operations is None:
            break
        reached += 1
        assert_consistent(world)
        assert_final_state(world, world.settle())
    assert reached > 25


def new_leader(world):
    driver = SimDriver(world)
    world.drivers.append(driver)
    driver.act()
    return driver


def test_a_late_leader_cannot_remove_a_job_that_its_successor_recovers():
    """A leader that has not noticed that it was replaced changes nothing, and the job ends only once."""
    world = World(1, jobs=1, faults=0)
    new_jobs(world).submit(SPEC, "job-0")
    first = new_leader(world)
    for process in world.processes:
        process.act()
    assert first.jobs.read("job-0")[0].state == "succeeded"
    successors = []

    def replace_leader(session, operations, moment):
        if not successors:  # the store gives the term to another process without notifying leader 1
            world.server.entries.pop("leader/holder")
            successors.append(None)
            successors[0] = new_leader(world)

    world.server.fault = replace_leader
    with pytest.raises(LeadershipLost):
        first.jobs.clean_up("job-0")
    [second] = successors
    assert second.jobs.read("job-0")[0].clean  # cleaned by leader 2, which did not run it
    assert len(world.processes) == 1
    assert second.jobs.submit(SPEC, "job-0") == "job-0"  # a repeated submit returns the job that has ended
    assert_final_state(world, second.jobs)


def test_a_run_of_a_replaced_leader_executes_no_step():
    """A run whose leader was replaced is lost, although the run's own session is alive. A later run finishes the
    job."""
    world = World(2, jobs=1, faults=0)
    new_jobs(world).submit(SPEC, "job-0")
    new_leader(world)
    [old] = world.processes
    world.server.entries.pop("leader/holder")
    new_leader(world)
    old.act()
    assert (old.code, world.ran) == (75, [])
    jobs = world.settle()
    assert_final_state(world, jobs)
    assert jobs.read("job-0")[0].run > 1


def test_a_leader_that_is_replaced_while_it_prepares_a_run_does_not_start_it(tmp_path):
    """A leader that is replaced while it prepares a run does not count the run, and deletes the run's files."""
    world = World(4, jobs=1, faults=0)
    new_jobs(world).submit(SPEC, "job-0")
    files = tmp_path / "run"

    class Replaced(SimDriver):
        def prepare(self, spec, job):
            files.mkdir()
            world.server.entries.pop("leader/holder")
            new_leader(world)
            return files

    replaced = Replaced(world)
    replaced.act()
    assert replaced.dead
    assert not files.exists()
    [process] = world.processes
    assert (process.term, process.run.number) == (world.drivers[-1].reconciler._term, 1)
    assert_final_state(world, world.settle())
    assert world.final_states == {("job-0", 0): "succeeded"}


def test_a_decided_commit_is_applied_before_the_job_is_cancelled():
    """If a user cancels a job after a commit was decided, the job becomes "cancelled" only when the commit is
    applied."""
    world = World(3, jobs=1, faults=0)
    world.sink.visible.clear()
    real = world.sink.commit

    def killed(*_):
        world.current.killed = True
        raise Killed

    world.sink.commit = killed
    new_jobs(world).submit(SPEC, "job-0")
    driver = new_leader(world)
    world.processes[0].act()
    assert world.processes[0].dead
    new_jobs(world).cancel("job-0")
    world.cancelled.add("job-0")
    world.server.expire(world.dead_sessions.pop())
    for _ in range(5):  # while the sink is unavailable, the job does not become cancelled, and keeps its state
        world.turn(driver, 60)
        assert driver.jobs.read("job-0")[0].state == "ending"
    world.sink.commit = real
    jobs = world.settle()
    assert jobs.read("job-0")[0].state == "cancelled"
    assert list(world.sink.visible.values()) == [["make by run 1"]]


@pytest.mark.parametrize("next_error", [StoreUnavailable, SessionLost, StoreRefused])
def test_a_submit_with_a_lost_reply_has_an_unknown_outcome(next_error):
    """If the first try's reply is lost and the retry fails, the error says that the outcome is unknown and names the
    id.

    Another submit with this id returns the stored job. If no reply is lost, nothing is stored, and the submit raises
    the error of the retry.
    """
    for reply_lost in (False, True):
        world = World(11, jobs=1, faults=0)
        faults = ["after", "before", "before"] if reply_lost else ["before", "before"]

        def fault(session, operations, moment, faults=faults):
            if faults[:1] == [moment] and any(
                isinstance(operation, Create) and operation.key.startswith("specs/") for operation in operations
            ):
                faults.pop(0)
                raise (
                    PossiblyInconsistentError("the reply was lost")
                    if moment == "after"
                    else next_error("nothing was done")
                )

        world.server.fault = fault
        with pytest.raises(PossiblyInconsistentError if reply_lost else next_error) as raised:
            new_jobs(world).submit(SPEC)
        world.server.fault = lambda *_: None
        jobs = new_jobs(world)
        if not reply_lost:
            assert jobs.names() == []
            assert world.states() == set()
            continue
        [job] = jobs.names()
        assert f"whether job {job!r} was stored: submit it again with this id" in str(raised.value)
        assert jobs.submit(SPEC, job) == job
        assert jobs.names() == [job]


def test_a_cancel_after_the_end_of_a_job_changes_nothing():
    """When a job has succeeded, the leader cannot start to cancel it, and a user's cancel returns "succeeded"."""
    world = World(4, jobs=1, faults=0)
    new_jobs(world).submit(SPEC, "job-0")
    driver = new_leader(world)
    known = driver.jobs.read("job-0")
    driver.jobs.finish("job-0", known, JobState.SUCCEEDED, Result.of_value(1))
    with pytest.raises(StagecrewError):
        driver.jobs.start_ending("job-0", known, JobState.CANCELLED, "late")
    assert new_jobs(world).cancel("job-0") == "succeeded"
    world.processes[0].act()  # the process notices that its job has ended
    assert world.processes[0].code == 75
    for _ in range(2):  # the leader pauses before it checks a lost run again
        driver.act()
        world.clock += 60
    assert driver.jobs.read("job-0")[0].clean
    assert driver.jobs.result("job-0").value() == 1


def test_a_job_can_be_submitted_again_at_each_write():
    """At any write, a submit with the same id and content returns the same job. With other content it is refused, and
    that content never runs."""
    world = World(5, jobs=1, faults=0)
    new_jobs(world).submit(SPEC, "job-0")
    ids = []

    def submit_again(session, operations, moment):
        world.server.fault = lambda *_: None
        ids.append(new_jobs(world).submit(SPEC, "job-0"))
        with pytest.raises(JobExists):
            new_jobs(world).submit(JobSpec("other.py", (), {}, {}, b"", 50), "job-0")
        world.server.fault = submit_again

    world.server.fault = submit_again
    driver = SimDriver(world)
    for _ in range(4):
        driver.act()
        for process in world.processes:
            if not process.dead:
                process.act()
    world.server.fault = lambda *_: None
    assert set(ids) == {"job-0"}
    assert len(ids) > 30
    assert (driver.jobs.read("job-0")[0].clean, len(world.processes)) == (True, 1)


@pytest.mark.parametrize("damage", ["record", "state", "deleted"])
def test_one_unreadable_job_does_not_stop_the_others(damage):
    """A job whose record or state is truncated or deleted is kept but does not run, and the other jobs end.

    The error names the unreadable job.
    """
    world = World(6, jobs=1, faults=0)
    before = world.states()
    new_jobs(world).submit(JobSpec("bad.py", (), {}, {}, b"", 50), "bad")
    [state] = world.states() - before
    if damage == "record":
        world.server.session().transact(Replace("jobs/bad", b"{", 0))
    elif damage == "state":
        with world.filesystem.open_output_stream(state) as stream:
            stream.write(b"half")
    else:
        world.filesystem.delete_file(state)
    assert_final_state(world, world.settle())
    jobs = new_jobs(world)
    assert "specs/bad" in world.server.entries
    with pytest.raises(RecordUnreadable, match="'bad'"):
        jobs.read("bad") if damage == "record" else jobs.spec("bad")
    assert all(process.run.job == "job-0" for process in world.processes)


@pytest.mark.parametrize("damaged", ["specs", "steps", "commits"])
def test_a_job_whose_state_becomes_corrupt_is_kept(damaged):
    """A job whose next run cannot read a state of the last run does not end, however often the leader checks it. Other
    jobs end. Once the state is restored, the job continues after its finished steps."""
    world = World(12, jobs=1, faults=0)
    new_jobs(world).submit(JobSpec("bad.py", (), {}, {}, b"", 3), "bad")
    driver = new_leader(world)

    def killed(session, operations, moment):
        if moment == "before" and any(operation.key == "jobs/bad/steps/last" for operation in operations):
            world.current.killed = True
            raise Killed

    world.server.fault = killed
    world.processes[0].act()
    world.server.fault = lambda *_: None
    corrupt = {path: world.filesystem.open_input_stream(path).read() for path in world.states() if damaged in path}
    assert corrupt
    for path in corrupt:
        with world.filesystem.open_output_stream(path) as stream:
            stream.write(b"half")
    before = world.states()
    new_jobs(world).submit(SPEC, "job-0")

    def take_turns():
        for _ in range(40):
            world.turn(driver, 100.0)

    take_turns()
    jobs = new_jobs(world)
    assert jobs.read("job-0")[0].clean
    record, _ = jobs.read("bad")
    assert (record.state, record.run <= 2) == ("running", True)
    assert before <= world.states()
    for path, data in corrupt.items():
        with world.filesystem.open_output_stream(path) as stream:
            stream.write(data)
    take_turns()
    assert (jobs.read("bad")[0].clean, jobs.result("bad").state) == (True, "succeeded")
    assert world.ran.count(("bad", "make", 1)) == 1
    assert not [run for job, step, run in world.ran if job == "bad" and step in ("make", "write") and run > 1]
    assert world.sink.visible["bad/write/sink"] == ["make by run 1"]


def test_an_unreadable_job_can_be_cancelled():
    """A job whose state files were deleted can still be cancelled, and then ends."""
    world = World(7, jobs=1, faults=0)
    new_jobs(world).submit(SPEC, "job-0")
    for state in world.states():
        world.filesystem.delete_file(state)
    new_jobs(world).cancel("job-0")
    world.cancelled.add("job-0")
    assert world.settle(submit=False).read("job-0")[0].state == "cancelled"


@pytest.mark.parametrize("part", ["steps", "commits", "results"])
def test_a_job_waits_while_the_storage_is_full(part, monkeypatch):
    """The writes of a step, a commit and a result are retried until the storage has space. The job ends in its first
    run."""
    world, failures = World(9, jobs=1, faults=0), [3]
    new_jobs(world).submit(SPEC, "job-0")
    real = StateStorage.write

    def write(self, hint, data, folder=""):
        if part in folder and failures[0]:
            failures[0] -= 1
            raise StateStorageError("no space left on device")
        return real(self, hint, data, folder)

    monkeypatch.setattr(StateStorage, "write", write)
    new_leader(world)
    [process] = world.processes
    process.act()
    assert (process.code, failures) == (0, [0])
    record, _ = new_jobs(world).read("job-0")
    assert (record.state, record.run) == ("succeeded", 1)
    assert_final_state(world, world.settle())


@pytest.mark.parametrize("key", ["jobs/job-0/steps/", "jobs/job-0/commits/", "jobs/job-0/claim", "results/job-0"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_write_is_repeated_after_a_lost_or_refused_request(key, moment):
    """A write whose request is refused or whose reply is lost takes effect once, and the job ends in its first run."""
    world = World(10, jobs=1, faults=0)
    new_jobs(world).submit(SPEC, "job-0")
    new_leader(world)
    [process] = world.processes
    errors = (
        [StoreRefused("no room"), PossiblyInconsistentError("lost")]
        if moment == "before"
        else [PossiblyInconsistentError("lost")]
    )

    def fault(session, operations, current_moment):
        written = [operation.key for operation in operations if not isinstance(operation, Check)]
        if (
            errors
            and current_moment == moment
            and any(name.startswith(key) for name in written)
            and "jobs/job-0/process" not in written
        ):
            raise errors.pop(0)

    world.server.fault = fault
    process.act()
    assert (process.code, errors) == (0, [])
    record, _ = new_jobs(world).read("job-0")
    assert (record.state, record.run) == ("succeeded", 1)
    assert_final_state(world, world.settle())


def test_a_submit_to_a_full_storage_stores_nothing(monkeypatch):
    """While the storage is full, a submit stores nothing and raises an error that says so. Later submits succeed."""
    world = World(8, jobs=1, faults=0)

    def raise_full(*_):
        raise StateStorageError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(StateStorageError, match="no space"):
        patch.setattr(StateStorage, "write", raise_full)
        new_jobs(world).submit(SPEC, "job-0")
    assert new_jobs(world).names() == []
    assert_final_state(world, world.settle())
