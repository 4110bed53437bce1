"""Drivers and runs of jobs in one process, over a store in memory: all that they do is real, but for Spark and for processes.

Whatever runs can be interrupted before and after each of its transactions: another goes on meanwhile (it is paused), or it ends
there for good (it is killed). What a killed one held at the store stays until the store ends its session, some time later.
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

from modelstore import ModelServer
from stagecrew.errors import JobUnreadable, PossiblyInconsistentError, StagecrewError, StoreConflict
from stagecrew.operators.commits import commit
from stagecrew.recovery import retry
from stagecrew.recovery.driver import reconciler as reconciler_module
from stagecrew.recovery.driver.reconciler import JobReconciler
from stagecrew.recovery.jobs.fenced import FencedJobs
from stagecrew.recovery.jobs.job import current_job
from stagecrew.recovery.jobs.record import JobRecord
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.recovery.jobs.store import Jobs
from stagecrew.recovery.leadership.fencing import HOLDER, FencedStore, fence
from stagecrew.recovery.retry import RETRY_TIMEOUT
from stagecrew.recovery.run.claim import ClaimedRun
from stagecrew.recovery.run.execution import execute_run
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.recovery.stores.contract import Create, Delete, Replace
from stagecrew.session.running_job import set_running_job

SCHEMA = pa.schema([("id", pa.int64())])
retry._PAUSE = 0.0  # no time passes but the world's own
reconciler_module._PRUNE_PERIOD, reconciler_module._PRUNED_PER_PASS = 5.0, 1


class Killed(BaseException):
    """The one that runs ends here."""


class Deleted(BaseException):
    """What was decided is gone, for ever: no error that a driver tries again behind."""


class MemorySink:
    """A sink that remembers; what is asked of it twice it does once. Pickled as its name: the place outlives all drivers."""

    def __init__(self, name):
        self.identity = name
        self.visible, self.staged = {}, {}
        PLACES[name] = self

    def __reduce__(self):
        return _place, (self.identity,)

    def begin(self, staging):
        self.staged[staging.run] = []

    def commit(self, staging, messages):
        if staging.commit_id not in self.visible:
            if staging.run not in self.staged:
                raise Deleted(f"{staging} is decided, and was deleted")
            self.visible[staging.commit_id] = [message["text"] for message in messages]

    def done(self, commit_id):
        return commit_id in self.visible

    def discard(self, staging, kept):
        self.staged.pop(staging.run, None)


PLACES = {}


def _place(name):
    return PLACES[name]


class World:
    """One history, made by a seed."""

    def __init__(self, seed, jobs=2, faults=40):
        self.random = random.Random(seed)
        self.server = ModelServer()
        self.server.fault = self._moment
        self.server.done = self._done
        self.filesystem = filesystem = pyarrow.fs._MockFileSystem()  # in memory: without a disk that has to be reached
        filesystem.create_dir("states")
        self.storage = StateStorage("states", filesystem)
        self.clock = 0.0
        self.patience = RETRY_TIMEOUT
        self.faults = faults
        self.depth = 0
        self.current = None
        self.drivers = []
        self.processes = []
        self.doomed = []  # sessions of the dead, which the store has not ended yet
        self.sink = MemorySink(f"sink-{seed}")
        self.ran = []  # (job, step, run) of each call of a step
        self.stored = set()  # (job, life, step): no later run calls the step again
        self.lives = collections.Counter()  # of each job, how often it was pruned: the next job of that id is another
        self.keep = None  # after how many seconds a leader removes ended jobs
        self.names = [f"job-{number}" for number in range(jobs)]
        self.submitted, self.cancelled = set(), set()
        self.over = {}  # by (job, life)

    def _done(self, operations):
        for one in operations:
            if isinstance(one, Delete) and one.key in [f"jobs/{job}" for job in self.names]:
                self.lives[one.key.removeprefix("jobs/")] += 1

    # -- What may happen at each moment of a transaction

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
            raise PossiblyInconsistentError(f"lost {moment} it was done")
        self.depth += 1
        mine = self.current
        try:
            for _ in range(self.random.randrange(1, 6)):  # this one is paused
                self.act()
        finally:
            self.current = mine
            self.depth -= 1
        if mine is not None and mine.dead:
            mine.killed = True
            raise Killed

    def act(self):
        """One of those that can do something does it."""
        self.clock += self.random.choice([0.0, 0.3, 1.0, 5.0])
        choices = [self._submit, self._cancel, self._expire, self._kill, self._sweep, self._prune]
        choices += [driver.act for driver in self.drivers if not driver.busy and not driver.dead] * 3
        choices += [process.act for process in self.processes if not process.busy and not process.dead] * 3
        if len([driver for driver in self.drivers if not driver.dead]) < 2:
            choices.append(self._new_driver)
        self.random.choice(choices)()

    def _submit(self):
        job = self.random.choice(self.names)
        with self.as_(None):
            session = self.server.session()
            try:
                Jobs(session, self.storage, lambda: self.clock).submit(JobSpec(f"{job}.py", (), {}, {}, b"", 50), job)
                self.submitted.add(job)
            except StagecrewError:
                pass  # it would be submitted again
            session.close()

    def _cancel(self):
        if self.random.random() > 0.1:
            return
        job = self.random.choice(self.names)
        with self.as_(None):
            session = self.server.session()
            try:
                self.cancelled.add(job)
                Jobs(session, self.storage, lambda: self.clock).cancel(job)
            except StagecrewError:
                pass
            session.close()

    def _sweep(self):
        if self.random.random() > 0.3:
            return
        with self.as_(None):
            session = self.server.session()
            with contextlib.suppress(StagecrewError):
                Jobs(session, self.storage).sweep(0.0, lambda: math.inf)
            session.close()

    def _prune(self):
        with self.as_(None):
            session = self.server.session()
            with contextlib.suppress(StagecrewError):
                list(Jobs(session, self.storage, lambda: self.clock).prune(self.random.choice([0.0, 2.0, 20.0])))
            session.close()

    def states(self):
        """The files that are stored, of all jobs."""
        selector = pyarrow.fs.FileSelector("states", recursive=True)
        infos = self.filesystem.get_file_info(selector)
        return {info.path for info in infos if info.type == pyarrow.fs.FileType.File}

    def _expire(self):
        if self.doomed:
            self.server.expire(self.doomed.pop(self.random.randrange(len(self.doomed))))
        elif self.random.random() < 0.2:  # of one that lives and is paused
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

    def as_(self, who):
        return _As(self, who)

    @staticmethod
    def fails(job):
        """Whether the job's own code raises."""
        return zlib.crc32(job.encode()) % 3 == 0

    # -- The end

    def turn(self, driver, seconds):
        """Time goes by; this driver acts, and so does all that runs; sessions end whose owners died."""
        self.clock += seconds
        driver.act()
        for process in self.processes:
            if not process.dead:
                process.act()
        while self.doomed:
            self.server.expire(self.doomed.pop())

    def settle(self, submit=True):
        """Nothing fails any more: what is left is done by one more driver."""
        self.faults = 0
        self.keep = None
        for driver in self.drivers:
            driver.die()
        while self.doomed:
            self.server.expire(self.doomed.pop())
        for job in self.names if submit else ():
            session = self.server.session()
            Jobs(session, self.storage, lambda: self.clock).submit(JobSpec(f"{job}.py", (), {}, {}, b"", 50), job)
            session.close()
        last = SimDriver(self)
        self.drivers.append(last)
        for _ in range(600):
            self.turn(last, 30.0)
            if last.jobs is not None and all(last.jobs.read(job)[0].clean for job in self.names):
                break
        return last.jobs


class _As:
    def __init__(self, world, who):
        self.world, self.who = world, who

    def __enter__(self):
        self.before, self.world.current = self.world.current, self.who

    def __exit__(self, *_):
        self.world.current = self.before


class Actor:
    """Has a session; is busy while it is in the middle of something."""

    def __init__(self, world):
        self.world, self.session = world, world.server.session()
        self.busy = self.dead = self.killed = False

    def die(self):
        if not self.dead:
            self.dead = True
            self.world.doomed.append(self.session.session)

    def act(self):
        self.busy = True
        try:
            with self.world.as_(self):
                contextvars.Context().run(self._act)  # a job's step is that of its process
        except Killed:
            self.die()
        except StagecrewError:
            self.die()  # as a driver, and a run, end themselves
        finally:
            self.busy = False


class SimDriver(Actor):
    """Campaigns by the same transaction as a contender, and tends to jobs while it leads."""

    def __init__(self, world):
        super().__init__(world)
        self.jobs = self.tending = None

    def _act(self):
        if self.tending is None:
            if (term := self.campaign()) is None:
                return
            self.granted(term)
        self.tending.reconcile()

    def campaign(self):
        """The term that the store gives it; None while another leads."""
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

    def granted(self, term):
        """It is told that it leads."""
        self.jobs = FencedJobs(FencedStore(self.session, fence(term)), self.world.storage, lambda: self.world.clock)
        self.tending = JobReconciler(self.jobs, term, self, 16, lambda: self.world.clock, self.world.keep)

    def prepare(self, spec, job):
        return None

    def start(self, folder, run, term, finish):
        process = SimProcess(self.world, run, term, finish)
        self.world.processes.append(process)
        return process


class SimProcess(Actor):
    """One run: what `stagecrew.recovery.run` does, without Spark."""

    def __init__(self, world, run, term, finish):
        super().__init__(world)
        self.run, self.term, self.finishing = run, term, finish
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
            assert (job, self.life) not in world.over, f"{job} has ended twice: {world.over}"
            world.over[job, self.life] = claimed.jobs.result(job).state if self.life == world.lives[job] else "pruned"
        self._leave(0 if done else 75)

    def _program(self, job):
        """Steps, of which the second commits what the first has made."""
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
            raise ValueError("as its code says")
        return job.step("last", lambda: self._step(job, "last"))

    def stored(self, step):
        """The step is done: no run of this job does it again."""
        self.world.stored.add((self.run.job, self.life, step))

    def _step(self, job, name):
        done = (job.id, self.life, name) in self.world.stored
        assert not done, f"step {name} of {job.id} was done, and is run again"
        self.world.ran.append((job.id, name, job.attempt))
        return f"{name} by run {job.attempt}"

    def _leave(self, code):
        self.code = code
        self.session.close()
        self.dead = True


def consistent(world):
    """What holds at any time: a job that may run again has all that it needs; of one that is clean nothing is left but its end."""
    jobs = Jobs(world.server.session(), world.storage, lambda: world.clock)
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
    indexed(world.server.entries)


def indexed(entries):
    """After each transaction, the index of open jobs and that of ended ones are as the records say. A job that was pruned
    has left nothing but states, and a result that is marked."""
    open_, ended = set(), collections.Counter()
    for key, entry in entries.items():
        top, _, job = key.partition("/")
        if top == "jobs" and job and "/" not in job:
            try:
                record = JobRecord.from_bytes(entry.value)
            except JobUnreadable:
                assert f"open/{job}" in entries  # a leader tries again
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


def check(world, jobs):
    """What must hold at the end of a history."""
    entries = world.server.entries
    for job in world.names:
        record, _ = jobs.read(job)
        # Each job is at its end, clean, and has a result of that kind.
        assert record.clean, (job, record)
        assert jobs.result(job).state == str(record.state)
        # A job that was not cancelled has ended as its code does.
        if job not in world.cancelled:
            assert str(record.state) == ("failed" if world.fails(job) else "succeeded"), (job, record)
        # Rows are there once or not at all; those of a job that has succeeded are there.
        visible = world.sink.visible.get(f"{job}/write/sink")
        assert visible is not None or record.state == "cancelled", (job, record)
        # There is a reference if and only if the job must be recovered.
        assert f"specs/{job}" not in entries
        assert not [key for key in entries if key.startswith((f"jobs/{job}/steps/", f"jobs/{job}/commits/"))]
    assert not world.sink.staged, "what was staged is left"
    # Behind a sweep there is no state but the results, and what jobs need that cannot be run.
    others = [job for job in jobs.names() if job not in world.names]
    report = jobs.sweep(0.0, lambda: math.inf)
    assert bool(report.failed) <= bool(others), report
    assert len(world.states()) <= len(world.names) + len(others), world.states()
