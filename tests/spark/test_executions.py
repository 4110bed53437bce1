"""Listeners of the session builder: for the whole application, and once per execution."""

from __future__ import annotations

import sys

import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import stagecrew
from support.journal import Journal, Recorder, recording_body
from support.sessions import Sessions
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def application(tmp_path_factory, master) -> tuple[Journal, tuple[Recorder, ...]]:
    journal = Journal(str(tmp_path_factory.mktemp("application") / "journal"))
    every = Recorder(journal, "application")
    each = Recorder(journal, "execution", lifetime=stagecrew.Lifetime.EXECUTION)
    return journal, (every, each)


@pytest.fixture
def spark(sessions: Sessions, master: str, application) -> SparkSession:
    return sessions.get(master, listeners=application[1])


def settled(journal: Journal, since: int, opens: int | None = None) -> list[dict]:
    """What the execution's listener did since then, once all it opened is closed."""

    def done():
        events = [e for e in journal.read(listener="execution")[since:] if e["event"] in ("open", "close")]
        o = [e for e in events if e["event"] == "open"]
        c = [e for e in events if e["event"] == "close"]
        return events if o and len(o) == len(c) and (opens is None or len(o) >= opens) else None

    return eventually(done, 30, "the execution's listeners close")


def topologies(events: list[dict]) -> set[str]:
    return {event["topology"] for event in events}


def test_listeners_of_the_builder_cover_named_topologies_too(spark, application, journal):
    """The builder's listeners are opened first and outermost in a named topology, and stay open after it."""
    log = application[0]
    with stagecrew.crew(spark).topology("named", listeners=[Recorder(log, "named")]):
        spark.sparkContext.parallelize(range(4), 4).mapPartitions(recording_body(log, "in named")).collect()
    for inside in log.read(event="body", name="in named"):
        entered = [e["listener"] for e in log.read(event="enter", attempt=inside["attempt"])]
        assert entered == ["application", "execution", "named"]
    assert not log.read(event="close", listener="application")
    for pid in {e["pid"] for e in log.read(event="open", listener="named")}:
        opened = [e["listener"] for e in log.read(event="open", pid=pid)]
        assert opened.index("application") < opened.index("named")


def test_an_aqe_query_of_several_jobs_is_one_execution(spark, application):
    """A SQL execution opens and closes its listeners once per process, however many jobs it takes."""
    log = application[0]
    before = len(log.read(listener="execution"))
    spark.sparkContext.setJobGroup("aqe", "a query of several jobs")
    rows = spark.range(0, 100, 1, 2).mapInArrow(lambda batches: batches, "id long").groupBy("id").count().collect()
    spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
    assert len(rows) == 100
    assert len(spark.sparkContext.statusTracker().getJobIdsForGroup("aqe")) > 1
    events = settled(log, before)
    assert len(topologies(events)) == 1
    for pid in {e["pid"] for e in events}:
        assert [e["event"] for e in events if e["pid"] == pid] == ["open", "close"]


def test_each_query_is_an_execution_of_its_own(spark, application):
    """Two queries one after the other are two executions."""
    log = application[0]
    before = len(log.read(listener="execution"))
    for _ in range(2):
        spark.range(0, 10, 1, 2).mapInArrow(lambda batches: batches, "id long").collect()
    assert len(topologies(settled(log, before, 2))) == 2


def test_each_rdd_job_is_an_execution(spark, application):
    """An RDD job opens and closes the listeners once per process that it uses."""
    log = application[0]
    before = len(log.read(listener="execution"))
    for _ in range(2):
        spark.sparkContext.parallelize(range(4), 4).mapPartitions(recording_body(log, "job")).collect()
    events = settled(log, before, 2)
    assert len(topologies(events)) == 2
    for name in topologies(events):
        for pid in {e["pid"] for e in events}:
            mine = [e["event"] for e in events if e["pid"] == pid and e["topology"] == name]
            assert mine in ([], ["open", "close"])


def test_a_streaming_query_is_one_execution(spark, application, tmp_path):
    """All batches of a streaming query, and foreachBatch's inner jobs, are one execution, that ends with the query."""
    log = application[0]
    before = len(log.read(listener="execution"))
    path = log.path

    def each(frame, batch):
        frame.sparkSession.sparkContext.parallelize(range(2), 2).map(lambda x: x).collect()
        Journal(path).write(event="batch", batch=batch)

    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    query = (
        stream.mapInArrow(lambda batches: batches, stream.schema)
        .writeStream.foreachBatch(lambda frame, batch: (frame.collect(), each(frame, batch))[1])
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    eventually(lambda: len(log.read(event="batch")) >= 3, 90, "three batches")
    query.stop()
    events = settled(log, before)
    assert len(topologies(events)) == 1
    for pid in {e["pid"] for e in events}:
        assert [e["event"] for e in events if e["pid"] == pid] == ["open", "close"]


def test_everything_of_the_application_closes_at_the_stop(sessions, spark, application):
    """spark.stop() closes what the application opened, in every process."""
    log = application[0]
    spark.sparkContext.parallelize(range(4), 4).mapPartitions(recording_body(log, "last")).collect()
    sessions.stop()
    opened = log.read(event="open")
    assert opened
    eventually(lambda: len(log.read(event="close")) == len(opened), 10, "all are closed")
