"""What a topology leaves behind is known, and goes when it ends; who uses it again gets the same rows."""

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
from support.journal import Journal
from support.sessions import LOCAL, LOCAL_CLUSTER
from support.spark_storage import (
    cached_blocks,
    cached_rdds,
    executed_plan,
    forget_executors,
    map_outputs,
    paths,
    private_field,
    run_and_count_tasks,
    shuffle_files,
    tracker,
    without_spark_events,
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
    """The masters, as everywhere; in `make test` the one where executors are processes."""
    return request.getfixturevalue("standalone") if request.param == "standalone" else request.param


@pytest.fixture
def before(spark, tmp_path):
    """What was stored before the test: nothing of it may go."""
    return set(shuffle_files(spark, tmp_path)), map_outputs(spark)


def stored_since(spark, tmp_path, before):
    """Files and outputs that came since."""
    now = map_outputs(spark)
    return set(shuffle_files(spark, tmp_path)) - before[0], {s: n for s, n in now.items() if s not in before[1]}


def frame(spark, rows=1000, parts=4):
    """A dataset with a shuffle whose rows come back in one order."""
    return spark.range(0, rows, 1, parts).groupBy((f.col("id") % 7).alias("k")).agg(f.sum("id").alias("s"))


def rows(dataset):
    return sorted(map(tuple, dataset.collect()))


def counted(spark, parts=4):
    """An RDD with a shuffle."""
    return spark.sparkContext.parallelize(range(100), parts).map(lambda n: (n % 5, n)).reduceByKey(operator.add)


EXPECTED = sorted((k, sum(range(k, 100, 5))) for k in range(5))


def test_nothing_is_left_after_the_exit(spark, crew, tmp_path, before):
    """After the exit no file, no output in the tracker and no entry in a table is left, whichever writer wrote it."""
    with crew.topology("t") as topology:
        datasets = [frame(spark)]
        bypass = spark.range(0, 1000, 1, 3).repartition(3)  # BypassMergeSortShuffleWriter
        spark.conf.set("spark.sql.shuffle.partitions", 300)
        unsafe = frame(spark)  # UnsafeShuffleWriter
        unsafe.collect()
        spark.conf.set("spark.sql.shuffle.partitions", 2)
        sort = counted(spark)  # SortShuffleWriter, which combines
        datasets += [bypass]
        for dataset in datasets:
            dataset.collect()
        assert sorted(sort.collect()) == EXPECTED
        found, tracked = stored_since(spark, tmp_path, before)
        assert len(tracked) == 4
        assert sum(name.endswith(".data") for name in found) == sum(tracked.values())
        eventually(
            lambda: sum(one.outputs for one in topology.partitions) == sum(tracked.values()), 20, "it is reported"
        )
    assert stored_since(spark, tmp_path, before) == (set(), {})
    report = topology.report
    assert report.released == sum(tracked.values())
    assert report.release_failures == 0
    assert report.released_bytes > 0
    assert not [one for one in topology.partitions if one.outputs or one.in_progress or one.blocks]
    assert {one.topology for one in crew.partitions()} >= {topology.id}
    for dataset in (datasets[0], unsafe):  # held until here, or Spark's own cleaner might have taken them
        assert rows(dataset) == sorted((k, sum(range(k, 1000, 7))) for k in range(7))


def test_what_cannot_be_deleted_is_no_release(spark, crew, tmp_path, before):
    """Files that an executor cannot delete are counted as failures, and not as released: one output and one cached block, in
    whose places there are folders."""

    def replaced(pattern: str) -> Path:
        path = next(path for path in paths(spark, tmp_path, pattern) if path.name not in before[0])
        path.unlink()
        path.mkdir()
        (path / "held").touch()
        return path

    with crew.topology("t", release="all") as topology:
        shuffled, stored = counted(spark), spark.sparkContext.parallelize(range(100), 4).persist(StorageLevel.DISK_ONLY)
        assert sorted(shuffled.collect()) == EXPECTED
        assert stored.count() == 100
        size = sum(map_outputs(spark)[shuffle] for shuffle in map_outputs(spark) if shuffle not in before[1])
        held = [replaced("shuffle_*.data"), replaced(f"rdd_{stored.id()}_*")]
    report = topology.report
    assert (report.released, report.release_failures) == (size + 4 - 2, 2)
    assert sum(one.release_failures for one in topology.partitions) == 2
    for path in held:
        (path / "held").unlink()
        path.rmdir()


def test_what_is_used_again_is_computed_again(spark, crew, tmp_path, before):
    """A dataset gives the same rows after the release of its shuffles, of half of them, and again under another topology."""
    with crew.topology("a"):
        first = counted(spark)
        assert sorted(first.collect()) == EXPECTED
    second = first.map(lambda kv: (kv[0] % 2, kv[1])).reduceByKey(operator.add)
    expected = sorted({p: sum(v for k, v in EXPECTED if k % 2 == p) for p in (0, 1)}.items())
    with crew.topology("b"):
        assert sorted(second.collect()) == expected  # the first shuffle is gone, the second is new
    with crew.topology("c"):
        assert sorted(first.collect()) == EXPECTED
        with crew.topology("d"):
            assert sorted(second.collect()) == expected  # half of the lineage is there
        assert sorted(second.collect()) == expected
    assert stored_since(spark, tmp_path, before) == (set(), {})
    assert sorted(second.collect()) == expected
    adaptive = frame(spark)
    with crew.topology("e"):
        one = rows(adaptive)
    assert rows(adaptive) == one  # AQE holds the plan, and its stages, that ran inside


def test_what_the_application_uses_stays(spark, crew, tmp_path, before):
    """What jobs of no topology wrote, or read, is theirs; what only one of two topologies that use it ends stays."""
    mine = counted(spark)
    mine.collect()
    with crew.topology("reads"):
        mine.collect()
        shared = counted(spark)
        shared.collect()
        crew_thread = threading.Thread(target=shared.collect)  # no topology: a thread does not inherit it
        crew_thread.start()
        crew_thread.join(60)
    assert len(stored_since(spark, tmp_path, before)[1]) == 2
    with crew.topology("outer"):
        with crew.topology("inner"):
            passed = counted(spark)
            passed.collect()
        assert len(stored_since(spark, tmp_path, before)[1]) == 2
        with crew.topology("inner"):
            passed.collect()
            other = threading.Thread(target=crew.topologies.innermost.parent.wrap(passed.collect))
            other.start()
            other.join(60)
        assert len(stored_since(spark, tmp_path, before)[1]) == 3  # the outer one has it
        assert run_and_count_tasks(spark, passed.collect)[1] == 4
    assert len(stored_since(spark, tmp_path, before)[1]) == 2
    assert sorted(mine.collect()) == sorted(shared.collect()) == sorted(passed.collect()) == EXPECTED


def test_keep(spark, crew, tmp_path, before):
    """What is kept stays, of RDDs and of DataFrames: it is read again, and not computed."""
    already = cached_rdds(spark)
    with crew.topology("t", release="all") as topology:
        kept, gone, data = counted(spark), counted(spark), frame(spark)
        held = spark.range(100).cache()
        for dataset in (kept, gone, data, held):
            dataset.collect()
        topology.keep(kept, data, held)
    assert len(stored_since(spark, tmp_path, before)[1]) == 2
    answer, tasks = run_and_count_tasks(spark, kept.collect)
    assert (sorted(answer), tasks) == (EXPECTED, 4)  # the reduce stage alone
    assert run_and_count_tasks(spark, lambda: rows(data))[1] <= 2
    assert len(cached_rdds(spark) - already) == 1
    assert run_and_count_tasks(spark, gone.collect)[1] == 8
    held.unpersist(True)


def test_keep_of_what_an_inner_topology_ran(spark, crew, tmp_path, before):
    """An outer topology keeps what ran in an inner one, from its own `keep` on; what cannot be looked at harms no other."""
    with crew.topology("outer") as outer:
        dataset, other = counted(spark), counted(spark)
        outer.keep(dataset)
        with crew.topology("inner"):
            dataset.collect()
            other.collect()
        assert len(stored_since(spark, tmp_path, before)[1]) == 1
        outer.keep(spark.range(3).selectExpr("raise_error('no plan of this runs') as a"))
    assert sum(stored_since(spark, tmp_path, before)[1].values()) == 4
    assert run_and_count_tasks(spark, dataset.collect)[1] == 4


LEVELS = [StorageLevel.MEMORY_ONLY, StorageLevel.MEMORY_AND_DISK, StorageLevel.DISK_ONLY]


def test_cached_datasets(spark, crew, tmp_path, before):
    """Policy `all` unpersists what was cached inside, at every level; the others leave it; what was cached outside stays."""
    outside = spark.sparkContext.parallelize(range(10), 2).cache()
    outside.count()
    already = cached_rdds(spark)

    def cache_some() -> list[Any]:
        some = [spark.range(100 + i).persist(level) for i, level in enumerate(LEVELS)]
        more = [spark.sparkContext.parallelize(range(100), 2).persist(level) for level in LEVELS]
        for dataset in (*some, *more):
            assert dataset.count() >= 100
        outside.count()
        return [*some, *more]

    with crew.topology("shuffles"):
        some = cache_some()
    assert len(cached_rdds(spark) - already) == 6
    with crew.topology("reads", release="all"):
        some[0].count()
    assert len(cached_rdds(spark) - already) == 6
    for dataset in some:
        dataset.unpersist(True)
    with crew.topology("all", release=stagecrew.Release.ALL) as topology:
        some = cache_some()
        local = spark.sparkContext.parallelize(list(range(10)), 2)
        local.localCheckpoint()
        assert local.count() == 10
    assert len(cached_rdds(spark) - already) == 1  # a local checkpoint has no lineage to be computed again from
    assert local.count() == 10
    assert topology.report.released >= 12
    assert topology.report.release_failures == 0
    assert not [one for one in topology.partitions if one.blocks]
    assert sum(dataset.count() for dataset in some) == 103 + 200 + 300
    with crew.topology("last", release="all"):
        shared = spark.sparkContext.parallelize(range(10), 2).cache()
        with crew.topology("first", release="all") as first:
            shared.count()
            reader = threading.Thread(target=first.parent.wrap(shared.count))
            reader.start()
            reader.join(60)
        assert shared.getStorageLevel().useMemory
        assert len(cached_rdds(spark) - already) == 2
    assert len(cached_rdds(spark) - already) == 1  # it went with its last user
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


def test_every_storage_level(spark, crew, tmp_path):
    """What is cached at any level, twice or thrice too, goes with policy `all` from disks and the BlockManagerMaster."""
    before = (
        cached_blocks(spark),
        shuffle_files(spark, tmp_path, "rdd_*"),
    )  # of which Spark's cleaner may take something away

    def since():
        now = cached_blocks(spark), shuffle_files(spark, tmp_path, "rdd_*")
        return [Counter(new) - Counter(old) for new, old in zip(now, before, strict=True)]

    with crew.topology("t", release="all") as topology:
        held = [spark.range(0, 20 + i, 1, 2).persist(level) for i, level in enumerate(EVERY_LEVEL)]
        held += [spark.sparkContext.parallelize(range(20), 2).persist(level) for level in EVERY_LEVEL]
        for dataset in held:
            assert dataset.count() >= 20
        there, on_disk = since()
        assert len(there) == 2 * len(held)
        if not spark.sparkContext.master.startswith("local["):  # where there is another executor to have them
            assert there.total() > 2 * len(held)
        assert on_disk.total() >= 4 * 2  # DISK_ONLY and OFF_HEAP, of each kind
    assert since() == [Counter(), Counter()]
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
def configured(spark, settings):
    """Settings of SQL that hold meanwhile."""
    had = {key: spark.conf.get(key) for key in settings}
    for key, value in settings.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, value in had.items():
            spark.conf.set(key, value)


def test_adaptive_reads(spark, crew, tmp_path, before):
    """Reads that AQE splits or coalesces, and a broadcast join, give the same rows again from its plan after the release."""
    with configured(spark, SKEWED):
        key = f.when(f.col("id") < 700, 1).otherwise(f.col("id") % 50)
        left, right = (spark.range(0, 1000, 1, 4).select(key.alias("k"), f.col("id").alias(of)) for of in ("a", "b"))
        few = spark.range(50).withColumnRenamed("id", "k")
        skewed = left.join(right.where("b > 650"), "k").select("k", "a", "b")
        small = left.groupBy("k").agg(f.sum("a").alias("s")).join(f.broadcast(few), "k")
        with crew.topology("t"):
            wanted = [rows(skewed), rows(small)]
            plans = [executed_plan(skewed), executed_plan(small)]
        assert stored_since(spark, tmp_path, before) == (set(), {})
        assert "skewed" in plans[0]
        assert "AQEShuffleRead coalesced" in plans[1]
        assert "BroadcastExchange" in plans[1]
        assert [rows(skewed), rows(small)] == wanted
        assert "skewed" in executed_plan(skewed)
        assert "AQEShuffleRead coalesced" in executed_plan(small)


def test_policy_none(spark, crew, tmp_path, before):
    """Policy `none` releases nothing, also when another topology that reads it ends."""
    with crew.topology("around"), crew.topology("t", release="none") as topology:
        dataset = counted(spark)
        dataset.collect()
        reader = threading.Thread(
            target=crew.topologies.innermost.parent.wrap(dataset.collect)
        )  # it uses it, and ends later
        reader.start()
        reader.join(60)
    with crew.topology("reads"):
        dataset.collect()
    assert sum(stored_since(spark, tmp_path, before)[1].values()) == 4
    assert topology.report.released == 0
    assert run_and_count_tasks(spark, dataset.collect)[1] == 4


def stays(condition, seconds=3.0):
    """For so long it is true: executors report within."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition()
        time.sleep(0.05)


def test_a_job_that_begins_while_its_topology_closes(spark, crew, tmp_path, before, journal):
    """What a job uses that another thread starts while its topology closes is never dropped: it is the application's then."""
    gate, path = tmp_path / "gate", journal.path

    @stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
    def slow_to_close(context):
        yield None
        Journal(path).write(event="closing")
        eventually(gate.exists, 60, "the gate")

    topology = crew.topology("t", listeners=[slow_to_close()]).start()
    old, new = counted(spark), counted(spark)
    old.collect()
    may, found = threading.Event(), []

    def uses():
        may.wait(60)
        found.extend(sorted(dataset.collect()) for dataset in (old, new))

    user = threading.Thread(target=topology.wrap(uses))
    user.start()
    ends = threading.Thread(target=topology.close)
    ends.start()
    try:
        eventually(lambda: journal.read(event="closing"), 60, "it closes")
        may.set()
        user.join(60)
        assert found == [EXPECTED, EXPECTED]
        mine = stored_since(spark, tmp_path, before)[1]
        assert list(mine.values()) == [4, 4]
        stays(lambda: stored_since(spark, tmp_path, before)[1] == mine)
    finally:
        gate.touch()
        ends.join(60)
    topology.close()
    assert stored_since(spark, tmp_path, before)[1] == mine
    for dataset in (old, new):
        assert run_and_count_tasks(spark, dataset.collect)[1] == 4  # the reduce stage alone


def test_a_job_of_a_closed_topology_whose_start_is_not_heard(spark, crew, tmp_path, before, journal):
    """What runs is never dropped, though the bus dropped its start, and its thread bears the mark of what has ended."""
    gate, may, found = tmp_path / "gate", threading.Event(), []

    def wait(part):
        eventually(gate.exists, 60, "the gate")
        return part

    dataset = counted(spark).mapPartitions(wait)

    def uses():
        may.wait(60)
        found.append(sorted(dataset.collect()))

    with crew.topology("t") as topology:
        user = threading.Thread(target=topology.wrap(uses))
        user.start()
    with without_spark_events(spark):
        may.set()
        try:
            eventually(lambda: list(stored_since(spark, tmp_path, before)[1].values()) == [4], 60, "it is written")
            stays(lambda: list(stored_since(spark, tmp_path, before)[1].values()) == [4])
        finally:
            gate.touch()
            user.join(60)
    assert found == [EXPECTED]


def test_an_end_that_reaches_no_executor(spark, crew, tmp_path, before):
    """Executors that never hear of the end of a topology learn it from their inventory: files go, and tables are empty."""
    with crew.topology("outer") as outer:
        shared = counted(spark)
        shared.collect()
        with crew.topology("t") as topology:
            dataset = counted(spark)
            assert sorted(dataset.collect()) == sorted(shared.collect()) == EXPECTED
            eventually(lambda: sum(one.outputs for one in topology.partitions) == 4, 20, "it is reported")
            forget_executors(crew, topology.id)
        assert list(stored_since(spark, tmp_path, before)[1].values()) == [4]
        eventually(
            lambda: sum(n.endswith(".data") for n in stored_since(spark, tmp_path, before)[0]) == 4, 20, "files go"
        )
        eventually(lambda: not [one for one in topology.partitions if one.outputs], 20, "tables are empty")
        assert topology.report.released == 4
        assert run_and_count_tasks(spark, shared.collect)[1] == 4  # what another uses stays
        outer.close()
    assert stored_since(spark, tmp_path, before) == (set(), {})
    assert sorted(dataset.collect()) == EXPECTED


def cancelled(dataset):
    """Its action is cancelled."""
    with pytest.raises(Exception, match="cancel"):
        dataset.collect()


def test_cancelled_while_it_writes(spark, crew, tmp_path, before, journal):
    """Of a topology that is cancelled while its tasks write, no file and no entry is left."""

    def slow(part):
        journal.write(event="writes")
        for n in part:
            time.sleep(0.05)
            yield n % 5, n

    with pytest.raises(ZeroDivisionError), crew.topology("t") as topology:
        dataset = spark.sparkContext.parallelize(range(400), 4).mapPartitions(slow).reduceByKey(operator.add)
        thread = threading.Thread(target=topology.wrap(lambda: cancelled(dataset)))
        thread.start()
        eventually(lambda: len(journal.read(event="writes")) >= 2, 60, "they write")
        raise ZeroDivisionError
    thread.join(60)
    assert stored_since(spark, tmp_path, before) == (set(), {})
    assert not [one for one in topology.partitions if one.outputs or one.in_progress]


@pytest.mark.parametrize("whose", ["the application's", "a topology's"])
def test_a_shared_map_stage(spark, crew, tmp_path, before, journal, whose):
    """A map stage that two jobs share survives the cancellation of the first, whose topology's tasks go on to write it; it goes
    with the second, if that is a topology's."""
    gate = tmp_path / "gate"

    def slow(part):
        journal.write(event="writes")
        eventually(gate.exists, 60, "the gate")
        return part

    numbers = spark.sparkContext.parallelize(range(100), 8).mapPartitions(slow)
    dataset = numbers.map(lambda n: (n % 5, n)).reduceByKey(operator.add)
    second: list[Any] = []

    def other():
        with crew.topology("other") if whose != "the application's" else contextlib.nullcontext():
            second.append(dataset.collect())

    status = spark.sparkContext.statusTracker()
    with pytest.raises(ZeroDivisionError), crew.topology("t") as topology:
        first = threading.Thread(target=topology.wrap(lambda: cancelled(dataset)))
        first.start()
        eventually(lambda: journal.read(event="writes"), 60, "the map stage runs")
        thread = threading.Thread(target=other)
        thread.start()
        eventually(lambda: len(status.getActiveJobsIds()) == 2, 60, "the second job waits for it")

        def open_gate():
            eventually(lambda: len(status.getActiveJobsIds()) == 1, 60, "the first is cancelled")
            gate.touch()

        opens = threading.Thread(target=open_gate)
        opens.start()
        raise ZeroDivisionError
    opens.join(60)
    thread.join(60)
    first.join(60)
    assert sorted(second[0]) == EXPECTED
    assert len(journal.read(event="writes")) == 8  # nothing was written twice
    if whose == "the application's":
        assert list(stored_since(spark, tmp_path, before)[1].values()) == [8]
    else:
        eventually(lambda: stored_since(spark, tmp_path, before) == (set(), {}), 30, "it goes with its last user")
    assert sorted(dataset.collect()) == EXPECTED


@pytest.mark.parametrize("when", ["map", "reduce"])
def test_a_release_in_the_middle_of_a_stage(spark, crew, tmp_path, before, journal, when):
    """Outputs that go while somebody's job writes or reads that very shuffle do not fail it: what it misses is computed again."""
    gate = tmp_path / "gate"

    def at(stage, ready):
        def wait(part):
            part = list(part)
            journal.write(event=stage, keys=len(part))
            if when == stage and ready(part):
                eventually(gate.exists, 60, "the gate")
            return part

        return wait

    numbers = spark.sparkContext.parallelize(range(100), 4).mapPartitions(at("map", lambda part: 99 in part))
    shuffled = numbers.map(lambda n: (n % 5, n)).partitionBy(4).mapPartitions(at("reduce", lambda part: bool(part)))
    dataset = shuffled.reduceByKey(operator.add)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(dataset.collect()))
    thread.start()
    if when == "map":
        # The fourth waits.
        eventually(lambda: sum(stored_since(spark, tmp_path, before)[1].values()) == 3, 60, "three are written")
    else:
        eventually(lambda: journal.read(event="reduce"), 60, "it is read")
    new = [shuffle for shuffle in map_outputs(spark) if shuffle not in before[1]]
    assert new
    drop(spark, crew, new)
    delete(spark, tmp_path, new)
    gate.touch()
    thread.join(120)
    assert sorted(found[0]) == EXPECTED
    assert sorted(dataset.collect()) == EXPECTED


def drop(spark, crew, shuffles):
    """Takes outputs off the tracker by what does it at the end of a topology."""
    to_scala = spark.sparkContext._jvm.org.apache.spark.api.python.PythonUtils.toSeq
    private_field(crew.connection.facade, "crew").partitions().drop(to_scala(shuffles))
    assert not set(map_outputs(spark)) & set(shuffles)


def delete(spark, tmp_path, shuffles):
    """Deletes the files of these shuffles."""
    from pathlib import Path

    from support.spark_storage import block_folders

    for folder in block_folders(spark, tmp_path):
        for shuffle in shuffles:
            for file in Path(folder).glob(f"*/shuffle_{shuffle}_*"):
                file.unlink(missing_ok=True)


@pytest.mark.parametrize("whose", ["its own", "a topology's"])
def test_a_release_between_two_stages_of_an_adaptive_query(spark, crew, tmp_path, before, journal, whose):
    """A query that AQE runs stage by stage gives its rows, though outputs that a later stage reads go while an earlier one runs:
    those that it wrote itself, and those of a topology that ends. So it does again, by the plan that AQE holds."""
    gate = tmp_path / "gate"

    def wait(part):
        journal.write(event="stage")
        eventually(gate.exists, 60, "the gate")
        return part

    waits = spark.sparkContext.parallelize(range(100), 1).mapPartitions(wait).map(lambda n: (n % 5, n))
    early = spark.createDataFrame(waits, "k long, v long").groupBy("k").agg(f.sum("v").alias("s"))
    found: list[Any] = []
    with configured(spark, {"spark.sql.autoBroadcastJoinThreshold": "-1"}):
        if whose == "its own":
            at_once = spark.range(0, 100, 1, 2).groupBy((f.col("id") % 5).alias("k")).agg(f.sum("id").alias("t"))
            query, count = early.join(at_once, "k").select("k", (f.col("s") + f.col("t")).alias("s")), 2
        else:
            topology = crew.topology("t").start()
            shared = counted(spark)
            assert sorted(shared.collect()) == EXPECTED
            late = spark.createDataFrame(shared, "k long, s long")
            query, count = early.unionAll(late).groupBy("k").agg(f.sum("s").alias("s")), 4
        thread = threading.Thread(target=lambda: found.append(rows(query)))
        thread.start()
        try:
            eventually(lambda: journal.read(event="stage"), 60, "the earlier stage runs")
            eventually(lambda: list(stored_since(spark, tmp_path, before)[1].values()) == [count], 60, "it is written")
            if whose == "its own":
                written = list(stored_since(spark, tmp_path, before)[1])
                drop(spark, crew, written)
                delete(spark, tmp_path, written)
            else:
                topology.close()
                assert topology.report.released == count
            assert stored_since(spark, tmp_path, before)[1] == {}
            assert thread.is_alive()
            assert "isFinalPlan=false" in executed_plan(query)
        finally:
            gate.touch()
            thread.join(120)
        assert found == [[(k, 2 * s) for k, s in EXPECTED]]
        assert rows(query) == found[0]


def shuffled(spark, adaptive, parts):
    """Two datasets, of which the second shuffles what the first has shuffled: DataFrames, which AQE runs, or RDDs."""
    if not adaptive:
        dataset = counted(spark, parts)
        return dataset, dataset.map(lambda kv: (kv[0] % 2, kv[1])).reduceByKey(operator.add, 2)
    frame = spark.range(0, 100, 1, parts).groupBy((f.col("id") % 5).alias("k")).agg(f.sum("id").alias("s"))
    return frame, frame.groupBy((f.col("k") % 2).alias("p")).agg(f.sum("s").alias("s"))


def random_release(spark, crew, seed):
    """A topology writes a shuffle and ends at some moment; others use the shuffle at another, one of them by a thread that bears
    its mark. All get their rows."""
    chance = random.Random(seed)
    adaptive = seed % 2 == 1
    dataset, whole = shuffled(spark, adaptive, chance.choice([1, 2, 4]))
    expected = sorted({p: sum(v for k, v in EXPECTED if k % 2 == p) for p in (0, 1)}.items())
    problems: list[BaseException] = []
    pauses = [chance.uniform(0, 0.5 if adaptive else 0.25) for _ in range(4)]
    begin = ("at once", "at its end", "after it")[seed // 2 % 3]
    others = threading.Event()
    if begin == "at once":
        others.set()

    def user(pause, run, wanted):
        def body():
            others.wait(60)
            time.sleep(pause)
            try:
                assert run() == wanted
            except BaseException as error:
                problems.append(error)

        return body

    topology = crew.topology(f"random {seed}", release=chance.choice(["shuffles", "all"])).start()
    if begin == "after it" or chance.random() < 0.5:
        rows(dataset)

    def run():
        return rows(dataset)

    if chance.random() < 0.5:  # another topology, which ends when it likes

        def run():
            with crew.topology("other"):
                return rows(dataset)

    users = [user(pauses[0], run, EXPECTED), user(pauses[1], lambda: rows(whole), expected)]
    entered = threading.Event()
    if begin != "after it" and chance.random() < 0.5:
        body = user(pauses[3], lambda: rows(whole), expected)
        users.append(topology.wrap(lambda: (entered.set(), body())))
    else:
        entered.set()
    threads = [threading.Thread(target=body) for body in users]
    for thread in threads:
        thread.start()
    if chance.random() < 0.5:
        rows(whole)
    time.sleep(pauses[2])
    assert entered.wait(60)
    if begin == "at its end":
        others.set()
    topology.close()
    others.set()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not problems, (seed, problems)
    assert rows(whole) == expected
    assert rows(dataset) == EXPECTED
    return topology.report.released


@pytest.mark.parametrize("seeds", [10, pytest.param(240, marks=pytest.mark.long)])
def test_releases_at_random_moments(spark, crew, seeds):
    """No job of anybody fails, or gets other rows, whenever topologies release what it works on: RDDs and, of every second seed,
    DataFrames that AQE runs."""
    everywhere = spark.sparkContext.master.startswith("spark://")
    released = [random_release(spark, crew, seed) for seed in range(seeds if everywhere else min(seeds, 40))]
    for kind in (released[::2], released[1::2]):
        assert sum(map(bool, kind)) >= len(kind) / 5, released  # of the rest others use all, or nothing was run


def test_a_thousand_partitions_within_two_seconds(spark, crew, tmp_path, before):
    """The exit of a topology with 1,000 map outputs takes less than two seconds, and leaves none."""
    topology = crew.topology("t").start()
    dataset = spark.range(0, 1000, 1, 1000).repartition(2)
    assert len(dataset.collect()) == 1000
    assert sum(stored_since(spark, tmp_path, before)[1].values()) == 1000
    started = time.monotonic()
    topology.close()
    took = time.monotonic() - started
    assert stored_since(spark, tmp_path, before) == (set(), {})
    assert took < 2.0, took
    assert dataset.columns == ["id"]  # it is held until here


def test_a_closed_resource_names_keep(spark, crew):
    """A dataset that is computed again needs its resource again: the error says that `keep` would have helped."""

    @stagecrew.resource
    def pool(context):
        yield 7

    port = pool()
    with crew.topology("t", listeners=[port]) as topology:
        lost = spark.sparkContext.parallelize(range(4), 2).map(lambda n: (n, port.get())).partitionBy(2)
        kept = spark.sparkContext.parallelize(range(4), 2).map(lambda n: (n, port.get())).partitionBy(2)
        assert lost.count() == kept.count() == 4
        topology.keep(kept)
    assert sorted(kept.collect()) == [(n, 7) for n in range(4)]
    with pytest.raises(Exception, match=r"topology\.keep\(dataset\)"):
        lost.collect()


def test_what_is_released_twice_or_unknown(spark, crew, tmp_path, before):
    """Shuffles that Spark's cleaner has taken, or another topology has released, harm no exit."""
    with crew.topology("outer") as outer:
        dataset = counted(spark)
        dataset.collect()
        (shuffle,) = stored_since(spark, tmp_path, before)[1]
        tracker(spark).unregisterAllMapAndMergeOutput(shuffle)
        delete(spark, tmp_path, [shuffle])
        gone = counted(spark)
        gone.collect()
        (other,) = set(stored_since(spark, tmp_path, before)[1])
        spark.sparkContext._jsc.sc().cleaner().get().doCleanupShuffle(other, True)
        eventually(lambda: sum(one.outputs for one in outer.partitions) <= 4, 20, "what is gone is forgotten")
        outer.close()
        outer.close()
    assert stored_since(spark, tmp_path, before) == (set(), {})
    assert sorted(dataset.collect()) == EXPECTED


def test_bad_input(spark, crew):
    """A policy that is none, a dataset that is none and a topology that has ended are refused by name."""
    with pytest.raises(
        stagecrew.ConfigurationError, match="release='some' is no release policy.*'shuffles', 'all', 'none'"
    ):
        crew.topology("t", release="some")
    topology = crew.topology("t")
    with pytest.raises(stagecrew.TopologyError, match="topology.keep takes DataFrames and RDDs, not int"):
        topology.keep(7)
    with pytest.raises(stagecrew.TopologyClosed, match="'t' is new; keep datasets only inside its `with`"):
        topology.keep(spark.range(3))


def test_streaming_with_state(spark, crew, tmp_path, before, request):
    """A stateful streaming query runs on while topologies around other queries end, and leaves nothing behind its own."""
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
                counted(spark).collect()
        assert sorted(map(tuple, spark.table(query.name).collect())) == [(k, 30) for k in range(3)]
        query.stop()
    assert stored_since(spark, tmp_path, before) == (set(), {})
