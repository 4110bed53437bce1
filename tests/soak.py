"""Checks that a long-running session holds hardly more resources at the end than at the beginning.

The first part uses operators thousands of times in one topology, the second runs many topologies in one session. The
script samples the threads, file descriptors and memory of all processes, and compares the first quarter of the samples
with the last. `make soak` runs it; a test runs a short form.
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
from support.spark_home import use_spark_home
from support.waiting import eventually

#: Number of samples in one part.
SAMPLES = 20
#: The bytes that one use of an operator may keep: 2 kB, and the state of a splits coordinator with one split.
BYTES_PER_USE = 2048 + 2560


@dataclasses.dataclass
class Resources:
    """The resources of all processes of one kind.

    Memory is in MB. For a JVM it is the used heap after a garbage collection, otherwise the RSS.
    """

    threads: int = 0
    files: int = 0
    memory: float = 0.0

    def add(self, process: psutil.Process, memory: float | None = None) -> None:
        """Adds a process of this kind."""
        self.threads += process.num_threads()
        self.files += process.num_fds()
        self.memory += process.memory_info().rss / 2**20 if memory is None else memory


def sample(spark: Any) -> dict[str, Resources]:
    """Returns the resources of this process, its JVM, the executors, and the Python processes of the executors."""
    gc.collect()
    found = {kind: Resources() for kind in ("driver Python", "driver JVM", "executors", "workers and agents")}
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
    """Returns the used heap of a JVM after a garbage collection, in MB."""

    def jcmd(*arguments: str) -> str:
        return subprocess.run(["jcmd", str(pid), *arguments], capture_output=True, text=True, check=True).stdout

    jcmd("GC.run")
    return sum(int(used) for used in re.findall(r"used (\d+)K", jcmd("GC.heap_info").partition("Metaspace")[0])) / 1024


class Samples:
    """The samples of one part, and the durations of its checkpoints."""

    def __init__(self, spark: Any, total: int) -> None:
        self._spark, self._total = spark, total
        self._every = max(1, total // SAMPLES)
        self.samples: list[tuple[int, dict[str, Resources]]] = []
        self.checkpoints: list[float] = []
        self._began = time.monotonic()

    def at(self, number: int) -> None:
        """Takes a sample if it is due after `number` operations."""
        if number % self._every == 0:
            self.samples.append((number, sample(self._spark)))
            held = "  ".join(
                f"{kind}: {one.threads}/{one.files}/{one.memory:.0f} MB" for kind, one in self.samples[-1][1].items()
            )
            print(f"{number:6} of {self._total}, {time.monotonic() - self._began:5.0f} s  {held}", flush=True)

    def check_growth(self, bytes_per_use: int) -> tuple[list[str], dict[str, Any]]:
        """Returns the resources that grew too much, and the figures.

        `bytes_per_use` is how much memory the driver's Python may keep for each operation.
        """
        quarter = len(self.samples) // 4
        first, last = self.samples[1 : 1 + quarter], self.samples[-quarter:]
        grew, figures = [], {}
        for kind in first[0][1]:
            for what, slack in (("threads", 6), ("files", 12), ("memory", 24)):
                before = max(getattr(held[kind], what) for _, held in first)
                after = max(getattr(held[kind], what) for _, held in last)
                allowed = before * 1.1 + slack
                if (kind, what) == ("driver Python", "memory"):
                    allowed += bytes_per_use * (last[-1][0] - first[-1][0]) / 2**20
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
    """Sends one request to the coordinator for each batch."""
    for batch in batches:
        yield pa.record_batch({"id": [gateway.request(batch.num_rows)]})


def rows_of(split: int) -> Iterator[pa.RecordBatch]:
    """Yields one row."""
    yield pa.record_batch({"id": [split]})


def summed(steps: Any, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs one superstep."""
    yield pa.record_batch({"id": [steps.reduce(sum(batch.num_rows for batch in batches))]})


class Echo(stagecrew.Coordinator):
    """Returns each request."""

    def handle_request(self, evaluation: Any, request: Any) -> Any:
        """See `Coordinator`."""
        return request


def uses(spark: Any, folder: Path, total: int, run_one_in: int = 3) -> Samples:
    """Uses operators in one topology: splits, maps, commits and supersteps.

    Every commit runs. Of the other datasets, one in `run_one_in` runs.
    """
    course = Samples(spark, total)
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
def worker_listener(context: stagecrew.ListenerContext) -> Iterator[int]:
    """A listener that has nothing to close."""
    yield os.getpid()


@stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
def executor_listener(context: stagecrew.ListenerContext) -> Iterator[int]:
    """A listener with executor scope that has nothing to close."""
    yield os.getpid()


def key_with_listener(pool: Any) -> Callable[[int], tuple[int, int]]:
    """Returns a function for `map` that uses a listener."""
    return lambda number: (number % 2, pool.get())


def topologies(spark: Any, total: int) -> Samples:
    """Runs topologies one after the other, each with listeners, a shuffle, an operator and a dataset of splits."""
    course = Samples(spark, total)
    crew = stagecrew.crew(spark)
    for number in range(total):
        pool, wide = worker_listener(), executor_listener()
        with crew.topology(f"one-{number}", listeners=[pool, wide]) as topology:
            spark.sparkContext.parallelize(range(4), 2).map(key_with_listener(pool)).groupByKey(2).count()
            topology.splits([1], rows_of, "id long", parallelism=1).collect()
            topology.coordinate("echo", Echo).map(spark.range(0, 1, 1, 1), add_one, "id long").collect()
        assert topology.report.opens == topology.report.closes > 0
        course.at(number + 1)
    return course


def main(arguments: list[str] | None = None) -> int:
    """Runs both parts and prints the figures, at the end as JSON. Returns how many resources grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uses", type=int, default=10_000)
    parser.add_argument("--topologies", type=int, default=1_000)
    given = parser.parse_args(arguments)
    grew: list[str] = []
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("STAGECREW_TEST_FOLDER", folder)
        use_spark_home()
        builder = session_builder("local-cluster[1,2,1024]")
        # With small limits, Spark's own history of finished jobs reaches its limit early.
        for key in (
            "spark.ui.retainedJobs",
            "spark.ui.retainedStages",
            "spark.ui.retainedTasks",
            "spark.sql.ui.retainedExecutions",
        ):
            builder = builder.config(key, "50")
        spark = stagecrew.configure(builder.config("spark.executor.heartbeatInterval", "2s")).getOrCreate()
        try:
            for name, course, bytes_per_use in (
                ("uses", lambda: uses(spark, Path(folder) / "out", given.uses), BYTES_PER_USE),
                ("topologies", lambda: topologies(spark, given.topologies), 0),
            ):
                found, figures[name] = course().check_growth(bytes_per_use)
                grew += [f"{name}: {one}" for one in found]
            children = psutil.Process().children(recursive=True)
        finally:
            spark.stop()
        workers = [
            one for one in children if {"stagecrew.worker.agent", "stagecrew.worker.daemon"} & set(_command(one))
        ]
        eventually(
            lambda: not any(one.is_running() for one in workers), 60, "the Python processes of the executors end"
        )
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
