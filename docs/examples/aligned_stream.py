"""A stream of two sources that advance in event time together: a fast one waits for a slow one, within the drift.

Run it: `python aligned_stream.py`.
"""

import tempfile

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

import stagecrew

DRIFT = 20
#: Event times that each source has, and how many of them it can give in one batch.
SOURCES = {"fast": (range(200), 50), "slow": (range(0, 200, 2), 5)}


class Merged(DataSource):
    """Rows (source, event time) of both."""

    @classmethod
    def name(cls):
        return "merged"

    def schema(self):
        return "source string, at long"

    def streamReader(self, schema):
        return Reader()


class Reader(DataSourceStreamReader):
    """Says how far each source may be read in the next batch: its own pace, and no further than the drift allows."""

    def __init__(self):
        self.at = dict.fromkeys(SOURCES, 0)

    def initialOffset(self):
        return dict.fromkeys(SOURCES, 0)

    def latestOffset(self):
        from stagecrew import WatermarkGroup

        group = WatermarkGroup(DRIFT)
        for source, (events, _) in SOURCES.items():
            if self.at[source] < len(events):
                group.report(source, events[self.at[source]])  # who has come to its end holds nobody
        for source, (events, pace) in SOURCES.items():
            wanted = events[self.at[source] : self.at[source] + pace]
            self.at[source] += sum(1 for event in wanted if group.allows(event))
        return dict(self.at)

    def partitions(self, start, end):
        return [InputPartition((source, start[source], end[source])) for source in SOURCES if end[source] > start[source]]

    def read(self, partition):
        source, first, behind = partition.value
        for event in SOURCES[source][0][first:behind]:
            yield source, event


def main():
    spark = stagecrew.configure(SparkSession.builder.master("local[2]").appName("aligned stream")).getOrCreate()
    spark.dataSource.register(Merged)
    spreads = []

    def look(batch, number):
        ends = {row.source: row.end for row in batch.groupBy("source").agg({"at": "max"}).toDF("source", "end").collect()}
        if len(ends) == 2:
            spreads.append(max(ends.values()) - min(ends.values()))

    with tempfile.TemporaryDirectory() as folder, stagecrew.crew(spark).topology("stream"):
        stream = spark.readStream.format("merged").load().writeStream.foreachBatch(look)
        query = stream.option("checkpointLocation", folder).start()
        while not (query.lastProgress and query.lastProgress["sources"][0]["endOffset"] == '{"fast": 200, "slow": 100}'):
            query.awaitTermination(0.1)
        query.stop()
    print(f"{len(spreads)} batches, at most {max(spreads)} apart, the drift is {DRIFT}")
    assert max(spreads) <= DRIFT
    spark.stop()


if __name__ == "__main__":
    main()
