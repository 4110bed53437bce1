"""Log records of tasks of a named topology say where they come from, in a worker and in the JVM."""

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

# Executors do not have this module: what it defines travels by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

KEYS = ("topology", "stage", "partition", "attempt")


@stagecrew.resource
def structured(context: stagecrew.ListenerContext, path: str) -> Iterator[None]:
    """A worker's log file, in which each line is JSON."""
    handler = logging.FileHandler(path)
    handler.setFormatter(stagecrew.StructuredFormatter())
    logging.getLogger("job").addHandler(handler)
    yield
    logging.getLogger("job").removeHandler(handler)
    handler.close()


def work(rows: Iterator[Any]) -> Iterator[tuple[int, int, int]]:
    """Logs, and says where it ran."""
    task = TaskContext.get()
    assert task is not None
    logging.getLogger("job").warning("at work")
    yield task.stageId(), task.partitionId(), task.taskAttemptId()


def test_a_workers_records_have_the_tasks_own_numbers(sessions: Sessions, tmp_path: Path) -> None:
    """As Spark's own structured logs have them: stage, partition and attempt are what the task's context says."""
    spark = sessions.get("local[2]")
    log = str(tmp_path / "log")
    listeners = [structured(log), stagecrew.LoggingContext()]
    with stagecrew.crew(spark).topology("nightly", listeners=listeners):
        spark.sparkContext.parallelize(range(3), 3).count()  # so that no two of the numbers are the same
        ran = spark.sparkContext.parallelize(range(4), 2).mapPartitions(work).collect()
    records = [json.loads(line) for line in Path(log).read_text().split("\n") if line]
    assert {(one["msg"], one["level"], one["logger"]) for one in records} == {("at work", "WARNING", "job")}
    found = sorted(tuple(one["context"][key] for key in KEYS) for one in records)
    assert found == sorted(("nightly", *map(str, where)) for where in ran)
    assert {one["context"]["application"] for one in records} == {spark.sparkContext.applicationId}
    assert len({where[2] for where in ran}) == 2


def test_a_tasks_thread_in_the_jvm_has_the_tasks_own_numbers(sessions: Sessions) -> None:
    """MdcListener gives it them with the topology's own name, and takes them back."""
    spark = sessions.get("local[2]")
    get = [f"reflect('org.slf4j.MDC', 'get', 'stagecrew.{key}') AS {key}" for key in KEYS]
    with stagecrew.crew(spark).topology("nightly", jvm_listeners=["stagecrew.MdcListener"]) as topology:
        spark.sparkContext.parallelize(range(3), 3).count()
        found = [tuple(row) for row in spark.range(0, 2, 1, 2).selectExpr(*get).collect()]
        store = spark.sparkContext._jsc.sc().statusStore()
        stage = int(found[0][1])
        tasks = store.taskList(stage, 0, 10)
        ran = [tasks.apply(i) for i in range(tasks.size())]
    assert sorted(found) == sorted(("nightly", str(stage), str(one.partitionId()), str(one.taskId())) for one in ran)
    assert len({one[3] for one in found}) == 2
    assert topology.report.jobs == 2
    after = [tuple(row) for row in spark.range(0, 4, 1, 4).selectExpr(*get).collect()]
    assert after == [("null",) * len(KEYS)] * 4
