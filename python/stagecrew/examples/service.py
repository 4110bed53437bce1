"""A service that handles 100 requests, each in a topology: the shuffle files of a request are deleted when it ends.

Run it: `python service.py`, or `python service.py 1000` for more requests.
"""

from __future__ import annotations

import sys

import stagecrew
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f


def handle(numbers: DataFrame, request: int) -> int:
    """Handles one request: a query with a shuffle."""
    keyed = numbers.select(((f.col("id") + request) % 1000).alias("key"), "id")
    return keyed.groupBy("key").agg(f.sum("id").alias("sum")).where("sum % 2 = 0").count()


def main(requests: int = 100) -> None:
    """Handles the requests, and prints the number of partitions that remain."""
    builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
    spark = stagecrew.configure(builder).getOrCreate()
    crew = stagecrew.crew(spark)
    numbers = spark.range(0, 20_000, 1, 2)
    released = 0
    for request in range(requests):
        with crew.topology("request") as topology:
            handle(numbers, request)
        released += topology.report.released
    remaining = sum(report.outputs + report.blocks for report in crew.partitions())
    print(f"{requests} requests, {released} partitions released, {remaining} remain")
    assert remaining == 0, "the partitions of a request are released when it ends"
    spark.stop()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
