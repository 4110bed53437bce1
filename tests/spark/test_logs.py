"""Log records of a task name its topology, stage, partition and attempt, in Python workers and in the JVM."""

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


def log_and_return_ids(rows: Iterator[Any]) -> Iterator[tuple[int, int, int]]:
    """Logs one line and returns stage, partition and attempt."""
    task = TaskContext.get()
    assert task is not None
    logging.getLogger("job").warning("at work")
    yield task.stageId(), task.partitionId(), task.taskAttemptId()


def test_log_records_in_a_worker_contain_the_ids_of_the_task(sessions: Sessions, tmp_path: Path) -> None:
    """Stage, partition and attempt in a record equal those of the task's context, as in Spark's structured logs."""
    spark = sessions.get("local[2]")
    log = str(tmp_path / "log")
    listeners = [structured(log), stagecrew.LoggingContext()]
    with stagecrew.crew(spark).topology("nightly", listeners=listeners):
        # After this job, the stage, partition and attempt of a task are different numbers.
        spark.sparkContext.parallelize(range(3), 3).count()
        task_ids = spark.sparkContext.parallelize(range(4), 2).mapPartitions(log_and_return_ids).collect()
    records = [json.loads(line) for line in Path(log).read_text().split("\n") if line]
    assert {(record["msg"], record["level"], record["logger"]) for record in records} == {("at work", "WARNING", "job")}
    contexts = sorted(tuple(record["context"][key] for key in KEYS) for record in records)
    assert contexts == sorted(("nightly", *map(str, ids)) for ids in task_ids)
    assert {record["context"]["application"] for record in records} == {spark.sparkContext.applicationId}
    assert len({ids[2] for ids in task_ids}) == 2


def test_the_mdc_of_a_task_thread_contains_the_ids_of_the_task(sessions: Sessions) -> None:
    """MdcListener sets the topology, stage, partition and attempt in the MDC, and removes them after the task."""
    spark = sessions.get("local[2]")
    get = [f"reflect('org.slf4j.MDC', 'get', 'stagecrew.{key}') AS {key}" for key in KEYS]
    with stagecrew.crew(spark).topology("nightly", jvm_listeners=["stagecrew.MdcListener"]) as topology:
        spark.sparkContext.parallelize(range(3), 3).count()
        contexts = [tuple(row) for row in spark.range(0, 2, 1, 2).selectExpr(*get).collect()]
        store = spark.sparkContext._jsc.sc().statusStore()
        stage = int(contexts[0][1])
        tasks = store.taskList(stage, 0, 10)
        task_data = [tasks.apply(i) for i in range(tasks.size())]
    assert sorted(contexts) == sorted(
        ("nightly", str(stage), str(task.partitionId()), str(task.taskId())) for task in task_data
    )
    assert len({context[3] for context in contexts}) == 2
    assert topology.report.jobs == 2
    after = [tuple(row) for row in spark.range(0, 4, 1, 4).selectExpr(*get).collect()]
    assert after == [("null",) * len(KEYS)] * 4
