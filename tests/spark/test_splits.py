"""Splits: each is in the result as often as Spark's own semantics say, whatever fails, on real Spark."""

from __future__ import annotations

import collections
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

import stagecrew
from stagecrew.operators.enumerators import DataSourcePartitions, Files, KeyRanges, ParquetRowGroups
from support.coordination import executor_pid
from support.processes import kill
from support.sessions import LOCAL, LOCAL_CLUSTER

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPLITS = list(range(40))


def rows_of(split: int) -> list[int]:
    return [split * 10 + i for i in range(split % 4)]  # some have no rows


EXPECTED = sorted(row for split in SPLITS for row in rows_of(split))


def read(split: int) -> Any:
    time.sleep(0.002)
    yield pa.record_batch({"id": pa.array(rows_of(split), pa.int64())})


def ids(dataset: Any) -> list[int]:
    return sorted(row.id for row in dataset.collect())


@pytest.fixture
def cluster(sessions):
    """A session on a cluster of two executors."""
    return sessions.get(LOCAL_CLUSTER)


def test_every_split_once(cluster):
    """All rows of all splits are there, once, and several tasks read them."""
    with stagecrew.crew(cluster).topology("t") as topology:
        splits = topology.splits(SPLITS, read, "id long", parallelism=4)
        assert ids(splits) == EXPECTED
        assert splits.select(f.spark_partition_id().alias("p")).distinct().count() > 1


@pytest.mark.long
def test_spark_s_semantics(cluster):
    """A second action, coalesce, repartition, unions and joins with itself, crossJoin: each row as often as of any dataset."""
    with stagecrew.crew(cluster).topology("t") as topology:

        def fresh():
            """One of which no split was read yet: what comes first gives them out."""
            return topology.splits(SPLITS, read, "id long", parallelism=4)

        def crossed(splits, hint):
            return splits.hint(hint).crossJoin(splits.withColumnRenamed("id", "other"))

        splits = fresh()
        assert ids(splits) == EXPECTED
        assert splits.count() == len(EXPECTED)
        for again in (splits, None):  # its logs are replayed, or made
            assert ids((again or fresh()).coalesce(1)) == EXPECTED
            assert ids((again or fresh()).coalesce(2)) == EXPECTED
            assert ids((again or fresh()).repartition(3)) == EXPECTED
            one = again or fresh()
            assert ids(one.union(one)) == sorted(EXPECTED * 2)
            one = again or fresh()
            assert ids(one.hint("merge").join(one, "id")) == EXPECTED
            for hint in ("broadcast", "shuffle_replicate_nl"):
                pairs = crossed(again or fresh(), hint)
                assert pairs.count() == pairs.distinct().count() == len(EXPECTED) ** 2


@pytest.mark.parametrize("prefix", ["take", "show"])
def test_a_prefix_and_then_the_whole(cluster, capsys, prefix):
    """An action that reads only some splits leaves the rest for the next."""
    begun = collections.Counter()

    def enumerated():
        for split in SPLITS:
            begun["splits"] += 1
            yield split

    def large(split):  # more than the buffers on the way of a consumer that has stopped
        rows = rows_of(split)
        yield pa.record_batch(
            {"id": pa.array(rows, pa.int64()), "pad": pa.array([b"x" * (1 << 20)] * len(rows), pa.binary())}
        )

    with stagecrew.crew(cluster).topology("t") as topology:
        splits = topology.splits(enumerated(), large, "id long, pad binary", parallelism=4)
        if prefix == "take":
            assert len(splits.take(3)) == 3
        else:
            splits.select("id").show(3)
            assert capsys.readouterr().out.count("|") > 3
        assert begun["splits"] < len(SPLITS)
        assert ids(splits.select("id")) == EXPECTED
        assert ids(splits.select("id")) == EXPECTED


def test_a_cached_dataset_that_lost_blocks(cluster):
    """What was cached on an executor that is gone is read again: the same splits."""
    with stagecrew.crew(cluster).topology("t") as topology:
        counted = cluster.sparkContext.accumulator(0)

        def counts(split):
            counted.add(1)
            yield from read(split)

        cached = topology.splits(SPLITS, counts, "id long", parallelism=4).cache()
        assert ids(cached) == EXPECTED
        assert ids(cached) == EXPECTED
        assert counted.value == len(SPLITS)

        def executor(batches):
            yield pa.record_batch({"pid": [executor_pid()]})

        kill(cluster.range(0, 1, 1, 1).mapInArrow(executor, "pid long").first().pid)
        assert ids(cached) == EXPECTED
        assert counted.value > len(SPLITS), "no block was lost"
        cached.unpersist()


@pytest.mark.parametrize("case", ["raises", "raises at once", "twice", "equal", "not picklable"])
def test_an_enumerator_that_fails(cluster, case):
    """It fails the topology at once, by the name of the operator, with what was raised."""

    def raises():
        yield from range(5)
        raise OSError("the listing broke")

    class AtOnce:
        def splits(self):
            raise OSError("the listing broke")

    enumerator, message = {
        "raises": (raises(), "enumerator of operator 'mine' raised OSError: the listing broke"),
        "raises at once": (AtOnce(), "enumerator of operator 'mine' raised OSError: the listing broke"),
        "twice": ([{"n": 1}, {"n": 2}, {"n": 1}], r"gave one split twice: \{'n': 1\}"),
        "equal": ([1, 2, 1.0], "gave one split twice: 1.0"),
        "not picklable": ([1, (n for n in ())], "raised .*cannot pickle"),
    }[case]
    started = time.monotonic()
    with (
        pytest.raises(stagecrew.CoordinatorFailed, match=message) as caught,
        stagecrew.crew(cluster).topology("t") as topology,
    ):
        topology.splits(enumerator, read_anything, "id long", parallelism=2, name="mine").collect()
    assert isinstance(caught.value.__cause__, stagecrew.SplitsFailed)
    assert time.monotonic() - started < 20


def read_anything(split: Any) -> Any:
    yield pa.record_batch({"id": pa.array([1], pa.int64())})


def test_an_enumerator_that_blocks(sessions):
    """It fails the topology when it gives no split within spark.stagecrew.request.timeout, and says so."""
    spark = sessions.get(LOCAL, **{"spark.stagecrew.request.timeout": "2s", "spark.stagecrew.close.timeout": "1s"})
    blocked = []

    def blocks():
        yield 1
        while not blocked:
            time.sleep(0.05)

    started = time.monotonic()
    try:
        with (
            pytest.raises(
                stagecrew.CoordinatorFailed, match="has not given its next split within 1.8 s: it blocks, or is slow"
            ),
            stagecrew.crew(spark).topology("t") as topology,
        ):
            topology.splits(blocks(), read, "id long", parallelism=2).collect()
    finally:
        blocked.append(True)
    assert time.monotonic() - started < 20


def test_bad_input(cluster):
    """What is no enumerator, no function, or yields no batches, is refused by name."""
    with stagecrew.crew(cluster).topology("t") as topology:
        with pytest.raises(stagecrew.OperatorMisused, match="int is neither"):
            topology.splits(3, read, "id long")
        with pytest.raises(stagecrew.OperatorMisused, match="reads with a function"):
            topology.splits(SPLITS, None, "id long")
        for wrong in (0, "2"):
            with pytest.raises(stagecrew.OperatorMisused, match="number of tasks"):
                topology.splits(SPLITS, read, "id long", parallelism=wrong)
        with pytest.raises(Exception, match=r"yields pyarrow.RecordBatch objects, not list"):
            topology.splits([1], lambda split: [[1]], "id long", parallelism=1).collect()
    with pytest.raises(stagecrew.TopologyClosed, match="only inside its `with`"):
        topology.splits(SPLITS, read, "id long")


def test_a_reset_to_a_checkpoint(cluster):
    """After a reset the logs are as of the checkpoint, and splits that are enumerated again are known."""
    with stagecrew.crew(cluster).topology("t") as topology:
        splits = topology.splits(SPLITS, read, "id long", parallelism=4)
        splits.take(3)
        checkpoint = stagecrew.Checkpoint.from_bytes(topology.checkpoint().to_bytes())
        assert ids(splits) == EXPECTED
        topology.reset(checkpoint)
        assert ids(splits) == EXPECTED
        topology.reset()
        assert ids(splits) == EXPECTED


def test_locations(cluster):
    """A split that prefers a host is given to a task there, when one asks."""

    class Located:
        def splits(self):
            return SPLITS

        def locations(self, split):
            return [here] if split % 2 else ["elsewhere"]

    def where(gateway, rows):
        yield gateway.host

    def marked(split):
        yield pa.record_batch({"id": pa.array([split], pa.int64())})

    with stagecrew.crew(cluster).topology("t") as topology:
        asking = topology.coordinate("o", stagecrew.Coordinator).bind(where)
        here = cluster.sparkContext.parallelize([1], 1).mapPartitions(asking).first()
        rows = topology.splits(Located(), marked, "id long", parallelism=1).collect()
    assert [row.id % 2 for row in rows] == [1] * 20 + [0] * 20


# -- Enumerators


def test_parquet_row_groups_and_files(cluster, tmp_path):
    """Every row of every row group, of a folder or URI with several files, their columns in any order; the largest first; a choice of columns."""
    folder = tmp_path / "table"
    folder.mkdir()
    for number, sizes in enumerate([(10, 500, 20), (300,), (1, 2, 3, 4)]):
        with pq.ParquetWriter(
            folder / f"{number}.parquet",
            pa.schema([("id", pa.int64()), ("text", pa.string())][:: 1 if number < 2 else -1]),
        ) as file:
            for group, size in enumerate(sizes):
                start = number * 10_000 + group * 1000
                numbers = list(range(start, start + size))
                rows = pa.table({"id": numbers, "text": [f"row {n}" for n in numbers]})
                file.write_table(rows.select(file.schema.names), row_group_size=size)
    expected = sorted(map(tuple, cluster.read.parquet(str(folder)).collect()))
    assert len(expected) == 840
    with stagecrew.crew(cluster).topology("t") as topology:
        groups = ParquetRowGroups(str(folder))
        assert [group.rows for group in groups.splits()][:3] == [500, 300, 20]
        assert sorted(map(tuple, topology.splits(groups, groups.read, groups.schema).collect())) == expected
        some = ParquetRowGroups(str(folder), columns=["id"], largest_first=False)
        assert sorted(map(tuple, topology.splits(some, some.read, some.schema).collect())) == [
            (n,) for n, _ in expected
        ]
        files = Files(folder.as_uri(), "parquet")
        assert sorted(map(tuple, topology.splits(files, files.read, files.schema).collect())) == expected
        for file_format, options in (("csv", {"header": True}), ("orc", {})):
            other = tmp_path / file_format
            cluster.createDataFrame(expected, "id long, text string").repartition(3).write.format(file_format).options(
                **options
            ).save(str(other))
            files = Files(str(other), file_format)
            assert sorted(map(tuple, topology.splits(files, files.read, files.schema).collect())) == expected


def test_key_ranges(cluster):
    """Every key once, also when there are more parts than keys."""

    def keys(split):
        yield pa.record_batch({"id": pa.array(range(*split), pa.int64())})

    with stagecrew.crew(cluster).topology("t") as topology:
        assert ids(topology.splits(KeyRanges(-5, 95, 7), keys, "id long")) == list(range(-5, 95))
        assert ids(topology.splits(KeyRanges(0, 3, 9), keys, "id long")) == [0, 1, 2]


class Numbers(DataSource):
    """A user's Python DataSource."""

    def schema(self):
        return "id long, text string"

    def reader(self, schema):
        return NumbersReader()


class NumbersReader(DataSourceReader):
    """Its reader."""

    def partitions(self):
        return [InputPartition(5) for _ in range(2)] + [InputPartition(n) for n in range(3)]

    def read(self, partition):
        for n in range(partition.value):
            yield n, f"row {n}"


def test_the_partitions_of_a_data_source(cluster):
    """The rows that Spark itself would read, also of partitions that look the same."""
    source = DataSourcePartitions(Numbers({}))
    with stagecrew.crew(cluster).topology("t") as topology:
        rows = topology.splits(source, source.read, source.schema, parallelism=3).collect()
    cluster.dataSource.register(Numbers)
    assert sorted(map(tuple, rows)) == sorted(map(tuple, cluster.read.format("Numbers").load().collect()))
    assert len(rows) == 13


# -- Seeded runs in which everything dies


@pytest.fixture
def dying(sessions, standalone):
    """A session in which much may fail, on two hosts."""
    return sessions.get(
        standalone,
        **{
            "spark.task.maxFailures": "30",
            "spark.speculation": "true",
            "spark.speculation.interval": "50ms",
            "spark.speculation.multiplier": "1.2",
            "spark.speculation.quantile": "0.3",
            "spark.speculation.minTaskRuntime": "150ms",
            "spark.excludeOnFailure.enabled": "false",
            "spark.executor.maxNumFailures": "10000",
        },
    )


def seeded_run(spark: Any, seed: int, folder: Path) -> collections.Counter[str]:
    """One run; answers what happened in it."""
    choice = random.Random(seed)
    folder.mkdir()
    fates = {split: choice.choice(["worker", "slow", "raise"]) for split in choice.sample(SPLITS, 3)}
    if seed % 8 == 0:
        fates[choice.choice(SPLITS)] = "executor"

    def dies(split):
        rows = rows_of(split)
        yield pa.record_batch({"id": pa.array(rows[:1], pa.int64())})
        fate = fates.get(split)
        if fate is not None:
            try:
                os.close(os.open(folder / str(split), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                fate = None  # it has met it
        if fate == "worker":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fate == "executor":
            os.kill(executor_pid(), signal.SIGKILL)
        elif fate == "raise":
            raise OSError("on purpose")
        elif fate == "slow":
            time.sleep(1.0)
        elif (folder / str(split)).exists() and fates.get(split) == "slow":
            (folder / f"{split}.again").touch()  # while the first sleeps, or behind it
        time.sleep(0.002)
        yield pa.record_batch({"id": pa.array(rows[1:], pa.int64())})

    splits = list(SPLITS)
    choice.shuffle(splits)
    with stagecrew.crew(spark).topology(f"seed {seed}") as topology:
        dataset = topology.splits(splits, dies, "id long", parallelism=choice.randrange(2, 7))
        if choice.random() < 0.3:
            dataset = dataset.repartition(2)
        found = ids(dataset)
    assert found == EXPECTED, (seed, fates, sorted(set(EXPECTED) - set(found)), len(found))
    return collections.Counter(
        "read again" if name.endswith(".again") else fates[int(name)] for name in os.listdir(folder)
    )


def several_runs(spark: Any, folder: Path, seeds: range, expected: set[str]) -> None:
    met: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        met += seeded_run(spark, seed, folder / str(seed))
    assert expected <= set(met), met
    print(f"{len(seeds)} runs: {dict(met)}")


def test_every_split_once_whatever_dies(dying, tmp_path):
    """Workers and executors killed, tasks that raise and that are speculated: every split once. Some seeds."""
    several_runs(dying, tmp_path, range(7, 10), {"worker", "slow", "executor"})


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 200, 25))
def test_every_split_once_whatever_dies_long(dying, tmp_path, first):
    """The same over 200 seeds."""
    several_runs(dying, tmp_path, range(first, first + 25), {"worker", "slow", "executor", "read again"})
