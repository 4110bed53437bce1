"""A stream that reads two sources in step: the fast source waits if it is ahead of the slow one by more than the drift.

Run it: `python aligned_stream.py`. It needs Spark 4.2 or newer, which passes the start of each batch to the reader.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

import stagecrew

DRIFT = 20
Rows = list[tuple[str, int]]
#: The event times of each source, and how many of them it can return in one batch.
SOURCES = {"fast": (range(200), 50), "slow": (range(0, 200, 2), 5)}


class Merged(DataSource):
    """A data source with the rows (source, event time) of both sources."""

    @classmethod
    def name(cls) -> str:
        return "merged"

    def schema(self) -> str:
        return "source string, at long"

    def streamReader(self, schema: Any) -> Reader:
        return Reader()


class Reader(DataSourceStreamReader):
    """Decides how far the next batch reads each source: at the pace of the source, within the drift.

    The reader stores no position. Spark passes the start of each batch, also after a restart from the checkpoint.
    """

    def initialOffset(self) -> dict[str, int]:
        return dict.fromkeys(SOURCES, 0)

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
        from stagecrew.operators import WatermarkGroup

        group: WatermarkGroup[str] = WatermarkGroup(DRIFT)
        for source, (events, _) in SOURCES.items():
            if start[source] < len(events):
                group.report(source, events[start[source]])  # a source at its end is not reported, so none waits for it
        end = {}
        for source, (events, pace) in SOURCES.items():
            ready = events[start[source] : start[source] + pace]
            end[source] = start[source] + sum(1 for event in ready if group.allows(event))
        return end

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        unread = [source for source in SOURCES if end[source] > start[source]]
        return [InputPartition((source, start[source], end[source])) for source in unread]

    def read(self, partition: InputPartition) -> Iterator[tuple[str, int]]:
        source, first, end = partition.value
        for event in SOURCES[source][0][first:end]:
            yield source, event


def run(spark: SparkSession, folder: str, batches: dict[int, Rows], enough: int) -> None:
    """Continues from the checkpoint until there are enough rows. A repeated batch replaces its first result."""

    def keep(batch: DataFrame, number: int) -> None:
        batches[number] = [(row.source, row["at"]) for row in batch.collect()]

    stream = spark.readStream.format("merged").load().writeStream.foreachBatch(keep)
    query = stream.option("checkpointLocation", folder).start()
    while sum(map(len, batches.values())) < enough:
        query.awaitTermination(1)  # raises the error of a failed query
    query.stop()


def main() -> None:
    spark = stagecrew.configure(SparkSession.builder.master("local[2]").appName("aligned stream")).getOrCreate()
    spark.dataSource.register(Merged)
    everything = [(source, event) for source, (events, _) in SOURCES.items() for event in events]
    batches: dict[int, Rows] = {}
    with tempfile.TemporaryDirectory() as folder, stagecrew.crew(spark).topology("stream"):
        run(spark, folder, batches, len(everything) // 2)
        run(spark, folder, batches, len(everything))  # continues where the first run stopped
    ends = [dict(sorted(rows)) for rows in batches.values()]  # the last event of each source in a batch
    spreads = [max(end.values()) - min(end.values()) for end in ends if len(end) == 2]
    print(f"{len(batches)} batches, at most {max(spreads)} apart, the drift is {DRIFT}")
    assert max(spreads) <= DRIFT
    assert sorted(row for rows in batches.values() for row in rows) == sorted(everything)
    spark.stop()


if __name__ == "__main__":
    main()
