"""Programs of jobs, and their interpreter, which runs in the simulation or with real Spark.

A program is a tuple of statements. Each statement is a tuple:

    ("topology", name, body)         runs the body inside a topology that has an operator of its own
    ("step", name, body)             runs the body as `job.step`
    ("stream", name, n, wrapped, broken, outside, body)
                                     runs a query of n batches. Its `foreachBatch` function, which the topology wraps
                                     or not, runs the body `outside`, and then `body` in `job.batch`. In each process,
                                     the first run of batch number `broken` fails at its end, and the query starts again
    ("try", body)                    runs the body, and catches the program's own error
    ("threads", bodies)              runs each body in a thread of its own
    ("use", variable, source)        creates a dataset from a source: ("session", numbers), ("topology", numbers),
                                     ("outer", numbers) for the outermost topology, or ("splits", label, n)
    ("nameless", variable, source)   like "use", without the name that it needs because another thread has begun the
                                     place: an error
    ("act", variable, n)             runs an action: all rows, or the first n
    ("commit", name, source)         creates a dataset and commits it
    ("raise",)                       raises the program's own error

A body returns the results of its statements. A name is used once in a program, except for names of steps and
topologies, which are used once in a place.
"""

import dataclasses
import inspect

import pyarrow as pa

from stagecrew.coordination.contract import Coordinator
from stagecrew.coordination.operator import Operator
from stagecrew.recovery.jobs.job import current_job

#: Whether uses can be named.
NAMED = "name" in inspect.signature(Operator.map).parameters


class Tally(Coordinator):
    """Sums the numbers of tasks, which arrive as events and as requests, and the resets of subtasks.

    The reply to a request is the sum so far.
    """

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


def add_number(gateway, batches):
    """Adds the task's number, one half by an event and the other by a request, and yields the reply."""
    assert next(gateway.events()) == "go"
    for batch in batches:
        (number,) = batch.column("v").to_pylist()
        gateway.send(number // 2)
        yield pa.record_batch({"v": [gateway.request(number - number // 2)]})


class Broken(Exception):
    """The error of a broken batch, which is raised once in each process."""


@dataclasses.dataclass(frozen=True)
class Scope:
    """The place of a statement: the topologies around it with their operators, and its datasets.

    A use needs a name if its thread has not begun the innermost topology, step or batch (not `in_home_thread`), or if
    that holds for a topology around it and the operator was created outside that topology. Operators are counted
    from the outside, the application's first: those with an index below `foreign_operators` need a name.
    """

    topologies: tuple = ()
    datasets: dict = dataclasses.field(default_factory=dict)
    in_home_thread: bool = True
    foreign_operators: int = 0
    suffix: str = ""

    def within(self, **changes):
        return dataclasses.replace(self, datasets=dict(self.datasets), **changes)


class Runner:
    """Runs a program in one process.

    `ground` is the environment, in which real Spark and the simulation differ: `run_threads(calls)`;
    `numbers(values)`, a dataset with one number in each partition; `stream(name, count, f)`, a query; `sink(name)`;
    and `write(key, value)`, which stores a value outside the process.
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
            foreign_operators = scope.foreign_operators if scope.in_home_thread else len(around)
            return self.body(
                body, scope.within(topologies=around, in_home_thread=True, foreign_operators=foreign_operators)
            )

    def _step(self, scope, name, body):
        return self.job.step(name, lambda: self.body(body, scope.within(in_home_thread=True)))

    def _stream(self, scope, name, count, wrapped, broken, outside_body, body):
        failing = [broken]

        def inside(number):
            results = self.body(body, scope.within(in_home_thread=True))
            if failing == [number]:
                failing.clear()
                raise Broken
            return results

        def batch(number):
            outside = self.body(outside_body, scope.within(in_home_thread=False, suffix=f"-{number}"))
            results = self.job.batch(name, number, lambda: inside(number))
            self.ground.write(f"{name}-{number}", [outside, results])

        called = scope.topologies[-1][0].wrap(batch) if wrapped else batch
        try:
            self.ground.stream(name, count, called)
        except Exception as error:
            if "job_programs.Broken" not in f"{type(error).__module__}.{type(error).__name__}: {error}":
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
            return lambda: self.body(body, scope.within(in_home_thread=False))

        wrap = scope.topologies[-1][0].wrap if scope.topologies else lambda f: f
        return self.ground.run_threads([wrap(branch(body)) for body in bodies])

    def _use(self, scope, variable, source):
        known_from = {"session": 0, "outer": 1}.get(source[0], len(scope.topologies))
        is_placed = scope.in_home_thread and known_from >= scope.foreign_operators
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
        return operator.map(self.ground.numbers(*rest), add_number, "v long", **named)

    def _act(self, scope, variable, limit):
        dataset = scope.datasets[variable] if limit is None else scope.datasets[variable].limit(limit)
        rows = [row[0] for row in dataset.collect()]
        if rows and isinstance(rows[0], str):  # the order of splits is not guaranteed
            return sorted(rows) if limit is None else [len(rows), *sorted({row.rstrip("0123456789") for row in rows})]
        return max(rows)

    def _commit(self, scope, name, source):
        topology, _ = scope.topologies[-1]
        self._use(scope, name, source)
        sink = self.ground.sink(f"{name}-{'text' if source[0] == 'splits' else 'number'}")
        return topology.commit(scope.datasets.pop(name), sink, name=name).rows

    def _raise(self, scope):
        raise ValueError("the program's own error")
