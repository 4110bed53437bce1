"""What Spark has stored, as its own parts know it: files on the executors' disks, outputs in the tracker, cached datasets."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import SparkSession

from crewtools import eventually, slots, together

# Executors do not have the tests: what is defined here travels by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

_FOLDERS: dict[tuple[str, frozenset[str]], set[str]] = {}


def executors(spark: SparkSession) -> list[str]:
    """Those that Spark has now; none in a local master."""
    ids = spark.sparkContext._jsc.sc().getExecutorIds()
    return [ids.apply(i) for i in range(ids.size())]


def folders(spark: SparkSession, path: Path) -> set[str]:
    """Where its executors keep blocks. All of them run a task at once to say so."""
    context = spark.sparkContext
    local = context.master.startswith("local[")
    here = [] if local else eventually(lambda: executors(spark), 60, "an executor comes")
    key = (context.applicationId, frozenset(here))
    if key not in _FOLDERS:
        many = slots(context.master)
        if context.master.startswith("local-cluster"):  # of which an executor may have left
            many = many * len(here) // int(context.master[14 : context.master.index(",")])
        meet = together(str(path / uuid.uuid4().hex), "where", many)

        def where(rows: Any) -> Any:
            list(meet(rows))
            yield from os.environ["SPARK_LOCAL_DIRS"].split(",")

        _FOLDERS[key] = set(context.parallelize(range(many), many).mapPartitions(where).collect())
    return _FOLDERS[key]


def files(spark: SparkSession, path: Path, pattern: str = "shuffle_*") -> list[str]:
    """The names of shuffle files, or of others, on the disks of its executors."""
    return sorted(file.name for file in paths(spark, path, pattern))


def paths(spark: SparkSession, path: Path, pattern: str) -> list[Path]:
    """Files on the disks of its executors."""
    return [file for folder in folders(spark, path) for file in Path(folder).glob(f"*/{pattern}")]


def size(spark: SparkSession, path: Path) -> int:
    """How many bytes shuffle files take on the disks of its executors."""
    return sum(file.stat().st_size for folder in folders(spark, path) for file in Path(folder).glob("*/shuffle_*"))


def field(of: Any, name: str) -> Any:
    """A private field of an object of the JVM."""
    found = of.getClass().getDeclaredField(name)
    found.setAccessible(True)
    return found.get(of)


def tracker(spark: SparkSession) -> Any:
    """Spark's MapOutputTracker."""
    return field(spark.sparkContext._jsc.sc().dagScheduler(), "mapOutputTracker")


def outputs(spark: SparkSession) -> dict[int, int]:
    """How many outputs of each shuffle the tracker has; none that has none."""
    of = tracker(spark)
    shuffles = of.shuffleStatuses().keysIterator()
    found = {}
    while shuffles.hasNext():
        shuffle = shuffles.next()
        if count := of.getNumAvailableOutputs(shuffle):
            found[shuffle] = count
    return found


@contextlib.contextmanager
def deaf(spark: SparkSession) -> Iterator[None]:
    """The driver's crew hears no event of Spark's meanwhile, as when the bus drops them all."""
    bus = spark.sparkContext._jsc.sc().listenerBus()
    (listener,) = [one for one in bus.listeners() if one.getClass().getName().endswith("stagecrew.driver.BusListener")]
    bus.removeListener(listener)
    try:
        yield
    finally:
        bus.addToManagementQueue(listener)


def end_reaches_nobody(crew: Any, topology: str) -> None:
    """No executor will be told that the topology ends."""
    one = field(field(crew.facade, "crew"), "topologies").apply(topology)
    one.executors().clear()
    one.holders().clear()


def cached(spark: SparkSession) -> set[int]:
    """The datasets of which the SparkContext says that they have blocks. Spark may clean those that nobody holds."""
    return {info.id() for info in spark.sparkContext._jsc.sc().getRDDStorageInfo() if info.numCachedPartitions() > 0}


def blocks(spark: SparkSession) -> list[str]:
    """The blocks of cached datasets by the driver's BlockManagerMaster itself, each as often as there are executors with it."""
    found = []
    for status in field(spark.sparkContext._jsc.sc().dagScheduler(), "blockManagerMaster").getStorageStatus():
        names = status.rddBlocks().keysIterator()
        while names.hasNext():
            found.append(names.next().name())
    return sorted(found)


def plan(dataset: Any) -> str:
    """The plan by which its last action ran."""
    return str(dataset._jdf.queryExecution().executedPlan().toString())


def shuffle_handle(rdd: Any) -> str:
    """The class by which Spark's manager has chosen the writer of the last shuffle of an RDD of the JVM."""
    while True:
        dependency = rdd.dependencies().apply(0)
        if dependency.getClass().getSimpleName() == "ShuffleDependency":
            return str(dependency.shuffleHandle().getClass().getSimpleName())
        rdd = dependency.rdd()


def dropped_events(spark: SparkSession) -> int:
    """How many events Spark's bus has dropped, on all of its queues."""
    counters = spark.sparkContext._jsc.sc().listenerBus().metrics().metricRegistry().getCounters()
    return sum(counters.get(name).getCount() for name in counters.keySet() if name.endswith("numDroppedEvents"))


def ran(spark: SparkSession, run: Any) -> tuple[Any, int]:
    """What this answers, and how many tasks Spark ran for it."""
    context = spark.sparkContext
    group = uuid.uuid4().hex
    context.addJobTag(group)
    try:
        answer = run()
    finally:
        context.removeJobTag(group)
    context._jsc.sc().listenerBus().waitUntilEmpty(60_000)  # by which the status store hears of tasks
    jobs = context._jsc.sc().statusStore().jobsList(None)
    mine = [jobs.apply(i) for i in range(jobs.size()) if group in str(jobs.apply(i).jobTags())]
    return answer, sum(job.numCompletedTasks() for job in mine)
