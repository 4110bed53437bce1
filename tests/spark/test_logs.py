"""Log records of tasks of a named topology carry their origin, in a worker and in the JVM."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark import TaskContext, cloudpickle

import stagecrew
from support.sessions import Sessions

# Executors do not have this module: its definitions are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

KEYS = ("topology", "stage", "partition", "attempt")


@stagecrew.resource
def structured(context: stagecrew.ListenerContext, path: str) -> Iterator[None]:
    """A worker's log file with one JSON object per line."""
    handler = logging.FileHandler(path)
    handler.setFormatter(stagecrew.StructuredFormatter())
    logging.getLogger("job").addHandler(handler)
    yield
    logging.getLogger("job").removeHandler(handler)
    handler.close()


def log_and_return_numbers(rows: Iterator[Any]) -> Iterator[tuple[int, int, int]]:
    """Logs one line and returns stage, partition and attempt."""
    task = TaskContext.get()
    assert task is not None
    logging.getLogger("job").warning("at work")
    yield task.stageId(), task.partitionId(), task.taskAttemptId()


def test_a_workers_log_records_carry_the_tasks_numbers(sessions: Sessions, tmp_path: Path) -> None:
    """Stage, partition and attempt in a record equal those of the task's context, as in Spark's structured logs."""
    spark = sessions.get("local[2]")
    log = str(tmp_path / "log")
    listeners = [structured(log), stagecrew.LoggingContext()]
    with stagecrew.crew(spark).topology("nightly", listeners=listeners):
        spark.sparkContext.parallelize(range(3), 3).count()  # so that stage, partition and attempt differ
        task_numbers = spark.sparkContext.parallelize(range(4), 2).mapPartitions(log_and_return_numbers).collect()
    records = [json.loads(line) for line in Path(log).read_text().split("\n") if line]
    assert {(one["msg"], one["level"], one["logger"]) for one in records} == {("at work", "WARNING", "job")}
    found = sorted(tuple(one["context"][key] for key in KEYS) for one in records)
    assert found == sorted(("nightly", *map(str, numbers)) for numbers in task_numbers)
    assert {one["context"]["application"] for one in records} == {spark.sparkContext.applicationId}
    assert len({numbers[2] for numbers in task_numbers}) == 2


def test_a_tasks_jvm_thread_carries_the_tasks_numbers(sessions: Sessions) -> None:
    """MdcListener sets them with the topology's name and removes them after the task."""
    spark = sessions.get("local[2]")
    get = [f"reflect('org.slf4j.MDC', 'get', 'stagecrew.{key}') AS {key}" for key in KEYS]
    with stagecrew.crew(spark).topology("nightly", jvm_listeners=["stagecrew.MdcListener"]) as topology:
        spark.sparkContext.parallelize(range(3), 3).count()
        found = [tuple(row) for row in spark.range(0, 2, 1, 2).selectExpr(*get).collect()]
        store = spark.sparkContext._jsc.sc().statusStore()
        stage = int(found[0][1])
        tasks = store.taskList(stage, 0, 10)
        task_numbers = [tasks.apply(i) for i in range(tasks.size())]
    assert sorted(found) == sorted(
        ("nightly", str(stage), str(one.partitionId()), str(one.taskId())) for one in task_numbers
    )
    assert len({one[3] for one in found}) == 2
    assert topology.report.jobs == 2
    after = [tuple(row) for row in spark.range(0, 4, 1, 4).selectExpr(*get).collect()]
    assert after == [("null",) * len(KEYS)] * 4
