"""Partitions are released while executors start, migrate outputs, leave and die. Each test has its own session."""

from __future__ import annotations

import operator
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import stagecrew
from support.clusters import shuffle_service
from support.coordination import executor_pid
from support.driver_scripts import driver_script, java_processes
from support.journal import Journal, rendezvous
from support.processes import kill
from support.sessions import LOCAL, LOCAL_CLUSTER, session_builder
from support.shuffle_datasets import EXPECTED, summed_rdd
from support.spark_storage import (
    block_folders,
    cached_blocks,
    cached_rdds,
    dropped_events,
    executor_ids,
    map_outputs,
    shuffle_files,
)
from support.waiting import eventually

TWO_EXECUTORS = "local-cluster[2,1,1024]"


def shuffle_files_in(directories: set[str]) -> list[str]:
    """The names of the shuffle files in these directories."""
    return sorted(file.name for place in directories for file in Path(place).glob("*/shuffle_*"))


def tables_are_empty(crew) -> bool:
    """Whether the partition table of every executor is empty."""
    return not [one for one in crew.partitions() if one.outputs or one.blocks or one.in_progress]


def test_everything_is_released_when_the_bus_drops_nearly_every_event(sessions, tmp_path):
    """When Spark's bus drops nearly every event, the tables, the disks and the tracker still end empty."""
    spark = sessions.get(LOCAL_CLUSTER, spark__scheduler__listenerbus__eventqueue__capacity="1")
    crew = stagecrew.crew(spark)
    datasets = []
    for i in range(6):
        with crew.topology(f"t{i}", release="all"):
            datasets += [summed_rdd(spark), summed_rdd(spark).cache()]
            for dataset in datasets[-2:]:
                assert sorted(dataset.collect()) == EXPECTED
            if i % 2:
                with crew.topology("inner"):
                    assert sorted(datasets[-3].collect()) == EXPECTED
    eventually(lambda: tables_are_empty(crew), 30, "the tables are empty")
    eventually(lambda: not shuffle_files(spark, tmp_path) and not map_outputs(spark), 30, "everything is released")
    assert not cached_rdds(spark)
    assert not cached_blocks(spark)
    assert dropped_events(spark) > 0


#: Dynamic allocation must remove the executors within this many seconds. Plain Spark must keep them that long.
REMOVAL_SECONDS = 10


@pytest.mark.long
def test_executors_of_ended_topologies_are_removed_by_dynamic_allocation(sessions, tmp_path):
    """Dynamic allocation removes the executors of ended topologies within seconds, despite shuffle tracking.

    Plain Spark keeps executors that have shuffle outputs.
    """
    settings = {
        "spark__dynamicAllocation__enabled": "true",
        "spark__dynamicAllocation__minExecutors": "0",
        "spark__dynamicAllocation__executorIdleTimeout": "1s",
    }
    spark = sessions.get(TWO_EXECUTORS, **settings)
    crew = stagecrew.crew(spark)
    with crew.topology("t"):
        dataset = summed_rdd(spark)
        assert sorted(dataset.collect()) == EXPECTED
        assert executor_ids(spark)
    eventually(lambda: not executor_ids(spark), REMOVAL_SECONDS, "all executors are removed")
    assert sorted(dataset.collect()) == EXPECTED  # on new executors
    sessions.stop()
    builder = session_builder(TWO_EXECUTORS)
    for key, value in settings.items():
        builder = builder.config(key.replace("__", "."), value)
    plain = builder.getOrCreate()
    try:
        dataset = summed_rdd(plain)
        assert sorted(dataset.collect()) == EXPECTED
        deadline = time.monotonic() + REMOVAL_SECONDS
        while time.monotonic() < deadline:
            assert executor_ids(plain)
            time.sleep(0.5)  # plain Spark removes no executor during this time
        assert sorted(dataset.collect()) == EXPECTED
    finally:
        plain.stop()


@stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
def slow_to_close(context, path, seconds):
    """A listener whose close takes some seconds."""
    yield None
    time.sleep(seconds)
    Journal(path).write(event="closed", executor=context.executor)


@pytest.mark.long
def test_an_executor_is_not_idle_while_a_topology_closes_on_it(sessions, journal):
    """An executor counts as idle only once a closing topology's listeners are closed on it. Then it is removed."""
    spark = sessions.get(
        TWO_EXECUTORS,
        spark__dynamicAllocation__enabled="true",
        spark__dynamicAllocation__minExecutors="0",
        spark__dynamicAllocation__initialExecutors="2",
        spark__dynamicAllocation__executorIdleTimeout="2s",
    )
    monitor = spark.sparkContext._jsc.sc().executorAllocationManager().get().executorMonitor()
    crew = stagecrew.crew(spark)
    topology = crew.topology("t", listeners=[slow_to_close(journal.path, 6)]).start()
    # Both tasks end at the same time, right before the exit, so no executor was idle until then.
    meet = rendezvous(journal.path, "both", 2)
    dataset = spark.sparkContext.parallelize(range(2), 2).map(lambda n: (n, n)).partitionBy(2).mapPartitions(meet)
    assert len(dataset.collect()) == 2
    assert list(map_outputs(spark).values()) == [2]
    closing = threading.Thread(target=topology.close)
    closing.start()
    while closing.is_alive():
        pending = monitor.pendingRemovalCount()
        assert pending == 0 or not closing.is_alive()
        closing.join(0.05)
    assert len(journal.read(event="closed")) == 2
    assert not topology.report.lost_executors
    assert not topology.report.unclosed
    assert not map_outputs(spark)
    eventually(lambda: not executor_ids(spark), 20, "the executors are removed")


@stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
def dies_at_close(context, path):
    """Kills the first executor that closes this listener."""
    yield None
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    kill(os.getppid())


@pytest.mark.long
def test_the_exit_does_not_wait_for_an_executor_lost_during_the_release(sessions, tmp_path, journal):
    """If an executor is lost during the release, the exit does not wait for that executor.

    Nothing is left on the other executors, and a dataset that is used again has the right rows.
    """
    spark = sessions.get(LOCAL_CLUSTER)
    crew = stagecrew.crew(spark)
    stored_before = set(map_outputs(spark)), set(shuffle_files(spark, tmp_path))
    with crew.topology("t", listeners=[dies_at_close(str(tmp_path / "killed"))]) as topology:
        dataset = summed_rdd(spark)
        meet = rendezvous(journal.path, "all", 4)
        assert len(spark.sparkContext.parallelize(range(4), 4).mapPartitions(meet).collect()) == 4
        assert sorted(dataset.collect()) == EXPECTED
        before_exit = set(block_folders(spark, tmp_path))
    (lost,) = topology.report.lost_executors
    eventually(lambda: len(set(executor_ids(spark)) - {lost}) == 2, 60, "a new executor starts")
    assert set(map_outputs(spark)) <= stored_before[0]
    after_exit = block_folders(spark, tmp_path)
    assert set(shuffle_files_in(after_exit)) <= stored_before[1]
    assert sorted(dataset.collect()) == EXPECTED
    assert before_exit - after_exit


@pytest.mark.long
def test_outputs_of_both_attempts_of_a_stage_are_released(sessions, tmp_path, journal):
    """Outputs of both attempts of a stage are released, even if an executor with some of them was killed in between."""
    spark = sessions.get(LOCAL_CLUSTER)
    crew = stagecrew.crew(spark)
    stored_before = set(map_outputs(spark)), set(shuffle_files(spark, tmp_path))
    executors_before = set(executor_ids(spark))
    marker = str(tmp_path / "marker")

    def kill_once(part: Any) -> Any:
        part = list(part)
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return part
        kill(executor_pid())
        return part

    with crew.topology("t") as topology:
        dataset = summed_rdd(spark, 8).mapPartitions(kill_once)
        assert sorted(dataset.collect()) == EXPECTED
    assert set(map_outputs(spark)) <= stored_before[0]
    eventually(
        lambda: len(executor_ids(spark)) == 2 and set(executor_ids(spark)) != executors_before,
        60,
        "a new executor starts",
    )
    assert set(shuffle_files(spark, tmp_path)) <= stored_before[1]
    assert tables_are_empty(crew)
    assert topology.report.released >= 4


@pytest.mark.long
def test_outputs_of_speculative_attempts_are_released(sessions, standalone, tmp_path, journal):
    """When two speculative attempts write the same partition, no output of either is left, whichever attempt wins."""
    spark = sessions.get(
        standalone,
        spark__speculation="true",
        spark__speculation__interval="100ms",
        spark__speculation__quantile="0.5",
        spark__speculation__minTaskRuntime="100ms",
    )
    crew = stagecrew.crew(spark)
    marker = str(tmp_path / "marker")

    def slow_first(part: Any) -> Any:
        rows = list(part)
        if 0 in rows:
            journal.write(event="attempt")
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                time.sleep(60)  # until Spark kills it
        return rows

    with crew.topology("t"):
        numbers = spark.sparkContext.parallelize(range(100), 8).mapPartitions(slow_first)
        dataset = numbers.map(lambda n: (n % 5, n)).reduceByKey(operator.add)
        assert sorted(dataset.collect()) == EXPECTED
    assert len(journal.read(event="attempt")) == 2
    assert not map_outputs(spark)
    assert not shuffle_files(spark, tmp_path)
    assert tables_are_empty(crew)


@pytest.mark.long
def test_outputs_in_an_external_shuffle_service_are_deleted_at_the_exit(sessions, tmp_path):
    """At the exit, the external shuffle service deletes the outputs of a lost executor.

    Outputs of live executors are released as usual.
    """
    with shuffle_service(tmp_path) as settings:
        spark = sessions.get(
            "local-cluster[1,2,1024]", **{key.replace(".", "__"): value for key, value in settings.items()}
        )
        check_release_after_executor_loss(spark, tmp_path)
        sessions.stop()


def check_release_after_executor_loss(spark, tmp_path):
    """Exits a topology that has outputs of a killed executor, and checks that nothing is left and rows are right."""
    crew = stagecrew.crew(spark)
    with crew.topology("t"):
        dataset = summed_rdd(spark)
        assert sorted(dataset.collect()) == EXPECTED
        directories = set(block_folders(spark, tmp_path))
        (pid,) = set(spark.sparkContext.parallelize([1], 1).map(lambda _: executor_pid()).collect())
        kill(pid)
        eventually(
            lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", 30, "the executor has ended"
        )
        second = summed_rdd(spark)
        assert sorted(second.collect()) == EXPECTED
        assert sum(map_outputs(spark).values()) == 8
        assert len([name for name in shuffle_files_in(directories) if name.endswith(".data")]) >= 4
        directories |= block_folders(spark, tmp_path)
    assert not map_outputs(spark)
    assert shuffle_files_in(directories) == []
    assert sorted(dataset.collect()) == sorted(second.collect()) == EXPECTED


def test_executors_delete_finished_outputs_when_the_driver_is_killed(tmp_path, journal):
    """After SIGKILL of the driver, executors delete finished outputs of topologies, even with a shuffle service."""
    script = """
from support.spark_storage import block_folders
from pathlib import Path
builder = session_builder("local-cluster[1,2,1024]").config("spark.stagecrew.shutdown.timeout", "60s")
for key, value in SETTINGS.items():
    builder = builder.config(key, value)
spark = stagecrew.configure(builder).getOrCreate()
topology = stagecrew.crew(spark).topology("t").start()
dataset = spark.range(0, 1000, 1, 1000).repartition(2)
dataset.collect()
journal.write(event="stored", folders=sorted(block_folders(spark, Path.cwd())), jvm=spark.sparkContext._gateway.proc.pid)
time.sleep(600)
"""
    with (
        shuffle_service(tmp_path) as settings,
        driver_script(tmp_path, journal, LOCAL, f"SETTINGS = {settings}\n{script}") as process,
    ):
        (stored,) = eventually(lambda: journal.read(event="stored"), 90, "the driver has stored outputs")
        directories = set(stored["folders"])
        assert len([name for name in shuffle_files_in(directories) if name.endswith(".data")]) == 1000
        for java in java_processes(process.pid):
            if "CoarseGrained" not in " ".join(java.cmdline()):
                java.kill()
        eventually(lambda: shuffle_files_in(directories) == [], 60, "all outputs are deleted")


DECOMMISSIONING = {
    "spark__decommission__enabled": "true",
    "spark__storage__decommission__enabled": "true",
    "spark__storage__decommission__shuffleBlocks__enabled": "true",
    "spark__storage__decommission__replicationReattemptInterval": "500ms",
}


def test_migrated_outputs_are_released(sessions, tmp_path):
    """Outputs that a decommissioned executor migrated to another one are released as well."""
    spark = sessions.get(TWO_EXECUTORS, **DECOMMISSIONING)
    crew = stagecrew.crew(spark)
    eventually(lambda: len(executor_ids(spark)) == 2, 60, "both executors are registered")
    directories = set(block_folders(spark, tmp_path))
    assert len(directories) == 2
    with crew.topology("t"):
        dataset = summed_rdd(spark, 8)
        assert sorted(dataset.collect()) == EXPECTED
        pids = set(spark.sparkContext.parallelize(range(8), 8).map(lambda _: executor_pid()).collect())
        leaving_pid = min(pids)
        kill(leaving_pid, signal.SIGPWR)
        eventually(
            lambda: len(executor_ids(spark)) >= 1 and not psutil.pid_exists(leaving_pid),
            60,
            "the decommissioned executor has left",
        )
        data = [name for name in shuffle_files_in(directories) if name.endswith(".data")]
        assert len(data) == 8  # all of them are on the other executor now
        assert sum(map_outputs(spark).values()) == 8
    assert shuffle_files_in(directories | block_folders(spark, tmp_path)) == []
    assert not map_outputs(spark)


def decommission_one(spark, directories):
    """Decommissions one of two executors. Returns its process id when the first outputs have migrated."""

    def outputs_by_directory():
        return {directory: len(list(Path(directory).glob("*/shuffle_*.data"))) for directory in directories}

    pids = set(spark.sparkContext.parallelize(range(8), 8).map(lambda _: executor_pid()).collect())
    before = outputs_by_directory()
    kill(min(pids), signal.SIGPWR)
    eventually(
        lambda: [directory for directory, count in outputs_by_directory().items() if count > before[directory]],
        60,
        "some outputs have migrated",
    )
    return min(pids)


def decommissioning_session(sessions, tmp_path, **settings):
    """A session of two executors that migrate their outputs one by one, and the executors' directories."""
    sessions.stop()  # the session must not have lost an executor
    spark = sessions.get(
        TWO_EXECUTORS, spark__storage__decommission__shuffleBlocks__maxThreads="1", **settings, **DECOMMISSIONING
    )
    eventually(lambda: len(executor_ids(spark)) == 2, 60, "both executors are registered")
    return spark, set(block_folders(spark, tmp_path))


def large_shuffle(spark):
    """An RDD with 16 map outputs of 16 MB each."""
    rows = spark.sparkContext.parallelize(range(16), 16)
    return rows.flatMap(lambda _: [(i, os.urandom(1 << 20)) for i in range(16)]).groupByKey(2)


@pytest.mark.long
def test_outputs_that_migrate_during_the_exit_are_released_on_arrival(sessions, tmp_path):
    """Outputs that migrate between executors during the exit are released on arrival.

    A shuffle that is used again outside any topology is kept.
    """
    spark, directories = decommissioning_session(sessions, tmp_path)
    dataset = large_shuffle(spark)
    with stagecrew.crew(spark).topology("t"):
        assert dataset.count() == 16
        (shuffle,) = map_outputs(spark)
        reused = summed_rdd(spark, 8)
        assert sorted(reused.collect()) == EXPECTED
        leaving_pid = decommission_one(spark, directories)
    assert psutil.pid_exists(leaving_pid)  # it has not migrated all outputs yet
    assert sorted(reused.collect()) == EXPECTED  # outside any topology
    eventually(lambda: not psutil.pid_exists(leaving_pid), 60, "the decommissioned executor has left")
    directories |= block_folders(spark, tmp_path)
    eventually(
        lambda: (
            shuffle not in map_outputs(spark)
            and not [name for name in shuffle_files_in(directories) if name.startswith(f"shuffle_{shuffle}_")]
        ),
        30,
        "the migrated outputs are released",
    )
    assert sum(map_outputs(spark).values()) == 8
    assert sorted(reused.collect()) == EXPECTED


@pytest.mark.long
def test_an_executor_that_receives_outputs_after_an_exit_is_removable(sessions, tmp_path):
    """With dynamic allocation, an executor that received outputs while their topology ended is removed when idle."""
    spark, directories = decommissioning_session(
        sessions,
        tmp_path,
        spark__dynamicAllocation__enabled="true",
        spark__dynamicAllocation__minExecutors="0",
        spark__dynamicAllocation__initialExecutors="2",
        spark__dynamicAllocation__executorIdleTimeout="8s",
    )
    dataset = large_shuffle(spark)
    with stagecrew.crew(spark).topology("t"):
        assert dataset.count() == 16
        leaving_pid = decommission_one(spark, directories)
    assert psutil.pid_exists(leaving_pid)
    eventually(lambda: not executor_ids(spark), 60, "both executors are removed")
