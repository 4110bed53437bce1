"""Attempts that are lost, repeated, speculative or cancelled, and coordinators that fail. One master is enough."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import Any

import psutil
import pyarrow as pa
import pytest
from pyspark import cloudpickle

import stagecrew
from support.coordination import RecordingCoordinator, batch_of
from support.sessions import LOCAL, LOCAL_CLUSTER
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def cluster(sessions):
    """A session on a cluster of two executors, in which attempts may fail often."""
    return sessions.get(LOCAL_CLUSTER, **{"spark.task.maxFailures": "30"})


@pytest.fixture
def coordinators():
    """The coordinators that the test has created."""
    return []


# -- Attempts


def test_subtasks_whose_output_is_lost_are_reset_and_ready_again(cluster, coordinators, tmp_path):
    """After an executor with shuffle output is killed, the subtasks whose output was lost are reset and run again.

    For each of these subtasks, the coordinator gets `subtask_reset` and then `ready`.
    """
    marker = tmp_path / "killed"

    def work(gateway, batches):
        for batch in batches:
            gateway.send("hello")
            yield batch_of(*batch.column("id").to_pylist())

    def kill_executor(batches):
        if not marker.exists():
            marker.touch()
            os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
            time.sleep(60)
        yield from batches

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: RecordingCoordinator(context, coordinators))
        bound = operator.map(cluster.range(0, 40, 1, 4), work, "a long")
        found = bound.repartition(2, "a").mapInArrow(kill_executor, "a long").collect()
    assert sorted(row.a for row in found) == list(range(40))
    (coordinator,) = coordinators
    reset_subtasks = {call[1] for call in coordinator.calls_named("reset")}
    assert reset_subtasks
    for subtask in range(4):
        calls = [
            call[0]
            for call in coordinator.calls
            if (call[0] == "reset" and call[1] == subtask)
            or (call[0] != "close" and call[0] != "reset" and call[1].subtask == subtask)
        ]
        assert calls == (
            ["ready", "finished", "reset", "ready", "finished"] if subtask in reset_subtasks else ["ready", "finished"]
        )


def test_two_operators_in_one_stage_have_separate_coordinators(cluster, coordinators):
    """Chained operators run in separate processes. No event is lost, and each operator has its own coordinator."""

    def work(gateway, batches):
        for batch in batches:
            for value in batch.column(0).to_pylist():
                gateway.send(value)
            yield batch_of(*batch.column(0).to_pylist())

    with stagecrew.crew(cluster).topology("t") as topology:
        first = topology.coordinate("first", lambda context: RecordingCoordinator(context, coordinators))
        second = topology.coordinate("second", lambda context: RecordingCoordinator(context, coordinators))
        inner = first.map(cluster.range(0, 1000, 1, 4), work, "a long")
        assert second.map(inner, work, "a long").count() == 1000
    for coordinator in coordinators:
        assert sorted(coordinator.all_events()) == list(range(1000))
        assert sorted(call[1].subtask for call in coordinator.calls_named("finished")) == [0, 1, 2, 3]


def test_a_subtask_keeps_its_number_under_a_cross_join(cluster, coordinators):
    """A subtask keeps its number even if a cross join makes Spark renumber the partitions."""

    def work(gateway, batches):
        for batch in batches:
            yield batch_of(*[gateway.subtask * 1000 + value for value in batch.column("id").to_pylist()])

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: RecordingCoordinator(context, coordinators))
        bound = operator.map(cluster.range(0, 40, 1, 4), work, "a long")
        other = cluster.range(0, 3, 1, 3)
        expected = sorted([n // 10 * 1000 + n for n in range(40)] * 3)
        for crossed in (
            other.crossJoin(bound),
            bound.crossJoin(other),
            # A Cartesian product numbers the pairs of partitions.
            other.join(bound.hint("shuffle_replicate_nl")),
            bound.hint("shuffle_replicate_nl").join(other),
        ):
            assert sorted(row.a for row in crossed.select("a").collect()) == expected
        plan = bound.hint("shuffle_replicate_nl").join(other)._jdf.queryExecution().executedPlan().toString()
        assert "CartesianProduct" in plan


# -- Cancellation and failure


def wait_for_events(gateway, batches):
    for _ in batches:
        pass
    gateway.send("waits")
    for _ in gateway.events():
        pass
    yield batch_of(1)


@pytest.mark.contract
@pytest.mark.parametrize("ending", ["fail", "cancel", "end"])
def test_a_waiting_task_ends_within_a_second(cluster, coordinators, ending, journal):
    """A task that waits for an event ends within a second of its cancellation or of its topology's failure or end."""
    seconds_until_task_ends(
        cluster, coordinators, ending, journal
    )  # warm-up: Spark's JVM loads classes for up to a second
    coordinators.clear()
    assert seconds_until_task_ends(cluster, coordinators, ending, journal) < 1.0


def seconds_until_task_ends(cluster, coordinators, ending, journal) -> float:
    """Ends waiting tasks in one of three ways. Returns the seconds until Spark runs none of them.

    Also checks that the user's function ends within one second in every task.
    """
    crew = stagecrew.crew(cluster)
    topology = crew.topology("t").start()
    operator = topology.coordinate("o", lambda context: RecordingCoordinator(context, coordinators))

    def recorded(gateway, batches):
        try:
            yield from wait_for_events(gateway, batches)
        finally:
            journal.write(event="function ended")

    dataset = operator.map(cluster.range(0, 2, 1, 2), recorded, "a long")
    outcome: list[Any] = []

    def collect():
        try:
            outcome.append(dataset.collect())
        except Exception as error:
            outcome.append(error)

    runner = threading.Thread(target=topology.wrap(collect))
    runner.start()
    (coordinator,) = coordinators
    eventually(lambda: len(coordinator.events) == 2, 60, "both tasks are waiting")
    tracker = cluster.sparkContext.statusTracker()
    (stage,) = tracker.getActiveStageIds()
    started = time.time()
    if ending == "fail":
        coordinator.context.fail(ValueError("on purpose"))
    elif ending == "cancel":
        cluster.sparkContext.cancelAllJobs()
    else:
        threading.Thread(target=lambda: topology.close(cancel=True)).start()
    runner.join(20)
    assert outcome
    assert isinstance(outcome[0], Exception)

    def running():
        found = tracker.getStageInfo(stage)
        return found.numActiveTasks if found else 0

    eventually(lambda: running() == 0, 20, "no task is running")
    elapsed = time.time() - started
    function_ended = [
        entry["time"] - started for entry in journal.read(event="function ended") if entry["time"] >= started
    ]
    assert len(function_ended) >= 2
    assert max(function_ended) < 1.0
    with pytest.raises(stagecrew.errors.CoordinatorFailed) if ending == "fail" else contextlib.nullcontext():
        topology.close(cancel=True)
    return elapsed


def test_a_topology_fails_once_with_the_first_cause(cluster, coordinators, caplog):
    """If several threads call `fail`, the topology fails once, with the first cause and its traceback."""

    def work(gateway, batches):
        yield from wait_for_events(gateway, batches)

    def fail(coordinator, n):
        try:
            raise KeyError(f"number {n}")
        except KeyError as error:
            coordinator.context.fail(error)

    with (
        pytest.raises(stagecrew.errors.CoordinatorFailed, match="number") as caught,
        stagecrew.crew(cluster).topology("t") as topology,
    ):
        operator = topology.coordinate("o", lambda context: RecordingCoordinator(context, coordinators))
        dataset = operator.map(cluster.range(0, 2, 1, 2), work, "a long")

        def fail_from_threads():
            eventually(lambda: len(coordinators[0].events) == 2, 60, "both tasks are waiting")
            threads = [threading.Thread(target=fail, args=(coordinators[0], n)) for n in range(16)]
            for thread in threads:
                thread.start()

        threading.Thread(target=fail_from_threads).start()
        dataset.collect()
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.__traceback__ is not None
    (record,) = [record for record in caplog.records if "failed; the topology is cancelled" in record.message]
    assert record.exc_info[1] is caught.value.__cause__


@pytest.mark.parametrize(
    "callback", ["factory", "start", "ready", "handle_event", "finished", "run_in_coordinator_thread"]
)
def test_a_callback_that_raises_fails_the_topology(cluster, coordinators, callback):
    """Whichever callback raises, the topology fails with that exception as its cause.

    An exception raised by the factory itself is raised unchanged in the code that uses the operator.
    """

    def fail(self, *args):
        raise ZeroDivisionError(callback)

    def factory(context):
        if callback == "factory":
            fail(None)
        coordinator = RecordingCoordinator(context, coordinators)
        if callback == "run_in_coordinator_thread":
            coordinator.start = lambda: context.run_in_coordinator_thread(fail, None)
        else:
            setattr(coordinator, callback, lambda *args: fail(None))
        return coordinator

    def work(gateway, batches):
        gateway.send(1)
        yield batch_of(gateway.subtask)

    expected = ZeroDivisionError if callback == "factory" else stagecrew.errors.CoordinatorFailed
    with pytest.raises(expected, match=callback), stagecrew.crew(cluster).topology("t") as topology:
        topology.coordinate("o", factory).map(cluster.range(0, 1, 1, 1), work, "a long").collect()


def test_an_open_inner_topology_is_closed_with_the_outer_one(cluster, coordinators):
    """The coordinators of an inner topology that is left open are closed with the outer topology."""
    crew = stagecrew.crew(cluster)
    with crew.topology("outer"):
        inner = crew.topology("inner").start()
        inner.coordinate("o", lambda context: RecordingCoordinator(context, coordinators)).bind(lambda gateway: 1)
    assert coordinators[0].calls == [("close",)]


@pytest.mark.long
def test_an_operator_name_and_a_bound_function_are_used_only_once(cluster, coordinators):
    """Using an operator's name twice, or a bound function on two datasets, raises an error that says so."""
    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: RecordingCoordinator(context, coordinators))
        with pytest.raises(stagecrew.errors.OperatorMisused, match="already has an operator 'o'"):
            topology.coordinate("o", lambda context: RecordingCoordinator(context, coordinators))

        def work(gateway, batches):
            gateway.send(1)
            yield from batches

        bound = operator.bind(work)
        numbers = cluster.range(4)
        first = numbers.mapInArrow(bound, "id long")
        assert first.count() == first.count() == 4
        for reuse in (
            lambda: numbers.mapInArrow(bound, "id long"),
            lambda: cluster.range(2).mapInPandas(bound, "id long"),
        ):
            with pytest.raises(
                stagecrew.errors.OperatorMisused, match="used on two datasets.*call bind\\(\\) once for each"
            ):
                reuse()
        pairs = operator.bind(lambda gateway, values: (gateway.send(2), list(values))[1])
        rdd = cluster.sparkContext.parallelize(range(4), 2)
        mapped = rdd.mapPartitions(pairs)
        assert mapped.count() == mapped.map(lambda n: n).count() == 4
        with pytest.raises(stagecrew.errors.OperatorMisused, match="two datasets"):
            cluster.sparkContext.parallelize(range(4), 2).mapPartitions(pairs).count()


def test_the_coordinators_of_a_topology_share_a_store(cluster):
    """A coordinator reads values that other coordinators of the same topology have stored."""

    class Sharing(stagecrew.Coordinator):
        def handle_request(self, evaluation, request):
            self.context.store[self.context.operator] = request
            return sorted(self.context.store.items())

    def work(gateway, batches):
        yield pa.record_batch({"a": [str(gateway.request(1))]})

    with stagecrew.crew(cluster).topology("t") as topology:
        for name, expected in (("x", "[('x', 1)]"), ("y", "[('x', 1), ('y', 1)]")):
            dataset = topology.coordinate(name, Sharing).map(cluster.range(0, 1, 1, 1), work, "a string")
            assert dataset.first().a == expected


def test_the_exit_is_bounded_when_a_coordinator_blocks_in_close(sessions, coordinators, caplog):
    """`spark.stagecrew.close.timeout` bounds the exit, and the log names the operator."""
    spark = sessions.get(LOCAL, **{"spark.stagecrew.close.timeout": "1s"})
    release = threading.Event()

    class Blocking(RecordingCoordinator):
        def close(self):
            release.wait(60)

    with stagecrew.crew(spark).topology("t") as topology:
        topology.coordinate("stuck", lambda context: Blocking(context, coordinators)).bind(lambda gateway: 1)
        started = time.monotonic()
    assert time.monotonic() - started < 5
    release.set()
    assert "the coordinator of operator 'stuck' did not close within 1 s" in caplog.text


@pytest.mark.long
def test_speculative_attempts_of_one_subtask_are_separate_evaluations(sessions, standalone, coordinators, tmp_path):
    """Two live evaluations of one subtask are both ready, with no reset in between. The slower evaluation fails."""
    spark = sessions.get(
        standalone,
        **{
            "spark.speculation": "true",
            "spark.speculation.interval": "50ms",
            "spark.speculation.multiplier": "1.1",
            "spark.speculation.quantile": "0.3",
            "spark.speculation.minTaskRuntime": "100ms",
        },
    )
    marker = tmp_path / "slow once"

    def work(gateway, batches):
        gateway.send("begun")
        if gateway.subtask == 0:
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                for _ in gateway.events(timeout=120):  # the first attempt waits until Spark kills it
                    pass
        yield batch_of(gateway.subtask)

    with stagecrew.crew(spark).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: RecordingCoordinator(context, coordinators))
        found = operator.map(spark.range(0, 8, 1, 8), work, "a long").collect()
        (coordinator,) = coordinators
        eventually(lambda: coordinator.calls_named("failed"), 20, "the slower attempt fails")
    assert sorted(row.a for row in found) == list(range(8))
    calls = [call for call in coordinator.calls if call[0] != "close" and call[0] != "reset" and call[1].subtask == 0]
    assert [call[0] for call in calls] == ["ready", "ready", "finished", "failed"]
    loser, winner = calls[0][1], calls[1][1]
    assert (calls[2][1], calls[3][1]) == (winner, loser)
    assert not coordinator.calls_named("reset")
