"""A job that survives its driver: finished steps do not run again, and its rows are written exactly once."""

from __future__ import annotations

from typing import Any

import stagecrew
from pyspark.sql import SparkSession
from stagecrew.operators.sinks import ParquetSink


def load(rows: str, folder: str) -> dict[str, Any]:
    """Counts and writes `rows` rows. `stagecrew driver` calls this function in a separate process."""
    job = stagecrew.current_job()
    spark = stagecrew.configure(SparkSession.builder).getOrCreate()
    numbers = spark.range(int(rows))

    total = job.step("count", numbers.count)

    def write() -> int:
        with stagecrew.crew(spark).topology("load") as topology:
            return topology.commit(numbers, ParquetSink(f"{folder}/numbers")).rows

    written = job.step("write", write)
    spark.stop()
    return {"counted": total, "written": written}
