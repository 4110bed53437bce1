"""A small language for test jobs, and its interpreter, which runs them in the simulation or with real Spark.

A program is a tuple of statements. Each statement is a tuple:

    ("topology", name, body)         runs the body inside a topology that has an operator of its own
    ("step", name, body)             runs the body as `job.step`
    ("stream", name, n, wrapped, broken, outside, body)
                                     runs a query of n batches. For each batch, its `foreachBatch` function runs the
                                     body `outside`, and then runs `body` inside `job.batch`. If `wrapped`, the
                                     function is wrapped by `topology.wrap`. In each process, the first run of batch
                                     number `broken` raises after its body, and the query is restarted
    ("try", body)                    runs the body, and catches the program's own error
    ("threads", bodies)              runs each body in a thread of its own
    ("use", variable, source)        creates a dataset from a source: ("session", numbers), ("topology", numbers),
                                     ("outer", numbers) for the outermost topology, or ("splits", label, n)
    ("nameless", variable, source)   like "use", but omits the required name (another thread began the enclosing
                                     block), so this raises an error
    ("act", variable, n)             runs an action: all rows, or the first n
    ("commit", name, source)         creates a dataset and commits it
    ("raise",)                       raises the program's own error

A body returns the results of its statements. Names are unique in a program, except that names of steps and topologies
are unique only within their enclosing block.
"""

import dataclasses
import inspect

import pyarrow as pa

from stagecrew.coordination.contract import Coordinator
from stagecrew.coordination.operator import Operator
from stagecrew.recovery.jobs.job import current_job

#: Whether `Operator.map` accepts a name.
SUPPORTS_NAMES = "name" in inspect.signature(Operator.map).parameters


class Tally(Coordinator):
    """Adds up the numbers that tasks send in events and requests, and adds 100 for each reset of a subtask.

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
    """Sends half of the task's number in an event and the rest in a request, and yields the reply."""
    assert next(gateway.events()) == "go"
    for batch in batches:
        (number,) = batch.column("v").to_pylist()
        gateway.send(number // 2)
        yield pa.record_batch({"v": [gateway.request(number - number // 2)]})


class Broken(Exception):
    """The error that a broken batch raises, once in each process."""


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What surrounds a statement: the enclosing topologies with their operators, and the datasets so far.

    A use must be named in two cases. First, its thread did not begin the innermost topology, step or batch (then
    `in_home_thread` is false). Second, this is true of an enclosing topology, and the operator was created outside that
    topology. Operators are counted from the outermost, the application's being 0. Uses of operators below
    `first_local_operator` are the second case.
    """

    topologies: tuple = ()
    datasets: dict = dataclasses.field(default_factory=dict)
    in_home_thread: bool = True
    first_local_operator: int = 0
    suffix: str = ""

    def within(self, **changes):
        return dataclasses.replace(self, datasets=dict(self.datasets), **changes)


class Runner:
    """Runs a program in one process.

    `backend` has the operations that real Spark and the simulation implement differently: `run_threads(calls)`;
    `numbers(values)`, which creates a dataset with one number in each partition; `stream(name, count, f)`, which runs a
    query that calls `f(number)` for each batch; `sink(name)`; and `write(key, value)`, which stores a value outside the
    process.
    """

    def __init__(self, backend, crew):
        self.backend, self.crew, self.job = backend, crew, current_job()

    def run_body(self, statements, surroundings):
        results = []
        for kind, *rest in statements:
            if (result := getattr(self, f"_{kind}")(surroundings, *rest)) is not None:
                results.append(result)
        return results

    def _topology(self, surroundings, name, body):
        with self.crew.topology(name) as topology:
            operator = topology.coordinate("o", Tally)
            around = (*surroundings.topologies, (topology, operator))
            first_local = surroundings.first_local_operator if surroundings.in_home_thread else len(around)
            return self.run_body(
                body, surroundings.within(topologies=around, in_home_thread=True, first_local_operator=first_local)
            )

    def _step(self, surroundings, name, body):
        return self.job.step(name, lambda: self.run_body(body, surroundings.within(in_home_thread=True)))

    def _stream(self, surroundings, name, count, wrapped, broken, outside_body, body):
        failing = [broken]

        def inside(number):
            results = self.run_body(body, surroundings.within(in_home_thread=True))
            if failing == [number]:
                failing.clear()
                raise Broken
            return results

        def foreach_batch(number):
            outside = self.run_body(outside_body, surroundings.within(in_home_thread=False, suffix=f"-{number}"))
            results = self.job.batch(name, number, lambda: inside(number))
            self.backend.write(f"{name}-{number}", [outside, results])

        function = surroundings.topologies[-1][0].wrap(foreach_batch) if wrapped else foreach_batch
        try:
            self.backend.stream(name, count, function)
        except Exception as error:
            if "job_programs.Broken" not in f"{type(error).__module__}.{type(error).__name__}: {error}":
                raise
            self.backend.stream(name, count, function)
        self.job.after_stream(name)

    def _try(self, surroundings, body):
        try:
            return self.run_body(body, surroundings.within())
        except ValueError as error:
            return str(error)

    def _threads(self, surroundings, bodies):
        def branch(body):
            return lambda: self.run_body(body, surroundings.within(in_home_thread=False))

        wrap = surroundings.topologies[-1][0].wrap if surroundings.topologies else lambda f: f
        return self.backend.run_threads([wrap(branch(body)) for body in bodies])

    def _use(self, surroundings, variable, source):
        operator_index = {"session": 0, "outer": 1}.get(source[0], len(surroundings.topologies))
        needs_no_name = surroundings.in_home_thread and operator_index >= surroundings.first_local_operator
        name_argument = {} if needs_no_name or not SUPPORTS_NAMES else {"name": f"{variable}{surroundings.suffix}"}
        surroundings.datasets[variable] = self._make_dataset(surroundings, source, name_argument)

    def _nameless(self, surroundings, variable, source):
        surroundings.datasets[variable] = self._make_dataset(surroundings, source, {})

    def _make_dataset(self, surroundings, source, name_argument):
        kind, *rest = source
        topology, operator = surroundings.topologies[-1] if surroundings.topologies else (None, None)
        if kind == "splits":
            label, count = rest
            splits = [f"{label}{number}" for number in range(count)]
            return topology.splits(
                splits, lambda split: [pa.record_batch({"s": [split]})], "s string", 2, **name_argument
            )
        if kind in ("session", "outer"):
            operator = self.crew.operator("c") if kind == "session" else surroundings.topologies[0][1]
        return operator.map(self.backend.numbers(*rest), add_number, "v long", **name_argument)

    def _act(self, surroundings, variable, limit):
        dataset = surroundings.datasets[variable] if limit is None else surroundings.datasets[variable].limit(limit)
        rows = [row[0] for row in dataset.collect()]
        if rows and isinstance(rows[0], str):  # the order of splits is not guaranteed
            return sorted(rows) if limit is None else [len(rows), *sorted({row.rstrip("0123456789") for row in rows})]
        return max(rows)

    def _commit(self, surroundings, name, source):
        topology, _ = surroundings.topologies[-1]
        self._use(surroundings, name, source)
        sink = self.backend.sink(f"{name}-{'text' if source[0] == 'splits' else 'number'}")
        return topology.commit(surroundings.datasets.pop(name), sink, name=name).rows

    def _raise(self, surroundings):
        raise ValueError("the program's own error")
