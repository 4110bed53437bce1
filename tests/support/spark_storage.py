"""Inspects Spark's storage through its own components: files on executors' disks, map outputs, cached datasets."""

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

from support.journal import rendezvous
from support.sessions import slots
from support.waiting import eventually

# Executors cannot import the tests, so the definitions of this module are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

_FOLDERS: dict[tuple[str, frozenset[str]], set[str]] = {}


def executor_ids(spark: SparkSession) -> list[str]:
    """Returns the ids of the current executors. The list is empty with a local master."""
    ids = spark.sparkContext._jsc.sc().getExecutorIds()
    return [ids.apply(i) for i in range(ids.size())]


def block_folders(spark: SparkSession, path: Path) -> set[str]:
    """Returns the folders in which the executors keep blocks. To find them, each executor runs a task."""
    context = spark.sparkContext
    local = context.master.startswith("local[")
    executors = [] if local else eventually(lambda: executor_ids(spark), 60, "an executor is registered")
    key = (context.applicationId, frozenset(executors))
    if key not in _FOLDERS:
        many = slots(context.master)
        if context.master.startswith("local-cluster"):  # some executors may have ended
            many = many * len(executors) // int(context.master[14 : context.master.index(",")])
        meet = rendezvous(str(path / uuid.uuid4().hex), "where", many)

        def where(rows: Any) -> Any:
            list(meet(rows))
            yield from os.environ["SPARK_LOCAL_DIRS"].split(",")

        _FOLDERS[key] = set(context.parallelize(range(many), many).mapPartitions(where).collect())
    return _FOLDERS[key]


def shuffle_files(spark: SparkSession, path: Path, pattern: str = "shuffle_*") -> list[str]:
    """Returns the names of the shuffle files (or of the files that match `pattern`) on the executors' disks."""
    return sorted(file.name for file in paths(spark, path, pattern))


def paths(spark: SparkSession, path: Path, pattern: str) -> list[Path]:
    """Returns the paths of the files that match a pattern on the executors' disks."""
    return [file for folder in block_folders(spark, path) for file in Path(folder).glob(f"*/{pattern}")]


def shuffle_bytes(spark: SparkSession, path: Path) -> int:
    """Returns how many bytes the shuffle files occupy on the executors' disks."""
    return sum(
        file.stat().st_size for folder in block_folders(spark, path) for file in Path(folder).glob("*/shuffle_*")
    )


def private_field(owner: Any, name: str) -> Any:
    """Returns a private field of a JVM object."""
    found = owner.getClass().getDeclaredField(name)
    found.setAccessible(True)
    return found.get(owner)


def tracker(spark: SparkSession) -> Any:
    """Returns Spark's MapOutputTracker."""
    return private_field(spark.sparkContext._jsc.sc().dagScheduler(), "mapOutputTracker")


def map_outputs(spark: SparkSession) -> dict[int, int]:
    """Returns the number of available map outputs for each shuffle that has any."""
    owner = tracker(spark)
    shuffles = owner.shuffleStatuses().keysIterator()
    found = {}
    while shuffles.hasNext():
        shuffle = shuffles.next()
        if count := owner.getNumAvailableOutputs(shuffle):
            found[shuffle] = count
    return found


@contextlib.contextmanager
def without_spark_events(spark: SparkSession) -> Iterator[None]:
    """Within the block, the driver's crew receives no Spark events, as if Spark's bus dropped all of them."""
    bus = spark.sparkContext._jsc.sc().listenerBus()
    (listener,) = [one for one in bus.listeners() if one.getClass().getName().endswith("stagecrew.driver.BusListener")]
    bus.removeListener(listener)
    try:
        yield
    finally:
        bus.addToManagementQueue(listener)


def forget_executors(crew: Any, topology: str) -> None:
    """Makes the driver forget all executors of a topology, so that none is notified when the topology ends."""
    one = private_field(private_field(crew.connection.facade, "crew"), "topologies").apply(topology)
    one.executors().clear()
    one.holders().clear()


def cached_rdds(spark: SparkSession) -> set[int]:
    """Returns the ids of the RDDs that have blocks according to the SparkContext.

    Spark may already have cleaned RDDs that nothing references.
    """
    return {info.id() for info in spark.sparkContext._jsc.sc().getRDDStorageInfo() if info.numCachedPartitions() > 0}


def cached_blocks(spark: SparkSession) -> list[str]:
    """Returns the cached blocks according to the driver's BlockManagerMaster, once per executor that has the block."""
    found = []
    for status in private_field(spark.sparkContext._jsc.sc().dagScheduler(), "blockManagerMaster").getStorageStatus():
        names = status.rddBlocks().keysIterator()
        while names.hasNext():
            found.append(names.next().name())
    return sorted(found)


def executed_plan(dataset: Any) -> str:
    """Returns the plan of the dataset's last action."""
    return str(dataset._jdf.queryExecution().executedPlan().toString())


def shuffle_handle(rdd: Any) -> str:
    """Returns the class name of the shuffle handle of an RDD's last shuffle. It determines the shuffle writer."""
    while True:
        dependency = rdd.dependencies().apply(0)
        if dependency.getClass().getSimpleName() == "ShuffleDependency":
            return str(dependency.shuffleHandle().getClass().getSimpleName())
        rdd = dependency.rdd()


def dropped_events(spark: SparkSession) -> int:
    """Returns how many events all queues of Spark's bus have dropped."""
    counters = spark.sparkContext._jsc.sc().listenerBus().metrics().metricRegistry().getCounters()
    return sum(counters.get(name).getCount() for name in counters.keySet() if name.endswith("numDroppedEvents"))


def run_and_count_tasks(spark: SparkSession, run: Any) -> tuple[Any, int]:
    """Returns the result of `run`, and the number of tasks that Spark ran for it."""
    context = spark.sparkContext
    group = uuid.uuid4().hex
    context.addJobTag(group)
    try:
        result = run()
    finally:
        context.removeJobTag(group)
    context._jsc.sc().listenerBus().waitUntilEmpty(60_000)  # the status store gets its tasks from the bus
    jobs = context._jsc.sc().statusStore().jobsList(None)
    matching = [jobs.apply(i) for i in range(jobs.size()) if group in str(jobs.apply(i).jobTags())]
    return result, sum(job.numCompletedTasks() for job in matching)
