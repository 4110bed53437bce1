"""A job of three steps that outlives its driver: what is finished is not done again, and its rows are there once."""

import stagecrew
from pyspark.sql import SparkSession
from stagecrew.operators.sinks import ParquetSink


def load(rows: str, folder: str) -> dict:
    """Counts, writes and checks so many rows. Called by `stagecrew driver`, in a process of its own."""
    job = stagecrew.current_job()
    spark = stagecrew.configure(SparkSession.builder).getOrCreate()
    numbers = spark.range(int(rows))

    total = job.step("count", numbers.count)

    def write():
        with stagecrew.crew(spark).topology("load") as topology:
            return topology.commit(numbers, ParquetSink(f"{folder}/numbers")).rows

    written = job.step("write", write)
    spark.stop()
    return {"counted": total, "written": written}
