"""Simulates Spark and the threads of one driver process.

Stagecrew's own Python code in the driver and in tasks is real, except its threads, its connections and the driver's JVM.

Threads run one at a time, in an order that the seed determines. A process can be killed at numbered *points*, beginning
with 1. There is one point before and one point after each of these:

- a write to the store, and a write to the program's table of results
- a bind, and a call of a sink
- a message from a task (except CREDIT and ASK_HANDLED), and a frame to a task
- the end of a stream's batch in Spark's log
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
from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType

from stagecrew.coordination import operators
from stagecrew.coordination.host import Host
from stagecrew.coordination.operator import Operator
from stagecrew.session.application import Application
from stagecrew.session.crew import Crew
from stagecrew.testing.inline import InlineThreads, InlineTransport
from stagecrew.wire.frames import decode_all, encode
from stagecrew.worker import evaluations, task_gateway
from support.simulated_jobs import Killed

#: The state of the current thread: the lock that it waits for until its turn, its task, and its local properties.
CURRENT = threading.local()
TYPES = {"long": LongType(), "string": StringType()}


class ThreadScheduler:
    """Runs the threads of one process, one at a time.

    At point number `kill_at`, the process dies: each thread raises `Killed`, at the latest at its next turn.
    """

    def __init__(self, seed, kill_at=None):
        self.random, self.kill_at = random.Random(seed), kill_at
        self.points = []  # the names of all points so far
        self.dead = False
        self.ready = [_held_lock()]  # one lock for each thread that can run
        CURRENT.turn = self.ready[0]

    def point(self, what, *, switches=True):
        """Marks a point, at which the process can be killed, or switch to another of its threads."""
        if not self.dead:
            self.points.append(what)
            self.dead = len(self.points) == self.kill_at
        if self.dead:
            raise Killed
        if switches and len(self.ready) > 1 and (other := self.random.choice(self.ready)) is not CURRENT.turn:
            other.release()
            CURRENT.turn.acquire()
            if self.dead:
                raise Killed

    def run_threads(self, calls):
        """Runs each call in a thread of its own, and returns the results in the order of the calls.

        Waits until all calls have ended. If some failed, raises the error of the one that is first in `calls`. Raises
        `Killed` if the process was killed.
        """
        own_turn, outcomes = CURRENT.turn, {}

        def run(number, turn):
            CURRENT.turn, CURRENT.properties = turn, {}
            turn.acquire()
            try:
                outcomes[number] = (calls[number](), None)
            except BaseException as error:
                outcomes[number] = (None, error)
            self.ready.remove(turn)
            if len(outcomes) == len(calls):
                self.ready.append(own_turn)
            self.random.choice(self.ready).release()

        self.ready.remove(own_turn)
        turns = [_held_lock() for _ in calls]
        self.ready += turns
        for number, turn in enumerate(turns):
            threading.Thread(target=run, args=(number, turn), daemon=True).start()
        self.random.choice(self.ready).release()
        own_turn.acquire()
        if self.dead:
            raise Killed
        for _, (_, error) in sorted(outcomes.items()):
            if error is not None:
                raise error
        return [result for _, (result, _) in sorted(outcomes.items())]


def _held_lock():
    """Returns a new lock that is already held."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Executor:
    """Simulates the only executor. It connects the tasks and the driver, and runs the driver's threads.

    Coordinators run while a task or the driver waits, and after each `collect`.
    """

    is_broken = False
    welcome = types.MappingProxyType({"host": "here"})

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.changed = threading.Condition()
        self.gateways = {}
        self._running = False
        self._transport = InlineTransport(self.deliver)
        self.threads = InlineThreads(self.run, self._later)
        self.host = Host(self._transport, 1 << 20, 30.0, lambda: 0.0)

    # -- The connection of the tasks

    def add(self, gateway):
        self.gateways[gateway.id] = gateway

    def remove(self, gateway):
        self.gateways.pop(gateway.id, None)

    def send(self, *pieces):
        frames = b"".join(pieces)
        kinds = " ".join(frame.kind for frame in decode_all(frames) if frame.kind not in ("CREDIT", "ASK_HANDLED"))
        # The simulated driver needs no CREDIT and ASK_HANDLED. A generator can be closed after its process was killed.
        if not kinds or self.scheduler.dead:
            return
        self.scheduler.point(f"before {kinds}")
        self.host.received("1", frames)
        self.scheduler.point(f"after {kinds}")

    def wait(self, find, seconds):
        self.run()
        if (result := find()) is None:
            raise AssertionError("this task is waiting for a frame that never arrives")
        return result

    # -- The threads and timers of the driver

    def run(self):
        """Runs all pending calls of coordinators, and delivers the frames that coordinators send."""
        if self._running:
            return  # the outer call continues with the new work
        self._running = True
        try:
            busy = True
            while busy:
                busy = False
                for loop in self.scheduler.random.sample(self.threads.loops, len(self.threads.loops)):
                    busy |= loop.run()
                busy |= self._transport.deliver_all()
        finally:
            self._running = False

    def _later(self, seconds, call):
        raise AssertionError("no coordinator here uses a timer")

    def deliver(self, frame):
        """Delivers a frame to a task. Events enter its mailbox immediately, and are acknowledged."""
        if (gateway := self.gateways.get(frame["evaluation"])) is None:
            return
        self.scheduler.point(f"before {frame.kind} to a task", switches=False)
        gateway._handle(frame)
        if frame.kind == "EVENTS":
            last = frame["first"] + len(frame["payloads"]) - 1
            self.host.received("1", encode("ACCEPTED", evaluation=gateway.id, sequence=last))
        self.scheduler.point(f"after {frame.kind} to a task", switches=False)


def parsed_schema(text):
    """Reads a schema as Spark's JVM does, for the few types that programs use."""
    pairs = [field.split() for field in text.split(",")]
    return StructType([StructField(name, TYPES[type_]) for name, type_ in pairs])


class Dataset:
    """Simulates a DataFrame. Each action computes the partitions again with `make(number)`.

    `collect` without a limit computes several partitions in concurrent tasks, and otherwise one after the other.
    """

    def __init__(self, spark, count, make, schema):
        self.spark, self.partitions, self.make = spark, count, make
        self.schema = parsed_schema(schema) if isinstance(schema, str) else schema

    def withColumn(self, name, _):  # only for `spark_partition_id()`; the schema stays as it is
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
            parts = self.spark.scheduler.run_threads([functools.partial(self._task, number) for number in every])
        else:
            parts, remaining = [], limit
            for number in every:
                parts.append(self._task(number, remaining))
                if remaining is not None and (remaining := remaining - len(parts[-1])) <= 0:
                    break
        self.spark.executor.run()
        return [Row(**row) for part in parts for row in part]

    def _task(self, number, limit=None):
        CURRENT.task = Task(number, next(self.spark.attempts))
        rows = []
        for batch in (batches := self.make(number)):
            rows += batch.to_pylist()
            if limit is not None and len(rows) >= limit:
                batches.close()  # as Spark does when it has enough rows
                return rows[:limit]
        return rows


class Task:
    """Simulates a TaskContext."""

    def __init__(self, partition, attempt):
        self.partitionId, self.taskAttemptId = (lambda: partition), (lambda: attempt)
        self.attemptNumber = self.stageId = lambda: 0
        self.getLocalProperty = lambda _: "address file"


class Facade:
    """Simulates the driver's JVM. It responds as if no task of a closing topology were running."""

    def __getattr__(self, name):
        report = '{"topologies": []}'
        responses = {"closeTimeoutMs": 1000, "activity": '{"isComplete": true}', "report": report, "end": report}
        return lambda *_: responses.get(name)


class Spark:
    """Simulates the SparkContext and the SparkSession of one process.

    `log` is Spark's log of streams: it maps the name of a stream to the number of its last completed batch.
    """

    master, environment, _python_includes, _jsc = "local[2]", {}, (), True

    def __init__(self, scheduler, log):
        self.scheduler, self.log = scheduler, log
        self.executor = Executor(scheduler)
        self.attempts = itertools.count(1)
        self.sparkContext = self

    def getConf(self):
        return {}

    def getLocalProperty(self, key):
        return CURRENT.properties.get(key)

    def setLocalProperty(self, key, value):
        CURRENT.properties[key] = value

    def addJobTag(self, tag):
        pass

    def removeJobTag(self, tag):
        pass

    def stop(self):
        pass

    def range(self, start, end, step, partitions):
        numbers = range(start, end, step)

        def make(number):
            own_numbers = numbers[len(numbers) * number // partitions : len(numbers) * (number + 1) // partitions]
            yield pa.record_batch({"v": pa.array(own_numbers, pa.int64())})

        return Dataset(self, partitions, make, "v long")

    def stream(self, name, batches, f):
        """Runs a streaming query with `foreachBatch` to its end. It starts after the last completed batch in `log`."""
        properties = dict(CURRENT.properties)

        def run():
            CURRENT.properties = properties
            for number in range(self.log.get(name, -1) + 1, batches):
                f(number)
                self.scheduler.point("before Spark's log")
                self.log[name] = number
                self.scheduler.point("after Spark's log")

        self.scheduler.run_threads([run])


@contextlib.contextmanager
def process(scheduler, log, coordinators):
    """Simulates a driver process with a Spark session. Yields the crew."""
    CURRENT.properties = {}
    spark = Spark(scheduler, log)
    bound = Operator.bound

    def bound_at_points(self, *args, **kwargs):
        scheduler.point("before bind")
        made = bound(self, *args, **kwargs)
        scheduler.point("after bind")
        return made

    with contextlib.ExitStack() as patches:
        for owner, name, value in [
            (SparkContext, "_active_spark_context", spark),
            (SparkSession, "getActiveSession", lambda: spark),
            (functions, "spark_partition_id", lambda: None),
            (DataType, "fromDDL", parsed_schema),
            (TaskContext, "get", lambda: CURRENT.task),
            (evaluations, "connected", lambda _: spark.executor),
            (task_gateway, "_FLUSH_DELAY", -1.0),  # the gateway sends messages immediately, not in a thread
            (operators, "Threads", lambda: spark.executor.threads),
            (Operator, "bound", bound_at_points),
        ]:
            patches.callback(setattr, owner, name, owner.__dict__[name])
            setattr(owner, name, value)
        application = Application(coordinators)
        crew = spark._stagecrew = Crew(spark, Facade())
        crew.connection._channel = spark.executor
        crew._register((), application)
        yield crew
