"""Spark's own pages describe jobs by their topology, unless the user has described them."""

from __future__ import annotations

import threading

import pytest
from pyspark.sql import SparkSession

import stagecrew
from support.sessions import Sessions


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
