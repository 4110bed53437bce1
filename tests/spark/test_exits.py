"""Exits of topologies: the jobs and queries that they stop, or wait for."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import stagecrew
from support.journal import recording_body
from support.sessions import Sessions
from support.waiting import eventually


@pytest.fixture
def spark(sessions: Sessions, master: str) -> SparkSession:
    return sessions.get(master, spark__stagecrew__close__timeout="2s")


@pytest.fixture
def crew(spark: SparkSession) -> stagecrew.Crew:
    return stagecrew.crew(spark)


def start_query(spark: SparkSession, folder: Path, batch: Any) -> StreamingQuery:
    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    return stream.writeStream.foreachBatch(batch).option("checkpointLocation", str(folder)).start()


def test_a_cancelling_exit_does_not_wait_for_a_blocked_batch(spark, crew, tmp_path):
    """A batch that blocks in Python delays a cancelling exit by at most the close timeout. All queries are stopped."""
    blocked, released, batches = threading.Event(), threading.Event(), []

    def block(frame: Any, number: int) -> None:
        blocked.set()
        assert released.wait(60)

    topology = crew.topology("t").start()
    try:
        one = start_query(spark, tmp_path / "one", block)
        other = start_query(spark, tmp_path / "other", lambda frame, number: batches.append(number))
        assert blocked.wait(60)
        eventually(lambda: batches, 60, "the other query has a batch")
        exit_started = time.monotonic()
        topology.close(cancel=True)
        assert time.monotonic() - exit_started < 10
        eventually(lambda: not other.isActive, 20, "the other query has stopped")
    finally:
        released.set()
    eventually(lambda: not one.isActive, 20, "the blocked query has stopped")


@pytest.mark.contract
def test_a_cancelling_exit_cancels_the_jobs_of_inner_topologies(spark, crew, journal):
    """The exit also cancels a job of a thread that entered only an inner topology."""
    work = recording_body(journal, seconds=60)
    outer = crew.topology("outer").start()
    inner = crew.topology("inner").start()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(inner.wrap(lambda: spark.sparkContext.parallelize([1], 1).mapPartitions(work).collect()))
        eventually(lambda: journal.read(event="body"), 60, "the task runs")
        outer.close(cancel=True)
        with pytest.raises(Exception, match="topology 'outer' was cancelled"):
            job.result(20)


@pytest.mark.contract
def test_an_exit_waits_for_the_queries_of_inner_topologies(spark, crew, tmp_path):
    """The exit also waits for a query of a thread that entered only an inner topology."""
    batches: list[int] = []
    outer = crew.topology("outer").start()
    inner = crew.topology("inner").start()

    def start() -> StreamingQuery:
        return start_query(spark, tmp_path / "query", lambda frame, number: batches.append(number))

    with ThreadPoolExecutor(2) as pool:
        query = pool.submit(inner.wrap(start)).result(60)
        try:
            ended: Future[None] = pool.submit(outer.close)
            before = len(batches)
            eventually(lambda: len(batches) > before + 3 or ended.done(), 60, "the query has more batches")
            assert not ended.done()
        finally:
            query.stop()
        ended.result(60)
    outer.close()
