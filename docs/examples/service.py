"""A service that answers 100 requests, each in a topology of its own: what a request shuffles goes when it is answered.

Run it: `python service.py`, or `python service.py 1000` for more of them.
"""

from __future__ import annotations

import sys

import stagecrew
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f


def answer(numbers: DataFrame, request: int) -> int:
    """One request: a query with a shuffle."""
    keyed = numbers.select(((f.col("id") + request) % 1000).alias("key"), "id")
    return keyed.groupBy("key").agg(f.sum("id").alias("sum")).where("sum % 2 = 0").count()


def main(requests: int = 100) -> None:
    """Answers the requests, and prints what they left."""
    builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
    spark = stagecrew.configure(builder).getOrCreate()
    crew = stagecrew.crew(spark)
    numbers = spark.range(0, 20_000, 1, 2)
    released = 0
    for request in range(requests):
        with crew.topology("request") as topology:
            answer(numbers, request)
        released += topology.report.released
    left = sum(one.outputs + one.blocks for one in crew.partitions())
    print(f"{requests} requests, {released} partitions released, {left} left")
    assert left == 0, "what requests store goes with them"
    spark.stop()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
