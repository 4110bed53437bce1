"""Runs job programs in the simulation until the job has ended, with or without kills."""

import contextvars
import dataclasses
import logging
import re

import pyarrow as pa
import pyarrow.fs

from stagecrew.errors import StagecrewError
from stagecrew.recovery.jobs.fenced import FencedJobs
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.recovery.leadership.fencing import HOLDER, FencedStore, fence
from stagecrew.recovery.run.claim import ClaimedRun
from stagecrew.recovery.run.execution import execute_run
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.recovery.stores.contract import Create, Replace
from stagecrew.session.running_job import set_running_job
from support.job_programs import Runner, Surroundings, Tally
from support.model_store import ModelServer
from support.simulated_jobs import SINKS, Killed, MemorySink
from support.simulated_spark import Dataset, ThreadScheduler, process

JOB = "job"
#: A job that has not ended after this many runs without a kill has the outcome "lost".
MAX_RUNS = 6


class Sink(MemorySink):
    """A sink whose calls are points at which the process can be killed."""

    def __init__(self, world):
        super().__init__(f"sink-{id(world)}")
        self.world = world

    def stage(self, staging, partition, attempt, batches):
        rows = [row for batch in batches for row in batch.column(0).to_pylist()]
        self.point("before stage")
        self.staged[staging.run].append(rows)
        self.point("after stage")
        return {"text": rows, "rows": len(rows)} if rows else None

    def begin(self, staging):
        self.point("before begin")
        super().begin(staging)
        self.point("after begin")

    def commit(self, staging, messages):
        self.point("before commit")
        super().commit(staging, messages)
        self.point("after commit")

    def discard(self, staging, kept):
        self.point("before discard")
        super().discard(staging, kept)
        self.point("after discard")

    def point(self, what):
        self.world.scheduler.point(what)


class World:
    """What outlives a process: a store with one job, the storage, a sink, and the logs and results of streams."""

    def __init__(self):
        self.server = ModelServer()
        self.server.fault = self._point
        filesystem = pyarrow.fs._MockFileSystem()
        filesystem.create_dir("states")
        self.storage = StateStorage("states", filesystem)
        self.sink = Sink(self)
        self.log, self.table = {}, {}
        self.scheduler = None  # runs the threads of the current process
        leader = self.server.session()
        leader.ensure("leader", "leader/term")
        _, self.term = leader.transact(
            Create(HOLDER, b"leader", ephemeral=True),
            Replace("leader/term", b"leader", leader.read("leader/term").version),
        )
        self.jobs = FencedJobs(FencedStore(leader, fence(self.term)), self.storage, lambda: 0.0)
        self.jobs.submit(JobSpec("job.py", (), {}, {}, b"", 50), JOB)

    def _point(self, session, operations, moment):
        if self.scheduler is not None:
            self.scheduler.point(f"{moment} {type(operations[-1]).__name__} {operations[-1].key}")

    def run(self, program, seed, kill):
        """Runs the job once in a new process, which is killed at point number `kill` unless this is None."""
        run = self.jobs.start_run(JOB, self.jobs.read(JOB), self.jobs.claim_version(JOB))
        session = self.server.session()
        self.scheduler = scheduler = ThreadScheduler(seed, kill)
        try:
            claim = FencedJobs(FencedStore(session, fence(self.term)), self.storage, lambda: 0.0).claim_run(run, {})
            claimed = ClaimedRun(session, self.storage, self.term, run, claim)

            def call(_spec):
                with process(scheduler, self.log, {"c": Tally} if "session" in str(program) else {}) as crew:
                    return Runner(SimulatedBackend(self, crew.context), crew).run_body(program, Surroundings())

            execute_run(claimed, False, call, lambda: "killed" if scheduler.dead else None, retry_timeout=0.0)
        except (Killed, StagecrewError):
            pass
        finally:
            set_running_job(None)
            self.points, self.scheduler = scheduler.points, None
            self.server.expire(session.session)


class SimulatedBackend:
    """Runs the operations of a program in the simulation. See `Runner`."""

    def __init__(self, world, spark):
        self.world, self.spark = world, spark
        self.run_threads, self.stream = world.scheduler.run_threads, spark.stream

    def numbers(self, values):
        return Dataset(self.spark, len(values), lambda i: iter([pa.record_batch({"v": [values[i]]})]), "v long")

    def sink(self, name):
        return self.world.sink

    def write(self, key, value):
        self.world.scheduler.point("before write")
        self.world.table[key] = value
        self.world.scheduler.point("after write")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a job, which must not depend on when its processes are killed."""

    state: str
    reason: str
    value: object
    rows: dict
    table: dict
    staged: int


def history(program, seed, *kills):
    """Runs a program as a job. Run number n is killed at point number `kills[n - 1]`; later runs are not killed.

    Returns the outcome of the job, and the names of the points of its first run.
    """
    world = World()
    points = None
    logging.disable(logging.CRITICAL)
    try:
        for kill in (*kills, *[None] * MAX_RUNS):
            contextvars.Context().run(world.run, program, seed, kill)
            points = points or world.points
            if world.jobs.read(JOB)[0].state.is_terminal:
                break
        else:
            return Outcome("lost", "", None, {}, {}, 0), points
    finally:
        logging.disable(logging.NOTSET)
        del SINKS[world.sink.identity]
    result = world.jobs.result(JOB)
    rows = {id_: sorted(row for part in parts for row in part) for id_, parts in world.sink.visible.items()}
    reason = re.sub(r"\b[0-9a-f]{12,32}\b", "<id>", result.reason)
    return Outcome(result.state, reason, result.shown, rows, dict(world.table), len(world.sink.staged)), points
