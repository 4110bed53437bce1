"""Programs of a job, and who carries them out: in the simulation, or with real Spark.

A program is a tuple of statements, each of which is a tuple:

    ("topology", name, body)         the body inside a topology, with an operator of its own
    ("step", name, body)             `job.step`
    ("stream", name, n, wrapped, broken, own, body)
                                     a query of n batches: what `foreachBatch` calls, which the topology wraps or not, does what is its
                                     `own`, and then the body in `job.batch`; in each process the broken batch fails at its end when it is
                                     run first, and the query is started again
    ("try", body)                    the body, whose own error is caught
    ("threads", bodies)              each body in a thread of its own
    ("use", variable, source)        a dataset is made; sources: ("session", numbers), ("topology", numbers),
                                     ("outer", numbers) of the outermost topology, and ("splits", label, n)
    ("nameless", variable, source)   the same without the name that it needs, where another thread has begun the place: an error
    ("act", variable, n)             an action: all rows, or the first n
    ("commit", name, source)         a dataset is made and committed
    ("raise",)                       the program's own error

A body returns the results of its statements. A name is used once in a program, but those of steps and topologies, and those once
in a place.
"""

import dataclasses
import inspect

import pyarrow as pa

from stagecrew.coordination.contract import Coordinator
from stagecrew.coordination.operator import Operator
from stagecrew.recovery.jobs.job import current_job

#: Whether a use can be named.
NAMED = "name" in inspect.signature(Operator.map).parameters


class Tally(Coordinator):
    """Adds up the numbers of tasks, by events and by requests, which it replies to with the sum so far; and the resets of subtasks."""

    total = 0

    def ready(self, evaluation, gateway):
        gateway.send("go")

    def handle_event(self, evaluation, number):
        self.total += number

    def handle_request(self, evaluation, number):
        self.total += number
        return self.total

    def subtask_reset(self, subtask, checkpoint_id):
        self.total += 100

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


class Broken(Exception):
    """A batch fails, once in each process."""


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
    """Carries out a program in one process.

    The ground has what differs between real Spark and the simulation: `together(calls)`, threads; `numbers(values)`, a dataset with one
    in each partition; `stream(name, count, f)`, a query; `sink(name)`; and `write(key, value)`, what outlives the process.
    """

    def __init__(self, ground, crew):
        self.ground, self.crew, self.job = ground, crew, current_job()

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

    def _stream(self, scope, name, count, wrapped, broken, own, body):
        failing = [broken]

        def inside(number):
            results = self.body(body, scope.within(at_home=True))
            if failing == [number]:
                failing.clear()
                raise Broken
            return results

        def batch(number):
            outside = self.body(own, scope.within(at_home=False, suffix=f"-{number}"))
            results = self.job.batch(name, number, lambda: inside(number))
            self.ground.write(f"{name}-{number}", [outside, results])

        called = scope.topologies[-1][0].wrap(batch) if wrapped else batch
        try:
            self.ground.stream(name, count, called)
        except Exception as error:
            if "programs.Broken" not in f"{type(error).__module__}.{type(error).__name__}: {error}":
                raise
            self.ground.stream(name, count, called)
        self.job.after_stream(name)

    def _try(self, scope, body):
        try:
            return self.body(body, scope.within())
        except ValueError as error:
            return str(error)

    def _threads(self, scope, bodies):
        def branch(body):
            return lambda: self.body(body, scope.within(at_home=False))

        wrap = scope.topologies[-1][0].wrap if scope.topologies else lambda f: f
        return self.ground.together([wrap(branch(body)) for body in bodies])

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
        return operator.map(self.ground.numbers(*rest), tell, "v long", **named)

    def _act(self, scope, variable, limit):
        dataset = scope.datasets[variable] if limit is None else scope.datasets[variable].limit(limit)
        rows = [row[0] for row in dataset.collect()]
        if rows and isinstance(rows[0], str):  # which of its splits come first is not promised
            return sorted(rows) if limit is None else [len(rows), *sorted({row.rstrip("0123456789") for row in rows})]
        return max(rows)

    def _commit(self, scope, name, source):
        topology, _ = scope.topologies[-1]
        self._use(scope, name, source)
        sink = self.ground.sink(f"{name}-{'text' if source[0] == 'splits' else 'number'}")
        return topology.commit(scope.datasets.pop(name), sink, name=name).rows

    def _raise(self, scope):
        raise ValueError("the program's own error")
