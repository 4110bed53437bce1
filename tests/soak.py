"""A session that works for a long time: in the end it must hold no more than in the beginning.

One topology with thousands of uses of operators, and one session with many topologies. Threads, file descriptors and memory of all
processes are sampled, and the first quarter is compared with the last. Run by `make soak`, and in a short form by a test.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

import stagecrew
from stagecrew.operators.sinks import ParquetSink
from support.sessions import session_builder
from support.waiting import eventually

#: How often it is looked in the course of one part.
SAMPLES = 20
#: What one use may keep, in bytes: 2 kB, and the state of a coordinator of splits with one split.
USE = 2048 + 2560


@dataclasses.dataclass
class Held:
    """Resources of the processes of one kind. Memory in MB: of a JVM the used heap after a collection, else resident."""

    threads: int = 0
    files: int = 0
    memory: float = 0.0

    def add(self, process: psutil.Process, memory: float | None = None) -> None:
        """One more process of the kind."""
        self.threads += process.num_threads()
        self.files += process.num_fds()
        self.memory += process.memory_info().rss / 2**20 if memory is None else memory


def sample(spark: Any) -> dict[str, Held]:
    """The resources of this process, its JVM, the executors, and all Python processes of the executors now."""
    gc.collect()
    found = {kind: Held() for kind in ("driver Python", "driver JVM", "executors", "workers and agents")}
    me = psutil.Process()
    found["driver Python"].add(me)
    jvm = spark.sparkContext._jvm
    for _ in range(2):
        jvm.System.gc()
    heap = jvm.java.lang.management.ManagementFactory.getMemoryMXBean().getHeapMemoryUsage().getUsed() / 2**20
    for process in me.children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            if "CoarseGrainedExecutorBackend" in command:
                found["executors"].add(process, heap_of(process.pid))
            elif "org.apache.spark.deploy.SparkSubmit" in command:
                found["driver JVM"].add(process, heap)
            elif "stagecrew.worker.agent" in command or "stagecrew.worker.daemon" in command:
                found["workers and agents"].add(process)
        except psutil.NoSuchProcess:
            continue
    return found


def heap_of(pid: int) -> float:
    """The used heap of a JVM after a collection, in MB."""

    def jcmd(*arguments: str) -> str:
        return subprocess.run(["jcmd", str(pid), *arguments], capture_output=True, text=True, check=True).stdout

    jcmd("GC.run")
    return sum(int(used) for used in re.findall(r"used (\d+)K", jcmd("GC.heap_info").partition("Metaspace")[0])) / 1024


class Course:
    """Samples of one part, and how long checkpoints took."""

    def __init__(self, spark: Any, total: int) -> None:
        self._spark, self._total = spark, total
        self._every = max(1, total // SAMPLES)
        self.samples: list[tuple[int, dict[str, Held]]] = []
        self.checkpoints: list[float] = []
        self._began = time.monotonic()

    def at(self, number: int) -> None:
        """This many are done."""
        if number % self._every == 0:
            self.samples.append((number, sample(self._spark)))
            held = "  ".join(
                f"{kind}: {one.threads}/{one.files}/{one.memory:.0f} MB" for kind, one in self.samples[-1][1].items()
            )
            print(f"{number:6} of {self._total}, {time.monotonic() - self._began:5.0f} s  {held}", flush=True)

    def verdict(self, each: int) -> tuple[list[str], dict[str, Any]]:
        """The resources that grew too much, and the figures. `each` is what one more may keep in the driver's Python, in bytes."""
        quarter = len(self.samples) // 4
        first, last = self.samples[1 : 1 + quarter], self.samples[-quarter:]
        grew, figures = [], {}
        for kind in first[0][1]:
            for what, slack in (("threads", 6), ("files", 12), ("memory", 24)):
                before = max(getattr(held[kind], what) for _, held in first)
                after = max(getattr(held[kind], what) for _, held in last)
                allowed = before * 1.1 + slack
                if (kind, what) == ("driver Python", "memory"):
                    allowed += each * (last[-1][0] - first[-1][0]) / 2**20
                figures[f"{kind}, {what}"] = (round(before, 1), round(after, 1))
                if after > allowed:
                    grew.append(f"{what} of {kind}: {before:.1f} in the first quarter, {after:.1f} in the last")
        if self.checkpoints:
            some = max(1, len(self.checkpoints) // 4)
            figures["checkpoint, ms"] = tuple(
                round(1000 * sorted(part)[len(part) // 2], 1)
                for part in (self.checkpoints[:some], self.checkpoints[-some:])
            )
        return grew, figures


def add_one(gateway: Any, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A task that asks its coordinator once for each batch."""
    for batch in batches:
        yield pa.record_batch({"id": [gateway.request(batch.num_rows)]})


def rows_of(split: int) -> Iterator[pa.RecordBatch]:
    """One row."""
    yield pa.record_batch({"id": [split]})


def summed(steps: Any, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """One superstep."""
    yield pa.record_batch({"id": [steps.reduce(sum(batch.num_rows for batch in batches))]})


class Echo(stagecrew.Coordinator):
    """Returns each request."""

    def handle_request(self, evaluation: Any, request: Any) -> Any:
        """See `Coordinator`."""
        return request


def uses(spark: Any, folder: Path, total: int, run_one_in: int = 3) -> Course:
    """Uses of operators in one topology: splits, maps, commits and supersteps, of which commits and one in a few others run."""
    course = Course(spark, total)
    one = spark.range(0, 1, 1, 1)
    with stagecrew.crew(spark).topology("soak") as topology:
        echo = topology.coordinate("echo", Echo)
        kinds: list[Callable[[int], Any]] = [
            lambda number: topology.splits(iter([number]), rows_of, "id long", parallelism=1),
            lambda number: echo.map(one, add_one, "id long"),
            lambda number: topology.commit(one, ParquetSink(str(folder / str(number)))),
            lambda number: topology.supersteps(one, summed, "id long"),
            lambda number: topology.splits([number], rows_of, "id long", parallelism=1),
        ]
        for number in range(total):
            made = kinds[number % len(kinds)](number)
            if number // len(kinds) % run_one_in == 0 and hasattr(made, "collect"):
                assert len(made.collect()) == 1
            if number % 50 == 0:
                began = time.monotonic()
                topology.checkpoint()
                course.checkpoints.append(time.monotonic() - began)
            course.at(number + 1)
    return course


@stagecrew.resource
def something(context: stagecrew.ListenerContext) -> Iterator[int]:
    """A listener that has nothing to close."""
    yield os.getpid()


@stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
def something_wide(context: stagecrew.ListenerContext) -> Iterator[int]:
    """One of the executor's scope."""
    yield os.getpid()


def keyed(pool: Any) -> Callable[[int], tuple[int, int]]:
    """A function for `map` that uses a listener."""
    return lambda number: (number % 2, pool.get())


def topologies(spark: Any, total: int) -> Course:
    """Topologies one after the other, each with listeners, a shuffle, an operator and a dataset of splits."""
    course = Course(spark, total)
    crew = stagecrew.crew(spark)
    for number in range(total):
        pool, wide = something(), something_wide()
        with crew.topology(f"one-{number}", listeners=[pool, wide]) as topology:
            spark.sparkContext.parallelize(range(4), 2).map(keyed(pool)).groupByKey(2).count()
            topology.splits([1], rows_of, "id long", parallelism=1).collect()
            topology.coordinate("echo", Echo).map(spark.range(0, 1, 1, 1), add_one, "id long").collect()
        assert topology.report.opens == topology.report.closes > 0
        course.at(number + 1)
    return course


def main(arguments: list[str] | None = None) -> int:
    """Runs both parts and prints the figures, as JSON at last. Returns how many things grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uses", type=int, default=10_000)
    parser.add_argument("--topologies", type=int, default=1_000)
    given = parser.parse_args(arguments)
    grew: list[str] = []
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("STAGECREW_TEST_FOLDER", folder)
        builder = session_builder("local-cluster[1,2,1024]")
        # What Spark itself keeps of jobs that have ended reaches its bound early.
        for kept in (
            "spark.ui.retainedJobs",
            "spark.ui.retainedStages",
            "spark.ui.retainedTasks",
            "spark.sql.ui.retainedExecutions",
        ):
            builder = builder.config(kept, "50")
        spark = stagecrew.configure(builder.config("spark.executor.heartbeatInterval", "2s")).getOrCreate()
        try:
            for name, course, each in (
                ("uses", lambda: uses(spark, Path(folder) / "out", given.uses), USE),
                ("topologies", lambda: topologies(spark, given.topologies), 0),
            ):
                found, figures[name] = course().verdict(each)
                grew += [f"{name}: {one}" for one in found]
            children = psutil.Process().children(recursive=True)
        finally:
            spark.stop()
        workers = [
            one for one in children if {"stagecrew.worker.agent", "stagecrew.worker.daemon"} & set(_command(one))
        ]
        eventually(lambda: not any(one.is_running() for one in workers), 60, "Python processes of executors end")
        eventually(
            lambda: not [one.name for one in threading.enumerate() if one.name.startswith("stagecrew-")],
            30,
            "threads end",
        )
    print(json.dumps({"grew": grew, "figures": figures}))
    return len(grew)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


if __name__ == "__main__":
    sys.exit(main())
