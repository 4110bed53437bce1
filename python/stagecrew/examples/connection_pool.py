"""Opens one database connection in each Python worker, instead of one in each task."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator

import pandas as pd
import stagecrew
from pyspark.sql import SparkSession

folder = tempfile.TemporaryDirectory()
path = os.path.join(folder.name, "airports.db")
with sqlite3.connect(path) as setup:
    setup.execute("create table airports(code text primary key, name text)")
    setup.executemany(
        "insert into airports values (?, ?)", [("JFK", "John F Kennedy Intl"), ("EWR", "Newark Liberty Intl")]
    )
setup.close()


@stagecrew.resource
def airports(context: stagecrew.ListenerContext, path: str) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    yield connection
    connection.close()


database = airports(path)


def add_names(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    for frame in frames:
        names = dict(database.get().execute("select code, name from airports"))
        yield frame.assign(name=frame["origin"].map(names.get))


spark = stagecrew.configure(SparkSession.builder.master("local[2]").appName("connection pool")).getOrCreate()
with stagecrew.crew(spark).topology("names", listeners=[database]) as topology:
    flights = spark.createDataFrame(
        [("JFK", 1), ("EWR", 2), ("JFK", 3), ("EWR", 4)], "origin string, flight long"
    ).repartition(4)
    rows = flights.mapInPandas(add_names, "origin string, flight long, name string").collect()

assert all(row.name for row in rows)
print(f"{len(rows)} rows, {topology.report.opens} connections opened, {topology.report.closes} closed")
spark.stop()
folder.cleanup()
