"""Listeners of the session builder: open for the whole application, or once per execution."""

from __future__ import annotations

import sys

import pytest
from pyspark import TaskContext, cloudpickle
from pyspark.sql import SparkSession

import stagecrew
from support.journal import Journal, Recorder, recording_body
from support.sessions import Sessions
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def application(tmp_path_factory, master) -> tuple[Journal, tuple[Recorder, ...]]:
    journal = Journal(str(tmp_path_factory.mktemp("application") / "journal"))
    application_listener = Recorder(journal, "application")
    execution_listener = Recorder(journal, "execution", lifetime=stagecrew.Lifetime.EXECUTION)
    return journal, (application_listener, execution_listener)


@pytest.fixture
def spark(sessions: Sessions, master: str, application) -> SparkSession:
    return sessions.get(master, listeners=application[1])


def open_and_close_events(journal: Journal, since: int, opens: int | None = None) -> list[dict]:
    """Waits until every open of the execution's listener has a close. Returns these opens and closes.

    Ignores the listener's first `since` events of any kind. Waits for at least `opens` opens, if given.
    """

    def all_closed():
        events = [e for e in journal.read(listener="execution")[since:] if e["event"] in ("open", "close")]
        opens_seen = [e for e in events if e["event"] == "open"]
        closes_seen = [e for e in events if e["event"] == "close"]
        return (
            events
            if opens_seen and len(opens_seen) == len(closes_seen) and (opens is None or len(opens_seen) >= opens)
            else None
        )

    return eventually(all_closed, 30, "the execution's listeners close")


def topology_ids(events: list[dict]) -> set[str]:
    """The ids of the executions: each execution is a topology of its own."""
    return {event["topology"] for event in events}


def test_listeners_of_the_builder_cover_named_topologies(spark, application):
    """In a named topology, `decorate` of the builder's listeners wraps that of the topology's own listeners.

    The application's listener opens before the topology's listener and stays open after the topology.
    """
    journal = application[0]
    with stagecrew.crew(spark).topology("named", listeners=[Recorder(journal, "named")]):
        spark.sparkContext.parallelize(range(4), 4).mapPartitions(recording_body(journal, "in named")).collect()
    for inside in journal.read(event="body", name="in named"):
        entered = [e["listener"] for e in journal.read(event="enter", attempt=inside["attempt"])]
        assert entered == ["application", "execution", "named"]
    assert not journal.read(event="close", listener="application")
    for pid in {e["pid"] for e in journal.read(event="open", listener="named")}:
        opened = [e["listener"] for e in journal.read(event="open", pid=pid)]
        assert opened.index("application") < opened.index("named")


def test_an_aqe_query_of_several_jobs_is_one_execution(spark, application):
    """A SQL execution opens and closes its listeners once per process, however many jobs it runs."""
    journal = application[0]
    before = len(journal.read(listener="execution"))
    spark.sparkContext.setJobGroup("aqe", "a query of several jobs")
    rows = spark.range(0, 100, 1, 2).mapInArrow(lambda batches: batches, "id long").groupBy("id").count().collect()
    spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
    assert len(rows) == 100
    assert len(spark.sparkContext.statusTracker().getJobIdsForGroup("aqe")) > 1
    events = open_and_close_events(journal, before)
    assert len(topology_ids(events)) == 1
    for pid in {e["pid"] for e in events}:
        assert [e["event"] for e in events if e["pid"] == pid] == ["open", "close"]


@pytest.mark.contract
def test_each_query_is_a_separate_execution(spark, application):
    """Two consecutive queries are two executions."""
    journal = application[0]
    before = len(journal.read(listener="execution"))
    for _ in range(2):
        spark.range(0, 10, 1, 2).mapInArrow(lambda batches: batches, "id long").collect()
    assert len(topology_ids(open_and_close_events(journal, before, 2))) == 2


def test_tasks_of_a_local_iterator_have_the_listeners(spark, application):
    """`DataFrame.toLocalIterator` runs its jobs after the end of its SQL execution. Their tasks have the listeners."""
    path, before = application[0].path, len(application[0].read(listener="execution"))
    earlier = len(application[0].read(event="body", name="iterator"))

    def work(batches):
        Journal(path).write(event="body", name="iterator", attempt=TaskContext.get().taskAttemptId())
        yield from batches

    assert len(list(spark.range(0, 6, 1, 3).mapInArrow(work, "id long").toLocalIterator())) == 6
    open_and_close_events(application[0], before)
    bodies = application[0].read(event="body", name="iterator")[earlier:]
    assert len(bodies) == 3
    for body in bodies:
        entered = [e["listener"] for e in application[0].read(event="enter", attempt=body["attempt"])]
        assert entered == ["application", "execution"]


def test_each_rdd_job_is_an_execution(spark, application):
    """Each RDD job is an execution: its listeners open and close once in each process that runs its tasks."""
    journal = application[0]
    before = len(journal.read(listener="execution"))
    for _ in range(2):
        spark.sparkContext.parallelize(range(4), 4).mapPartitions(recording_body(journal, "job")).collect()
    events = open_and_close_events(journal, before, 2)
    assert len(topology_ids(events)) == 2
    for topology_id in topology_ids(events):
        for pid in {e["pid"] for e in events}:
            hooks = [e["event"] for e in events if e["pid"] == pid and e["topology"] == topology_id]
            assert hooks in ([], ["open", "close"])


@pytest.mark.contract
def test_a_streaming_query_is_one_execution(spark, application, tmp_path):
    """All batches of a streaming query, and the inner jobs of foreachBatch, are one execution that ends with the
    query."""
    journal = application[0]
    before = len(journal.read(listener="execution"))
    path = journal.path

    def run_inner_job(frame, batch):
        frame.sparkSession.sparkContext.parallelize(range(2), 2).map(lambda x: x).collect()
        Journal(path).write(event="batch", batch=batch)

    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    query = (
        stream.mapInArrow(lambda batches: batches, stream.schema)
        .writeStream.foreachBatch(lambda frame, batch: (frame.collect(), run_inner_job(frame, batch))[1])
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    eventually(lambda: len(journal.read(event="batch")) >= 3, 90, "three batches are processed")
    query.stop()
    events = open_and_close_events(journal, before)
    assert len(topology_ids(events)) == 1
    for pid in {e["pid"] for e in events}:
        assert [e["event"] for e in events if e["pid"] == pid] == ["open", "close"]


def test_stopping_spark_closes_every_listener_of_the_application(sessions, spark, application):
    """`spark.stop()` closes the listeners of the application in every process."""
    journal = application[0]
    spark.sparkContext.parallelize(range(4), 4).mapPartitions(recording_body(journal, "last")).collect()
    sessions.stop()
    opened = journal.read(event="open")
    assert opened
    eventually(lambda: len(journal.read(event="close")) == len(opened), 10, "every listener is closed")
