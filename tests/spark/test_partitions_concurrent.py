"""Stored partitions are released while jobs run. Every job still returns its rows.

The releases come from topologies that close or are cancelled, from shared stages, and at random moments.
"""

from __future__ import annotations

import contextlib
import operator
import random
import threading
import time
from typing import Any

import pytest
from pyspark.sql import functions as f

import stagecrew
from support.journal import Journal
from support.sessions import LOCAL, LOCAL_CLUSTER
from support.shuffle_datasets import EXPECTED, delete, drop, rows, sql_settings, stored_since, summed_rdd
from support.spark_storage import (
    executed_plan,
    forget_executors,
    map_outputs,
    run_and_count_tasks,
    shuffle_files,
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
    """All masters. `make test` uses only the standalone cluster, where executors are separate processes."""
    return request.getfixturevalue("standalone") if request.param == "standalone" else request.param


@pytest.fixture
def stored_before(spark, tmp_path):
    """Files and outputs that existed before the test. `stored_since` ignores them."""
    return set(shuffle_files(spark, tmp_path)), map_outputs(spark)


def assert_holds(condition, seconds=3.0):
    """Checks that a condition holds for some seconds. Executors report to the driver more often than that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition()
        time.sleep(0.05)


def test_a_job_that_starts_while_its_topology_closes_keeps_its_outputs(spark, crew, tmp_path, stored_before, journal):
    """A job that starts while its topology is closing uses old outputs and writes new ones.

    None of these outputs is released, because they now belong to the application.
    """
    gate, path = tmp_path / "gate", journal.path

    @stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
    def slow_closing(context):
        yield None
        Journal(path).write(event="closing")
        eventually(gate.exists, 60, "the gate")

    topology = crew.topology("t", listeners=[slow_closing()]).start()
    old, new = summed_rdd(spark), summed_rdd(spark)
    old.collect()
    may_use_datasets, found = threading.Event(), []

    def use():
        may_use_datasets.wait(60)
        found.extend(sorted(dataset.collect()) for dataset in (old, new))

    user = threading.Thread(target=topology.wrap(use))
    user.start()
    closer = threading.Thread(target=topology.close)
    closer.start()
    try:
        eventually(lambda: journal.read(event="closing"), 60, "the topology is closing")
        may_use_datasets.set()
        user.join(60)
        assert found == [EXPECTED, EXPECTED]
        kept = stored_since(spark, tmp_path, stored_before)[1]
        assert list(kept.values()) == [4, 4]
        assert_holds(lambda: stored_since(spark, tmp_path, stored_before)[1] == kept)
    finally:
        gate.touch()
        closer.join(60)
    topology.close()
    assert stored_since(spark, tmp_path, stored_before)[1] == kept
    for dataset in (old, new):
        assert run_and_count_tasks(spark, dataset.collect)[1] == 4  # only the reduce stage ran


def test_a_running_job_keeps_its_outputs_when_its_start_event_is_dropped(spark, crew, tmp_path, stored_before, journal):
    """The outputs of a running job are never deleted, even if the listener bus dropped the job's start event.

    The thread that starts the job still has the local property of a topology that has ended.
    """
    gate, may_use_dataset, found = tmp_path / "gate", threading.Event(), []

    def wait(part):
        eventually(gate.exists, 60, "the gate")
        return part

    dataset = summed_rdd(spark).mapPartitions(wait)

    def use():
        may_use_dataset.wait(60)
        found.append(sorted(dataset.collect()))

    with crew.topology("t") as topology:
        user = threading.Thread(target=topology.wrap(use))
        user.start()
    with without_spark_events(spark):
        may_use_dataset.set()
        try:
            eventually(
                lambda: list(stored_since(spark, tmp_path, stored_before)[1].values()) == [4],
                60,
                "the map stage is written",
            )
            assert_holds(lambda: list(stored_since(spark, tmp_path, stored_before)[1].values()) == [4])
        finally:
            gate.touch()
            user.join(60)
    assert found == [EXPECTED]


def test_executors_that_miss_the_end_of_a_topology_delete_its_files_later(spark, crew, tmp_path, stored_before):
    """Executors that missed the end of a topology learn about it when they report their inventory.

    Then they delete the topology's files and table entries.
    """
    with crew.topology("outer") as outer:
        shared = summed_rdd(spark)
        shared.collect()
        with crew.topology("t") as topology:
            dataset = summed_rdd(spark)
            assert sorted(dataset.collect()) == sorted(shared.collect()) == EXPECTED
            eventually(lambda: sum(one.outputs for one in topology.partitions) == 4, 20, "the outputs are reported")
            forget_executors(crew, topology.id)
        assert list(stored_since(spark, tmp_path, stored_before)[1].values()) == [4]
        eventually(
            lambda: sum(n.endswith(".data") for n in stored_since(spark, tmp_path, stored_before)[0]) == 4,
            20,
            "the files are deleted",
        )
        eventually(lambda: not [one for one in topology.partitions if one.outputs], 20, "the tables are empty")
        assert topology.report.released == 4
        assert run_and_count_tasks(spark, shared.collect)[1] == 4  # only the reduce stage: the shuffle was kept
        outer.close()
    assert stored_since(spark, tmp_path, stored_before) == (set(), {})
    assert sorted(dataset.collect()) == EXPECTED


def expect_cancellation(dataset):
    """Runs an action, and checks that it is cancelled."""
    with pytest.raises(Exception, match="cancel"):
        dataset.collect()


def test_a_topology_cancelled_while_its_tasks_write_leaves_nothing(spark, crew, tmp_path, stored_before, journal):
    """If a topology is cancelled while its tasks are writing outputs, neither a file nor a table entry is left."""

    def slow(part):
        journal.write(event="writes")
        for n in part:
            time.sleep(0.05)
            yield n % 5, n

    with pytest.raises(ZeroDivisionError), crew.topology("t") as topology:
        dataset = spark.sparkContext.parallelize(range(400), 4).mapPartitions(slow).reduceByKey(operator.add)
        thread = threading.Thread(target=topology.wrap(lambda: expect_cancellation(dataset)))
        thread.start()
        eventually(lambda: len(journal.read(event="writes")) >= 2, 60, "two tasks are writing")
        raise ZeroDivisionError
    thread.join(60)
    assert stored_since(spark, tmp_path, stored_before) == (set(), {})
    assert not [one for one in topology.partitions if one.outputs or one.in_progress]


@pytest.mark.parametrize("second_job_in", ["application", "topology"])
def test_a_shared_map_stage_survives_the_cancellation_of_the_first_job(
    spark, crew, tmp_path, stored_before, journal, second_job_in
):
    """Two jobs share a map stage. When the first job is cancelled, the tasks of the stage continue.

    If the second job runs in a topology, the outputs are released when that topology ends. Otherwise they are kept.
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
        with crew.topology("other") if second_job_in == "topology" else contextlib.nullcontext():
            second_rows.append(dataset.collect())

    status = spark.sparkContext.statusTracker()
    with pytest.raises(ZeroDivisionError), crew.topology("t") as topology:
        first_job = threading.Thread(target=topology.wrap(lambda: expect_cancellation(dataset)))
        first_job.start()
        eventually(lambda: journal.read(event="writes"), 60, "the map stage is running")
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
    if second_job_in == "application":
        assert list(stored_since(spark, tmp_path, stored_before)[1].values()) == [8]
    else:
        eventually(
            lambda: stored_since(spark, tmp_path, stored_before) == (set(), {}),
            30,
            "the stage is released when its last user ends",
        )
    assert sorted(dataset.collect()) == EXPECTED


@pytest.mark.parametrize("held_stage", ["map", "reduce"])
def test_outputs_released_while_a_job_uses_them_are_recomputed(
    spark, crew, tmp_path, stored_before, journal, held_stage
):
    """A job does not fail if its shuffle outputs are deleted while it writes or reads them.

    Spark recomputes the missing outputs.
    """
    gate = tmp_path / "gate"

    def hold_at(stage, holds):
        def wait(part):
            part = list(part)
            journal.write(event=stage, keys=len(part))
            if held_stage == stage and holds(part):
                eventually(gate.exists, 60, "the gate")
            return part

        return wait

    numbers = spark.sparkContext.parallelize(range(100), 4).mapPartitions(hold_at("map", lambda part: 99 in part))
    shuffled_once = (
        numbers.map(lambda n: (n % 5, n)).partitionBy(4).mapPartitions(hold_at("reduce", lambda part: bool(part)))
    )
    dataset = shuffled_once.reduceByKey(operator.add)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(dataset.collect()))
    thread.start()
    if held_stage == "map":
        # The fourth task waits at the gate.
        eventually(
            lambda: sum(stored_since(spark, tmp_path, stored_before)[1].values()) == 3, 60, "three outputs are written"
        )
    else:
        eventually(lambda: journal.read(event="reduce"), 60, "the shuffle is read")
    new = [shuffle for shuffle in map_outputs(spark) if shuffle not in stored_before[1]]
    assert new
    drop(spark, crew, new)
    delete(spark, tmp_path, new)
    gate.touch()
    thread.join(120)
    assert sorted(found[0]) == EXPECTED
    assert sorted(dataset.collect()) == EXPECTED


@pytest.mark.parametrize("released", ["the query's outputs", "a topology's outputs"])
def test_an_adaptive_query_survives_a_release_between_two_of_its_stages(
    spark, crew, tmp_path, stored_before, journal, released
):
    """An adaptive query returns its rows although the inputs of a later stage are released while an earlier stage runs.

    The inputs are outputs of the query itself, or of a topology that ends. A second run of the query returns the
    same rows.
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
        if released == "the query's outputs":
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
            eventually(lambda: journal.read(event="stage"), 60, "the earlier stage is running")
            eventually(
                lambda: list(stored_since(spark, tmp_path, stored_before)[1].values()) == [count],
                60,
                "the outputs are written",
            )
            if released == "the query's outputs":
                written = list(stored_since(spark, tmp_path, stored_before)[1])
                drop(spark, crew, written)
                delete(spark, tmp_path, written)
            else:
                topology.close()
                assert topology.report.released == count
            assert stored_since(spark, tmp_path, stored_before)[1] == {}
            assert thread.is_alive()
            assert "isFinalPlan=false" in executed_plan(query)
        finally:
            gate.touch()
            thread.join(120)
        assert found == [[(k, 2 * s) for k, s in EXPECTED]]
        assert rows(query) == found[0]


def two_shuffles(spark, adaptive, parts):
    """Returns a shuffled dataset and another one that shuffles it again: two DataFrames that AQE runs, or two RDDs."""
    if not adaptive:
        dataset = summed_rdd(spark, parts)
        return dataset, dataset.map(lambda kv: (kv[0] % 2, kv[1])).reduceByKey(operator.add, 2)
    grouped_frame = spark.range(0, 100, 1, parts).groupBy((f.col("id") % 5).alias("k")).agg(f.sum("id").alias("s"))
    return grouped_frame, grouped_frame.groupBy((f.col("k") % 2).alias("p")).agg(f.sum("s").alias("s"))


def random_release(spark, crew, seed):
    """A topology writes a shuffle and ends at a random moment, while other threads use the shuffle.

    One of these threads may run inside the topology (`topology.wrap`). All of them must get their rows.
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

    if rng.random() < 0.5:  # the first thread runs in another topology, which ends independently

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
    """No job fails or returns wrong rows, at whatever moment topologies release the shuffles that the job uses.

    Even seeds use RDDs. Odd seeds use DataFrames that AQE runs.
    """
    on_cluster = spark.sparkContext.master.startswith("spark://")
    released = [random_release(spark, crew, seed) for seed in range(seeds if on_cluster else min(seeds, 40))]
    for kind in (released[::2], released[1::2]):
        # A run releases nothing if all outputs are still in use at the end, or if no job ran before it.
        assert sum(map(bool, kind)) >= len(kind) / 5, released
