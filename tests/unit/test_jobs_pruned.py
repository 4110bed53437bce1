"""Which jobs a leader reads, and the removal of ended ones, met by everything else at each single write."""

import contextlib
import itertools

import pytest

from jobsim import Killed, SimDriver, World, check, consistent, indexed, reconciler_module
from stagecrew.errors import (
    JobError,
    JobExists,
    JobUnknown,
    LeadershipLost,
    PossiblyInconsistentError,
    StagecrewError,
    StateStorageError,
    StoreUnavailable,
)
from stagecrew.files import quoted
from stagecrew.recovery.driver.reconciler import JobReconciler
from stagecrew.recovery.jobs.fenced import FencedJobs
from stagecrew.recovery.jobs.record import JobState
from stagecrew.recovery.jobs.result import Result
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.recovery.jobs.store import Jobs
from stagecrew.recovery.leadership.fencing import HOLDER, TERM
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.recovery.stores.contract import Create, Replace

SPEC = JobSpec("job-0.py", (), {}, {}, b"", 50)
OTHER = JobSpec("job-0.py", ("otherwise",), {}, {}, b"", 50)


def quiet(*_):
    """No fault."""


def jobs_of(world):
    """The jobs, as a process with a session of its own has them."""
    return FencedJobs(world.server.session(), world.storage, lambda: world.clock)


def leading(world):
    """A new driver; the store gives it the term, also when another driver leads."""
    world.server.entries.pop(HOLDER, None)
    driver = SimDriver(world)
    world.drivers.append(driver)
    driver.act()
    return driver


def runs(world):
    """Each process of a run does its work, to its end."""
    for process in world.processes:
        if not process.dead and not process.busy:
            process.act()


def life(world, until="clean"):
    """Submits job-0; a new leader begins its run, which ends it; then it is cleaned."""
    jobs_of(world).submit(SPEC, "job-0")
    driver = leading(world)
    if until != "running":
        runs(world)
    if until == "clean":
        world.clock += 2.0
        driver.act()
    return driver


def ended(seed, until="clean"):
    """A world in which job-0 is in this state."""
    world = World(seed, jobs=1, faults=0)
    world.sink.visible.clear()
    real = world.server.done

    def done(operations):
        real(operations)
        indexed(world.server.entries)  # after each single transaction

    world.server.done = done
    driver = life(world, until)
    record, _ = jobs_of(world).read("job-0")
    assert ("clean" if record.clean else record.state) == until
    return world, driver


def removed(world):
    """Whether job-0 is gone, with all that other processes can see of it. A job that is not gone is whole."""
    jobs = jobs_of(world)
    try:
        record, _ = jobs.read("job-0")
    except JobUnknown:
        with pytest.raises(JobUnknown):
            jobs.result("job-0")
        assert (jobs.names(), jobs.open_names(), list(jobs.prune(0.0))) == ([], [], [])
        assert [key for key in world.server.entries if "job-0" in key] in ([], ["results/job-0"])
        return True
    assert record.clean
    assert jobs.result("job-0").state == "succeeded"
    return False


# -- The cost of a look


class Counted:
    """A store that counts its reads and writes."""

    def __init__(self, store):
        self._store = store
        self.reads, self.writes = [], 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def read(self, key):
        self.reads.append(key)
        return self._store.read(key)

    def children(self, key):
        self.reads.append(key)
        return self._store.children(key)

    def transact(self, *operations):
        self.writes += 1
        return self._store.transact(*operations)


class Idle:
    """A launcher that starts nothing."""

    def prepare(self, spec, job):
        raise AssertionError("nothing is to be run")


@pytest.mark.parametrize("keep", [None, 1e6])
def test_a_look_reads_open_jobs_alone(keep):
    """A takeover and each poll read as much with 200 ended jobs as with none, and write nothing: one list of the open jobs. A leader
    that removes old jobs reads one more list, of hours, once in some minutes."""
    counts = []
    for number in (0, 200):
        world = World(1, jobs=1, faults=0)
        world.clock = 1e7
        jobs = jobs_of(world)
        for one in range(number):
            job = f"ended-{one}"
            jobs.submit(SPEC, job)
            jobs.start_run(job, jobs.read(job), jobs.claim_version(job))
            jobs.finish(job, jobs.read(job), JobState.SUCCEEDED, Result.of_value(one))
            jobs.clean_up(job)
        assert len(jobs.names()) == number
        store = Counted(world.server.session())
        found = []
        tending = None
        for _ in range(4):
            world.clock += 1.0
            store.reads.clear()
            if tending is None:
                clock = lambda world=world: world.clock  # noqa: E731
                tending = JobReconciler(FencedJobs(store, world.storage, clock), 1, Idle(), 16, clock, keep)
            tending.reconcile()
            found.append(list(store.reads))
        assert store.writes == 0
        assert found[2:] == [["open"], ["open"]]
        counts.append([len(one) for one in found])
    assert counts[0] == counts[1]
    assert counts[0][0] <= 7


# -- Which jobs a prune removes


def test_what_a_prune_leaves():
    """A job that is open, has ended and is not clean, is younger, or cannot be read stays, with all that it has; so does one whose process
    is still there. Only old, clean ones are removed, with their results."""
    world, _ = ended(2)
    jobs = jobs_of(world)
    made = {}
    for job in ("open", "runs", "unclean", "unreadable", "lingers"):
        made[job] = jobs.submit(SPEC, job)
    for job in ("runs", "unclean", "unreadable", "lingers"):
        jobs.start_run(job, jobs.read(job), jobs.claim_version(job))
    for job in ("unclean", "unreadable", "lingers"):
        jobs.finish(job, jobs.read(job), JobState.SUCCEEDED, Result.of_value(1))
    for job in ("unreadable", "lingers"):
        jobs.clean_up(job)
    session = world.server.session()
    session.transact(Create("jobs/lingers/process", b"{}", ephemeral=True))
    world.server.done = quiet  # the record below is no record
    whole = jobs.read("unreadable")[0].to_bytes()
    session.transact(Replace("jobs/unreadable", b"{", session.read("jobs/unreadable").version))
    world.clock += 100.0
    jobs.submit(SPEC, "young")
    jobs.start_run("young", jobs.read("young"), jobs.claim_version("young"))
    jobs.finish("young", jobs.read("young"), JobState.FAILED, Result("failed"))
    jobs.clean_up("young")
    before = dict(world.server.entries)
    found = {one.job: one for one in jobs.prune(50.0)}
    assert [job for job, one in found.items() if one.removed] == ["job-0"]
    assert {job for job, one in found.items() if one.reason} == {"unreadable", "lingers"}
    assert "process" in found["lingers"].reason
    gone = before.keys() - world.server.entries.keys()
    assert gone
    assert all("job-0" in key for key in gone)
    assert jobs.names() == sorted(["lingers", "open", "runs", "unclean", "unreadable", "young"])
    assert removed_states(world, "job-0") == []
    session.transact(Replace("jobs/unreadable", whole, session.read("jobs/unreadable").version))
    session.close()
    assert sorted(one.job for one in jobs.prune(50.0) if one.removed) == ["lingers", "unreadable"]
    assert [key for key in world.server.entries if key.startswith("ended/")] == [
        key for key in before if key.startswith("ended/") and ("young" in key or key.count("/") == 1)
    ]
    assert sorted(jobs.open_names()) == ["open", "runs", "unclean"]


def removed_states(world, job):
    """The states that are left of a job."""
    return [state for state in world.states() if job in state]


def test_old_hours_go():
    """The index of ended jobs keeps no hour in which nothing is left; the hour that lasts stays."""
    world, _ = ended(3)
    world.clock += 7200.0
    jobs = jobs_of(world)
    assert [one.job for one in jobs.prune(60.0) if one.removed] == ["job-0"]
    assert [key for key in world.server.entries if key.startswith("ended/")] == []
    life(world)
    assert [one.job for one in jobs.prune(0.0) if one.removed] == ["job-0"]
    assert [key for key in world.server.entries if key.startswith("ended/")] == ["ended/1970-01-01T02"]


def test_a_pruned_id_is_free():
    """A removed id can be submitted with the same content or other content, under the same leader: it is a new job, and runs."""
    world, driver = ended(4)
    with pytest.raises(JobExists):
        jobs_of(world).submit(OTHER, "job-0")
    for spec in (SPEC, OTHER):
        world.clock += 100.0
        assert [one.removed for one in jobs_of(world).prune(50.0)] == [True]
        assert removed(world)
        begun = len(world.processes)
        jobs_of(world).submit(spec, "job-0")
        for _ in range(3):
            driver.act()
            runs(world)
        assert len(world.processes) == begun + 1
        assert jobs_of(world).read("job-0")[0].clean
    assert world.lives["job-0"] == 2


def test_a_leader_forgets_jobs_that_have_ended():
    """A leader remembers nothing of a job that is clean: neither its pauses nor its warnings. So its memory does not grow, and
    the next job of that id is not taken for it."""
    world, driver = ended(12)
    prepare, tried = driver.prepare, []

    def fails(spec, job):
        tried.append(job)
        if len(tried) < 3:
            raise JobError("there is no room for its files")
        return prepare(spec, job)

    driver.prepare = fails
    jobs_of(world).submit(SPEC, "troubled")
    names = ("_retries", "_ended_by_us", "_logged_errors", "_lingering_since", "_waiting")
    for _ in range(3):
        driver.act()
        assert any("troubled" in getattr(driver.tending, name) for name in names)
        world.clock += 60.0
    runs(world)
    driver.act()
    assert jobs_of(world).read("troubled")[0].clean
    driver.act()
    assert not any(getattr(driver.tending, name) for name in names)


def test_what_dead_writers_left_goes_with_the_job(monkeypatch):
    """A prune deletes states of the job that nothing refers to, as nothing finds them later. When they cannot be deleted the job stays,
    and says why; the next prune removes it."""
    world, _ = ended(5)
    [folder] = {state.rpartition("/")[0] for state in world.states()}
    generation = folder.split("/")[1]
    for below in ("steps", "commits"):
        world.storage.write("left", b"by a dead writer", f"{generation}/{quoted(f'jobs/job-0/{below}')}")
    world.clock += 100.0
    with monkeypatch.context() as patch:
        patch.setattr(StateStorage, "discard", lambda *_: (_ for _ in ()).throw(StateStorageError("access denied")))
        [one] = jobs_of(world).prune(50.0)
        assert (one.removed, "access denied" in one.reason) == (False, True)
    assert not removed(world)
    [one] = jobs_of(world).prune(50.0)
    assert (one.removed, one.reason) == (True, "")
    assert world.states() == set()


def test_a_result_that_cannot_be_deleted(monkeypatch, caplog):
    """A job whose result's bytes cannot be deleted is removed as a whole, and a sweep deletes the bytes; so does the next job of that id."""
    for then in ("sweep", "life"):
        world, _ = ended(6)
        world.clock += 100.0
        with monkeypatch.context() as patch:
            patch.setattr(StateStorage, "discard", lambda *_: (_ for _ in ()).throw(StateStorageError("access denied")))
            [one] = jobs_of(world).prune(50.0)
        assert (one.removed, one.reason) == (True, "")
        assert removed(world)
        assert "a sweep will delete it" in caplog.text
        if then == "sweep":
            jobs_of(world).sweep(0.0, lambda: 1e12)
            assert world.states() == set()
        else:
            life(world)
            consistent(world)
            assert len(world.states()) == 1


# -- A leader that removes old jobs


def test_a_leader_removes_old_jobs_a_few_at_each_look(monkeypatch):
    """A leader that keeps jobs for some time removes older ones, few at each look, and tends to its open jobs meanwhile. Without a time it
    keeps all of them."""
    monkeypatch.setattr(reconciler_module, "_PRUNED_PER_PASS", 2)
    for keep in (None, 50.0):
        world, _ = ended(7)
        jobs = jobs_of(world)
        for one in range(7):
            jobs.submit(SPEC, f"old-{one}")
            jobs.start_run(f"old-{one}", jobs.read(f"old-{one}"), jobs.claim_version(f"old-{one}"))
            jobs.finish(f"old-{one}", jobs.read(f"old-{one}"), JobState.SUCCEEDED, Result.of_value(one))
            jobs.clean_up(f"old-{one}")
        world.clock += 100.0
        jobs.submit(SPEC, "new")
        world.keep = keep
        driver = leading(world)
        left = [len(jobs.names())]
        for _ in range(6):
            driver.act()
            left.append(len(jobs.names()))
        assert left == ([9] * 7 if keep is None else [7, 5, 3, 1, 1, 1, 1])
        assert [process.run.job for process in world.processes if process.term == driver.tending._term] == ["new"]


def test_a_prune_that_fails_stops_nothing(monkeypatch, caplog):
    """A leader logs an error of its prune, still tends to its jobs, and prunes again some minutes later."""
    world, _ = ended(8)
    world.clock += 100.0
    world.keep = 50.0
    real = Jobs.prune

    def away(self, older_than):
        yield from ()
        raise StoreUnavailable("the store is away")

    monkeypatch.setattr(Jobs, "prune", away)
    driver = leading(world)
    assert (
        "old jobs could not be removed; the leader tries again in 5 s: StoreUnavailable: the store is away"
        in caplog.text
    )
    monkeypatch.setattr(Jobs, "prune", real)
    jobs_of(world).submit(SPEC, "new")
    driver.act()
    assert [process.run.job for process in world.processes][1:] == ["new"]
    assert not removed_names(world)
    world.clock += reconciler_module._PRUNE_PERIOD
    driver.act()
    assert removed_names(world)


def removed_names(world):
    return "job-0" not in jobs_of(world).names()


def test_a_replaced_leader_removes_nothing():
    """A leader that was replaced, and was not told, removes nothing: its prune is fenced by its term."""
    world, driver = ended(9)
    world.clock += 100.0
    leading(world)
    with pytest.raises(LeadershipLost):
        list(driver.jobs.prune(50.0))
    assert not removed(world)


# -- At each write


class At:
    """Does something before or after one write, or before one read, and nothing else."""

    def __init__(self, world, number, moment, do):
        self.world, self.number, self.moment, self.do = world, number, moment, do
        self.seen, self.met = 0, False
        world.server.fault = self
        if moment == "at a read":
            world.server.looks = lambda session, key: self(session, (), moment)

    def __call__(self, session, operations, moment):
        if moment in ("before", "at a read"):
            self.seen += 1
        if self.seen != self.number or moment != self.moment or self.met:
            return
        self.met = True
        self.world.server.fault = self.world.server.looks = quiet
        before = self.world.current
        try:
            with self.world.as_(None):
                self.do(session)
        finally:
            self.world.current = before


def dies(world, session):
    """The process that writes ends here."""
    if world.current is not None:
        world.current.killed = True
    raise Killed


def is_lost(world, session):
    raise PossiblyInconsistentError("the reply was lost")


def is_cut_off(world, session):
    world.server.expire(session)
    raise PossiblyInconsistentError("the reply was lost")


def is_replaced(world, session):
    if term := world.server.entries.get(TERM):
        world.server.entries.pop(HOLDER, None)
        world.server.session().transact(Replace(TERM, b"another", term.version))
    raise PossiblyInconsistentError("the reply was lost")


@pytest.mark.parametrize("by", ["a command", "a leader"])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("fault", [dies, is_lost, is_cut_off, is_replaced])
def test_at_each_write_of_a_prune(by, moment, fault):
    """A process that dies, or gets no reply, at any one write of a prune leaves the job whole or removed. Another prune finishes it, and
    the id can run again."""
    reached = 0
    for number in itertools.count(1):
        world, _ = ended(10)
        world.clock += 100.0
        if by == "a leader":
            world.keep = 50.0
            world.server.entries.pop(HOLDER, None)
            driver = SimDriver(world)
            world.drivers.append(driver)
            at = At(world, number, moment, lambda session, world=world: fault(world, session))
            driver.act()
        else:
            jobs = jobs_of(world)
            at = At(world, number, moment, lambda session, world=world: fault(world, session))
            with contextlib.suppress(Killed, StagecrewError):
                list(jobs.prune(50.0))
        world.server.fault = quiet
        if not at.met:
            assert removed(world)
            break
        reached += 1
        consistent(world)
        was_removed = removed(world)
        found = list(jobs_of(world).prune(50.0))
        assert [one.removed for one in found] == ([] if was_removed else [True])
        assert removed(world)
        jobs_of(world).sweep(0.0, lambda: 1e12)
        assert world.states() == set()
        check(world, world.settle())
        assert world.lives["job-0"] == 1
    assert reached >= 3


def submits(world):
    assert jobs_of(world).submit(SPEC, "job-0") == "job-0"


def submits_other(world):
    """Other content under that id. It is refused while the first job is there."""
    with contextlib.suppress(JobExists):
        jobs_of(world).submit(OTHER, "job-0")


def cancels(world):
    world.cancelled.add("job-0")
    with contextlib.suppress(JobUnknown):
        jobs_of(world).cancel("job-0")


def prunes(world):
    for one in jobs_of(world).prune(0.0):
        assert not one.reason or "still has process" in one.reason  # a run that is in the middle of something


def sweeps(world):
    assert not jobs_of(world).sweep(0.0, lambda: 1e12).failed


def takes_over(world):
    leading(world)


def ends(world):
    """Its run ends, and a new leader cleans it; then it is pruned."""
    runs(world)
    leading(world)
    world.clock += 1.0
    prunes(world)


def lives_again(world):
    """It is pruned and submitted again, and ends, all in the hour in which it ended first."""
    prunes(world)
    life(world)


def lists(world):
    jobs_of(world).all()


def shows(world):
    with contextlib.suppress(JobUnknown):
        jobs_of(world).result("job-0")


def prunes_later(world):
    """Hours later: it also deletes hours in which nothing is left."""
    world.clock += 7200.0
    prunes(world)


#: A process reads these before it does anything.
ENTRIES = ["jobs", "specs", "results", "open", "ended"]
WAYS = [submits, submits_other, cancels, prunes, sweeps, takes_over]
OTHERS = [*WAYS, prunes_later, ends, lives_again]


#: Which way, from which state, is in each make test: where most can go wrong. All others are in the long tests.
OFTEN = [
    (submits, "clean"), (submits_other, "clean"), (cancels, "running"), (prunes, "clean"), (takes_over, "succeeded"), (lists, "clean"),
    (shows, "clean"),
]  # fmt: skip
MEETINGS = [
    pytest.param(one, until, id=f"{one.__name__}-{until}", marks=[] if (one, until) in OFTEN else pytest.mark.long)
    for one in [*WAYS, lists, shows, lives_again]
    for until in ("running", "succeeded", "clean")
]


@pytest.mark.parametrize("moment", ["before", "after", "at a read"])
@pytest.mark.parametrize(("one", "until"), MEETINGS)
def test_any_two_that_meet(one, moment, until):
    """At any one read or write of a prune, a submit, a cancel, a sweep, a takeover or a whole life of the job, any other of these is done
    as a whole. The only errors say that the job is there, or is not. The indexes are right after each transaction, a
    prune removes only the job that it has read, and the job that is there last ends."""
    for other in OTHERS:
        for number in itertools.count(1):
            world, _ = ended(11, until)
            world.clock += 1.0
            at = At(world, number, moment, lambda session, world=world, other=other: other(world))
            with contextlib.suppress(LeadershipLost, *[JobExists] if other is submits_other else []):
                one(world)
            world.server.fault = world.server.looks = quiet
            if not at.met:
                break
            consistent(world)
            begun = moment != "at a read" or number > len(ENTRIES)
            if (one, other, until, begun) == (prunes, lives_again, "clean", True):
                assert world.lives["job-0"] == 1, "the job that was submitted meanwhile is there"
            digests = [record.digest for record, _ in jobs_of(world).all()[0].values()]
            check(world, world.settle(submit=digests != [OTHER.digests[0]]))


def test_a_submit_that_meets_a_whole_life():
    """A submit whose id another process takes first, and whose job then ends and is pruned before the submit looks again, submits its own."""
    world, _ = ended(13)
    prunes(world)
    met = []

    def other_submits(session, operations, moment):
        if any(isinstance(one, Create) and one.key == "jobs/job-0" for one in operations):
            world.server.fault = quiet
            met.append("its id is taken")
            submits(world)
            world.server.looks = it_ends

    def it_ends(session, key):
        if key != "jobs/job-0":
            return
        world.server.looks = quiet
        met.append("the job ends")
        leading(world)
        ends(world)
        assert removed(world)

    world.server.fault = other_submits
    submits(world)
    assert met == ["its id is taken", "the job ends"]
    assert jobs_of(world).read("job-0")[0].state == "submitted"
    check(world, world.settle())
