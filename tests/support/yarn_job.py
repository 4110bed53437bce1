"""A job for YARN: `yarn_job.py RESULT JOURNAL CONTAINERS`.

It uses listeners, shuffles and a coordinator, and kills a container. The job writes its outcome to RESULT as
JSON, and the calls of its listeners to JOURNAL. CONTAINERS is the folder with the files of all containers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

import stagecrew

RESULT, JOURNAL, CONTAINERS = map(Path, sys.argv[1:])


class Recorder(stagecrew.Listener):
    """Appends a line for each open and close to the journal, which all containers share."""

    name = "recorder"

    def __init__(self, path: Path) -> None:
        self.path = path

    def _note(self, event: str, context: stagecrew.TopologyContext) -> None:
        with self.path.open("a") as file:
            file.write(f"{event} {context.topology} {context.executor} {os.getpid()} {sys.executable}\n")

    def open(self, context: stagecrew.TopologyContext) -> None:
        self._note("open", context)

    def close(self, context: stagecrew.TopologyContext) -> None:
        self._note("close", context)


class Budget(stagecrew.Coordinator):
    """Grants 100 calls in all."""

    left = 100

    def handle_request(self, evaluation, requested):
        granted = min(requested, self.left)
        self.left -= granted
        return granted


def work(gateway, batches):
    for batch in batches:
        yield pa.record_batch({"calls": [gateway.request(batch.num_rows)]})


def executor_jvms(spark: SparkSession) -> list[int]:
    """Returns the process ids of the executors' JVMs."""

    def jvm(_):
        import psutil

        yield next(one.pid for one in psutil.Process().parents() if one.name() == "java")

    return spark.sparkContext.parallelize(range(16), 16).mapPartitions(jvm).distinct().collect()


def executor_ids(spark: SparkSession) -> set[str]:
    """Returns the ids of the executors that the driver knows."""
    ids = spark.sparkContext._jsc.sc().getExecutorIds()
    return {ids.apply(i) for i in range(ids.size())}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Waits at most a minute until the condition is true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not within a minute: {what}"
        time.sleep(0.05)


def main() -> None:
    spark = stagecrew.configure(SparkSession.builder.appName("crew")).getOrCreate()
    crew = stagecrew.crew(spark)
    recorder = Recorder(JOURNAL)
    # Spark gives the first tasks of a stage to the executors in turn, so both run some tasks of each stage.
    wait_until(lambda: len(executor_ids(spark)) == 2, "both executors are registered")

    with crew.topology("work", listeners=[recorder]) as topology:
        counts = spark.range(0, 1000, 1, 4).selectExpr("id % 10 as key").groupBy("key").count()
        rows = counts.mapInArrow(lambda batches: batches, counts.schema).collect()
        budget = topology.coordinate("budget", Budget)
        granted = budget.map(spark.range(0, 400, 1, 4), work, "calls long").groupBy().sum().first()[0]
    work_report = topology.report

    with crew.topology("loss", listeners=[recorder]) as topology:
        mapped = spark.sparkContext.accumulator(0)

        def pairs(numbers):
            for number in numbers:
                mapped.add(1)
                yield number % 8, number

        sums = spark.sparkContext.parallelize(range(1000), 4).mapPartitions(pairs).groupByKey(8).mapValues(sum)
        before = sums.collectAsMap()
        jvms = executor_jvms(spark)
        executors = executor_ids(spark)
        os.kill(jvms[0], signal.SIGKILL)
        # Until then, tasks read the files of the lost executor.
        wait_until(lambda: not executors <= executor_ids(spark), "the driver notices that an executor is lost")
        after = sums.collectAsMap()
    loss_report = topology.report

    RESULT.write_text(
        json.dumps(
            {
                "rows": sorted(tuple(row) for row in rows),
                "granted": granted,
                "same": before == after,
                "executors": len(jvms),
                "mapped": mapped.value,
                "left": len(list(CONTAINERS.rglob("shuffle_*.data"))),
                "jar": stagecrew.jar_path(),
                "package": stagecrew.__file__,
                "reports": {
                    report.name: {
                        "opens": report.opens,
                        "closes": report.closes,
                        "lost": sum(report.lost_processes.values()),
                        "lost_executors": list(report.lost_executors),
                        "unclosed": list(report.unclosed),
                        "released": report.released,
                        "failures": report.release_failures,
                    }
                    for report in (work_report, loss_report)
                },
            }
        )
    )
    spark.stop()


main()
