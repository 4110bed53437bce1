"""Opens a database connection once per Python worker, and closes it when the run ends.

Run it: `python quickstart.py`. With `--wait`, the Spark UI stays open until you press Enter.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterable, Iterator

import stagecrew
from pyspark.sql import SparkSession


@stagecrew.resource
def airports(context: stagecrew.ListenerContext) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")  # in each worker, before its first task
    connection.execute("create table airports (number integer, code text)")
    connection.executemany("insert into airports values (?, ?)", enumerate(["JFK", "LGA", "EWR"]))
    yield connection
    connection.close()  # after its last task


database = airports()


def codes(numbers: Iterable[int]) -> Iterator[str]:
    """Looks up the code of each number, with the connection of this worker."""
    for number in numbers:
        (code,) = database.get().execute("select code from airports where number = ?", [number % 3]).fetchone()
        yield code


spark = stagecrew.configure(SparkSession.builder.master("local[2]").appName("quickstart")).getOrCreate()
with stagecrew.crew(spark).topology("enrich", listeners=[database]) as topology:
    found = spark.sparkContext.parallelize(range(100), 8).mapPartitions(codes).collect()

print(len(found), "rows in 8 tasks")
print(topology.report.opens, "connections opened,", topology.report.closes, "closed")
if "--wait" in sys.argv:
    input(f"See {spark.sparkContext.uiWebUrl}/stagecrew/, then press Enter: ")
spark.stop()
