"""Programs of a job, and histories of their runs in the simulation: with kills, or without.

A program is a tuple of statements, each of which is a tuple:

    ("topology", name, body)         the body inside a topology, with an operator of its own
    ("step", name, body)             `job.step`
    ("stream", name, n, own, body)   a query of n batches: `own` is called by `foreachBatch`, and then `job.batch` with the body
    ("threads", bodies)              each body in a thread of its own
    ("use", variable, source)        a dataset is made; sources: ("session", numbers), ("topology", numbers),
                                     ("outer", numbers) of the outermost topology, and ("splits", label, n)
    ("nameless", variable, source)   the same without the name that it needs, where another thread has begun the place: an error
    ("act", variable, n)             an action: all rows, or the first n
    ("commit", name, source)         a dataset is made and committed
    ("raise",)                       the program's own error

What a body returns are the results of its statements. A name is used once in a program, but those of steps and topologies, and those once
in a place.
"""

import contextvars
import dataclasses
import inspect
import logging
import re

import pyarrow as pa
import pyarrow.fs

from jobsim import PLACES, Killed, MemorySink
from modelstore import ModelServer
from sparksim import Dataset, Turns, process
from stagecrew.coordination.coordinator import Coordinator
from stagecrew.coordination.operator import Operator
from stagecrew.errors import StagecrewError
from stagecrew.recovery.election import HOLDER, Fenced, fence
from stagecrew.recovery.job import current_job, set_current
from stagecrew.recovery.jobs import Jobs
from stagecrew.recovery.run import Claimed, carry_out
from stagecrew.recovery.specs import JobSpec
from stagecrew.recovery.storage import StateStorage
from stagecrew.recovery.stores.contract import Create, Replace

JOB = "job"
#: Whether a use can be named.
NAMED = "name" in inspect.signature(Operator.map).parameters
#: After so many runs a history does not end.
RUNS = 6


class Tally(Coordinator):
    """Adds up what tasks say, by events and by requests, which it answers with the sum so far."""

    total = 0

    def ready(self, evaluation, gateway):
        gateway.send("go")

    def handle_event(self, evaluation, number):
        self.total += number

    def handle_request(self, evaluation, number):
        self.total += number
        return self.total

    def checkpoint(self, checkpoint_id):
        return str(self.total).encode()

    def reset_to_checkpoint(self, checkpoint_id, state):
        self.total = int(state or 0)


def tell(gateway, batches):
    """A task adds its number, a half of it by an event, and yields the sum that its request is answered."""
    assert next(gateway.events()) == "go"
    for batch in batches:
        (number,) = batch.column("v").to_pylist()
        gateway.send(number // 2)
        yield pa.record_batch({"v": [gateway.request(number - number // 2)]})


class Sink(MemorySink):
    """A sink that the running process calls at its points."""

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
        self.world.turns.point(what)


class World:
    """What outlives a process: the store with one job, the storage, a sink, the logs of streams, and what batches have given."""

    def __init__(self):
        self.server = ModelServer()
        self.server.fault = self._point
        filesystem = pyarrow.fs._MockFileSystem()
        filesystem.create_dir("states")
        self.storage = StateStorage("states", filesystem)
        self.sink = Sink(self)
        self.log, self.table = {}, {}
        self.turns = None  # of the process that runs
        leader = self.server.session()
        leader.ensure("leader", "leader/term")
        _, self.term = leader.transact(
            Create(HOLDER, b"leader", ephemeral=True),
            Replace("leader/term", b"leader", leader.read("leader/term").version),
        )
        self.jobs = Jobs(Fenced(leader, fence(self.term)), self.storage, lambda: 0.0)
        self.jobs.submit(JobSpec("job.py", (), {}, {}, b"", 50), JOB)

    def _point(self, session, operations, moment):
        if self.turns is not None:
            self.turns.point(f"{moment} {type(operations[-1]).__name__} {operations[-1].key}")

    def run(self, program, seed, kill):
        """One run of the job, which ends it, or is lost."""
        run = self.jobs.start(JOB, self.jobs.read(JOB), self.jobs.claim(JOB))
        session = self.server.session()
        self.turns = turns = Turns(seed, kill)
        try:
            claim = Jobs(Fenced(session, fence(self.term)), self.storage, lambda: 0.0).take(run, {})
            claimed = Claimed(session, self.storage, self.term, run, claim)

            def call(_spec):
                with process(turns, self.log, {"c": Tally} if "session" in str(program) else {}) as crew:
                    return Runner(self, crew).body(program, Scope())

            carry_out(claimed, False, call, lambda: "killed" if turns.dead else None, patience=0.0)
        except (Killed, StagecrewError):
            pass
        finally:
            set_current(None)
            self.points, self.turns = turns.points, None
            self.server.expire(session.session)


@dataclasses.dataclass(frozen=True)
class Scope:
    """Where a statement is: the topologies around it, with their operators, and the datasets that it sees.

    A use needs a name where its thread has not begun the innermost topology, step or batch (it is not `at_home`), and where that holds of
    a topology around it: `astray` is how many operators are known from further out than such a one, the application's first.
    """

    topologies: tuple = ()
    datasets: dict = dataclasses.field(default_factory=dict)
    at_home: bool = True
    astray: int = 0
    suffix: str = ""

    def within(self, **changes):
        return dataclasses.replace(self, datasets=dict(self.datasets), **changes)


class Runner:
    """Carries out a program in one process."""

    def __init__(self, world, crew):
        self.world, self.crew, self.job = world, crew, current_job()

    def body(self, statements, scope):
        results = []
        for kind, *rest in statements:
            if (result := getattr(self, f"_{kind}")(scope, *rest)) is not None:
                results.append(result)
        return results

    def _topology(self, scope, name, body):
        with self.crew.topology(name) as topology:
            operator = topology.coordinate("o", Tally)
            around = (*scope.topologies, (topology, operator))
            astray = scope.astray if scope.at_home else len(around)
            return self.body(body, scope.within(topologies=around, at_home=True, astray=astray))

    def _step(self, scope, name, body):
        return self.job.step(name, lambda: self.body(body, scope.within(at_home=True)))

    def _stream(self, scope, name, count, own, body):
        def batch(number):
            outside = self.body(own, scope.within(at_home=False, suffix=f"-{number}"))
            inside = self.job.batch(name, number, lambda: self.body(body, scope.within(at_home=True)))
            self.world.turns.point("before write")
            self.world.table[f"{name}/{number}"] = (outside, inside)
            self.world.turns.point("after write")

        self.crew.context.stream(name, count, batch)

    def _threads(self, scope, bodies):
        def branch(body):
            return lambda: self.body(body, scope.within(at_home=False))

        wrap = scope.topologies[-1][0].wrap if scope.topologies else lambda f: f
        return self.world.turns.together([wrap(branch(body)) for body in bodies])

    def _use(self, scope, variable, source):
        known_from = {"session": 0, "outer": 1}.get(source[0], len(scope.topologies))
        is_placed = scope.at_home and known_from >= scope.astray
        named = {} if is_placed or not NAMED else {"name": f"{variable}{scope.suffix}"}
        scope.datasets[variable] = self._made(scope, source, named)

    def _nameless(self, scope, variable, source):
        scope.datasets[variable] = self._made(scope, source, {})

    def _made(self, scope, source, named):
        kind, *rest = source
        topology, operator = scope.topologies[-1] if scope.topologies else (None, None)
        if kind == "splits":
            label, count = rest
            splits = [f"{label}{number}" for number in range(count)]
            return topology.splits(splits, lambda split: [pa.record_batch({"s": [split]})], "s string", 2, **named)
        if kind in ("session", "outer"):
            operator = self.crew.operator("c") if kind == "session" else scope.topologies[0][1]
        (numbers,) = rest  # one for each partition
        spark = self.crew.context
        dataset = Dataset(spark, len(numbers), lambda i: iter([pa.record_batch({"v": [numbers[i]]})]), "v long")
        return operator.map(dataset, tell, "v long", **named)

    def _act(self, scope, variable, limit):
        rows = [next(iter(vars(row).values())) for row in scope.datasets[variable].collect(limit)]
        if rows and isinstance(rows[0], str):  # which of its splits come first is not promised
            return sorted(rows) if limit is None else [len(rows), *sorted({row.rstrip("0123456789") for row in rows})]
        return max(rows)

    def _commit(self, scope, name, source):
        topology, _ = scope.topologies[-1]
        self._use(scope, name, source)
        return topology.commit(scope.datasets.pop(name), self.world.sink, name=name).rows

    def _raise(self, scope):
        raise ValueError("the program's own error")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All that a history has to agree about with any other of its program."""

    state: str
    reason: str
    value: object
    rows: dict
    table: dict
    staged: int


def history(program, seed, *kills):
    """The outcome of a program, whose runs end at these points in turn; and the points of its first run."""
    world = World()
    points = None
    logging.disable(logging.CRITICAL)
    try:
        for kill in (*kills, *[None] * RUNS):
            contextvars.Context().run(world.run, program, seed, kill)
            points = points or world.points
            if world.jobs.read(JOB)[0].state.is_terminal:
                break
        else:
            return Outcome("lost", "", None, {}, {}, 0), points
    finally:
        logging.disable(logging.NOTSET)
        del PLACES[world.sink.identity]
    result = world.jobs.result(JOB)
    rows = {id_: sorted(row for part in parts for row in part) for id_, parts in world.sink.visible.items()}
    reason = re.sub(r"\b[0-9a-f]{12,32}\b", "<id>", result.reason)
    return Outcome(result.state, reason, result.shown, rows, dict(world.table), len(world.sink.staged)), points
