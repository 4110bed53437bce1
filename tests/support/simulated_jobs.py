"""Simulates drivers and runs of jobs in one process.

Everything is real except Spark, the processes, and the store, which is in memory.

Before and after each transaction, the driver or run that made it can be killed, or paused while others act. The
ephemeral entries of a killed driver or run stay in the store until the store ends its session later.
"""

import collections
import contextlib
import contextvars
import datetime as dt
import math
import random
import zlib

import pyarrow as pa
import pyarrow.fs

from stagecrew.errors import PossiblyInconsistentError, RecordUnreadable, StagecrewError, StoreConflict
from stagecrew.operators.commits import commit
from stagecrew.recovery import retry
from stagecrew.recovery.driver import reconciler as reconciler_module
from stagecrew.recovery.driver.reconciler import JobReconciler
from stagecrew.recovery.jobs.fenced import FencedJobs
from stagecrew.recovery.jobs.job import current_job
from stagecrew.recovery.jobs.record import JobRecord
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.recovery.leadership.fencing import HOLDER, FencedStore, fence
from stagecrew.recovery.retry import RETRY_TIMEOUT
from stagecrew.recovery.run.claim import ClaimedRun
from stagecrew.recovery.run.execution import execute_run
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.recovery.stores.contract import Create, Delete, Replace
from stagecrew.session.running_job import set_running_job
from support.model_store import ModelServer

SCHEMA = pa.schema([("id", pa.int64())])
retry._PAUSE = 0.0  # real time does not matter, only the clock of the world
reconciler_module._PRUNE_PERIOD, reconciler_module._PRUNED_PER_PASS = 5.0, 1


class Killed(BaseException):
    """The driver or run that is acting was killed here."""


class Deleted(BaseException):
    """A decided commit was deleted. Not an `Exception`, so that no driver or run catches it."""


class MemorySink:
    """An idempotent sink in memory. Unpickling returns the same object, so its content outlives all drivers."""

    def __init__(self, name):
        self.identity = name
        self.visible, self.staged = {}, {}
        SINKS[name] = self

    def __reduce__(self):
        return _sink_named, (self.identity,)

    def begin(self, staging):
        self.staged[staging.run] = []

    def commit(self, staging, messages):
        if staging.commit_id not in self.visible:
            if staging.run not in self.staged:
                raise Deleted(f"{staging} is decided, but was deleted")
            self.visible[staging.commit_id] = [message["text"] for message in messages]

    def done(self, commit_id):
        return commit_id in self.visible

    def discard(self, staging, kept):
        self.staged.pop(staging.run, None)


#: All sinks by name.
SINKS = {}


def _sink_named(name):
    return SINKS[name]


class World:
    """The store, the storage, and all drivers and runs of a random history, which the seed determines."""

    def __init__(self, seed, jobs=2, faults=40):
        self.random = random.Random(seed)
        self.server = ModelServer()
        self.server.fault = self._moment
        self.server.on_transaction = self._count_pruned_jobs
        self.filesystem = filesystem = pyarrow.fs._MockFileSystem()  # in memory: no disk is used
        filesystem.create_dir("states")
        self.storage = StateStorage("states", filesystem)
        self.clock = 0.0
        self.patience = RETRY_TIMEOUT
        self.faults = faults
        self.depth = 0
        self.current = None
        self.drivers = []
        self.processes = []
        self.dead_sessions = []  # sessions of killed drivers and runs that the store has not ended yet
        self.sink = MemorySink(f"sink-{seed}")
        self.ran = []  # (job, step, run) of each execution of a step
        self.stored = set()  # (job, life, step) of each durable step, which must not run again
        self.lives = collections.Counter()  # how often each job was pruned, after which its id begins a new life
        self.keep = None  # the number of seconds after which a leader prunes ended jobs
        self.names = [f"job-{number}" for number in range(jobs)]
        self.submitted, self.cancelled = set(), set()
        self.final_states = {}  # final states by (job, life)

    def _count_pruned_jobs(self, operations):
        for one in operations:
            if isinstance(one, Delete) and one.key in [f"jobs/{job}" for job in self.names]:
                self.lives[one.key.removeprefix("jobs/")] += 1

    # -- Faults before and after each transaction

    def _moment(self, session, operations, moment):
        if self.faults <= 0 or self.depth > 3:
            return
        chance = self.random.random()
        if chance > 0.12:
            return
        self.faults -= 1
        if chance < 0.03 and self.current is not None:
            self.current.killed = True
            raise Killed
        if chance < 0.045:
            raise PossiblyInconsistentError(f"lost {moment} the transaction was applied")
        self.depth += 1
        interrupted = self.current
        try:
            for _ in range(self.random.randrange(1, 6)):  # the current actor is paused
                self.act()
        finally:
            self.current = interrupted
            self.depth -= 1
        if interrupted is not None and interrupted.dead:
            interrupted.killed = True
            raise Killed

    def act(self):
        """Performs one random action: a driver or run acts, a user submits or cancels, a session ends, ..."""
        self.clock += self.random.choice([0.0, 0.3, 1.0, 5.0])
        choices = [self._submit, self._cancel, self._expire, self._kill, self._sweep, self._prune]
        choices += [driver.act for driver in self.drivers if not driver.busy and not driver.dead] * 3
        choices += [process.act for process in self.processes if not process.busy and not process.dead] * 3
        if len([driver for driver in self.drivers if not driver.dead]) < 2:
            choices.append(self._new_driver)
        self.random.choice(choices)()

    def _submit(self):
        job = self.random.choice(self.names)
        with self.acting_as(None):
            session = self.server.session()
            try:
                FencedJobs(session, self.storage, lambda: self.clock).submit(
                    JobSpec(f"{job}.py", (), {}, {}, b"", 50), job
                )
                self.submitted.add(job)
            except StagecrewError:
                pass  # a real user would submit again
            session.close()

    def _cancel(self):
        if self.random.random() > 0.1:
            return
        job = self.random.choice(self.names)
        with self.acting_as(None):
            session = self.server.session()
            try:
                self.cancelled.add(job)
                FencedJobs(session, self.storage, lambda: self.clock).cancel(job)
            except StagecrewError:
                pass
            session.close()

    def _sweep(self):
        if self.random.random() > 0.3:
            return
        with self.acting_as(None):
            session = self.server.session()
            with contextlib.suppress(StagecrewError):
                FencedJobs(session, self.storage).sweep(0.0, lambda: math.inf)
            session.close()

    def _prune(self):
        with self.acting_as(None):
            session = self.server.session()
            with contextlib.suppress(StagecrewError):
                list(FencedJobs(session, self.storage, lambda: self.clock).prune(self.random.choice([0.0, 2.0, 20.0])))
            session.close()

    def states(self):
        """Returns the files of all jobs in the state storage."""
        selector = pyarrow.fs.FileSelector("states", recursive=True)
        infos = self.filesystem.get_file_info(selector)
        return {info.path for info in infos if info.type == pyarrow.fs.FileType.File}

    def _expire(self):
        if self.dead_sessions:
            self.server.expire(self.dead_sessions.pop(self.random.randrange(len(self.dead_sessions))))
        elif self.random.random() < 0.2:  # end the session of a live actor that is paused
            for one in self.drivers + self.processes:
                if one.busy and not one.dead:
                    self.server.expire(one.session.session)
                    return

    def _kill(self):
        if self.faults > 0 and self.random.random() < 0.05:
            living = [one for one in self.drivers + self.processes if not one.dead]
            if living:
                self.random.choice(living).die()

    def _new_driver(self):
        self.drivers.append(SimDriver(self))

    def acting_as(self, actor):
        return _Acting(self, actor)

    @staticmethod
    def fails(job):
        """Returns whether the code of a job raises."""
        return zlib.crc32(job.encode()) % 3 == 0

    # -- The end of a history

    def turn(self, driver, seconds):
        """Advances the clock, lets this driver and all runs act, and ends the sessions of killed drivers and runs."""
        self.clock += seconds
        driver.act()
        for process in self.processes:
            if not process.dead:
                process.act()
        while self.dead_sessions:
            self.server.expire(self.dead_sessions.pop())

    def settle(self, submit=True):
        """Ends the history without further faults: a new driver finishes all jobs. Returns its view of the jobs."""
        self.faults = 0
        self.keep = None
        for driver in self.drivers:
            driver.die()
        while self.dead_sessions:
            self.server.expire(self.dead_sessions.pop())
        for job in self.names if submit else ():
            session = self.server.session()
            FencedJobs(session, self.storage, lambda: self.clock).submit(JobSpec(f"{job}.py", (), {}, {}, b"", 50), job)
            session.close()
        last = SimDriver(self)
        self.drivers.append(last)
        for _ in range(600):
            self.turn(last, 30.0)
            if last.jobs is not None and all(last.jobs.read(job)[0].clean for job in self.names):
                break
        return last.jobs


class _Acting:
    def __init__(self, world, actor):
        self.world, self.actor = world, actor

    def __enter__(self):
        self.before, self.world.current = self.world.current, self.actor

    def __exit__(self, *_):
        self.world.current = self.before


class Actor:
    """A driver or a run, with a session of its own. While it acts (or is paused while it acts), it is busy."""

    def __init__(self, world):
        self.world, self.session = world, world.server.session()
        self.busy = self.dead = self.killed = False

    def die(self):
        if not self.dead:
            self.dead = True
            self.world.dead_sessions.append(self.session.session)

    def act(self):
        self.busy = True
        try:
            with self.world.acting_as(self):
                contextvars.Context().run(self._act)  # a process has its own current step
        except Killed:
            self.die()
        except StagecrewError:
            self.die()  # real drivers and runs also exit after such an error
        finally:
            self.busy = False


class SimDriver(Actor):
    """A driver. It campaigns with the same transaction as a real candidate, and reconciles jobs while it leads."""

    def __init__(self, world):
        super().__init__(world)
        self.jobs = self.reconciler = None

    def _act(self):
        if self.reconciler is None:
            if (term := self.campaign()) is None:
                return
            self.become_leader(term)
        self.reconciler.reconcile()

    def campaign(self):
        """Returns the term that the store granted, or None if another driver leads."""
        self.session.ensure("leader", "leader/term")
        term = self.session.read("leader/term").version
        try:
            _, term = self.session.transact(
                Create(HOLDER, self.session.session.encode(), ephemeral=True),
                Replace("leader/term", self.session.session.encode(), term),
            )
        except StoreConflict:
            return None
        return term

    def become_leader(self, term):
        """Starts reconciling jobs with this term."""
        self.jobs = FencedJobs(FencedStore(self.session, fence(term)), self.world.storage, lambda: self.world.clock)
        self.reconciler = JobReconciler(self.jobs, term, self, 16, lambda: self.world.clock, self.world.keep)

    def prepare(self, spec, job):
        return None

    def start(self, folder, run, term, finish):
        process = SimProcess(self.world, run, term, finish)
        self.world.processes.append(process)
        return process


class SimProcess(Actor):
    """A run. It does what `stagecrew.recovery.run` does, but without Spark."""

    def __init__(self, world, run, term, finish):
        super().__init__(world)
        self.run, self.term, self.finishing = run, term, finish
        self.pid = 1000 + len(world.processes)
        self.life = world.lives[run.job]
        self.code = None

    def exit_code(self):
        return self.code if self.code is not None else (137 if self.dead else None)

    def terminate(self):
        self.die()

    def kill(self):
        self.die()

    def wait(self, seconds):
        pass

    def _act(self):
        if self.code is not None:
            return
        world, job = self.world, self.run.job
        try:
            claim = FencedJobs(
                FencedStore(self.session, fence(self.term)), world.storage, lambda: world.clock
            ).claim_run(self.run, {"pid": id(self)})
            claimed = ClaimedRun(self.session, world.storage, self.term, self.run, claim, lambda: world.clock)
            done = execute_run(
                claimed,
                self.finishing,
                lambda spec: self._program(current_job()),
                lambda: "killed" if self.killed else None,
                retry_timeout=world.patience,
            )
        except StagecrewError:
            done = False
        finally:
            set_running_job(None)
        if self.killed:
            raise Killed
        if done:
            assert (job, self.life) not in world.final_states, f"{job} ended twice: {world.final_states}"
            world.final_states[job, self.life] = (
                claimed.jobs.result(job).state if self.life == world.lives[job] else "pruned"
            )
        self._exit(0 if done else 75)

    def _program(self, job):
        """The job's code. It runs three steps, and the second commits the result of the first."""
        text = job.step("make", lambda: self._step(job, "make"))
        self.stored("make")

        def write():
            def execute(staging):
                self.world.sink.staged[staging.run].append(text)
                return [{"text": text, "rows": 1}]

            commit(
                self.world.sink,
                job.commit_log(self.world.sink),
                job.commit_id("sink"),
                SCHEMA,
                execute,
                sleep=lambda _: None,
            )
            return self._step(job, "write")

        job.step("write", write)
        self.stored("write")
        if self.world.fails(job.id):
            raise ValueError("the job fails on purpose")
        return job.step("last", lambda: self._step(job, "last"))

    def stored(self, step):
        """Records that the step is durable, so that no later run of this job must execute it again."""
        self.world.stored.add((self.run.job, self.life, step))

    def _step(self, job, name):
        done = (job.id, self.life, name) in self.world.stored
        assert not done, f"step {name} of {job.id} is durable, but is running again"
        self.world.ran.append((job.id, name, job.attempt))
        return f"{name} by run {job.attempt}"

    def _exit(self, code):
        self.code = code
        self.session.close()
        self.dead = True


def assert_consistent(world):
    """Asserts what must always hold: a job that has not ended has a spec and no result, and a clean job has no spec."""
    jobs = FencedJobs(world.server.session(), world.storage, lambda: world.clock)
    records, unreadable = jobs.all()
    assert not unreadable
    for job, (record, _) in records.items():
        if not record.state.is_terminal:
            assert jobs.spec(job).target == f"{job}.py"
            assert jobs.result(job) is None
        else:
            assert jobs.result(job).state == record.state
        assert record.state.is_terminal or not record.clean
        assert not (record.clean and f"specs/{job}" in world.server.entries)
    assert_indexes_match(world.server.entries)


def assert_indexes_match(entries):
    """Asserts that the indexes of open and of ended jobs match the records.

    A handle of a spec or a result whose job no longer exists must be marked for removal.
    """
    open_, ended = set(), collections.Counter()
    for key, entry in entries.items():
        top, _, job = key.partition("/")
        if top == "jobs" and job and "/" not in job:
            try:
                record = JobRecord.from_bytes(entry.value)
            except RecordUnreadable:
                assert f"open/{job}" in entries  # so a later leader reads the record again
                open_.add(job)
                continue
            if record.clean:
                hour = dt.datetime.fromtimestamp(record.ended, dt.UTC)
                ended[f"{hour:%Y-%m-%dT%H}", job] += 1
            else:
                open_.add(job)
    assert {key.removeprefix("open/") for key in entries if key.startswith("open/")} == open_
    found = [key.split("/")[1:] for key in entries if key.startswith("ended/") and key.count("/") == 2]
    assert collections.Counter((hour, name.partition("-")[2]) for hour, name in found) == ended
    assert {job for _, job in ended}.isdisjoint(open_)
    for key in entries:
        if key.count("/") == 2 and key.startswith(("results/", "specs/")) and key.endswith("/locks"):
            assert f"jobs/{key.split('/')[1]}" in entries


def assert_final_state(world, jobs):
    """Asserts what must hold at the end of a history, after `settle`."""
    entries = world.server.entries
    for job in world.names:
        record, _ = jobs.read(job)
        # Each job has ended, is clean, and has a result with the same state.
        assert record.clean, (job, record)
        assert jobs.result(job).state == str(record.state)
        # A job that was not cancelled has failed if its code raises, and has succeeded otherwise.
        if job not in world.cancelled:
            assert str(record.state) == ("failed" if world.fails(job) else "succeeded"), (job, record)
        # The rows of a job that was not cancelled are visible.
        visible = world.sink.visible.get(f"{job}/write/sink")
        assert visible is not None or record.state == "cancelled", (job, record)
        # No references to the job's spec, steps or commits are left, because no leader must recover the job.
        assert f"specs/{job}" not in entries
        assert not [key for key in entries if key.startswith((f"jobs/{job}/steps/", f"jobs/{job}/commits/"))]
    assert not world.sink.staged, "staged data is left"
    # After a sweep, only the results, and the states of jobs that cannot run, are left.
    others = [job for job in jobs.names() if job not in world.names]
    report = jobs.sweep(0.0, lambda: math.inf)
    assert bool(report.failed) <= bool(others), report
    assert len(world.states()) <= len(world.names) + len(others), world.states()
