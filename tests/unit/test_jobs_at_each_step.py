"""Jobs whose processes die, or are not answered, before and after each single write of a whole history; and schedules by name."""

import contextlib
import itertools

import pytest

from jobsim import Killed, SimDriver, World, check, consistent
from stagecrew.errors import (
    JobExists,
    JobUnreadable,
    LeadershipLost,
    PossiblyInconsistentError,
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

SPEC = JobSpec("job-0.py", (), {}, {}, b"", 50)


class At:
    """Something happens at one moment of one transaction, and nothing else.

    "killed": who writes ends there. "lost": it is not answered. With "session" or "term" the store, behind the lost answer, ends that
    session too, or has another lead.
    """

    def __init__(self, world, number, moment, what):
        self.world, self.number, self.moment, self.what = world, number, moment, what
        self.seen = 0
        self.operations = None

    def __call__(self, session, operations, moment):
        if moment == "before":
            self.seen += 1
        if self.seen != self.number or moment != self.moment or self.operations is not None:
            return
        self.operations = operations
        if self.what == "killed":
            if self.world.current is not None:
                self.world.current.killed = True
            raise Killed
        if self.what == "session":
            self.world.server.expire(session)
        elif self.what == "term" and (term := self.world.server.entries.get(TERM)):
            self.world.server.entries.pop(HOLDER, None)
            self.world.server.session().transact(Replace(TERM, b"another", term.version))
        raise PossiblyInconsistentError("the answer was lost")


def session_of(world):
    return FencedJobs(world.server.session(), world.storage, lambda: world.clock)


def whole(world, cancel):
    """Submits, runs and cleans one job; with `cancel` it is cancelled while it waits behind its first run."""
    try:
        session_of(world).submit(SPEC, "job-0")
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
                session_of(world).cancel("job-0")
        for process in world.processes:
            if not process.dead:
                process.act()


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize(
    ("moment", "what"),
    [(moment, what) for what in ("killed", "lost", "session", "term") for moment in ("before", "after")],
)
def test_at_each_write(moment, what, cancel):
    """Whoever dies or is not answered at any one write of a job's life, and is cut off behind that: all is consistent then, and another
    driver ends the job."""
    reached = 0
    for number in itertools.count(1):
        world = World(0, jobs=1, faults=0)
        world.sink.visible.clear()
        at = world.server.fault = At(world, number, moment, what)
        whole(world, cancel)
        world.server.fault = lambda session, operations, moment: None
        if at.operations is None:
            break
        reached += 1
        consistent(world)
        check(world, world.settle())
    assert reached > 25


def leading(world):
    driver = SimDriver(world)
    world.drivers.append(driver)
    driver.act()
    return driver


def test_the_schedule_of_the_seed():
    """Leader 1 removes a finished job while leader 2 recovers it, granted before 1 was told: 1 changes nothing, the job ends once."""
    world = World(1, jobs=1, faults=0)
    session_of(world).submit(SPEC, "job-0")
    one = leading(world)
    for process in world.processes:
        process.act()
    assert one.jobs.read("job-0")[0].state == "succeeded"
    found = []

    def meanwhile(session, operations, moment):
        if not found:  # the store gives the term to another, and 1 was not told
            world.server.entries.pop("leader/holder")
            found.append(None)
            found[0] = leading(world)

    world.server.fault = meanwhile
    with pytest.raises(LeadershipLost):
        one.jobs.clean_up("job-0")
    [two] = found
    assert two.jobs.read("job-0")[0].clean  # by 2, which did not run it
    assert len(world.processes) == 1
    assert two.jobs.submit(SPEC, "job-0") == "job-0"  # resubmitted: the same job, which has ended
    check(world, two.jobs)


def test_a_run_of_the_old_leader_does_not_decide():
    """A run whose leader was replaced meanwhile decides nothing and finishes nothing, also when its own session lives."""
    world = World(2, jobs=1, faults=0)
    session_of(world).submit(SPEC, "job-0")
    leading(world)
    [old] = world.processes
    world.server.entries.pop("leader/holder")
    leading(world)
    old.act()
    assert (old.code, world.ran) == (75, [])
    jobs = world.settle()
    check(world, jobs)
    assert jobs.read("job-0")[0].run > 1


def test_a_leader_that_is_replaced_while_it_prepares_a_run(tmp_path):
    """A leader that loses its leadership while it writes a run's files counts no run, starts none, and deletes them."""
    world = World(4, jobs=1, faults=0)
    session_of(world).submit(SPEC, "job-0")
    files = tmp_path / "run"

    class Replaced(SimDriver):
        def prepare(self, spec, job):
            files.mkdir()
            world.server.entries.pop("leader/holder")
            leading(world)
            return files

    one = Replaced(world)
    one.act()
    assert one.dead
    assert not files.exists()
    [process] = world.processes
    assert (process.term, process.run.number) == (world.drivers[-1].tending._term, 1)
    check(world, world.settle())
    assert world.over == {("job-0", 0): "succeeded"}


def test_cancel_behind_a_decision():
    """A commit that is decided is done, though its job is cancelled before it was applied; only then is the job cancelled."""
    world = World(3, jobs=1, faults=0)
    world.sink.visible.clear()
    real = world.sink.commit

    def killed(*_):
        world.current.killed = True
        raise Killed

    world.sink.commit = killed
    session_of(world).submit(SPEC, "job-0")
    driver = leading(world)
    world.processes[0].act()
    assert world.processes[0].dead
    session_of(world).cancel("job-0")
    world.cancelled.add("job-0")
    world.server.expire(world.doomed.pop())
    for _ in range(5):  # the sink is away: the job is not cancelled yet, and nothing of it is deleted
        world.turn(driver, 60)
        assert driver.jobs.read("job-0")[0].state == "ending"
    world.sink.commit = real
    jobs = world.settle()
    assert jobs.read("job-0")[0].state == "cancelled"
    assert list(world.sink.visible.values()) == [["make by run 1"]]


@pytest.mark.parametrize("then", [StoreUnavailable, SessionLost, StoreRefused])
def test_a_submit_whose_answer_is_lost(then):
    """Behind a lost answer nobody knows whether the job is stored, whatever the next try says: the error names the id, and submitting by
    it answers that job. When no answer was lost, nothing is stored, and the error says that."""
    for answered in (True, False):
        world = World(11, jobs=1, faults=0)
        faults = ["before", "before"] if answered else ["after", "before", "before"]

        def fault(session, operations, moment, faults=faults):
            if faults[:1] == [moment] and any(
                isinstance(one, Create) and one.key.startswith("specs/") for one in operations
            ):
                faults.pop(0)
                raise (
                    PossiblyInconsistentError("the answer was lost") if moment == "after" else then("nothing was done")
                )

        world.server.fault = fault
        with pytest.raises(then if answered else PossiblyInconsistentError) as raised:
            session_of(world).submit(SPEC)
        world.server.fault = lambda *_: None
        jobs = session_of(world)
        if answered:
            assert jobs.names() == []
            assert world.states() == set()
            continue
        [job] = jobs.names()
        assert f"whether job {job!r} was stored: submit it again with this id" in str(raised.value)
        assert jobs.submit(SPEC, job) == job
        assert jobs.names() == [job]


def test_cancel_and_finish():
    """Of a cancel and an end that meet, the first that is written stays; the other changes nothing."""
    world = World(4, jobs=1, faults=0)
    session_of(world).submit(SPEC, "job-0")
    driver = leading(world)
    known = driver.jobs.read("job-0")
    driver.jobs.finish("job-0", known, JobState.SUCCEEDED, Result.of_value(1))
    with pytest.raises(StagecrewError):
        driver.jobs.start_ending("job-0", known, JobState.CANCELLED, "late")
    assert session_of(world).cancel("job-0") == "succeeded"
    world.processes[0].act()  # which finds that its job has ended
    assert world.processes[0].code == 75
    for _ in range(2):  # a run that was lost is looked at again a while later
        driver.act()
        world.clock += 60
    assert driver.jobs.read("job-0")[0].clean
    assert driver.jobs.result("job-0").value() == 1


def test_submit_while_it_finishes():
    """The same job, submitted at each write of its end, is that job; other content is refused at each, and never runs."""
    world = World(5, jobs=1, faults=0)
    session_of(world).submit(SPEC, "job-0")
    answers = []

    def again(session, operations, moment):
        world.server.fault = lambda *_: None
        answers.append(session_of(world).submit(SPEC, "job-0"))
        with pytest.raises(JobExists):
            session_of(world).submit(JobSpec("other.py", (), {}, {}, b"", 50), "job-0")
        world.server.fault = again

    world.server.fault = again
    driver = SimDriver(world)
    for _ in range(4):
        driver.act()
        for process in world.processes:
            if not process.dead:
                process.act()
    world.server.fault = lambda *_: None
    assert set(answers) == {"job-0"}
    assert len(answers) > 30
    assert (driver.jobs.read("job-0")[0].clean, len(world.processes)) == (True, 1)


@pytest.mark.parametrize("damage", ["record", "state", "gone"])
def test_one_unreadable_job_does_not_stop_the_others(damage):
    """A job whose record or state is corrupt, cut short or gone is named, kept, and not run; the others end."""
    world = World(6, jobs=1, faults=0)
    before = world.states()
    session_of(world).submit(JobSpec("bad.py", (), {}, {}, b"", 50), "bad")
    [state] = world.states() - before
    if damage == "record":
        world.server.session().transact(Replace("jobs/bad", b"{", 0))
    elif damage == "state":
        with world.filesystem.open_output_stream(state) as stream:
            stream.write(b"half")
    else:
        world.filesystem.delete_file(state)
    check(world, world.settle())
    jobs = session_of(world)
    assert "specs/bad" in world.server.entries
    with pytest.raises(JobUnreadable, match="'bad'"):
        jobs.read("bad") if damage == "record" else jobs.spec("bad")
    assert all(process.run.job == "job-0" for process in world.processes)


@pytest.mark.parametrize("what", ["specs", "steps", "commits"])
def test_a_job_whose_state_is_corrupt_behind_its_last_run(what):
    """What a run has left and the next cannot read is kept, however often it is looked at: the job does not end by that, others do; when
    it is put back, the job goes on where it was."""
    world = World(12, jobs=1, faults=0)
    session_of(world).submit(JobSpec("bad.py", (), {}, {}, b"", 3), "bad")
    driver = leading(world)

    def killed(session, operations, moment):
        if moment == "before" and any(one.key == "jobs/bad/steps/last" for one in operations):
            world.current.killed = True
            raise Killed

    world.server.fault = killed
    world.processes[0].act()
    world.server.fault = lambda *_: None
    corrupt = {path: world.filesystem.open_input_stream(path).read() for path in world.states() if what in path}
    assert corrupt
    for path in corrupt:
        with world.filesystem.open_output_stream(path) as stream:
            stream.write(b"half")
    before = world.states()
    session_of(world).submit(SPEC, "job-0")

    def goes_on():
        for _ in range(40):
            world.turn(driver, 100.0)

    goes_on()
    jobs = session_of(world)
    assert jobs.read("job-0")[0].clean
    record, _ = jobs.read("bad")
    assert (record.state, record.run <= 2) == ("running", True)
    assert before <= world.states()
    for path, data in corrupt.items():
        with world.filesystem.open_output_stream(path) as stream:
            stream.write(data)
    goes_on()
    assert (jobs.read("bad")[0].clean, jobs.result("bad").state) == (True, "succeeded")
    assert world.ran.count(("bad", "make", 1)) == 1
    assert not [run for job, step, run in world.ran if job == "bad" and step in ("make", "write") and run > 1]
    assert world.sink.visible["bad/write/sink"] == ["make by run 1"]


def test_an_unreadable_job_can_be_cancelled():
    """A job whose state is gone ends when it is cancelled, without its files."""
    world = World(7, jobs=1, faults=0)
    session_of(world).submit(SPEC, "job-0")
    for state in world.states():
        world.filesystem.delete_file(state)
    session_of(world).cancel("job-0")
    world.cancelled.add("job-0")
    assert world.settle(submit=False).read("job-0")[0].state == "cancelled"


@pytest.mark.parametrize("where", ["steps", "commits", "results"])
def test_a_storage_that_is_full_for_a_while(where, monkeypatch):
    """A step, a commit and the end of a job wait for room: the job ends in its first run."""
    world, left = World(9, jobs=1, faults=0), [3]
    session_of(world).submit(SPEC, "job-0")
    real = StateStorage.write

    def write(self, hint, data, folder=""):
        if where in folder and left[0]:
            left[0] -= 1
            raise StateStorageError("no space left on device")
        return real(self, hint, data, folder)

    monkeypatch.setattr(StateStorage, "write", write)
    leading(world)
    [process] = world.processes
    process.act()
    assert (process.code, left) == (0, [0])
    record, _ = session_of(world).read("job-0")
    assert (record.state, record.run) == ("succeeded", 1)
    check(world, world.settle())


@pytest.mark.parametrize("what", ["jobs/job-0/steps/", "jobs/job-0/commits/", "jobs/job-0/claim", "results/job-0"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_store_that_does_not_answer_for_a_while(what, moment):
    """Where nobody knows whether a run's write was done, or it is refused, it is repeated, once in all: the job ends in its first run."""
    world = World(10, jobs=1, faults=0)
    session_of(world).submit(SPEC, "job-0")
    leading(world)
    [process] = world.processes
    left = (
        [StoreRefused("no room"), PossiblyInconsistentError("lost")]
        if moment == "before"
        else [PossiblyInconsistentError("lost")]
    )

    def fault(session, operations, now):
        written = [one.key for one in operations if not isinstance(one, Check)]
        if (
            left
            and now == moment
            and any(key.startswith(what) for key in written)
            and "jobs/job-0/process" not in written
        ):
            raise left.pop(0)

    world.server.fault = fault
    process.act()
    assert (process.code, left) == (0, [])
    record, _ = session_of(world).read("job-0")
    assert (record.state, record.run) == ("succeeded", 1)
    check(world, world.settle())


def test_a_storage_that_is_full(monkeypatch):
    """Submitting where state cannot be written is an error that says so, and stores nothing; it works when there is room again."""
    world = World(8, jobs=1, faults=0)
    full = lambda *_: (_ for _ in ()).throw(StateStorageError("no space left on device"))  # noqa: E731
    with monkeypatch.context() as patch, pytest.raises(StateStorageError, match="no space"):
        patch.setattr(StateStorage, "write", full)
        session_of(world).submit(SPEC, "job-0")
    assert session_of(world).names() == []
    check(world, world.settle())
