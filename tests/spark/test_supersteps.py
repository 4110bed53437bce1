"""Supersteps on real Spark: tasks that compute together give the result of a single process, whatever fails."""

from __future__ import annotations

import functools
import operator
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import functions as f

import stagecrew
from stagecrew.demo.flights import frame
from support.coordination import executor_pid
from support.journal import Journal
from support.processes import kill
from support.sessions import LOCAL, LOCAL_CLUSTER
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCHEMA = "subtask long, value double"


def row_batch(subtask: int, value: float) -> pa.RecordBatch:
    return pa.record_batch({"subtask": [subtask], "value": [float(value)]})


def numbers(batches: Any) -> list[int]:
    return [value for batch in batches for value in batch.column("id").to_pylist()]


def mean_by_supersteps(steps: Any, batches: Any) -> Any:
    """Approximates the mean by halving the distance to it in each step."""
    values = numbers(batches)
    _, count = steps.reduce(np.array([float(sum(values)), float(len(values))]))
    guess = 0.0
    while not steps.stopped:
        missing = steps.reduce(float(sum(values)) - guess * len(values), "sum") / count
        guess += missing / 2
    yield row_batch(steps.subtask, guess)


def mean_in_one_process(subtasks: int) -> float:
    """Computes the result of `mean_by_supersteps` in a single process."""
    parts = [list(range(n * 100 // subtasks, (n + 1) * 100 // subtasks)) for n in range(subtasks)]
    guess = 0.0
    while True:
        missing = 0.0
        for number, part in enumerate(parts):
            value = float(sum(part)) - guess * len(part)
            missing = value if number == 0 else missing + value
        guess += missing / 100 / 2
        if abs(missing) < 1e-6:
            return guess


def close_enough(step: int, value: Any) -> bool:
    return step > 0 and abs(value) < 1e-6


@pytest.fixture
def cluster(sessions):
    """A session on a cluster of two executors."""
    return sessions.get(LOCAL_CLUSTER)


@pytest.mark.contract
def test_supersteps_give_the_result_of_a_single_process(cluster):
    """The result of supersteps equals that of a single process to the last bit.

    This also holds in a second action, below other operations, and with `take` and `first`.
    """
    with stagecrew.crew(cluster).topology("t") as topology:
        means = topology.supersteps(cluster.range(0, 100, 1, 2), mean_by_supersteps, SCHEMA, stop_when=close_enough)
        expected = [(subtask, mean_in_one_process(2)) for subtask in range(2)]
        assert sorted(map(tuple, means.collect())) == expected
        assert sorted(map(tuple, means.collect())) == expected
        assert means.first()[1] == expected[0][1]
        assert len(means.take(2)) == 2
        assert means.groupBy().sum("subtask").collect()[0][0] == 1
        assert means.union(means).count() == 4
        assert means.coalesce(1).count() == 2
        assert topology.progress["supersteps/1"]["stopped"] is True


def test_a_partition_without_rows_takes_part(cluster):
    """A partition without rows takes part like the others."""
    with stagecrew.crew(cluster).topology("t") as topology:
        few = cluster.range(0, 2, 1, 3)

        def work(steps, batches):
            found = steps.reduce(numbers(batches), "concat")
            yield row_batch(steps.subtask, len(found))

        rows = topology.supersteps(few, work, SCHEMA).collect()
        assert sorted(map(tuple, rows)) == [(0, 2.0), (1, 2.0), (2, 2.0)]


def test_rows_stay_together_and_in_order(cluster):
    """The rows of a subtask keep the order in which it yielded them."""
    with stagecrew.crew(cluster).topology("t") as topology:

        def work(steps, batches):
            steps.reduce(1)
            for number in range(50):
                yield pa.table({"subtask": [steps.subtask] * 10, "value": [float(number * 10 + i) for i in range(10)]})

        rows = topology.supersteps(cluster.range(0, 4, 1, 4), work, SCHEMA).collect()
        for subtask in range(4):
            assert [row.value for row in rows if row.subtask == subtask] == list(map(float, range(500)))


def test_large_values_are_reduced(cluster):
    """Each of two tasks reduces a value of 64 MB."""
    with stagecrew.crew(cluster).topology("t") as topology:

        def work(steps, batches):
            own_values = np.full(8 << 20, steps.subtask + 1, np.int64)
            total = steps.reduce(own_values)
            assert total.nbytes == 64 << 20
            yield row_batch(steps.subtask, float(total.min() + total.max()))

        rows = topology.supersteps(cluster.range(0, 2, 1, 2), work, SCHEMA).collect()
        assert [row.value for row in rows] == [6.0, 6.0]


def test_values_can_exceed_a_small_event_limit(sessions):
    """`spark.stagecrew.event.maxSize` limits the pieces of a value, not the value."""
    spark = sessions.get(LOCAL, **{"spark.stagecrew.event.maxSize": "1k"})
    with stagecrew.crew(spark).topology("t") as topology:

        def work(steps, batches):
            total = steps.reduce(np.full(10_000, steps.subtask + 1, np.int64))
            yield row_batch(steps.subtask, float(total.sum()))

        rows = topology.supersteps(spark.range(0, 2, 1, 2), work, SCHEMA).collect()
        assert [row.value for row in rows] == [30_000.0, 30_000.0]


def fail_in_third_step(path: str, fault: str, times: int) -> Any:
    """Work in which subtask 1 fails in its third step, `times` times."""

    def work(steps, batches):
        total = 0
        for number in range(5):
            total += steps.reduce(1)
            if number == 2 and steps.subtask == 1:
                failures = len(os.listdir(path))
                if failures < times:
                    Path(path, str(failures)).touch()
                    if fault == "worker":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if fault == "executor":
                        kill(executor_pid())
                    raise ValueError("the third step went wrong")
        yield row_batch(steps.subtask, total)

    return work


@pytest.mark.contract
@pytest.mark.parametrize(
    "fault", ["raises", *(pytest.param(fault, marks=pytest.mark.long) for fault in ("worker", "executor"))]
)
def test_a_failed_task_restarts_the_whole_stage(sessions, tmp_path, fault):
    """If a task fails, the whole stage runs again from its first step.

    The result contains nothing from the earlier attempts.
    """
    cluster = sessions.get(LOCAL_CLUSTER)
    (tmp_path / "n").mkdir()
    with stagecrew.crew(cluster).topology("t") as topology:
        work = fail_in_third_step(str(tmp_path / "n"), fault, 2)
        rows = topology.supersteps(cluster.range(0, 2, 1, 2), work, SCHEMA).collect()
        assert sorted(map(tuple, rows)) == [(0, 10.0), (1, 10.0)]
        assert len(os.listdir(tmp_path / "n")) == 2


def test_the_job_fails_at_sparks_limit_if_a_task_always_fails(cluster, tmp_path):
    """If a task always fails, the job fails with the task's own error after as many stage attempts as Spark allows."""
    (tmp_path / "n").mkdir()
    with stagecrew.crew(cluster).topology("t") as topology:
        work = fail_in_third_step(str(tmp_path / "n"), "raises", 100)
        with pytest.raises(Exception, match="the third step went wrong"):
            topology.supersteps(cluster.range(0, 2, 1, 2), work, SCHEMA).collect()
    assert len(os.listdir(tmp_path / "n")) == 4


def test_all_subtasks_run_again_when_some_output_is_lost(sessions, journal):
    """If some output is lost, all tasks run again in the end, and the rows are the same.

    Spark first reruns only the tasks whose output is lost, but these cannot proceed without the other tasks.
    """
    cluster = sessions.get(LOCAL_CLUSTER)
    path = journal.path
    with stagecrew.crew(cluster).topology("t") as topology:

        def work(steps, batches):
            Journal(path).write(subtask=steps.subtask, together=steps.subtasks, executor=executor_pid())
            yield row_batch(steps.subtask, steps.reduce(float(sum(numbers(batches)))))

        sums = topology.supersteps(cluster.range(0, 100, 1, 4), work, SCHEMA)
        rows = sums.rdd  # one RDD, so that the second action finds the output of the first
        expected = [(subtask, 4950.0) for subtask in range(4)]
        assert sorted(map(tuple, rows.collect())) == expected
        first = journal.read()
        assert sorted((record["subtask"], record["together"]) for record in first) == [
            (subtask, 4) for subtask in range(4)
        ]
        assert sorted(map(tuple, rows.collect())) == expected
        assert len(journal.read()) == 4  # no task ran again
        executor_by_subtask = {record["subtask"]: record["executor"] for record in first}
        lost = sorted(subtask for subtask in range(4) if executor_by_subtask[subtask] == executor_by_subtask[0])
        assert len(lost) == 2  # two executors with two slots each
        executors_before = executor_addresses(cluster)
        kill(executor_by_subtask[0])
        eventually(
            lambda: len(executors_before & executor_addresses(cluster)) == 2 and len(executor_addresses(cluster)) == 3,
            what="a new executor starts",
        )
        assert sorted(map(tuple, rows.collect())) == expected
    reruns = journal.read()[4:]
    rerun_by_spark = sorted(record["subtask"] for record in reruns if record["together"] == 2)
    assert rerun_by_spark == lost
    assert sorted(record["subtask"] for record in reruns if record["together"] == 4) == [0, 1, 2, 3]
    assert len(reruns) == 6


def executor_addresses(spark: Any) -> set[str]:
    """The addresses of the live executors and of the driver."""
    return set(spark.sparkContext._jsc.sc().getExecutorMemoryStatus().keySet().mkString(" ").split())


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (
            lambda steps: steps.reduce(1) if steps.subtask == 0 else None,
            r"subtask 1 ended after 0 steps, but subtask 0 waits in step 0: each must call reduce\(\) as often as the others",
        ),
        (
            lambda steps: steps.reduce(1, "sum" if steps.subtask else "max"),
            r"in step 0 subtask (0 reduces with 'max', but subtask 1 with 'sum'|1 reduces with 'sum', but subtask 0 with 'max')",
        ),
        (
            lambda steps: steps.reduce(2, operator.add if steps.subtask else operator.mul),
            (
                r"in step 0 subtask (0 reduces with '_operator.mul', but subtask 1 with '_operator.add'|"
                "1 reduces with '_operator.add', but subtask 0 with '_operator.mul')"
            ),
        ),
        (
            lambda steps: steps.reduce(2, lambda a, b: a + b, name="add" if steps.subtask else "multiply"),
            r"in step 0 subtask (0 reduces with 'multiply', but subtask 1 with 'add'|1 reduces with 'add', but subtask 0 with 'multiply')",
        ),
        (
            lambda steps: steps.reduce(1 if steps.subtask == 0 else [1]),
            "sum cannot combine different values: number in subtask 0 and list in subtask 1",
        ),
    ],
    ids=["less often", "another ready-made reducer", "another function", "another name", "another kind of value"],
)
def test_tasks_that_reduce_differently_fail_with_a_clear_error(cluster, work, message):
    """If two tasks differ in the number of reductions, the reducer or the kind of value, the action fails.

    The error names the difference, and no task hangs.
    """

    def work_and_yield(steps, batches):
        work(steps)
        yield row_batch(steps.subtask, 0)

    with (
        pytest.raises(stagecrew.errors.CoordinatorFailed, match=message),
        stagecrew.crew(cluster).topology("t") as topology,
    ):
        topology.supersteps(cluster.range(0, 2, 1, 2), work_and_yield, SCHEMA).collect()


def test_user_functions_with_the_same_name_are_the_same_reducer(cluster):
    """Each task makes its own functions. They count as one reducer if their names are equal.

    The functions are a lambda, a partial, a callable object and an importable function.
    """
    with stagecrew.crew(cluster).topology("t") as topology:

        def work(steps, batches):
            class Product:
                def __init__(self, start: float) -> None:
                    self.start = start

                def __call__(self, a: float, b: float) -> float:
                    return self.start * a * b

            names = {f"name {n}" for n in range(20)}
            value = float(steps.subtask + 2)
            total = 0.0
            for number in range(3):
                total += steps.reduce(value, Product(number), name="product")
                total += steps.reduce(value, lambda a, b, number=number: a + b + number + len(names), name="more")
                total += steps.reduce(value, functools.partial(max), "largest")
                total += steps.reduce(value, operator.add)
            yield row_batch(steps.subtask, total)

        rows = topology.supersteps(cluster.range(0, 2, 1, 2), work, SCHEMA).collect()
        assert sorted(map(tuple, rows)) == [(subtask, 18.0 + 78.0 + 9.0 + 15.0) for subtask in range(2)]


def test_a_lambda_without_a_name_fails_the_action(cluster):
    """Reducing with a lambda that has no name raises `OperatorMisused`, and the error asks for a name."""
    with (
        pytest.raises(Exception, match=r"OperatorMisused: .*<lambda> cannot be imported by its name. Pass a name"),
        stagecrew.crew(cluster).topology("t") as topology,
    ):

        def work(steps, batches):
            yield row_batch(steps.subtask, steps.reduce(2, lambda a, b: a * b))

        topology.supersteps(cluster.range(0, 2, 1, 2), work, SCHEMA).collect()


def example(name: str) -> dict[str, Any]:
    """Loads an example of the documentation without running its main."""
    return runpy.run_path(str(Path(__file__).parents[2] / "python/stagecrew/examples" / f"{name}.py"))


def test_the_kmeans_example_gives_the_result_of_a_single_process(sessions):
    """The centres and their airport counts equal those of a single process, even if one of two partitions is empty."""
    airports = frame("airports")[["lat", "lon"]].to_numpy()
    start = np.array([(40, -75), (35, -120), (62, -150), (30, -95)], dtype=float)
    centres, counts = start, np.zeros(len(start), int)
    while True:
        nearest = np.array([np.argmin([np.hypot(*(point - centre)) for centre in centres]) for point in airports])
        counts = np.bincount(nearest, minlength=len(centres))
        new = np.array([airports[nearest == number].mean(axis=0) for number in range(len(centres))])
        if np.allclose(new, centres, atol=1e-9):
            break
        centres = new
    spark = sessions.get(LOCAL)
    with stagecrew.crew(spark).topology("t") as topology:
        points = spark.createDataFrame(frame("airports")[["lat", "lon"]])
        kmeans = example("kmeans")["kmeans"]
        found = [
            kmeans(topology, spread, start.tolist()).collect()
            for spread in (points.repartition(2), points.repartition(2, f.lit(1)))
        ]
    for rows in found:
        assert [row.points for row in rows] == counts.tolist()
        assert np.allclose([(row.lat, row.lon) for row in rows], centres, rtol=0, atol=1e-6)
    assert counts.min() > 0
    assert np.abs(centres - start).max() > 1  # the centres did move


def test_the_pagerank_example_gives_the_result_of_a_single_process(sessions):
    """The ranks equal the exact solution within ten times the stop tolerance.

    This holds even with vertices that have no outgoing edge.
    """
    random = np.random.default_rng(7)
    vertices, epsilon = 60, 1e-9
    edges = [(int(s), int(d), float(w)) for s, d, w in random.integers(1, vertices, (300, 3)) if s % 7]
    links = np.zeros((vertices, vertices))
    for source, destination, weight in edges:
        links[destination, source] += weight
    out_weight = links.sum(axis=0)
    assert (out_weight == 0).sum() > 5
    moves = np.where(out_weight > 0, links / np.where(out_weight > 0, out_weight, 1), 1 / vertices)
    # The ranks are the stationary distribution, solved here directly as a linear system.
    expected = np.linalg.solve(np.eye(vertices) - 0.85 * moves, np.full(vertices, 0.15 / vertices))
    spark = sessions.get(LOCAL)
    with stagecrew.crew(spark).topology("t") as topology:
        frame = spark.createDataFrame(edges, "s long, d long, w double")
        rows = example("pagerank")["pagerank"](topology, frame, vertices, 2, epsilon=epsilon).collect()
    assert sorted(row.vertex for row in rows) == list(range(vertices))
    assert np.allclose([row["rank"] for row in sorted(rows)], expected, rtol=0, atol=10 * epsilon)


def test_the_error_for_too_few_slots_contains_the_remedy(sessions, caplog):
    """With more partitions than slots, the action raises Spark's error, with a remedy added, and does not hang."""
    spark = sessions.get(LOCAL)
    with (
        pytest.raises(Exception, match="requires more slots") as failed,
        stagecrew.crew(spark).topology("t") as topology,
    ):
        many = topology.supersteps(spark.range(0, 8, 1, 8), mean_by_supersteps, SCHEMA)
        (record,) = caplog.records
        many.collect()
    warning = record.getMessage()
    assert warning.startswith("supersteps: the dataset has 8 partitions, and 2 tasks can run at once: ")
    assert "`dataset.repartition(2)`" in warning
    assert any("to at most 2 partitions" in note for note in failed.value.__notes__)
    caplog.clear()
    with stagecrew.crew(spark).topology("t") as topology:
        shuffled = spark.range(0, 8, 1, 8).repartition(100)  # Spark may coalesce these partitions
        topology.supersteps(shuffled, mean_by_supersteps, SCHEMA)
        topology.supersteps(spark.range(0, 2, 1, 2), mean_by_supersteps, SCHEMA)
    assert caplog.records == []


def test_the_error_for_dynamic_allocation_contains_the_remedy(sessions):
    """Spark cannot run barrier stages with dynamic allocation. The error is raised before any task runs."""
    spark = sessions.get(LOCAL, **{"spark.dynamicAllocation.enabled": "true"})
    with (
        stagecrew.crew(spark).topology("t") as topology,
        pytest.raises(stagecrew.errors.OperatorMisused, match=r"set spark\.dynamicAllocation\.enabled to false"),
    ):
        topology.supersteps(spark.range(2), mean_by_supersteps, SCHEMA)


def test_invalid_arguments_are_rejected(sessions):
    """Supersteps reject arguments and yielded values of a wrong type, a timeout of zero, and a closed topology."""
    spark = sessions.get(LOCAL)
    with stagecrew.crew(spark).topology("t") as topology:
        frame = spark.range(2)
        with pytest.raises(stagecrew.errors.OperatorMisused, match="over a DataFrame, not int"):
            topology.supersteps(7, mean_by_supersteps, SCHEMA)
        with pytest.raises(stagecrew.errors.OperatorMisused, match="supersteps run a function"):
            topology.supersteps(frame, 7, SCHEMA)
        with pytest.raises(stagecrew.errors.OperatorMisused, match="stop_when is a function"):
            topology.supersteps(frame, mean_by_supersteps, SCHEMA, stop_when=7)
        with pytest.raises(
            stagecrew.errors.OperatorMisused, match="timeout must be a positive number of seconds, not 0"
        ):
            topology.supersteps(frame, mean_by_supersteps, SCHEMA, timeout=0)
        with pytest.raises(Exception, match="yields pyarrow.RecordBatch"):
            topology.supersteps(frame, lambda steps, batches: iter([7]), SCHEMA).collect()
    with pytest.raises(stagecrew.errors.TopologyError):
        topology.supersteps(frame, mean_by_supersteps, SCHEMA)
