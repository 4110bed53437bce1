"""Spark's own pages describe jobs by their topology, unless the user has described them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import stagecrew
from stagecrew.operators.sinks import ParquetSink
from support.sessions import Sessions
from support.waiting import eventually


@pytest.fixture(scope="module")
def spark(sessions: Sessions) -> SparkSession:
    return sessions.get("local[2]")


def described(spark: SparkSession) -> str | None:
    """Runs a job in this thread, and returns the description that Spark's pages show."""
    context = spark.sparkContext
    context.setLocalProperty("spark.jobGroup.id", "described")
    spark.sparkContext.parallelize([1], 1).count()
    (*_, job) = sorted(context.statusTracker().getJobIdsForGroup("described"))
    found = context._jsc.sc().statusStore().job(job).description()
    return found.get() if found.isDefined() else None


def test_jobs_are_described_by_their_innermost_topology(spark: SparkSession) -> None:
    """The description changes with each topology, and is removed when the last one has ended."""
    crew = stagecrew.crew(spark)
    assert described(spark) is None
    with crew.topology("day"):
        assert described(spark) == "topology day"
        with crew.topology("hour"):
            assert described(spark) == "topology hour"
        assert described(spark) == "topology day"
    assert described(spark) is None


def test_a_description_of_the_user_is_never_changed(spark: SparkSession) -> None:
    """Neither one from before the topology, nor one that is set inside."""
    crew, context = stagecrew.crew(spark), spark.sparkContext
    try:
        context.setJobDescription("mine")
        with crew.topology("day"):
            assert described(spark) == "mine"
        assert described(spark) == "mine"
        context.setLocalProperty("spark.job.description", None)
        with crew.topology("day"):
            context.setJobDescription("inside")
            with crew.topology("hour"):
                assert described(spark) == "inside"
        assert described(spark) == "inside"
    finally:
        context.setLocalProperty("spark.job.description", None)
    with crew.topology("day"):  # the user has removed the description
        assert described(spark) == "topology day"


def test_a_wrapped_function_describes_its_jobs(spark: SparkSession) -> None:
    """In another thread, only the jobs of the wrapped function have the description."""
    found = []
    with stagecrew.crew(spark).topology("threads") as topology:
        work = topology.wrap(lambda: found.append(described(spark)))

        def run() -> None:
            work()
            found.append(described(spark))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60)
    assert found == ["topology threads", None]


def descriptions(spark: SparkSession) -> set[str | None]:
    """The descriptions of the jobs that have run in the group of this thread."""
    context = spark.sparkContext
    store = context._jsc.sc().statusStore()
    group = context.getLocalProperty("spark.jobGroup.id")
    found = [store.job(job).description() for job in context.statusTracker().getJobIdsForGroup(group)]
    return {one.get() if one.isDefined() else None for one in found}


def test_the_job_of_a_commit_names_the_operator(spark: SparkSession, tmp_path: Path) -> None:
    """During the commit, the description names the topology and the operator. Afterwards, it names the topology."""
    spark.sparkContext.setLocalProperty("spark.jobGroup.id", "commit")
    with stagecrew.crew(spark).topology("day") as topology:
        topology.commit(spark.range(3), ParquetSink(str(tmp_path / "rows")), name="nightly")
        eventually(lambda: descriptions(spark) == {"topology day: nightly"}, 10)
        assert described(spark) == "topology day"


def test_sparks_description_of_a_micro_batch_is_kept(spark: SparkSession, tmp_path: Path) -> None:
    """Spark describes the jobs of a streaming query by its batch. The query's topology changes nothing."""
    found = []

    def handle(rows: DataFrame, batch: int) -> None:
        rows.count()
        found.extend(descriptions(rows.sparkSession))

    with stagecrew.crew(spark).topology("stream"):
        source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 2).load()
        query = source.writeStream.trigger(once=True).foreachBatch(handle)
        query.option("checkpointLocation", str(tmp_path)).start().awaitTermination()
    assert found
    assert all("batch = 0" in description for description in found)
