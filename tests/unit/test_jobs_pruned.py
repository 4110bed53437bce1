"""The removal of ended jobs (pruning), with interference at each read and write, and the keys that a leader reads."""

import contextlib
import itertools

import pytest

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
from support.simulated_jobs import (
    Killed,
    SimDriver,
    World,
    assert_consistent,
    assert_final_state,
    assert_indexes_match,
    reconciler_module,
)

pytestmark = pytest.mark.slow

SPEC = JobSpec("job-0.py", (), {}, {}, b"", 50)
OTHER = JobSpec("job-0.py", ("otherwise",), {}, {}, b"", 50)


def no_fault(*_):
    """Does nothing."""


def new_jobs(world):
    """The jobs as seen by a process with its own session."""
    return FencedJobs(world.server.session(), world.storage, lambda: world.clock)


def new_leader(world):
    """Creates a driver that becomes leader, even if another driver leads."""
    world.server.entries.pop(HOLDER, None)
    driver = SimDriver(world)
    world.drivers.append(driver)
    driver.act()
    return driver


def run_processes(world):
    """Runs each live process of a run to its end."""
    for process in world.processes:
        if not process.dead and not process.busy:
            process.act()


def run_job(world, until="clean"):
    """Submits job-0, and takes it to the state `until` under a new leader: running, succeeded, or clean."""
    new_jobs(world).submit(SPEC, "job-0")
    driver = new_leader(world)
    if until != "running":
        run_processes(world)
    if until == "clean":
        world.clock += 2.0
        driver.act()
    return driver


def world_with_job(seed, until="clean"):
    """A world with job-0 in the state `until`, and its leader."""
    world = World(seed, jobs=1, faults=0)
    world.sink.visible.clear()
    real = world.server.on_transaction

    def check_indexes(operations):
        real(operations)
        assert_indexes_match(world.server.entries)

    world.server.on_transaction = check_indexes
    driver = run_job(world, until)
    record, _ = new_jobs(world).read("job-0")
    assert ("clean" if record.clean else record.state) == until
    return world, driver


def is_removed(world):
    """Returns whether job-0 has been removed, and asserts that it is either complete or removed from every index."""
    jobs = new_jobs(world)
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


# -- The cost of a poll


class CountingStore:
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


class NoLauncher:
    """A launcher that must not be used."""

    def prepare(self, spec, job):
        raise AssertionError("no job must be run")


@pytest.mark.parametrize("keep", [None, 1e6])
def test_a_poll_reads_only_open_jobs(keep):
    """A takeover and each poll read as many keys with 200 ended jobs as with none, and write nothing. A poll reads only
    the list of open jobs. A leader that prunes also reads the list of hours, once every few minutes."""
    counts = []
    for number in (0, 200):
        world = World(1, jobs=1, faults=0)
        world.clock = 1e7
        jobs = new_jobs(world)
        for index in range(number):
            job = f"ended-{index}"
            jobs.submit(SPEC, job)
            jobs.start_run(job, jobs.read(job), jobs.claim_version(job))
            jobs.finish(job, jobs.read(job), JobState.SUCCEEDED, Result.of_value(index))
            jobs.clean_up(job)
        assert len(jobs.names()) == number
        store = CountingStore(world.server.session())
        reads = []
        reconciler = None
        for _ in range(4):
            world.clock += 1.0
            store.reads.clear()
            if reconciler is None:
                clock = lambda world=world: world.clock  # noqa: E731
                reconciler = JobReconciler(FencedJobs(store, world.storage, clock), 1, NoLauncher(), 16, clock, keep)
            reconciler.reconcile()
            reads.append(list(store.reads))
        assert store.writes == 0
        assert reads[2:] == [["open"], ["open"]]
        counts.append([len(keys) for keys in reads])
    assert counts[0] == counts[1]
    assert counts[0][0] <= 7


# -- Which jobs a prune removes


def test_a_prune_removes_only_old_clean_jobs():
    """A prune removes old clean jobs with their results. A job stays complete if it is open, not clean, too young or
    unreadable, or if its process is alive."""
    world, _ = world_with_job(2)
    jobs = new_jobs(world)
    for job in ("open", "runs", "unclean", "unreadable", "lingers"):
        jobs.submit(SPEC, job)
    for job in ("runs", "unclean", "unreadable", "lingers"):
        jobs.start_run(job, jobs.read(job), jobs.claim_version(job))
    for job in ("unclean", "unreadable", "lingers"):
        jobs.finish(job, jobs.read(job), JobState.SUCCEEDED, Result.of_value(1))
    for job in ("unreadable", "lingers"):
        jobs.clean_up(job)
    session = world.server.session()
    session.transact(Create("jobs/lingers/process", b"{}", ephemeral=True))
    world.server.on_transaction = no_fault  # the record below is invalid
    record = jobs.read("unreadable")[0].to_bytes()
    session.transact(Replace("jobs/unreadable", b"{", session.read("jobs/unreadable").version))
    world.clock += 100.0
    jobs.submit(SPEC, "young")
    jobs.start_run("young", jobs.read("young"), jobs.claim_version("young"))
    jobs.finish("young", jobs.read("young"), JobState.FAILED, Result("failed"))
    jobs.clean_up("young")
    before = dict(world.server.entries)
    pruned = {result.job: result for result in jobs.prune(50.0)}
    assert [job for job, result in pruned.items() if result.removed] == ["job-0"]
    assert {job for job, result in pruned.items() if result.reason} == {"unreadable", "lingers"}
    assert "process" in pruned["lingers"].reason
    deleted = before.keys() - world.server.entries.keys()
    assert deleted
    assert all("job-0" in key for key in deleted)
    assert jobs.names() == sorted(["lingers", "open", "runs", "unclean", "unreadable", "young"])
    assert remaining_states(world, "job-0") == []
    session.transact(Replace("jobs/unreadable", record, session.read("jobs/unreadable").version))
    session.close()
    assert sorted(result.job for result in jobs.prune(50.0) if result.removed) == ["lingers", "unreadable"]
    assert [key for key in world.server.entries if key.startswith("ended/")] == [
        key for key in before if key.startswith("ended/") and ("young" in key or key.count("/") == 1)
    ]
    assert sorted(jobs.open_names()) == ["open", "runs", "unclean"]


def remaining_states(world, job):
    """The stored states of a job."""
    return [state for state in world.states() if job in state]


def test_a_prune_removes_empty_hours_of_the_index():
    """A prune removes the empty hours of the index of ended jobs, except for the current hour."""
    world, _ = world_with_job(3)
    world.clock += 7200.0
    jobs = new_jobs(world)
    assert [result.job for result in jobs.prune(60.0) if result.removed] == ["job-0"]
    assert [key for key in world.server.entries if key.startswith("ended/")] == []
    run_job(world)
    assert [result.job for result in jobs.prune(0.0) if result.removed] == ["job-0"]
    assert [key for key in world.server.entries if key.startswith("ended/")] == ["ended/1970-01-01T02"]


def test_the_id_of_a_pruned_job_can_be_used_again():
    """A submit with a pruned job's id, with the same or other content, creates a new job that runs under the same
    leader."""
    world, driver = world_with_job(4)
    with pytest.raises(JobExists):
        new_jobs(world).submit(OTHER, "job-0")
    for spec in (SPEC, OTHER):
        world.clock += 100.0
        assert [result.removed for result in new_jobs(world).prune(50.0)] == [True]
        assert is_removed(world)
        count = len(world.processes)
        new_jobs(world).submit(spec, "job-0")
        for _ in range(3):
            driver.act()
            run_processes(world)
        assert len(world.processes) == count + 1
        assert new_jobs(world).read("job-0")[0].clean
    assert world.lives["job-0"] == 2


def test_a_leader_forgets_jobs_that_have_ended():
    """A leader keeps neither the pauses nor the warnings of a clean job. So its memory does not grow, and the next job
    with that id is not mistaken for the old one."""
    world, driver = world_with_job(12)
    prepare, tried = driver.prepare, []

    def prepare_fails_twice(spec, job):
        tried.append(job)
        if len(tried) < 3:
            raise JobError("no room for its files")
        return prepare(spec, job)

    driver.prepare = prepare_fails_twice
    new_jobs(world).submit(SPEC, "troubled")
    names = ("_retries", "_ended_by_us", "_logged_errors", "_lingering_since", "_waiting", "_exited", "_hung_since")
    for _ in range(3):
        driver.act()
        assert any("troubled" in getattr(driver.reconciler, name) for name in names)
        world.clock += 60.0
    run_processes(world)
    driver.act()
    assert new_jobs(world).read("troubled")[0].clean
    driver.act()
    assert not any(getattr(driver.reconciler, name) for name in names)


@pytest.mark.parametrize("finishing", [False, True])
def test_a_run_that_exits_with_code_0_before_its_job_ended_is_lost(finishing, caplog):
    """A job whose process exits with code 0, but wrote no result, is retried after a pause, with a warning."""
    world, driver = world_with_job(12)
    new_jobs(world).submit(SPEC, "exits")
    driver.act()
    if finishing:
        new_jobs(world).cancel("exits")
        for _ in range(3):  # the job begins to end, its run is killed, and another process finishes the commits
            driver.act()
    process = driver.reconciler.processes["exits"]
    assert process.finishing == finishing
    process._exit(0)
    caplog.clear()
    driver.act()
    driver.act()
    assert driver.reconciler.processes == {}
    assert caplog.text.count("exited with code 0 before the job ended; the leader continues the job in") == 1
    world.clock += 60
    driver.act()
    assert driver.reconciler.processes["exits"] is not process


def test_a_prune_deletes_unreferenced_states_of_the_job(monkeypatch):
    """A prune deletes states that dead writers of the job left, because nothing could find them later. If they cannot
    be deleted, the job stays, the prune says why, and the next prune removes the job."""
    world, _ = world_with_job(5)
    [folder] = {state.rpartition("/")[0] for state in world.states()}
    generation = folder.split("/")[1]
    for below in ("steps", "commits"):
        world.storage.write("left", b"by a dead writer", f"{generation}/{quoted(f'jobs/job-0/{below}')}")
    world.clock += 100.0
    with monkeypatch.context() as patch:
        patch.setattr(StateStorage, "discard", lambda *_: (_ for _ in ()).throw(StateStorageError("access denied")))
        [result] = new_jobs(world).prune(50.0)
        assert (result.removed, "access denied" in result.reason) == (False, True)
    assert not is_removed(world)
    [result] = new_jobs(world).prune(50.0)
    assert (result.removed, result.reason) == (True, "")
    assert world.states() == set()


def test_a_result_that_cannot_be_deleted_is_swept(monkeypatch, caplog):
    """If its result cannot be deleted, a job is removed anyway. A sweep, or the next job with that id, deletes the
    result's bytes."""
    for cleanup in ("sweep", "next job"):
        world, _ = world_with_job(6)
        world.clock += 100.0
        with monkeypatch.context() as patch:
            patch.setattr(StateStorage, "discard", lambda *_: (_ for _ in ()).throw(StateStorageError("access denied")))
            [result] = new_jobs(world).prune(50.0)
        assert (result.removed, result.reason) == (True, "")
        assert is_removed(world)
        assert "a sweep will delete it" in caplog.text
        if cleanup == "sweep":
            new_jobs(world).sweep(0.0, lambda: 1e12)
            assert world.states() == set()
        else:
            run_job(world)
            assert_consistent(world)
            assert len(world.states()) == 1


# -- A leader that prunes


def test_a_leader_removes_a_few_old_jobs_at_each_poll(monkeypatch):
    """At each poll, a leader removes a few old jobs and still runs its open jobs. It removes none if `keep` is None."""
    monkeypatch.setattr(reconciler_module, "_PRUNED_PER_PASS", 2)
    for keep in (None, 50.0):
        world, _ = world_with_job(7)
        jobs = new_jobs(world)
        for number in range(7):
            job = f"old-{number}"
            jobs.submit(SPEC, job)
            jobs.start_run(job, jobs.read(job), jobs.claim_version(job))
            jobs.finish(job, jobs.read(job), JobState.SUCCEEDED, Result.of_value(number))
            jobs.clean_up(job)
        world.clock += 100.0
        jobs.submit(SPEC, "new")
        world.keep = keep
        driver = new_leader(world)
        counts = [len(jobs.names())]
        for _ in range(6):
            driver.act()
            counts.append(len(jobs.names()))
        assert counts == ([9] * 7 if keep is None else [7, 5, 3, 1, 1, 1, 1])
        assert [process.run.job for process in world.processes if process.term == driver.reconciler._term] == ["new"]


def test_a_failed_prune_does_not_stop_the_leader(monkeypatch, caplog):
    """After a failed prune, the leader logs the error, still runs its jobs, and prunes again after the prune period."""
    world, _ = world_with_job(8)
    world.clock += 100.0
    world.keep = 50.0
    real = Jobs.prune

    def unavailable(self, older_than):
        yield from ()
        raise StoreUnavailable("no connection")

    monkeypatch.setattr(Jobs, "prune", unavailable)
    driver = new_leader(world)
    assert "old jobs could not be removed; the leader will retry in 5 s: StoreUnavailable: no connection" in caplog.text
    monkeypatch.setattr(Jobs, "prune", real)
    new_jobs(world).submit(SPEC, "new")
    driver.act()
    assert [process.run.job for process in world.processes][1:] == ["new"]
    assert not is_unlisted(world)
    world.clock += reconciler_module._PRUNE_PERIOD
    driver.act()
    assert is_unlisted(world)


def is_unlisted(world):
    return "job-0" not in new_jobs(world).names()


def test_a_replaced_leader_removes_nothing():
    """The prune of a leader that has not noticed its replacement is fenced by its term, and removes nothing."""
    world, driver = world_with_job(9)
    world.clock += 100.0
    new_leader(world)
    with pytest.raises(LeadershipLost):
        list(driver.jobs.prune(50.0))
    assert not is_removed(world)


# -- Interference at each read and write


class ActionAt:
    """Runs an action before or after one write, or before one read."""

    def __init__(self, world, number, moment, action):
        self.world, self.number, self.moment, self.action = world, number, moment, action
        self.seen, self.has_run = 0, False
        world.server.fault = self
        if moment == "at a read":
            world.server.on_read = lambda session, key: self(session, (), moment)

    def __call__(self, session, operations, moment):
        if moment in ("before", "at a read"):
            self.seen += 1
        if self.seen != self.number or moment != self.moment or self.has_run:
            return
        self.has_run = True
        self.world.server.fault = self.world.server.on_read = no_fault
        before = self.world.current
        try:
            with self.world.acting_as(None):
                self.action(session)
        finally:
            self.world.current = before


def kill(world, session):
    """Kills the writing process."""
    if world.current is not None:
        world.current.killed = True
    raise Killed


def lose_reply(world, session):
    raise PossiblyInconsistentError("the reply was lost")


def lose_session(world, session):
    world.server.expire(session)
    raise PossiblyInconsistentError("the reply was lost")


def lose_leadership(world, session):
    if term := world.server.entries.get(TERM):
        world.server.entries.pop(HOLDER, None)
        world.server.session().transact(Replace(TERM, b"another", term.version))
    raise PossiblyInconsistentError("the reply was lost")


@pytest.mark.parametrize("pruner", ["command", "leader"])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("fault", [kill, lose_reply, lose_session, lose_leadership])
def test_a_fault_at_each_write_of_a_prune(pruner, moment, fault):
    """A prune whose process dies or loses a reply leaves the job complete or removed. Another prune finishes the
    removal, and the id can be used again."""
    reached = 0
    for number in itertools.count(1):
        world, _ = world_with_job(10)
        world.clock += 100.0
        if pruner == "leader":
            world.keep = 50.0
            world.server.entries.pop(HOLDER, None)
            driver = SimDriver(world)
            world.drivers.append(driver)
            fault_at = ActionAt(world, number, moment, lambda session, world=world: fault(world, session))
            driver.act()
        else:
            jobs = new_jobs(world)
            fault_at = ActionAt(world, number, moment, lambda session, world=world: fault(world, session))
            with contextlib.suppress(Killed, StagecrewError):
                list(jobs.prune(50.0))
        world.server.fault = no_fault
        if not fault_at.has_run:
            assert is_removed(world)
            break
        reached += 1
        assert_consistent(world)
        was_removed = is_removed(world)
        results = list(new_jobs(world).prune(50.0))
        assert [result.removed for result in results] == ([] if was_removed else [True])
        assert is_removed(world)
        new_jobs(world).sweep(0.0, lambda: 1e12)
        assert world.states() == set()
        assert_final_state(world, world.settle())
        assert world.lives["job-0"] == 1
    assert reached >= 3


def submit(world):
    assert new_jobs(world).submit(SPEC, "job-0") == "job-0"


def submit_other(world):
    """Submits other content with the id job-0, which is refused while the first job exists."""
    with contextlib.suppress(JobExists):
        new_jobs(world).submit(OTHER, "job-0")


def cancel(world):
    world.cancelled.add("job-0")
    with contextlib.suppress(JobUnknown):
        new_jobs(world).cancel("job-0")


def prune(world):
    for result in new_jobs(world).prune(0.0):
        assert not result.reason or "still has process" in result.reason  # of a run that is still working


def sweep(world):
    assert not new_jobs(world).sweep(0.0, lambda: 1e12).failed


def take_over(world):
    new_leader(world)


def end_and_prune(world):
    """Ends the job's run, lets a new leader clean the job, and prunes it."""
    run_processes(world)
    new_leader(world)
    world.clock += 1.0
    prune(world)


def prune_and_run_again(world):
    """Prunes the job, submits it again and ends it, all within the hour in which it first ended."""
    prune(world)
    run_job(world)


def list_all(world):
    new_jobs(world).all()


def show_result(world):
    with contextlib.suppress(JobUnknown):
        new_jobs(world).result("job-0")


def prune_later(world):
    """Prunes hours later, which also deletes empty hours of the index."""
    world.clock += 7200.0
    prune(world)


#: The keys that a process reads before its action begins.
KEYS_READ_FIRST = ["jobs", "specs", "results", "open", "ended"]
ACTIONS = [submit, submit_other, cancel, prune, sweep, take_over]
INTERFERING = [*ACTIONS, prune_later, end_and_prune, prune_and_run_again]


#: The riskiest combinations, which `make test` runs. All others are long tests.
FREQUENT = [
    (submit, "clean"), (submit_other, "clean"), (cancel, "running"), (prune, "clean"), (take_over, "succeeded"),
    (list_all, "clean"), (show_result, "clean"),
]  # fmt: skip
COMBINATIONS = [
    pytest.param(
        action, until, id=f"{action.__name__}-{until}", marks=[] if (action, until) in FREQUENT else pytest.mark.long
    )
    for action in [*ACTIONS, list_all, show_result, prune_and_run_again]
    for until in ("running", "succeeded", "clean")
]


@pytest.mark.parametrize("moment", ["before", "after", "at a read"])
@pytest.mark.parametrize(("action", "until"), COMBINATIONS)
def test_any_action_can_run_inside_any_other(action, moment, until):
    """Another action can run completely at any read or write of an action. An action then fails only because the job
    exists, does not exist, or has a new leader. The indexes are correct after each transaction, a prune removes only
    the job that it has read, and the last job ends."""
    for other in INTERFERING:
        for number in itertools.count(1):
            world, _ = world_with_job(11, until)
            world.clock += 1.0
            interference = ActionAt(world, number, moment, lambda session, world=world, other=other: other(world))
            with contextlib.suppress(LeadershipLost, *[JobExists] if other is submit_other else []):
                action(world)
            world.server.fault = world.server.on_read = no_fault
            if not interference.has_run:
                break
            assert_consistent(world)
            begun = moment != "at a read" or number > len(KEYS_READ_FIRST)
            if (action, other, until, begun) == (prune, prune_and_run_again, "clean", True):
                assert world.lives["job-0"] == 1, "the job that was submitted meanwhile must stay"
            digests = [record.digest for record, _ in new_jobs(world).all()[0].values()]
            assert_final_state(world, world.settle(submit=digests != [OTHER.digests[0]]))


def test_a_submit_succeeds_after_another_job_with_its_id_was_pruned():
    """If another process takes the id first, and its job ends and is pruned before the submit reads the job, the submit
    succeeds."""
    world, _ = world_with_job(13)
    prune(world)
    steps = []

    def other_submits(session, operations, moment):
        if any(isinstance(operation, Create) and operation.key == "jobs/job-0" for operation in operations):
            world.server.fault = no_fault
            steps.append("its id is taken")
            submit(world)
            world.server.on_read = other_ends

    def other_ends(session, key):
        if key != "jobs/job-0":
            return
        world.server.on_read = no_fault
        steps.append("the job ends")
        new_leader(world)
        end_and_prune(world)
        assert is_removed(world)

    world.server.fault = other_submits
    submit(world)
    assert steps == ["its id is taken", "the job ends"]
    assert new_jobs(world).read("job-0")[0].state == "submitted"
    assert_final_state(world, world.settle())
