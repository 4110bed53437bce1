"""Splits on real Spark: each split is in the result as often as Spark's semantics require, whatever fails."""

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
from pyspark import TaskContext, cloudpickle
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

import stagecrew
from stagecrew.operators.enumerators import DataSourcePartitions, Files, KeyRanges, ParquetRowGroups
from support.coordination import executor_pid
from support.journal import Journal
from support.processes import kill
from support.sessions import LOCAL, LOCAL_CLUSTER
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPLITS = list(range(40))


def rows_of(split: int) -> list[int]:
    return [split * 10 + i for i in range(split % 4)]  # some splits have no rows


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


def test_every_split_is_read_once(cluster, tmp_path):
    """The result has every row of every split once, and several tasks read them."""
    journal = Journal(f"{tmp_path}/journal")

    def read_in_two_tasks(split):
        if rows_of(split):
            journal.write(partition=TaskContext.get().partitionId())
            # Without this, the first task may read everything before the worker of the second has started.
            eventually(lambda: len({event["partition"] for event in journal.read()}) > 1, 60, "only one task reads")
        yield from read(split)

    with stagecrew.crew(cluster).topology("t") as topology:
        splits = topology.splits(SPLITS, read_in_two_tasks, "id long", parallelism=4)
        assert ids(splits) == EXPECTED
        assert splits.select(f.spark_partition_id().alias("p")).distinct().count() > 1


@pytest.mark.long
def test_splits_follow_sparks_semantics(cluster):
    """With repeated actions, coalesce, repartition, unions and joins, each row appears as often as in any dataset."""
    with stagecrew.crew(cluster).topology("t") as topology:

        def new_dataset():
            """A dataset whose splits have not been read yet, so that the first action assigns them."""
            return topology.splits(SPLITS, read, "id long", parallelism=4)

        def cross_join(splits, hint):
            return splits.hint(hint).crossJoin(splits.withColumnRenamed("id", "other"))

        splits = new_dataset()
        assert ids(splits) == EXPECTED
        assert splits.count() == len(EXPECTED)
        for replayed in (splits, None):  # the split log is replayed, or written
            assert ids((replayed or new_dataset()).coalesce(1)) == EXPECTED
            assert ids((replayed or new_dataset()).coalesce(2)) == EXPECTED
            assert ids((replayed or new_dataset()).repartition(3)) == EXPECTED
            dataset = replayed or new_dataset()
            assert ids(dataset.union(dataset)) == sorted(EXPECTED * 2)
            dataset = replayed or new_dataset()
            assert ids(dataset.hint("merge").join(dataset, "id")) == EXPECTED
            for hint in ("broadcast", "shuffle_replicate_nl"):
                pairs = cross_join(replayed or new_dataset(), hint)
                assert pairs.count() == pairs.distinct().count() == len(EXPECTED) ** 2


@pytest.mark.parametrize("prefix", ["take", "show"])
def test_an_action_after_a_partial_read_returns_every_split(cluster, capsys, prefix):
    """An action that reads only some splits leaves the others for the next action."""
    enumerated_count = collections.Counter()

    def enumerate_splits():
        for split in SPLITS:
            enumerated_count["splits"] += 1
            yield split

    def large_rows(split):  # more than the buffers of a consumer that has stopped can hold
        rows = rows_of(split)
        yield pa.record_batch(
            {"id": pa.array(rows, pa.int64()), "pad": pa.array([b"x" * (1 << 20)] * len(rows), pa.binary())}
        )

    with stagecrew.crew(cluster).topology("t") as topology:
        splits = topology.splits(enumerate_splits(), large_rows, "id long, pad binary", parallelism=4)
        if prefix == "take":
            assert len(splits.take(3)) == 3
        else:
            splits.select("id").show(3)
            assert capsys.readouterr().out.count("|") > 3
        assert enumerated_count["splits"] < len(SPLITS)
        assert ids(splits.select("id")) == EXPECTED
        assert ids(splits.select("id")) == EXPECTED


def test_lost_cached_blocks_are_read_again(cluster, journal):
    """After an executor with cached blocks is lost, the same splits are read again."""
    with stagecrew.crew(cluster).topology("t") as topology:
        reads, path = cluster.sparkContext.accumulator(0), journal.path

        def count_reads(split):
            reads.add(1)
            Journal(path).write(event="read", executor=executor_pid())
            yield from read(split)

        cached = topology.splits(SPLITS, count_reads, "id long", parallelism=4).cache()
        assert ids(cached) == EXPECTED
        assert ids(cached) == EXPECTED
        assert reads.value == len(SPLITS)

        kill(journal.read(event="read")[0]["executor"])
        assert ids(cached) == EXPECTED
        assert reads.value > len(SPLITS), "no cached block was lost"
        cached.unpersist()


@pytest.mark.parametrize("case", ["raises", "raises at once", "twice", "equal", "not picklable"])
def test_a_failing_enumerator_fails_the_topology(cluster, case):
    """If an enumerator fails, the topology fails at once, and the error names the enumerator's fault."""

    def raise_after_some():
        yield from range(5)
        raise OSError("the listing broke")

    class RaisesAtOnce:
        def splits(self):
            raise OSError("the listing broke")

    enumerator, message = {
        "raises": (raise_after_some(), "enumerator of operator 'mine' raised OSError: the listing broke"),
        "raises at once": (RaisesAtOnce(), "enumerator of operator 'mine' raised OSError: the listing broke"),
        "twice": ([{"n": 1}, {"n": 2}, {"n": 1}], r"yielded one split twice: \{'n': 1\}"),
        "equal": ([1, 2, 1.0], "yielded one split twice: 1.0"),
        "not picklable": ([1, (n for n in ())], "raised .*cannot pickle"),
    }[case]
    started = time.monotonic()
    with (
        pytest.raises(stagecrew.errors.CoordinatorFailed, match=message) as caught,
        stagecrew.crew(cluster).topology("t") as topology,
    ):
        topology.splits(enumerator, read_one_row, "id long", parallelism=2, name="mine").collect()
    assert isinstance(caught.value.__cause__, stagecrew.errors.OperatorFailed)
    assert time.monotonic() - started < 20


def read_one_row(split: Any) -> Any:
    yield pa.record_batch({"id": pa.array([1], pa.int64())})


def test_a_blocking_enumerator_fails_the_topology(sessions):
    """The topology fails, with this reason, if the enumerator gives no split within spark.stagecrew.request.timeout."""
    spark = sessions.get(LOCAL, **{"spark.stagecrew.request.timeout": "2s", "spark.stagecrew.close.timeout": "1s"})
    released = []

    def block_after_one():
        yield 1
        while not released:
            time.sleep(0.05)

    started = time.monotonic()
    try:
        with (
            pytest.raises(
                stagecrew.errors.CoordinatorFailed,
                match="has not yielded its next split within 1.8 s: it blocks, or is slow",
            ),
            stagecrew.crew(spark).topology("t") as topology,
        ):
            topology.splits(block_after_one(), read, "id long", parallelism=2).collect()
    finally:
        released.append(True)
    assert time.monotonic() - started < 20


def test_invalid_arguments_are_rejected(cluster):
    """An invalid enumerator, function, number of tasks or batch, and a closed topology, are rejected."""
    with stagecrew.crew(cluster).topology("t") as topology:
        with pytest.raises(stagecrew.errors.OperatorMisused, match="int is neither"):
            topology.splits(3, read, "id long")
        with pytest.raises(stagecrew.errors.OperatorMisused, match="read must be a function"):
            topology.splits(SPLITS, None, "id long")
        for invalid in (0, "2"):
            with pytest.raises(stagecrew.errors.OperatorMisused, match="parallelism must be a whole number"):
                topology.splits(SPLITS, read, "id long", parallelism=invalid)
        with pytest.raises(Exception, match=r"must yield pyarrow.RecordBatch or pyarrow.Table objects, not list"):
            topology.splits([1], lambda split: [[1]], "id long", parallelism=1).collect()
    with pytest.raises(stagecrew.errors.TopologyError, match="only inside its `with`"):
        topology.splits(SPLITS, read, "id long")


def test_splits_are_read_once_after_a_reset_to_a_checkpoint(cluster):
    """A reset restores the split logs of the checkpoint. Splits that are enumerated again are recognized."""
    with stagecrew.crew(cluster).topology("t") as topology:
        splits = topology.splits(SPLITS, read, "id long", parallelism=4)
        splits.take(3)
        checkpoint = stagecrew.Checkpoint.from_bytes(topology.checkpoint().to_bytes())
        assert ids(splits) == EXPECTED
        topology.reset(checkpoint)
        assert ids(splits) == EXPECTED
        topology.reset()
        assert ids(splits) == EXPECTED


def test_a_split_is_given_to_a_task_on_its_preferred_host(cluster):
    """A split that prefers a host is given to a task on that host when such a task requests a split."""

    class Located:
        def splits(self):
            return SPLITS

        def locations(self, split):
            return [here] if split % 2 else ["elsewhere"]

    def report_host(gateway, rows):
        yield gateway.host

    def one_row_per_split(split):
        yield pa.record_batch({"id": pa.array([split], pa.int64())})

    with stagecrew.crew(cluster).topology("t") as topology:
        bound = topology.coordinate("o", stagecrew.Coordinator).bind(report_host)
        here = cluster.sparkContext.parallelize([1], 1).mapPartitions(bound).first()
        rows = topology.splits(Located(), one_row_per_split, "id long", parallelism=1).collect()
    assert [row.id % 2 for row in rows] == [1] * 20 + [0] * 20


# -- Enumerators


@pytest.mark.contract
def test_every_row_of_row_groups_and_files_is_read(cluster, tmp_path):
    """Every row of every row group or file of a directory is read once, from a path or a URI.

    The order of the columns in the files does not matter, and columns can be selected. The largest row groups come
    first by default.
    """
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
        selection = ParquetRowGroups(str(folder), columns=["id"], largest_first=False)
        assert sorted(map(tuple, topology.splits(selection, selection.read, selection.schema).collect())) == [
            (n,) for n, _ in expected
        ]
        files = Files(folder.as_uri(), "parquet")
        assert sorted(map(tuple, topology.splits(files, files.read, files.schema).collect())) == expected
        for file_format, options in (("csv", {"header": True}), ("orc", {})):
            path = tmp_path / file_format
            cluster.createDataFrame(expected, "id long, text string").repartition(3).write.format(file_format).options(
                **options
            ).save(str(path))
            files = Files(str(path), file_format)
            assert sorted(map(tuple, topology.splits(files, files.read, files.schema).collect())) == expected


def test_every_key_of_a_range_is_read_once(cluster):
    """Every key is read once, even with more parts than keys."""

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
    """The reader of `Numbers`."""

    def partitions(self):
        return [InputPartition(5) for _ in range(2)] + [InputPartition(n) for n in range(3)]

    def read(self, partition):
        for n in range(partition.value):
            yield n, f"row {n}"


@pytest.mark.contract
def test_partitions_of_a_data_source_give_sparks_rows(cluster):
    """`DataSourcePartitions` gives the rows that Spark itself reads, even if some partitions are equal."""
    source = DataSourcePartitions(Numbers({}))
    with stagecrew.crew(cluster).topology("t") as topology:
        rows = topology.splits(source, source.read, source.schema, parallelism=3).collect()
    cluster.dataSource.register(Numbers)
    assert sorted(map(tuple, rows)) == sorted(map(tuple, cluster.read.format("Numbers").load().collect()))
    assert len(rows) == 13


# -- Seeded runs with failures


@pytest.fixture
def faulty_cluster(sessions, standalone):
    """A session on two hosts, with speculation, in which tasks and executors may fail often."""
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
    """Runs one seed and counts the faults that occurred."""
    rng = random.Random(seed)
    folder.mkdir()
    fates = {split: rng.choice(["worker", "slow", "raise"]) for split in rng.sample(SPLITS, 3)}
    if seed % 8 == 0:
        fates[rng.choice(SPLITS)] = "executor"

    def read_with_faults(split):
        rows = rows_of(split)
        yield pa.record_batch({"id": pa.array(rows[:1], pa.int64())})
        fate = fates.get(split)
        if fate is not None:
            try:
                os.close(os.open(folder / str(split), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                fate = None  # this fault has already happened
        if fate == "worker":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fate == "executor":
            os.kill(executor_pid(), signal.SIGKILL)
        elif fate == "raise":
            raise OSError("on purpose")
        elif fate == "slow":
            time.sleep(1.0)
        elif (folder / str(split)).exists() and fates.get(split) == "slow":
            (folder / f"{split}.again").touch()  # while the first attempt sleeps, or after it
        time.sleep(0.002)
        yield pa.record_batch({"id": pa.array(rows[1:], pa.int64())})

    splits = list(SPLITS)
    rng.shuffle(splits)
    with stagecrew.crew(spark).topology(f"seed {seed}") as topology:
        dataset = topology.splits(splits, read_with_faults, "id long", parallelism=rng.randrange(2, 7))
        if rng.random() < 0.3:
            dataset = dataset.repartition(2)
        found = ids(dataset)
    assert found == EXPECTED, (seed, fates, sorted(set(EXPECTED) - set(found)), len(found))
    return collections.Counter(
        "read again" if name.endswith(".again") else fates[int(name)] for name in os.listdir(folder)
    )


def check_seeded_runs(spark: Any, folder: Path, seeds: range, expected: set[str]) -> None:
    faults: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        faults += seeded_run(spark, seed, folder / str(seed))
    assert expected <= set(faults), faults
    print(f"{len(seeds)} runs: {dict(faults)}")


def test_every_split_is_read_once_when_tasks_die(faulty_cluster, tmp_path):
    """Every row is returned once although workers and executors are killed and tasks raise. Three seeds."""
    check_seeded_runs(faulty_cluster, tmp_path, range(7, 10), {"worker", "slow", "executor"})


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 200, 25))
def test_every_split_is_read_once_when_tasks_die_in_many_runs(faulty_cluster, tmp_path, first):
    """Every row is returned once although workers and executors are killed and tasks raise. 200 seeds."""
    check_seeded_runs(faulty_cluster, tmp_path, range(first, first + 25), {"worker", "slow", "executor", "read again"})
