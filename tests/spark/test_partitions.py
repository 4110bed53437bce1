"""A topology releases its partitions when it ends. A dataset that is used again is recomputed with the same rows."""

from __future__ import annotations

import contextlib
import operator
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark import StorageLevel
from pyspark.sql import functions as f

import stagecrew
from crewtools import LOCAL, LOCAL_CLUSTER, Journal, eventually
from stored import blocks, cached, deaf, end_reaches_nobody, field, files, outputs, paths, plan, ran, tracker


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(LOCAL, marks=pytest.mark.long),
        pytest.param(LOCAL_CLUSTER, marks=pytest.mark.long),
        "standalone",
    ],
)
def master(request):
    """All masters. `make test` takes only the standalone cluster, where executors are separate processes."""
    return request.getfixturevalue("standalone") if request.param == "standalone" else request.param


@pytest.fixture
def stored_before(spark, tmp_path):
    """Files and outputs that existed before the test. They must stay."""
    return set(files(spark, tmp_path)), outputs(spark)


def stored_since(spark, tmp_path, stored_before):
    """Shuffle files and outputs that were added after `stored_before` was taken."""
    now = outputs(spark)
    return set(files(spark, tmp_path)) - stored_before[0], {s: n for s, n in now.items() if s not in stored_before[1]}


def grouped_frame(spark, rows=1000, parts=4):
    """A DataFrame with one shuffle: the sums of ids by key."""
    return spark.range(0, rows, 1, parts).groupBy((f.col("id") % 7).alias("k")).agg(f.sum("id").alias("s"))


def rows(dataset):
    return sorted(map(tuple, dataset.collect()))


def summed_rdd(spark, parts=4):
    """An RDD with one shuffle: the sums by key in `EXPECTED`."""
    return spark.sparkContext.parallelize(range(100), parts).map(lambda n: (n % 5, n)).reduceByKey(operator.add)


EXPECTED = sorted((k, sum(range(k, 100, 5))) for k in range(5))


def test_nothing_is_left_after_the_exit(spark, crew, tmp_path, stored_before):
    """Whichever shuffle writer wrote them, the exit leaves no file, no output in the tracker and no entry in a table."""
    with crew.topology("t") as topology:
        datasets = [grouped_frame(spark)]
        bypass = spark.range(0, 1000, 1, 3).repartition(3)  # BypassMergeSortShuffleWriter
        spark.conf.set("spark.sql.shuffle.partitions", 300)
        unsafe = grouped_frame(spark)  # UnsafeShuffleWriter
        unsafe.collect()
        spark.conf.set("spark.sql.shuffle.partitions", 2)
        sort = summed_rdd(spark)  # SortShuffleWriter, which combines
        datasets += [bypass]
        for dataset in datasets:
            dataset.collect()
        assert sorted(sort.collect()) == EXPECTED
        found, tracked = stored_since(spark, tmp_path, stored_before)
        assert len(tracked) == 4
        assert sum(name.endswith(".data") for name in found) == sum(tracked.values())
        eventually(
            lambda: sum(one.outputs for one in topology.partitions) == sum(tracked.values()), 20, "the outputs are reported"
        )
    assert stored_since(spark, tmp_path, stored_before) == (set(), {})
    report = topology.report
    assert report.released == sum(tracked.values())
    assert report.release_failures == 0
    assert report.released_bytes > 0
    assert not [one for one in topology.partitions if one.outputs or one.in_progress or one.blocks]
    assert {one.topology for one in crew.partitions()} >= {topology.id}
    for dataset in (datasets[0], unsafe):  # referenced until here, so that Spark's own cleaner cannot release them
        assert rows(dataset) == sorted((k, sum(range(k, 1000, 7))) for k in range(7))


def test_files_that_cannot_be_deleted_count_as_release_failures(spark, crew, tmp_path, stored_before):
    """Files that an executor cannot delete count as release failures, not as released.

    The test puts folders in the place of one shuffle output and one cached block.
    """

    def replace_by_folder(pattern: str) -> Path:
        path = next(path for path in paths(spark, tmp_path, pattern) if path.name not in stored_before[0])
        path.unlink()
        path.mkdir()
        (path / "held").touch()
        return path

    with crew.topology("t", release="all") as topology:
        two_shuffles, stored = summed_rdd(spark), spark.sparkContext.parallelize(range(100), 4).persist(StorageLevel.DISK_ONLY)
        assert sorted(two_shuffles.collect()) == EXPECTED
        assert stored.count() == 100
        size = sum(outputs(spark)[shuffle] for shuffle in outputs(spark) if shuffle not in stored_before[1])
        replaced_paths = [replace_by_folder("shuffle_*.data"), replace_by_folder(f"rdd_{stored.id()}_*")]
    report = topology.report
    assert (report.released, report.release_failures) == (size + 4 - 2, 2)
    assert sum(one.release_failures for one in topology.partitions) == 2
    for path in replaced_paths:
        (path / "held").unlink()
        path.rmdir()


def test_a_released_dataset_is_recomputed_with_the_same_rows(spark, crew, tmp_path, stored_before):
    """A dataset gives the same rows when all or half of its shuffles are released, also in another topology."""
    with crew.topology("a"):
        first = summed_rdd(spark)
        assert sorted(first.collect()) == EXPECTED
    second = first.map(lambda kv: (kv[0] % 2, kv[1])).reduceByKey(operator.add)
    expected = sorted({p: sum(v for k, v in EXPECTED if k % 2 == p) for p in (0, 1)}.items())
    with crew.topology("b"):
        assert sorted(second.collect()) == expected  # the first shuffle is gone, the second is new
    with crew.topology("c"):
        assert sorted(first.collect()) == EXPECTED
        with crew.topology("d"):
            assert sorted(second.collect()) == expected  # one of the two shuffles still exists
        assert sorted(second.collect()) == expected
    assert stored_since(spark, tmp_path, stored_before) == (set(), {})
    assert sorted(second.collect()) == expected
    frame = grouped_frame(spark)
    with crew.topology("e"):
        before_release = rows(frame)
    assert rows(frame) == before_release  # AQE reuses the plan and the stages that ran in the topology


def test_partitions_that_the_application_uses_are_kept(spark, crew, tmp_path, stored_before):
    """Partitions that a job outside any topology wrote or read belong to the application.

    If two topologies use a partition and one of them ends, the partition is kept.
    """
    application_dataset = summed_rdd(spark)
    application_dataset.collect()
    with crew.topology("reads"):
        application_dataset.collect()
        shared = summed_rdd(spark)
        shared.collect()
        other_job = threading.Thread(target=shared.collect)  # belongs to no topology: a new thread does not inherit it
        other_job.start()
        other_job.join(60)
    assert len(stored_since(spark, tmp_path, stored_before)[1]) == 2
    with crew.topology("outer"):
        with crew.topology("inner"):
            inner_dataset = summed_rdd(spark)
            inner_dataset.collect()
        assert len(stored_since(spark, tmp_path, stored_before)[1]) == 2
        with crew.topology("inner"):
            inner_dataset.collect()
            other = threading.Thread(target=crew.marks.innermost.parent.wrap(inner_dataset.collect))
            other.start()
            other.join(60)
        assert len(stored_since(spark, tmp_path, stored_before)[1]) == 3  # the outer topology uses it too
        assert ran(spark, inner_dataset.collect)[1] == 4
    assert len(stored_since(spark, tmp_path, stored_before)[1]) == 2
    assert sorted(application_dataset.collect()) == sorted(shared.collect()) == sorted(inner_dataset.collect()) == EXPECTED


def test_kept_datasets_are_not_recomputed(spark, crew, tmp_path, stored_before):
    """Kept RDDs and DataFrames are read again after the exit and are not recomputed."""
    cached_before = cached(spark)
    with crew.topology("t", release="all") as topology:
        kept, released, frame = summed_rdd(spark), summed_rdd(spark), grouped_frame(spark)
        cached_frame = spark.range(100).cache()
        for dataset in (kept, released, frame, cached_frame):
            dataset.collect()
        topology.keep(kept, frame, cached_frame)
    assert len(stored_since(spark, tmp_path, stored_before)[1]) == 2
    collected, tasks = ran(spark, kept.collect)
    assert (sorted(collected), tasks) == (EXPECTED, 4)  # the reduce stage alone
    assert ran(spark, lambda: rows(frame))[1] <= 2
    assert len(cached(spark) - cached_before) == 1
    assert ran(spark, released.collect)[1] == 8
    cached_frame.unpersist(True)


def test_an_outer_topology_keeps_a_dataset_that_an_inner_one_ran(spark, crew, tmp_path, stored_before):
    """An outer topology's `keep` covers what an inner topology runs later. A dataset without a plan does not disturb it."""
    with crew.topology("outer") as outer:
        dataset, discarded = summed_rdd(spark), summed_rdd(spark)
        outer.keep(dataset)
        with crew.topology("inner"):
            dataset.collect()
            discarded.collect()
        assert len(stored_since(spark, tmp_path, stored_before)[1]) == 1
        outer.keep(spark.range(3).selectExpr("raise_error('no plan of this runs') as a"))
    assert sum(stored_since(spark, tmp_path, stored_before)[1].values()) == 4
    assert ran(spark, dataset.collect)[1] == 4


LEVELS = [StorageLevel.MEMORY_ONLY, StorageLevel.MEMORY_AND_DISK, StorageLevel.DISK_ONLY]


def test_release_all_unpersists_datasets_cached_in_the_topology(spark, crew, tmp_path, stored_before):
    """Policy `all` unpersists datasets cached in the topology, at every level. Other policies do not.

    Datasets cached outside the topology stay cached.
    """
    outside = spark.sparkContext.parallelize(range(10), 2).cache()
    outside.count()
    cached_before = cached(spark)

    def cache_some() -> list[Any]:
        datasets = [spark.range(100 + i).persist(level) for i, level in enumerate(LEVELS)]
        rdds = [spark.sparkContext.parallelize(range(100), 2).persist(level) for level in LEVELS]
        for dataset in (*datasets, *rdds):
            assert dataset.count() >= 100
        outside.count()
        return [*datasets, *rdds]

    with crew.topology("shuffles"):
        datasets = cache_some()
    assert len(cached(spark) - cached_before) == 6
    with crew.topology("reads", release="all"):
        datasets[0].count()
    assert len(cached(spark) - cached_before) == 6
    for dataset in datasets:
        dataset.unpersist(True)
    with crew.topology("all", release=stagecrew.Release.ALL) as topology:
        datasets = cache_some()
        checkpointed = spark.sparkContext.parallelize(list(range(10)), 2)
        checkpointed.localCheckpoint()
        assert checkpointed.count() == 10
    assert len(cached(spark) - cached_before) == 1  # a local checkpoint has no lineage to recompute it from
    assert checkpointed.count() == 10
    assert topology.report.released >= 12
    assert topology.report.release_failures == 0
    assert not [one for one in topology.partitions if one.blocks]
    assert sum(dataset.count() for dataset in datasets) == 103 + 200 + 300
    with crew.topology("last", release="all"):
        shared = spark.sparkContext.parallelize(range(10), 2).cache()
        with crew.topology("first", release="all") as first:
            shared.count()
            reader = threading.Thread(target=first.parent.wrap(shared.count))
            reader.start()
            reader.join(60)
        assert shared.getStorageLevel().useMemory
        assert len(cached(spark) - cached_before) == 2
    assert len(cached(spark) - cached_before) == 1  # removed when its last user ended
    outside.unpersist(True)


EVERY_LEVEL = [
    StorageLevel.DISK_ONLY,
    StorageLevel.DISK_ONLY_2,
    StorageLevel.DISK_ONLY_3,
    StorageLevel.MEMORY_ONLY,
    StorageLevel.MEMORY_ONLY_2,
    StorageLevel(False, True, False, True),  # MEMORY_ONLY_DESER
    StorageLevel.MEMORY_AND_DISK,
    StorageLevel.MEMORY_AND_DISK_2,
    StorageLevel.MEMORY_AND_DISK_DESER,
    StorageLevel.OFF_HEAP,
]


def test_release_all_removes_blocks_of_every_storage_level(spark, crew, tmp_path):
    """Policy `all` removes cached blocks of every level, replicas included, from disks and the BlockManagerMaster."""
    stored_before = blocks(spark), files(spark, tmp_path, "rdd_*")  # Spark's cleaner may remove some of these

    def new_since():
        now = blocks(spark), files(spark, tmp_path, "rdd_*")
        return [Counter(new) - Counter(old) for new, old in zip(now, stored_before, strict=True)]

    with crew.topology("t", release="all") as topology:
        held = [spark.range(0, 20 + i, 1, 2).persist(level) for i, level in enumerate(EVERY_LEVEL)]
        held += [spark.sparkContext.parallelize(range(20), 2).persist(level) for level in EVERY_LEVEL]
        for dataset in held:
            assert dataset.count() >= 20
        new_blocks, on_disk = new_since()
        assert len(new_blocks) == 2 * len(held)
        if not spark.sparkContext.master.startswith("local["):  # where another executor can store the replicas
            assert new_blocks.total() > 2 * len(held)
        assert on_disk.total() >= 4 * 2  # DISK_ONLY and OFF_HEAP, of each kind
    assert new_since() == [Counter(), Counter()]
    assert topology.report.released >= 2 * len(held)
    assert [dataset.count() for dataset in held[:2]] == [20, 21]


SKEWED = {
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    "spark.sql.shuffle.partitions": "10",
    "spark.sql.adaptive.advisoryPartitionSizeInBytes": "400",
    "spark.sql.adaptive.coalescePartitions.minPartitionSize": "10",
    "spark.sql.adaptive.skewJoin.skewedPartitionThresholdInBytes": "400",
    "spark.sql.adaptive.skewJoin.skewedPartitionFactor": "2",
}


@contextlib.contextmanager
def sql_settings(spark, settings):
    """Applies SQL settings within the block and restores the previous values."""
    previous = {key: spark.conf.get(key) for key in settings}
    for key, value in settings.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, value in previous.items():
            spark.conf.set(key, value)


def test_adaptive_plans_give_the_same_rows_after_the_release(spark, crew, tmp_path, stored_before):
    """Skewed, coalesced and broadcast reads of AQE give the same rows again after the release, from the same plan."""
    with sql_settings(spark, SKEWED):
        key = f.when(f.col("id") < 700, 1).otherwise(f.col("id") % 50)
        left, right = (spark.range(0, 1000, 1, 4).select(key.alias("k"), f.col("id").alias(name)) for name in ("a", "b"))
        lookup = spark.range(50).withColumnRenamed("id", "k")
        skewed = left.join(right.where("b > 650"), "k").select("k", "a", "b")
        joined = left.groupBy("k").agg(f.sum("a").alias("s")).join(f.broadcast(lookup), "k")
        with crew.topology("t"):
            expected = [rows(skewed), rows(joined)]
            plans = [plan(skewed), plan(joined)]
        assert stored_since(spark, tmp_path, stored_before) == (set(), {})
        assert "skewed" in plans[0]
        assert "AQEShuffleRead coalesced" in plans[1]
        assert "BroadcastExchange" in plans[1]
        assert [rows(skewed), rows(joined)] == expected
        assert "skewed" in plan(skewed)
        assert "AQEShuffleRead coalesced" in plan(joined)


def test_policy_none_releases_nothing(spark, crew, tmp_path, stored_before):
    """Policy `none` releases nothing, even when another topology that reads the output ends."""
    with crew.topology("around"), crew.topology("t", release="none") as topology:
        dataset = summed_rdd(spark)
        dataset.collect()
        reader = threading.Thread(
            target=crew.marks.innermost.parent.wrap(dataset.collect)
        )  # the outer topology reads the output and ends later
        reader.start()
        reader.join(60)
    with crew.topology("reads"):
        dataset.collect()
    assert sum(stored_since(spark, tmp_path, stored_before)[1].values()) == 4
    assert topology.report.released == 0
    assert ran(spark, dataset.collect)[1] == 4


def holds_for(condition, seconds=3.0):
    """Checks that a condition holds for some seconds, longer than executors take to report."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition()
        time.sleep(0.05)


def test_a_job_that_starts_while_its_topology_closes_keeps_its_outputs(spark, crew, tmp_path, stored_before, journal):
    """The outputs of a job that starts while its topology closes are never dropped. They belong to the application."""
    gate, path = tmp_path / "gate", journal.path

    @stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
    def slow_to_close(context):
        yield None
        Journal(path).write(event="closing")
        eventually(gate.exists, 60, "the gate")

    topology = crew.topology("t", listeners=[slow_to_close()]).start()
    old, new = summed_rdd(spark), summed_rdd(spark)
    old.collect()
    use_datasets, found = threading.Event(), []

    def use():
        use_datasets.wait(60)
        found.extend(sorted(dataset.collect()) for dataset in (old, new))

    user = threading.Thread(target=topology.wrap(use))
    user.start()
    closer = threading.Thread(target=topology.close)
    closer.start()
    try:
        eventually(lambda: journal.read(event="closing"), 60, "the topology closes")
        use_datasets.set()
        user.join(60)
        assert found == [EXPECTED, EXPECTED]
        kept = stored_since(spark, tmp_path, stored_before)[1]
        assert list(kept.values()) == [4, 4]
        holds_for(lambda: stored_since(spark, tmp_path, stored_before)[1] == kept)
    finally:
        gate.touch()
        closer.join(60)
    topology.close()
    assert stored_since(spark, tmp_path, stored_before)[1] == kept
    for dataset in (old, new):
        assert ran(spark, dataset.collect)[1] == 4  # the reduce stage alone


def test_a_running_job_keeps_its_outputs_when_its_start_event_is_dropped(spark, crew, tmp_path, stored_before, journal):
    """The outputs of a running job are never dropped, even if the listener bus dropped its start event.

    The job's thread still carries the property of a topology that has ended.
    """
    gate, use_dataset, found = tmp_path / "gate", threading.Event(), []

    def wait(part):
        eventually(gate.exists, 60, "the gate")
        return part

    dataset = summed_rdd(spark).mapPartitions(wait)

    def use():
        use_dataset.wait(60)
        found.append(sorted(dataset.collect()))

    with crew.topology("t") as topology:
        user = threading.Thread(target=topology.wrap(use))
        user.start()
    with deaf(spark):
        use_dataset.set()
        try:
            eventually(lambda: list(stored_since(spark, tmp_path, stored_before)[1].values()) == [4], 60, "the map stage is written")
            holds_for(lambda: list(stored_since(spark, tmp_path, stored_before)[1].values()) == [4])
        finally:
            gate.touch()
            user.join(60)
    assert found == [EXPECTED]


def test_executors_that_miss_the_end_of_a_topology_learn_it_from_their_inventory(spark, crew, tmp_path, stored_before):
    """Executors that miss the end of a topology learn it from their inventory and delete its files and table entries."""
    with crew.topology("outer") as outer:
        shared = summed_rdd(spark)
        shared.collect()
        with crew.topology("t") as topology:
            dataset = summed_rdd(spark)
            assert sorted(dataset.collect()) == sorted(shared.collect()) == EXPECTED
            eventually(lambda: sum(one.outputs for one in topology.partitions) == 4, 20, "the outputs are reported")
            end_reaches_nobody(crew, topology.id)
        assert list(stored_since(spark, tmp_path, stored_before)[1].values()) == [4]
        eventually(
            lambda: sum(n.endswith(".data") for n in stored_since(spark, tmp_path, stored_before)[0]) == 4, 20, "the files are deleted"
        )
        eventually(lambda: not [one for one in topology.partitions if one.outputs], 20, "the tables are empty")
        assert topology.report.released == 4
        assert ran(spark, shared.collect)[1] == 4  # the outer topology still uses it
        outer.close()
    assert stored_since(spark, tmp_path, stored_before) == (set(), {})
    assert sorted(dataset.collect()) == EXPECTED


def expect_cancellation(dataset):
    """Runs an action that must be cancelled."""
    with pytest.raises(Exception, match="cancel"):
        dataset.collect()


def test_a_topology_cancelled_while_its_tasks_write_leaves_nothing(spark, crew, tmp_path, stored_before, journal):
    """A topology that is cancelled while its tasks write leaves no file and no table entry."""

    def slow(part):
        journal.write(event="writes")
        for n in part:
            time.sleep(0.05)
            yield n % 5, n

    with pytest.raises(ZeroDivisionError), crew.topology("t") as topology:
        dataset = spark.sparkContext.parallelize(range(400), 4).mapPartitions(slow).reduceByKey(operator.add)
        thread = threading.Thread(target=topology.wrap(lambda: expect_cancellation(dataset)))
        thread.start()
        eventually(lambda: len(journal.read(event="writes")) >= 2, 60, "two tasks write")
        raise ZeroDivisionError
    thread.join(60)
    assert stored_since(spark, tmp_path, stored_before) == (set(), {})
    assert not [one for one in topology.partitions if one.outputs or one.in_progress]


@pytest.mark.parametrize("second_user", ["the application's", "a topology's"])
def test_a_shared_map_stage_survives_the_cancellation_of_the_first_job(spark, crew, tmp_path, stored_before, journal, second_user):
    """Two jobs share a map stage. If the first is cancelled, its topology's tasks continue to write the stage.

    The outputs are released with the second job's topology, if it has one.
    """
    gate = tmp_path / "gate"

    def slow(part):
        journal.write(event="writes")
        eventually(gate.exists, 60, "the gate")
        return part

    numbers = spark.sparkContext.parallelize(range(100), 8).mapPartitions(slow)
    dataset = numbers.map(lambda n: (n % 5, n)).reduceByKey(operator.add)
    second_rows: list[Any] = []

    def run_second():
        with crew.topology("other") if second_user != "the application's" else contextlib.nullcontext():
            second_rows.append(dataset.collect())

    status = spark.sparkContext.statusTracker()
    with pytest.raises(ZeroDivisionError), crew.topology("t") as topology:
        first_job = threading.Thread(target=topology.wrap(lambda: expect_cancellation(dataset)))
        first_job.start()
        eventually(lambda: journal.read(event="writes"), 60, "the map stage runs")
        second_job = threading.Thread(target=run_second)
        second_job.start()
        eventually(lambda: len(status.getActiveJobsIds()) == 2, 60, "the second job waits for the map stage")

        def open_gate():
            eventually(lambda: len(status.getActiveJobsIds()) == 1, 60, "the first job is cancelled")
            gate.touch()

        opener = threading.Thread(target=open_gate)
        opener.start()
        raise ZeroDivisionError
    opener.join(60)
    second_job.join(60)
    first_job.join(60)
    assert sorted(second_rows[0]) == EXPECTED
    assert len(journal.read(event="writes")) == 8  # no output was written twice
    if second_user == "the application's":
        assert list(stored_since(spark, tmp_path, stored_before)[1].values()) == [8]
    else:
        eventually(lambda: stored_since(spark, tmp_path, stored_before) == (set(), {}), 30, "it is released with its last user")
    assert sorted(dataset.collect()) == EXPECTED


@pytest.mark.parametrize("held_stage", ["map", "reduce"])
def test_outputs_released_while_a_job_uses_them_are_recomputed(spark, crew, tmp_path, stored_before, journal, held_stage):
    """A job whose shuffle outputs are deleted while it writes or reads them does not fail. Missing ones are recomputed."""
    gate = tmp_path / "gate"

    def hold_at(stage, is_held):
        def wait(part):
            part = list(part)
            journal.write(event=stage, keys=len(part))
            if held_stage == stage and is_held(part):
                eventually(gate.exists, 60, "the gate")
            return part

        return wait

    numbers = spark.sparkContext.parallelize(range(100), 4).mapPartitions(hold_at("map", lambda part: 99 in part))
    two_shuffles = numbers.map(lambda n: (n % 5, n)).partitionBy(4).mapPartitions(hold_at("reduce", lambda part: bool(part)))
    dataset = two_shuffles.reduceByKey(operator.add)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(dataset.collect()))
    thread.start()
    if held_stage == "map":
        # The fourth task waits at the gate.
        eventually(lambda: sum(stored_since(spark, tmp_path, stored_before)[1].values()) == 3, 60, "three outputs are written")
    else:
        eventually(lambda: journal.read(event="reduce"), 60, "the shuffle is read")
    new = [shuffle for shuffle in outputs(spark) if shuffle not in stored_before[1]]
    assert new
    drop(spark, crew, new)
    delete(spark, tmp_path, new)
    gate.touch()
    thread.join(120)
    assert sorted(found[0]) == EXPECTED
    assert sorted(dataset.collect()) == EXPECTED


def drop(spark, crew, shuffles):
    """Unregisters outputs from the tracker through the code that runs at the end of a topology."""
    to_scala = spark.sparkContext._jvm.org.apache.spark.api.python.PythonUtils.toSeq
    field(crew.facade, "crew").partitions().drop(to_scala(shuffles))
    assert not set(outputs(spark)) & set(shuffles)


def delete(spark, tmp_path, shuffles):
    """Deletes the files of these shuffles."""
    from pathlib import Path

    from stored import folders

    for folder in folders(spark, tmp_path):
        for shuffle in shuffles:
            for file in Path(folder).glob(f"*/shuffle_{shuffle}_*"):
                file.unlink(missing_ok=True)


@pytest.mark.parametrize("released_outputs", ["its own", "a topology's"])
def test_an_adaptive_query_survives_a_release_between_two_of_its_stages(spark, crew, tmp_path, stored_before, journal, released_outputs):
    """An adaptive query gives its rows although outputs that a later stage reads are released while an earlier one runs.

    The outputs are the query's own, or those of a topology that ends. The plan that AQE holds gives the rows again.
    """
    gate = tmp_path / "gate"

    def wait(part):
        journal.write(event="stage")
        eventually(gate.exists, 60, "the gate")
        return part

    held_rows = spark.sparkContext.parallelize(range(100), 1).mapPartitions(wait).map(lambda n: (n % 5, n))
    early = spark.createDataFrame(held_rows, "k long, v long").groupBy("k").agg(f.sum("v").alias("s"))
    found: list[Any] = []
    with sql_settings(spark, {"spark.sql.autoBroadcastJoinThreshold": "-1"}):
        if released_outputs == "its own":
            immediate = spark.range(0, 100, 1, 2).groupBy((f.col("id") % 5).alias("k")).agg(f.sum("id").alias("t"))
            query, count = early.join(immediate, "k").select("k", (f.col("s") + f.col("t")).alias("s")), 2
        else:
            topology = crew.topology("t").start()
            shared = summed_rdd(spark)
            assert sorted(shared.collect()) == EXPECTED
            late = spark.createDataFrame(shared, "k long, s long")
            query, count = early.unionAll(late).groupBy("k").agg(f.sum("s").alias("s")), 4
        thread = threading.Thread(target=lambda: found.append(rows(query)))
        thread.start()
        try:
            eventually(lambda: journal.read(event="stage"), 60, "the earlier stage runs")
            eventually(lambda: list(stored_since(spark, tmp_path, stored_before)[1].values()) == [count], 60, "the outputs are written")
            if released_outputs == "its own":
                written = list(stored_since(spark, tmp_path, stored_before)[1])
                drop(spark, crew, written)
                delete(spark, tmp_path, written)
            else:
                topology.close()
                assert topology.report.released == count
            assert stored_since(spark, tmp_path, stored_before)[1] == {}
            assert thread.is_alive()
            assert "isFinalPlan=false" in plan(query)
        finally:
            gate.touch()
            thread.join(120)
        assert found == [[(k, 2 * s) for k, s in EXPECTED]]
        assert rows(query) == found[0]


def two_shuffles(spark, adaptive, parts):
    """Two datasets, the second of which shuffles the first again: DataFrames that AQE runs, or RDDs."""
    if not adaptive:
        dataset = summed_rdd(spark, parts)
        return dataset, dataset.map(lambda kv: (kv[0] % 2, kv[1])).reduceByKey(operator.add, 2)
    grouped_frame = spark.range(0, 100, 1, parts).groupBy((f.col("id") % 5).alias("k")).agg(f.sum("id").alias("s"))
    return grouped_frame, grouped_frame.groupBy((f.col("k") % 2).alias("p")).agg(f.sum("s").alias("s"))


def random_release(spark, crew, seed):
    """A topology writes a shuffle and ends at a random moment, while other threads use the shuffle.

    One of these threads may carry the topology's property. All of them must get their rows.
    """
    rng = random.Random(seed)
    adaptive = seed % 2 == 1
    shuffled_once, shuffled_twice = two_shuffles(spark, adaptive, rng.choice([1, 2, 4]))
    expected = sorted({p: sum(v for k, v in EXPECTED if k % 2 == p) for p in (0, 1)}.items())
    problems: list[BaseException] = []
    pauses = [rng.uniform(0, 0.5 if adaptive else 0.25) for _ in range(4)]
    start_of_others = ("at once", "at its end", "after it")[seed // 2 % 3]
    others_may_start = threading.Event()
    if start_of_others == "at once":
        others_may_start.set()

    def checked(pause, run, expected_rows):
        def body():
            others_may_start.wait(60)
            time.sleep(pause)
            try:
                assert run() == expected_rows
            except BaseException as error:
                problems.append(error)

        return body

    topology = crew.topology(f"random {seed}", release=rng.choice(["shuffles", "all"])).start()
    if start_of_others == "after it" or rng.random() < 0.5:
        rows(shuffled_once)

    def run():
        return rows(shuffled_once)

    if rng.random() < 0.5:  # in another topology, which ends independently

        def run():
            with crew.topology("other"):
                return rows(shuffled_once)

    users = [checked(pauses[0], run, EXPECTED), checked(pauses[1], lambda: rows(shuffled_twice), expected)]
    entered = threading.Event()
    if start_of_others != "after it" and rng.random() < 0.5:
        body = checked(pauses[3], lambda: rows(shuffled_twice), expected)
        users.append(topology.wrap(lambda: (entered.set(), body())))
    else:
        entered.set()
    threads = [threading.Thread(target=body) for body in users]
    for thread in threads:
        thread.start()
    if rng.random() < 0.5:
        rows(shuffled_twice)
    time.sleep(pauses[2])
    assert entered.wait(60)
    if start_of_others == "at its end":
        others_may_start.set()
    topology.close()
    others_may_start.set()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not problems, (seed, problems)
    assert rows(shuffled_twice) == expected
    assert rows(shuffled_once) == EXPECTED
    return topology.report.released


@pytest.mark.parametrize("seeds", [10, pytest.param(240, marks=pytest.mark.long)])
def test_releases_at_random_moments_fail_no_job(spark, crew, seeds):
    """No job fails or gets other rows, whenever topologies release the shuffles that it works on.

    Even seeds use RDDs, odd seeds use DataFrames that AQE runs.
    """
    on_cluster = spark.sparkContext.master.startswith("spark://")
    released = [random_release(spark, crew, seed) for seed in range(seeds if on_cluster else min(seeds, 40))]
    for kind in (released[::2], released[1::2]):
        assert sum(map(bool, kind)) >= len(kind) / 5, released  # in the other runs all outputs are in use, or nothing ran


def test_a_thousand_partitions_are_released_within_two_seconds(spark, crew, tmp_path, stored_before):
    """The exit of a topology with 1,000 map outputs takes less than two seconds and leaves no output."""
    topology = crew.topology("t").start()
    dataset = spark.range(0, 1000, 1, 1000).repartition(2)
    assert len(dataset.collect()) == 1000
    assert sum(stored_since(spark, tmp_path, stored_before)[1].values()) == 1000
    started = time.monotonic()
    topology.close()
    elapsed = time.monotonic() - started
    assert stored_since(spark, tmp_path, stored_before) == (set(), {})
    assert elapsed < 2.0, elapsed
    assert dataset.columns == ["id"]  # referenced until here


def test_the_error_for_a_closed_resource_suggests_keep(spark, crew):
    """If a recomputed dataset needs a closed resource, the error says that `topology.keep` prevents this."""

    @stagecrew.resource
    def pool(context):
        yield 7

    port = pool()
    with crew.topology("t", listeners=[port]) as topology:
        released = spark.sparkContext.parallelize(range(4), 2).map(lambda n: (n, port.get())).partitionBy(2)
        kept = spark.sparkContext.parallelize(range(4), 2).map(lambda n: (n, port.get())).partitionBy(2)
        assert released.count() == kept.count() == 4
        topology.keep(kept)
    assert sorted(kept.collect()) == [(n, 7) for n in range(4)]
    with pytest.raises(Exception, match=r"topology\.keep\(dataset\)"):
        released.collect()


def test_an_exit_tolerates_shuffles_that_are_already_released(spark, crew, tmp_path, stored_before):
    """An exit succeeds although Spark's cleaner or another topology has already released some of its shuffles."""
    with crew.topology("outer") as outer:
        dataset = summed_rdd(spark)
        dataset.collect()
        (unregistered_shuffle,) = stored_since(spark, tmp_path, stored_before)[1]
        tracker(spark).unregisterAllMapAndMergeOutput(unregistered_shuffle)
        delete(spark, tmp_path, [unregistered_shuffle])
        cleaned = summed_rdd(spark)
        cleaned.collect()
        (cleaned_shuffle,) = set(stored_since(spark, tmp_path, stored_before)[1])
        spark.sparkContext._jsc.sc().cleaner().get().doCleanupShuffle(cleaned_shuffle, True)
        eventually(lambda: sum(one.outputs for one in outer.partitions) <= 4, 20, "the removed outputs are forgotten")
        outer.close()
        outer.close()
    assert stored_since(spark, tmp_path, stored_before) == (set(), {})
    assert sorted(dataset.collect()) == EXPECTED


def test_invalid_arguments_are_rejected_with_their_names(spark, crew):
    """An unknown policy, an object that is no dataset and a topology that has not started are rejected with their names."""
    with pytest.raises(stagecrew.ConfigurationError, match="release='some' is no policy.*'shuffles', 'all', 'none'"):
        crew.topology("t", release="some")
    topology = crew.topology("t")
    with pytest.raises(stagecrew.TopologyError, match="topology.keep takes DataFrames and RDDs, and not int"):
        topology.keep(7)
    with pytest.raises(stagecrew.TopologyClosed, match="'t' is new: keep datasets inside the `with`"):
        topology.keep(spark.range(3))


def test_a_stateful_streaming_query_runs_on_while_other_topologies_end(spark, crew, tmp_path, stored_before, request):
    """A stateful streaming query runs on while other topologies end, and leaves nothing when its own topology ends."""
    source = tmp_path / "in"
    source.mkdir()
    with crew.topology("stream"):
        query = (
            spark.readStream.schema("n long").json(str(source)).groupBy((f.col("n") % 3).alias("k")).count()
            .writeStream.outputMode("complete").format("memory").queryName(f"q{time.monotonic_ns()}").start()
        )  # fmt: skip
        for i in range(3):
            (source / f"{i}.json").write_text("\n".join(f'{{"n": {n}}}' for n in range(30)))
            query.processAllAvailable()
            with crew.topology("beside"):
                summed_rdd(spark).collect()
        assert sorted(map(tuple, spark.table(query.name).collect())) == [(k, 30) for k in range(3)]
        query.stop()
    assert stored_since(spark, tmp_path, stored_before) == (set(), {})
