"""Spark, and the threads of one driver process, simulated; crew, topologies, operators, coordinators and the tasks' side are real.

Threads run one at a time, in an order that a seed draws. A process can be killed at its points, which are counted from 1: before and
after each store write, bind, message of a task, event and reply of a coordinator, call of a sink, and write of a stream's log.
"""

import contextlib
import functools
import itertools
import random
import threading
import types

import pyarrow as pa
from pyspark import SparkContext, TaskContext
from pyspark.sql import Row, SparkSession, functions
from pyspark.sql.types import LongType, StringType, StructField, StructType

from jobsim import Killed
from stagecrew.coordination import operators
from stagecrew.coordination.host import Host
from stagecrew.coordination.operator import Operator
from stagecrew.session.application import Application
from stagecrew.session.crew import Crew
from stagecrew.testing.inline import InlineThreads, InlineTransport
from stagecrew.wire.frames import decode_all, encode
from stagecrew.worker import evaluations

#: Of the running thread: its turn, its task, and the local properties that Spark knows of it.
HERE = threading.local()
TYPES = {"long": LongType(), "string": StringType()}


class Turns:
    """The threads of one process, which run one at a time; all end at the point of this number."""

    def __init__(self, seed, kill=None):
        self.random, self.kill = random.Random(seed), kill
        self.points = []  # what each was
        self.dead = False
        self.ready = [_turn()]  # of each thread that can go on, a lock that it waits for
        HERE.turn = self.ready[0]

    def point(self, what, *, switches=True):
        """The process may end here; else another of its threads may go on."""
        if not self.dead:
            self.points.append(what)
            self.dead = len(self.points) == self.kill
        if self.dead:
            raise Killed
        if switches and len(self.ready) > 1 and (other := self.random.choice(self.ready)) is not HERE.turn:
            other.release()
            HERE.turn.acquire()
            if self.dead:
                raise Killed

    def together(self, calls):
        """What each of these returns, in a thread of its own; raises the first error, in their order, when all have ended."""
        mine, found = HERE.turn, {}

        def run(number, turn):
            HERE.turn, HERE.properties = turn, {}
            turn.acquire()
            try:
                found[number] = (calls[number](), None)
            except BaseException as error:
                found[number] = (None, error)
            self.ready.remove(turn)
            if len(found) == len(calls):
                self.ready.append(mine)
            self.random.choice(self.ready).release()

        self.ready.remove(mine)
        turns = [_turn() for _ in calls]
        self.ready += turns
        for number, turn in enumerate(turns):
            threading.Thread(target=run, args=(number, turn), daemon=True).start()
        self.random.choice(self.ready).release()
        mine.acquire()
        if self.dead:
            raise Killed
        for _, (_, error) in sorted(found.items()):
            if error is not None:
                raise error
        return [result for _, (result, _) in sorted(found.items())]


def _turn():
    """A lock that is taken."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Executor:
    """The one executor: the connection of all its tasks, and the driver's way to it. Coordinators run when somebody waits."""

    is_broken = False
    welcome = types.MappingProxyType({"host": "here"})

    def __init__(self, turns):
        self.turns = turns
        self.changed = threading.Condition()
        self.gateways = {}
        self._running = False
        self._transport = InlineTransport(self.deliver)
        self.threads = InlineThreads(self.run, self._later)
        self.host = Host(self._transport, 1 << 20, 30.0, lambda: 0.0)

    # -- The tasks' connection

    def add(self, gateway):
        self.gateways[gateway.id] = gateway

    def remove(self, gateway):
        self.gateways.pop(gateway.id, None)

    def send(self, frames):
        kinds = " ".join(frame.kind for frame in decode_all(frames) if frame.kind not in ("CREDIT_REQUEST", "CREDIT"))
        if not kinds or self.turns.dead:  # a generator may be closed when its process has ended
            return
        self.turns.point(f"before {kinds}")
        self.host.received("1", frames)
        self.turns.point(f"after {kinds}")

    def wait(self, found, seconds):
        self.run()
        if (result := found()) is None:
            raise AssertionError("what this task waits for never comes")
        return result

    # -- The threads and timers of the driver's side

    def run(self):
        """Makes all calls of coordinators, and delivers their events."""
        if self._running:
            return  # the outer call continues with it
        self._running = True
        try:
            busy = True
            while busy:
                busy = False
                for loop in self.turns.random.sample(self.threads.loops, len(self.threads.loops)):
                    busy |= loop.run()
                busy |= self._transport.deliver_all()
        finally:
            self._running = False

    def _later(self, seconds, call):
        raise AssertionError("no coordinator here uses a timer")

    def deliver(self, frame):
        """A frame for a task: an event is in its mailbox at once, and acknowledged."""
        if (gateway := self.gateways.get(frame["evaluation"])) is None:
            return
        self.turns.point(f"before {frame.kind} to a task", switches=False)
        gateway.took(frame)
        if frame.kind == "EVENTS":
            last = frame["first"] + len(frame["payloads"]) - 1
            self.host.received("1", encode("ACCEPTED", evaluation=gateway.id, sequence=last))
        self.turns.point(f"after {frame.kind} to a task", switches=False)


class Dataset:
    """A DataFrame: each action computes its partitions again, `make(number)`, in tasks that run at once."""

    def __init__(self, spark, count, make, schema):
        self.spark, self.partitions, self.make = spark, count, make
        pairs = [field.split() for field in schema.split(",")]
        self.schema = StructType([StructField(name, TYPES[type_]) for name, type_ in pairs])

    def withColumn(self, name, _):
        def make(number):
            for batch in self.make(number):
                yield batch.append_column(name, pa.array([number] * batch.num_rows, pa.int32()))

        return Dataset(self.spark, self.partitions, make, "v long")

    def mapInArrow(self, f, schema):
        return Dataset(self.spark, self.partitions, lambda number: f(self.make(number)), schema)

    def limit(self, rows):
        return types.SimpleNamespace(collect=lambda: self.collect(rows))

    def collect(self, limit=None):
        every = range(self.partitions)
        if limit is None and self.partitions > 1:
            parts = self.spark.turns.together([functools.partial(self._task, number) for number in every])
        else:
            parts, left = [], limit
            for number in every:
                parts.append(self._task(number, left))
                if left is not None and (left := left - len(parts[-1])) <= 0:
                    break
        self.spark.executor.run()
        return [Row(**row) for part in parts for row in part]

    def _task(self, number, limit=None):
        HERE.task = Task(number, next(self.spark.attempts))
        rows = []
        for batch in (batches := self.make(number)):
            rows += batch.to_pylist()
            if limit is not None and len(rows) >= limit:
                batches.close()  # Spark needs no more
                return rows[:limit]
        return rows


class Task:
    """A TaskContext."""

    def __init__(self, partition, attempt):
        self.partitionId, self.taskAttemptId = (lambda: partition), (lambda: attempt)
        self.attemptNumber = self.stageId = lambda: 0
        self.getLocalProperty = lambda _: "place"


class Facade:
    """The replies of the driver's JVM: nothing of a topology that ends is running."""

    def __getattr__(self, name):
        answers = {"closeTimeoutMs": 1000, "activity": "{}", "report": '{"topologies": []}', "awaitEnd": True}
        return lambda *_: answers.get(name)


class Spark:
    """The context and the session of one process, over its threads. `log` has the last batch that each stream has done."""

    master, environment, _python_includes, _jsc = "local[2]", {}, (), True

    def __init__(self, turns, log):
        self.turns, self.log = turns, log
        self.executor = Executor(turns)
        self.attempts = itertools.count(1)
        self.sparkContext = self

    def getConf(self):
        return {}

    def getLocalProperty(self, key):
        return HERE.properties.get(key)

    def setLocalProperty(self, key, value):
        HERE.properties[key] = value

    def addJobTag(self, tag):
        pass

    def removeJobTag(self, tag):
        pass

    def stop(self):
        pass

    def range(self, start, end, step, partitions):
        numbers = range(start, end, step)

        def make(number):
            mine = numbers[len(numbers) * number // partitions : len(numbers) * (number + 1) // partitions]
            yield pa.record_batch({"v": pa.array(mine, pa.int64())})

        return Dataset(self, partitions, make, "v long")

    def stream(self, name, batches, f):
        """A streaming query with `foreachBatch`, to its end: it begins with the batch after the last one in Spark's log."""
        properties = dict(HERE.properties)

        def run():
            HERE.properties = properties
            for number in range(self.log.get(name, -1) + 1, batches):
                f(number)
                self.turns.point("before Spark's log")
                self.log[name] = number
                self.turns.point("after Spark's log")

        self.turns.together([run])


@contextlib.contextmanager
def process(turns, log, coordinators):
    """A driver process with its session: answers the crew. Whatever is killed ends here."""
    HERE.properties = {}
    spark = Spark(turns, log)
    bound = Operator.bound

    def bound_at_points(self, *args, **kwargs):
        turns.point("before bind")
        made = bound(self, *args, **kwargs)
        turns.point("after bind")
        return made

    with contextlib.ExitStack() as patches:
        for owner, name, value in [
            (SparkContext, "_active_spark_context", spark),
            (SparkSession, "getActiveSession", lambda: spark),
            (functions, "spark_partition_id", lambda: None),
            (TaskContext, "get", lambda: HERE.task),
            (evaluations, "connected", lambda _: spark.executor),
            (evaluations, "_PAUSE", -1.0),  # nothing is kept back, by no thread of a gateway's own
            (operators, "Threads", lambda: spark.executor.threads),
            (Operator, "bound", bound_at_points),
        ]:
            patches.callback(setattr, owner, name, owner.__dict__[name])
            setattr(owner, name, value)
        application = Application(coordinators)
        crew = spark._stagecrew = Crew(spark, Facade())
        crew.connection._channel = spark.executor
        crew.register((), application)
        yield crew
