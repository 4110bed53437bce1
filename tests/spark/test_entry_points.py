"""The listeners of a topology cover every way in which Spark's tasks run Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceWriter, InputPartition, WriterCommitMessage
from pyspark.sql.functions import broadcast, pandas_udf, udf, udtf

import stagecrew
from support.journal import Journal, Recorder
from support.spark_versions import HAS_ARROW_UDF
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@stagecrew.resource()
def greeting(context, word):
    yield word


hello = greeting("hello")


def rdd_map_partitions(spark: SparkSession) -> Any:
    return spark.sparkContext.parallelize(range(4), 2).map(lambda _: hello.get()).collect()


def python_udf(spark: SparkSession) -> Any:
    greet = udf(lambda _: hello.get(), "string")
    return [row[0] for row in spark.range(4).select(greet("id")).collect()]


def arrow_optimized_udf(spark: SparkSession) -> Any:
    greet = udf(lambda _: hello.get(), "string", useArrow=True)
    return [row[0] for row in spark.range(4).select(greet("id")).collect()]


def a_pandas_udf(spark: SparkSession) -> Any:
    @pandas_udf("string")
    def greet(ids: pd.Series) -> pd.Series:
        return ids.map(lambda _: hello.get())

    return [row[0] for row in spark.range(4).select(greet("id")).collect()]


def an_arrow_udf(spark: SparkSession) -> Any:
    from pyspark.sql.functions import arrow_udf

    @arrow_udf("string")
    def greet(ids: pa.Array) -> pa.Array:
        return pa.array([hello.get()] * len(ids))

    return [row[0] for row in spark.range(4).select(greet("id")).collect()]


def map_in_arrow(spark: SparkSession) -> Any:
    def greet(batches):
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"word": [hello.get()] * batch.num_rows})

    return [row[0] for row in spark.range(4).mapInArrow(greet, "word string").collect()]


def map_in_pandas(spark: SparkSession) -> Any:
    def greet(frames):
        for frame in frames:
            yield pd.DataFrame({"word": [hello.get()] * len(frame)})

    return [row[0] for row in spark.range(4).mapInPandas(greet, "word string").collect()]


def apply_in_pandas(spark: SparkSession) -> Any:
    def greet(frame: pd.DataFrame) -> pd.DataFrame:
        return pd.DataFrame({"word": [hello.get()] * len(frame)})

    return [row[0] for row in spark.range(4).groupBy("id").applyInPandas(greet, "word string").collect()]


def a_udtf(spark: SparkSession) -> Any:
    @udtf(returnType="word string")
    class Greet:
        def eval(self, _n: int):
            yield (hello.get(),)

    spark.udtf.register("say_hello", Greet)
    return [row[0] for row in spark.sql("SELECT word FROM range(4) r, LATERAL say_hello(r.id)").collect()]


def data_source_reader(spark: SparkSession) -> Any:
    class Reader(DataSourceReader):
        def partitions(self):
            return [InputPartition(i) for i in range(2)]

        def read(self, partition):
            for _ in range(2):
                yield (hello.get(),)

    class Words(DataSource):
        @classmethod
        def name(cls):
            return "words"

        def schema(self):
            return "word string"

        def reader(self, schema):
            return Reader()

    spark.dataSource.register(Words)
    return [row[0] for row in spark.read.format("words").load().collect()]


def data_source_writer(spark: SparkSession, journal: Journal) -> Any:
    path = journal.path

    class Writer(DataSourceWriter):
        def write(self, iterator):
            log = Journal(path)
            for _ in iterator:
                log.write(event="written", word=hello.get())
            return WriterCommitMessage()

    class Sink(DataSource):
        @classmethod
        def name(cls):
            return "sink"

        def schema(self):
            return "id long"

        def writer(self, schema, overwrite):
            return Writer()

    spark.dataSource.register(Sink)
    spark.range(4).write.format("sink").mode("append").save()
    return [event["word"] for event in journal.read(event="written")]


def two_chained_maps(spark: SparkSession) -> Any:
    def check_greeting(batches):
        for batch in batches:
            assert hello.get() == "hello"
            yield batch

    def replace_by_greeting(batches):
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"word": [hello.get()] * batch.num_rows})

    return [
        row[0]
        for row in spark.range(4)
        .mapInArrow(check_greeting, "id long")
        .mapInArrow(replace_by_greeting, "word string")
        .collect()
    ]


def broadcast_join_under_aqe(spark: SparkSession) -> Any:
    greet = udf(lambda _: hello.get(), "string")
    left = spark.range(4).withColumn("word", greet("id"))
    right = spark.range(4).withColumn("other", greet("id"))
    joined = left.join(broadcast(right), "id").groupBy("word", "other").count()
    rows = joined.collect()
    plan = joined._jdf.queryExecution().executedPlan().toString()
    assert "isFinalPlan=true" in plan
    assert "BroadcastHashJoin" in plan.split("== Initial Plan ==")[0]
    return [row.word for row in rows for _ in range(4) if row.other == "hello"]


ENTRY_POINTS: list[Callable[..., Any]] = [
    rdd_map_partitions,
    python_udf,
    arrow_optimized_udf,
    a_pandas_udf,
    *([an_arrow_udf] if HAS_ARROW_UDF else []),
    map_in_arrow,
    map_in_pandas,
    apply_in_pandas,
    a_udtf,
    data_source_reader,
    data_source_writer,
    two_chained_maps,
    broadcast_join_under_aqe,
]


@pytest.mark.contract
@pytest.mark.long_on_clusters
@pytest.mark.parametrize("entry", ENTRY_POINTS, ids=lambda entry: entry.__name__)
def test_listeners_are_open_at_every_entry_point(spark, journal, entry):
    """At each entry point, functions run with open listeners and inside `decorate`. Listeners close at the exit."""
    arguments = (spark, journal) if entry is data_source_writer else (spark,)
    with stagecrew.crew(spark).topology(entry.__name__, listeners=[hello, Recorder(journal)]) as topology:
        assert entry(*arguments) == ["hello"] * 4
    assert journal.read(event="enter")
    assert len(journal.read(event="enter")) == len(journal.read(event="leave"))
    if entry is two_chained_maps:  # one task with two processes, each of which is decorated
        for attempt in {e["attempt"] for e in journal.read(event="enter")}:
            entered = [e["pid"] for e in journal.read(event="enter", attempt=attempt)]
            assert len(entered) == len(set(entered)) == 2
            assert sorted(e["pid"] for e in journal.read(event="leave", attempt=attempt)) == sorted(entered)
    assert topology.report.opens == topology.report.closes == 2 * len(journal.read(event="open"))
    assert topology.report.lost == 0


@pytest.mark.contract
def test_listeners_are_open_in_a_streaming_query_and_its_foreach_batch(spark, journal, tmp_path):
    """The listeners cover the query's own tasks and the jobs of `foreachBatch`."""
    path = journal.path

    def record_batch_words(frame, batch):
        words = frame.sparkSession.sparkContext.parallelize(range(2), 2).map(lambda _: hello.get()).collect()
        Journal(path).write(event="batch", batch=batch, words=words)

    greet = udf(lambda _: hello.get(), "string")
    with stagecrew.crew(spark).topology("stream", listeners=[hello, Recorder(journal)]) as topology:
        stream = (
            spark.readStream.format("rate-micro-batch")
            .option("rowsPerBatch", 10)
            .load()
            .withColumn("word", greet("value"))
        )
        query = (
            stream.writeStream.foreachBatch(lambda frame, batch: (frame.collect(), record_batch_words(frame, batch))[1])
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )
        eventually(lambda: len(journal.read(event="batch")) >= 2, 90, "two batches are processed")
        query.stop()
    assert all(event["words"] == ["hello", "hello"] for event in journal.read(event="batch"))
    assert topology.report.opens == topology.report.closes > 0
