"""A topology releases its partitions when it ends. A dataset that is used again is recomputed with the same rows."""

from __future__ import annotations

import operator
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark import StorageLevel
from pyspark.sql import functions as f

import stagecrew
from support.sessions import LOCAL, LOCAL_CLUSTER
from support.shuffle_datasets import EXPECTED, delete, grouped_frame, rows, sql_settings, stored_since, summed_rdd
from support.spark_storage import (
    cached_blocks,
    cached_rdds,
    executed_plan,
    map_outputs,
    paths,
    run_and_count_tasks,
    shuffle_files,
    tracker,
)
from support.waiting import eventually


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
    return set(shuffle_files(spark, tmp_path)), map_outputs(spark)


def test_nothing_is_left_after_the_exit(spark, crew, tmp_path, stored_before):
    """The exit leaves no file, no output in the tracker and no table entry, whichever shuffle writer was used."""
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
            lambda: sum(one.outputs for one in topology.partitions) == sum(tracked.values()),
            20,
            "the outputs are reported",
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

    The test replaces one shuffle output and one cached block by folders.
    """

    def replace_by_folder(pattern: str) -> Path:
        path = next(path for path in paths(spark, tmp_path, pattern) if path.name not in stored_before[0])
        path.unlink()
        path.mkdir()
        (path / "held").touch()
        return path

    with crew.topology("t", release="all") as topology:
        summed, stored = (
            summed_rdd(spark),
            spark.sparkContext.parallelize(range(100), 4).persist(StorageLevel.DISK_ONLY),
        )
        assert sorted(summed.collect()) == EXPECTED
        assert stored.count() == 100
        size = sum(map_outputs(spark)[shuffle] for shuffle in map_outputs(spark) if shuffle not in stored_before[1])
        replaced_paths = [replace_by_folder("shuffle_*.data"), replace_by_folder(f"rdd_{stored.id()}_*")]
    report = topology.report
    assert (report.released, report.release_failures) == (size + 4 - 2, 2)
    assert sum(one.release_failures for one in topology.partitions) == 2
    for path in replaced_paths:
        (path / "held").unlink()
        path.rmdir()


@pytest.mark.contract
def test_a_released_dataset_is_recomputed_with_the_same_rows(spark, crew, tmp_path, stored_before):
    """A dataset gives the same rows after all or some of its shuffles are released, even in another topology."""
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
            other = threading.Thread(target=crew.topologies.innermost.parent.wrap(inner_dataset.collect))
            other.start()
            other.join(60)
        assert len(stored_since(spark, tmp_path, stored_before)[1]) == 3  # the outer topology uses it too
        assert run_and_count_tasks(spark, inner_dataset.collect)[1] == 4
    assert len(stored_since(spark, tmp_path, stored_before)[1]) == 2
    assert (
        sorted(application_dataset.collect()) == sorted(shared.collect()) == sorted(inner_dataset.collect()) == EXPECTED
    )


@pytest.mark.contract
def test_kept_datasets_are_not_recomputed(spark, crew, tmp_path, stored_before):
    """Kept RDDs and DataFrames are read again after the exit and are not recomputed."""
    cached_before = cached_rdds(spark)
    with crew.topology("t", release="all") as topology:
        kept, released, frame = summed_rdd(spark), summed_rdd(spark), grouped_frame(spark)
        cached_frame = spark.range(100).cache()
        for dataset in (kept, released, frame, cached_frame):
            dataset.collect()
        topology.keep(kept, frame, cached_frame)
    assert len(stored_since(spark, tmp_path, stored_before)[1]) == 2
    collected, tasks = run_and_count_tasks(spark, kept.collect)
    assert (sorted(collected), tasks) == (EXPECTED, 4)  # the reduce stage alone
    assert run_and_count_tasks(spark, lambda: rows(frame))[1] <= 2
    assert len(cached_rdds(spark) - cached_before) == 1
    assert run_and_count_tasks(spark, released.collect)[1] == 8
    cached_frame.unpersist(True)


def test_an_outer_topology_keeps_a_dataset_that_an_inner_one_ran(spark, crew, tmp_path, stored_before):
    """An outer topology's `keep` covers what an inner topology runs later.

    Keeping a dataset that Spark cannot plan has no effect on other datasets.
    """
    with crew.topology("outer") as outer:
        dataset, discarded = summed_rdd(spark), summed_rdd(spark)
        outer.keep(dataset)
        with crew.topology("inner"):
            dataset.collect()
            discarded.collect()
        assert len(stored_since(spark, tmp_path, stored_before)[1]) == 1
        outer.keep(spark.range(3).selectExpr("raise_error('no plan of this runs') as a"))
    assert sum(stored_since(spark, tmp_path, stored_before)[1].values()) == 4
    assert run_and_count_tasks(spark, dataset.collect)[1] == 4


@pytest.mark.contract
def test_a_kept_dataset_that_cannot_be_found_is_not_released(spark, crew, tmp_path, stored_before):
    """If the partitions of a kept dataset cannot be found, all partitions of the topology are kept.

    This also holds for partitions of an inner topology that an outer one wants to keep.
    """
    unknown = spark._jvm.java.lang.Object()
    datasets = [summed_rdd(spark) for _ in range(2)]  # Spark removes the shuffles of datasets that are not referenced
    with crew.topology("t", release="all") as topology:
        datasets[0].collect()
        topology._connection.keep(topology.id, unknown)
    assert len(stored_since(spark, tmp_path, stored_before)[1]) == 1
    with crew.topology("outer", release="all") as outer:
        outer._connection.keep(outer.id, unknown)
        with crew.topology("inner", release="all"):
            datasets[1].collect()
        assert len(stored_since(spark, tmp_path, stored_before)[1]) == 2


def test_keep_raises_if_this_spark_does_not_allow_it(spark, crew, monkeypatch):
    """The error says what this Spark lacks. The topology continues."""
    with crew.topology("t") as topology:
        assert topology._connection.problems() == []
        with monkeypatch.context() as patched:
            patched.setattr(type(topology._connection), "problems", lambda self: ["Spark lacks a.b"])
            with pytest.raises(stagecrew.errors.ConfigurationError, match="Spark lacks a.b"):
                topology.keep(spark.range(3))
        topology.keep(spark.range(3))


LEVELS = [StorageLevel.MEMORY_ONLY, StorageLevel.MEMORY_AND_DISK, StorageLevel.DISK_ONLY]


@pytest.mark.contract
def test_release_all_unpersists_datasets_cached_in_the_topology(spark, crew, tmp_path, stored_before):
    """Policy `all` unpersists datasets cached in the topology, at every level. Other policies do not.

    Datasets cached outside the topology stay cached.
    """
    outside = spark.sparkContext.parallelize(range(10), 2).cache()
    outside.count()
    cached_before = cached_rdds(spark)

    def cache_some() -> list[Any]:
        datasets = [spark.range(100 + i).persist(level) for i, level in enumerate(LEVELS)]
        rdds = [spark.sparkContext.parallelize(range(100), 2).persist(level) for level in LEVELS]
        for dataset in (*datasets, *rdds):
            assert dataset.count() >= 100
        outside.count()
        return [*datasets, *rdds]

    with crew.topology("shuffles"):
        datasets = cache_some()
    assert len(cached_rdds(spark) - cached_before) == 6
    with crew.topology("reads", release="all"):
        datasets[0].count()
    assert len(cached_rdds(spark) - cached_before) == 6
    for dataset in datasets:
        dataset.unpersist(True)
    with crew.topology("all", release=stagecrew.Release.ALL) as topology:
        datasets = cache_some()
        checkpointed = spark.sparkContext.parallelize(list(range(10)), 2)
        checkpointed.localCheckpoint()
        assert checkpointed.count() == 10
    assert len(cached_rdds(spark) - cached_before) == 1  # a local checkpoint has no lineage to recompute it from
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
        assert len(cached_rdds(spark) - cached_before) == 2
    assert len(cached_rdds(spark) - cached_before) == 1  # removed when its last user ended
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
    stored_before = (
        cached_blocks(spark),
        shuffle_files(spark, tmp_path, "rdd_*"),
    )  # Spark's cleaner may remove some of these

    def new_since():
        now = cached_blocks(spark), shuffle_files(spark, tmp_path, "rdd_*")
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


@pytest.mark.contract
def test_adaptive_plans_give_the_same_rows_after_the_release(spark, crew, tmp_path, stored_before):
    """Skewed, coalesced and broadcast reads of AQE give the same rows again after the release, from the same plan."""
    with sql_settings(spark, SKEWED):
        key = f.when(f.col("id") < 700, 1).otherwise(f.col("id") % 50)
        left, right = (
            spark.range(0, 1000, 1, 4).select(key.alias("k"), f.col("id").alias(name)) for name in ("a", "b")
        )
        lookup = spark.range(50).withColumnRenamed("id", "k")
        skewed = left.join(right.where("b > 650"), "k").select("k", "a", "b")
        joined = left.groupBy("k").agg(f.sum("a").alias("s")).join(f.broadcast(lookup), "k")
        with crew.topology("t"):
            expected = [rows(skewed), rows(joined)]
            plans = [executed_plan(skewed), executed_plan(joined)]
        assert stored_since(spark, tmp_path, stored_before) == (set(), {})
        assert "skewed" in plans[0]
        assert "AQEShuffleRead coalesced" in plans[1]
        assert "BroadcastExchange" in plans[1]
        assert [rows(skewed), rows(joined)] == expected
        assert "skewed" in executed_plan(skewed)
        assert "AQEShuffleRead coalesced" in executed_plan(joined)


def test_policy_none_releases_nothing(spark, crew, tmp_path, stored_before):
    """Policy `none` releases nothing, even when another topology that reads the output ends."""
    with crew.topology("around"), crew.topology("t", release="none") as topology:
        dataset = summed_rdd(spark)
        dataset.collect()
        reader = threading.Thread(
            target=crew.topologies.innermost.parent.wrap(dataset.collect)
        )  # the outer topology reads the output and ends later
        reader.start()
        reader.join(60)
    with crew.topology("reads"):
        dataset.collect()
    assert sum(stored_since(spark, tmp_path, stored_before)[1].values()) == 4
    assert topology.report.released == 0
    assert run_and_count_tasks(spark, dataset.collect)[1] == 4


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
    """An exit succeeds although some of its shuffles were already removed, by hand or by Spark's cleaner."""
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
    """An unknown policy, an object that is not a dataset and a topology that has not started are rejected."""
    with pytest.raises(
        stagecrew.errors.ConfigurationError, match="release='some' is not a release policy.*'shuffles', 'all', 'none'"
    ):
        crew.topology("t", release="some")
    topology = crew.topology("t")
    with pytest.raises(stagecrew.errors.TopologyError, match="topology.keep takes DataFrames and RDDs, not int"):
        topology.keep(7)
    with pytest.raises(
        stagecrew.errors.TopologyError, match="'t' is new; keep datasets only inside its `with` statement"
    ):
        topology.keep(spark.range(3))


def test_a_stateful_streaming_query_runs_on_while_other_topologies_end(spark, crew, tmp_path, stored_before, request):
    """A stateful streaming query keeps running while other topologies end, and leaves nothing when its own ends."""
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
