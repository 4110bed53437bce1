"""Coordinators of the session, of streaming queries, and of functions at every entry point of PySpark.

One master is enough.
"""

from __future__ import annotations

import sys
import threading

import pandas as pd
import pyarrow as pa
import pytest
from pyspark import SparkContext, cloudpickle
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import CalendarIntervalType, StructType

import stagecrew
from stagecrew.errors import JobError
from stagecrew.recovery.jobs.job import Job
from stagecrew.recovery.state.handles import StateHandleStore
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.session.running_job import set_running_job
from support.coordination import RecordingCoordinator, batch_of
from support.model_store import ModelServer
from support.sessions import LOCAL, session_builder
from support.spark_versions import HAS_ARROW_UDF
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def coordinators():
    """The coordinators that the test has created."""
    return []


@pytest.mark.contract
def test_a_coordinator_serves_every_micro_batch_of_a_query(sessions, coordinators, tmp_path):
    """A coordinator serves every micro-batch of a query inside its topology."""
    spark = sessions.get(LOCAL)

    class Summing(RecordingCoordinator):
        total = 0

        def handle_request(self, evaluation, request):
            self.total += request
            return self.total

    def work(gateway, batches):
        for batch in batches:
            gateway.request(batch.num_rows)
            yield batch_of(*batch.column("value").to_pylist())

    with stagecrew.crew(spark).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Summing(context, coordinators))
        stream = spark.readStream.format("rate").option("rowsPerSecond", 100).option("numPartitions", 2).load()
        mapped = operator.map(stream.select("value"), work, "a long")
        query = (
            mapped.writeStream.format("memory").queryName("mapped").trigger(processingTime="500 milliseconds").start()
        )
        eventually(lambda: coordinators[0].total > 150, 60, "some batches are processed")
        query.stop()
        count = spark.table("mapped").agg(f.count("*").alias("n")).first().n
    evaluations = [call[1] for call in coordinators[0].calls_named("ready")]
    assert len({one.stage for one in evaluations}) > 1
    assert coordinators[0].total >= count > 0


def test_a_use_in_foreach_batch_ends_with_its_query(sessions, coordinators, tmp_path):
    """A named use in `foreachBatch` blocks the steps of a job only as long as its query is running.

    The end of the query counts, because Spark keeps the Python thread that ran the batches.
    """
    spark = sessions.get(LOCAL)
    store = ModelServer().session()
    store.ensure("steps", "commits")
    storage = StateStorage(str(tmp_path))
    job = Job("nightly", 1, *(StateHandleStore(store, storage, name) for name in ("steps", "commits")))
    processed = threading.Event()

    def work(gateway, batches):
        yield from batches

    def start_query(operator, name, **trigger):
        def process_batch(frame, number):
            if number == 0:
                operator.map(frame.select("value"), work, "value long", name=name).collect()
                processed.set()

        stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
        processed.clear()
        return stream.writeStream.foreachBatch(topology.wrap(process_batch)).trigger(**trigger).start()

    set_running_job(job)
    try:
        with stagecrew.crew(spark).topology("t") as topology:
            operator = topology.coordinate("o", lambda context: RecordingCoordinator(context, coordinators))
            for number in (1, 2):
                query = start_query(operator, f"ended {number}", availableNow=True)
                assert query.awaitTermination(60)
                assert processed.is_set()
                assert job.step(f"after {number}", lambda number=number: number) == number
            query = start_query(operator, "running", processingTime="500 milliseconds")
            assert processed.wait(60)
            with pytest.raises(JobError, match="another thread uses operator 'o' of topology 't' during step 'during'"):
                job.step("during", lambda: 3)
            query.stop()
            assert job.step("at the end", lambda: 4) == 4
    finally:
        set_running_job(None)


def test_a_query_has_ended_although_its_thread_has_not(sessions):
    """A streaming query counts as running until `awaitTermination` returns, even if its thread in the JVM lives longer.

    The thread lives on for a moment, which no test can extend. So a thread that is not of the query takes its place.
    """
    spark = sessions.get(LOCAL)
    connection = stagecrew.crew(spark).connection
    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    query = stream.writeStream.format("noop").trigger(processingTime="500 milliseconds").start()
    try:
        assert connection.streaming_query() is None
        spark.sparkContext.setLocalProperty("sql.streaming.queryId", query.id)
        runs = connection.streaming_query()
        assert runs()
        query.stop()
        assert not runs()
    finally:
        query.stop()
        spark.sparkContext.setLocalProperty("sql.streaming.queryId", None)


@pytest.mark.contract
def test_bound_functions_work_at_every_entry_point(sessions, coordinators):
    """A function from `bind` reaches its coordinator from UDFs, pandas, Arrow, groups, UDTFs, data sources and RDDs."""
    spark = sessions.get(LOCAL)

    class Doubling(RecordingCoordinator):
        def handle_request(self, evaluation, request):
            return 2 * request

    def double(gateway, value):
        return gateway.request(value)

    def series(gateway, values: pd.Series) -> pd.Series:
        return values * gateway.request(1)

    def arrow(gateway, values: pa.Array) -> pa.Array:
        return pa.array([value * gateway.request(1) for value in values.to_pylist()], pa.int64())

    def frames(gateway, parts):
        for part in parts:
            yield part * gateway.request(1)

    def group(gateway, frame):
        return frame * gateway.request(1)

    with stagecrew.crew(spark).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Doubling(context, coordinators))
        numbers = spark.range(1, 5, 1, 2)
        in_udtf, in_source = operator.bind(double), operator.bind(double)

        class Doubled:
            def eval(self, value):
                yield (in_udtf(value),)

        class Source(DataSource):
            def schema(self):
                return "id long"

            def reader(self, schema):
                return Reader()

        class Reader(DataSourceReader):
            def partitions(self):
                return [InputPartition(n) for n in range(1, 5)]

            def read(self, partition):
                yield (in_source(partition.value),)

        spark.udtf.register("doubled", f.udtf(Doubled, returnType="id long"))
        spark.dataSource.register(Source)
        cases = {
            "udf": numbers.select(f.udf(operator.bind(double), "long")("id")),
            "pandas_udf": numbers.select(f.pandas_udf(operator.bind(series), "long")("id")),
            **({"arrow_udf": numbers.select(f.arrow_udf(operator.bind(arrow), "long")("id"))} if HAS_ARROW_UDF else {}),
            "mapInPandas": numbers.mapInPandas(operator.bind(frames), "id long"),
            "applyInPandas": numbers.groupBy("id").applyInPandas(operator.bind(group), "id long"),
            "udtf": spark.sql("select d.id from range(1, 5) r, lateral doubled(r.id) d"),
            "data source": spark.read.format("Source").load(),
            "rdd": numbers.rdd.map(lambda row: row.id).map(operator.bind(double)),
        }
        for name, dataset in cases.items():
            found = sorted(row if isinstance(row, int) else row[0] for row in dataset.collect())
            assert found == [2, 4, 6, 8], name
    calls = [call for coordinator in coordinators for call in coordinator.calls]
    assert {call[1].subtask for call in calls if call[0] == "ready"} == {None}
    assert not [call for call in calls if call[0] in ("failed", "reset")]


def test_a_map_with_a_wrong_schema_uses_up_no_name(sessions, coordinators):
    """If the schema of a `map` is wrong, no coordinator is created, and the corrected call can use the same name."""

    def work(gateway, batches):
        yield from batches

    with stagecrew.crew(sessions.get(LOCAL)).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: RecordingCoordinator(context, coordinators))
        frame = sessions.get(LOCAL).range(2)
        with pytest.raises(Exception, match="PARSE_SYNTAX_ERROR"):
            operator.map(frame, work, "id lnog not a type", name="eu")
        with pytest.raises(
            stagecrew.errors.OperatorMisused, match="the schema of operator 'o' must be a StructType or"
        ):
            operator.map(frame, work, 7, name="eu")
        with pytest.raises(stagecrew.errors.OperatorMisused, match="or a text such as 'id long', not 'long'"):
            operator.map(frame, work, "long", name="eu")
        with pytest.raises(Exception, match="UNSUPPORTED_DATA_TYPE"):
            operator.map(frame, work, StructType().add("i", CalendarIntervalType()), name="eu")
        assert coordinators == []
        assert operator.map(frame, work, "id long", name="eu").count() == 2
        assert len(coordinators) == 1


def test_session_coordinators_live_as_long_as_the_session(sessions, coordinators):
    """Session coordinators are created and restored before Spark starts, and start with Spark.

    They serve tasks inside and outside of topologies. When the session stops, they are closed, and so are the
    coordinators of topologies that are still open.
    """
    sessions.stop()
    lifecycle = []

    class Counter(RecordingCoordinator):
        total = 0

        def __init__(self, context):
            super().__init__(context, coordinators)
            lifecycle.append(("made", context.state, SparkContext._active_spark_context is None))
            with pytest.raises(stagecrew.errors.OperatorMisused):
                context.fail(ValueError())

        def reset_to_checkpoint(self, checkpoint_id, state):
            lifecycle.append(("restored", checkpoint_id, SparkContext._active_spark_context is None))
            self.total = int(state)

        def start(self):
            lifecycle.append(("start", self.context.state))

        def handle_request(self, evaluation, request):
            self.total += request
            return self.total

        def checkpoint(self, checkpoint_id):
            return b"%d" % self.total

    def work(gateway, batches):
        yield batch_of(gateway.request(1))

    restore = stagecrew.Checkpoint(4, {"counter/1": b"10"})
    builder = stagecrew.configure(session_builder("local[2]"), coordinators={"counter": Counter}, restore=restore)
    spark = builder.getOrCreate()
    try:
        eventually(lambda: len(lifecycle) == 3, 10, "the coordinator starts")
        assert lifecycle == [("made", "uninitialised", True), ("restored", 4, True), ("start", "initialised")]
        crew = stagecrew.crew(spark)
        operator = crew.operator("counter")
        bound = operator.map(spark.range(0, 1, 1, 1), work, "a long")
        assert bound.first().a == 11
        with crew.topology("t"):
            assert bound.first().a == 12
        second_use = crew.operator("counter").map(
            spark.range(0, 1, 1, 1), work, "a long"
        )  # a second use has its own coordinator
        assert second_use.first().a == 1
        checkpoint = crew.checkpoint()
        assert (checkpoint.id, checkpoint.states) == (5, {"counter/1": b"12", "counter/2": b"1"})
        with pytest.raises(stagecrew.errors.OperatorMisused, match="no operator 'other'; its operators are: 'counter'"):
            crew.operator("other")
        assert (
            stagecrew.configure(session_builder("local[2]"), coordinators={"counter": Counter}).getOrCreate()
            is not None
        )
        with pytest.raises(stagecrew.errors.ConfigurationError, match="it does not have: more"):
            stagecrew.configure(session_builder("local[2]"), coordinators={"more": Counter}).getOrCreate()
        coordinators[0].context.fail(ValueError("gone"))
        with pytest.raises(Exception, match="topology 'application' failed: ValueError: gone"):
            bound.first()
        with pytest.raises(stagecrew.errors.CoordinatorFailed, match="gone"):
            crew.operator("counter")
        assert spark.range(3).count() == 3
        crew.topology("open").start().coordinate("o", lambda context: RecordingCoordinator(context, coordinators)).bind(
            lambda gateway: 1
        )
    finally:
        spark.stop()
    assert all(coordinator.calls[-1] == ("close",) for coordinator in coordinators)


def test_corrupt_coordinator_state_fails_before_spark_starts(sessions, coordinators):
    """`getOrCreate` names the coordinator that cannot be restored and creates no SparkContext."""
    sessions.stop()

    class Picky(RecordingCoordinator):
        def __init__(self, context):
            super().__init__(context, coordinators)

        def reset_to_checkpoint(self, checkpoint_id, state):
            int(state)

    restore = stagecrew.Checkpoint(4, {"counter/1": b"garbage"})
    builder = stagecrew.configure(session_builder("local[2]"), coordinators={"counter": Picky}, restore=restore)
    with pytest.raises(
        stagecrew.errors.CoordinatorFailed,
        match="'counter' cannot be created, or restored from checkpoint 4: ValueError",
    ):
        builder.getOrCreate()
    assert SparkContext._active_spark_context is None
    eventually(lambda: "stagecrew-counter" not in {one.name for one in threading.enumerate()}, 5, "its thread ends")
    for invalid in ({"counter": 3}, {3: Picky}):
        with pytest.raises(
            stagecrew.errors.OperatorMisused, match="coordinators= maps names of operators to factories"
        ):
            stagecrew.configure(session_builder("local[2]"), coordinators=invalid)
