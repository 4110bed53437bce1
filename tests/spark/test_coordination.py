"""Operators and their coordinators, through the public API."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle

import stagecrew
from support.sessions import LOCAL_CLUSTER
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Recording(stagecrew.Coordinator):
    """Records its calls, replies to requests with twice their value, and sends each evaluation its subtask number."""

    instances: list[Recording]

    def __init__(self, context):
        super().__init__(context)
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[str] = set()
        type(self).instances.append(self)

    def _note(self, *call: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append(call)

    def calls_named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def start(self):
        self._note("start")

    def ready(self, evaluation, gateway):
        self._note("ready", evaluation)
        gateway.send(("hello", evaluation.subtask))
        gateway.close()

    def failed(self, evaluation, reason):
        self._note("failed", evaluation, reason)

    def finished(self, evaluation):
        self._note("finished", evaluation)

    def abandoned(self, evaluation):
        self._note("abandoned", evaluation)

    def subtask_reset(self, subtask, checkpoint_id):
        self._note("reset", subtask, checkpoint_id)

    def handle_event(self, evaluation, event):
        self._note("event", evaluation, event)

    def handle_request(self, evaluation, request):
        self._note("request", evaluation, request)
        return 2 * request

    def close(self):
        self._note("close")


@pytest.fixture
def recording() -> type[Recording]:
    """A fresh subclass, so that each test has its own list of instances."""
    return type("Recording", (Recording,), {"instances": []})


@pytest.fixture
def cluster(sessions):
    """A session on a cluster of two executors, for behaviour that is the same on every master."""
    return sessions.get(LOCAL_CLUSTER)


@pytest.fixture
def cluster_crew(cluster):
    """The crew of the `cluster` session."""
    return stagecrew.crew(cluster)


def id_sum(batches: Any) -> int:
    return sum(sum(batch.column("id").to_pylist()) for batch in batches)


def one_row(*values: int) -> pa.RecordBatch:
    return pa.record_batch({name: [value] for name, value in zip("abc", values, strict=False)})


@pytest.mark.contract
def test_events_and_requests_arrive_in_both_directions(spark, crew, recording):
    """Each subtask's events, requests and replies arrive in order. The coordinator is notified of each evaluation."""

    def work(gateway, batches):
        for i in range(100):
            gateway.send(i)
        doubled = gateway.request(id_sum(batches))
        yield one_row(
            gateway.subtask,
            doubled,
            sum(1 for event in gateway.events(timeout=30) if event == ("hello", gateway.subtask)),
        )

    with crew.topology("t") as topology:
        operator = topology.coordinate("doubler", recording)
        rows = operator.map(spark.range(0, 40, 1, 4), work, "a long, b long, c long").collect()
    assert sorted(map(tuple, rows)) == [(n, 2 * sum(range(10 * n, 10 * n + 10)), 1) for n in range(4)]
    (coordinator,) = recording.instances
    assert coordinator.calls[0] == ("start",)
    assert coordinator.calls[-1] == ("close",)
    assert all(name.startswith("stagecrew-coordinator") for name in coordinator.threads)
    evaluations = {evaluation.subtask: evaluation for (evaluation,) in coordinator.calls_named("ready")}
    assert set(evaluations) == {0, 1, 2, 3}
    assert {evaluation for (evaluation,) in coordinator.calls_named("finished")} == set(evaluations.values())
    for evaluation in evaluations.values():
        assert [event for sender, event in coordinator.calls_named("event") if sender == evaluation] == list(range(100))
        calls = [call[0] for call in coordinator.calls if call[1:2] == (evaluation,)]
        assert calls == ["ready", *["event"] * 100, "request", "finished"]
    assert not coordinator.calls_named("failed")
    assert not coordinator.calls_named("reset")


def test_a_subtask_keeps_its_number_in_derived_datasets(cluster, cluster_crew, recording):
    """After coalesce, union or cache, a subtask still has the number of its partition in the bound dataset."""

    def work(gateway, batches):
        yield one_row(gateway.subtask, id_sum(batches))

    def expected_row(n: int) -> tuple[int, int]:
        return n, sum(range(10 * n, 10 * n + 10))

    with cluster_crew.topology("t") as topology:
        operator = topology.coordinate("o", recording)
        bound = operator.map(cluster.range(0, 40, 1, 4), work, "a long, b long")
        assert sorted(map(tuple, bound.coalesce(2).collect())) == [expected_row(n) for n in range(4)]
        assert sorted(map(tuple, bound.union(bound).collect())) == sorted([expected_row(n) for n in range(4)] * 2)
        other = cluster.range(3).selectExpr("cast(-1 as long) a", "cast(0 as long) b")
        assert sorted(map(tuple, other.union(bound).where("a >= 0").collect())) == [expected_row(n) for n in range(4)]
        cached = bound.cache()
        assert cached.count() == 4
        assert sorted(map(tuple, cached.collect())) == [expected_row(n) for n in range(4)]
        cached.unpersist()


def test_a_bound_function_works_without_a_subtask(cluster, cluster_crew, recording):
    """`bind` gives a gateway to any function, for example one that `mapPartitions` runs on an RDD.

    The evaluations of such a function have no subtask.
    """

    def work(gateway, rows):
        yield gateway.subtask, gateway.request(sum(rows))

    with cluster_crew.topology("t") as topology:
        operator = topology.coordinate("o", recording)
        found = cluster.sparkContext.parallelize(range(8), 2).mapPartitions(operator.bind(work)).collect()
    assert sorted(found) == [(None, 12), (None, 44)]
    (coordinator,) = recording.instances
    assert {evaluation.subtask for (evaluation,) in coordinator.calls_named("ready")} == {None}


def test_an_exception_in_handle_request_fails_only_the_request(cluster, cluster_crew, recording):
    """An exception raised by `handle_request` reaches the task as a RequestFailed.

    The RequestFailed contains the coordinator's traceback. Nothing else fails.
    """

    class Refusing(recording):
        def handle_request(self, evaluation, request):
            raise KeyError("no such thing")

    def work(gateway, batches):
        try:
            gateway.request(1)
        except stagecrew.errors.RequestFailed as error:
            yield pa.record_batch({"a": [str(error)], "b": [type(error.__cause__).__name__]})

    with cluster_crew.topology("t") as topology:
        (row,) = topology.coordinate("o", Refusing).map(cluster.range(0, 1, 1, 1), work, "a string, b string").collect()
    assert row.b == "KeyError"
    assert "handle_request" in row.a
    assert "no such thing" in row.a


def test_an_exception_in_a_callback_fails_the_topology(cluster, cluster_crew, recording):
    """An exception raised by a callback fails the topology.

    The topology's `with` statement raises CoordinatorFailed with that exception as the cause.
    """

    class Broken(recording):
        def handle_event(self, evaluation, event):
            raise ZeroDivisionError("in the coordinator")

    def work(gateway, batches):
        gateway.send(1)
        list(gateway.events())
        for _ in gateway.events(timeout=60):
            yield one_row(1)

    with (
        pytest.raises(stagecrew.errors.CoordinatorFailed, match="in the coordinator") as caught,
        cluster_crew.topology("t") as topology,
    ):
        topology.coordinate("o", Broken).map(cluster.range(0, 2, 1, 2), work, "a long").collect()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    (coordinator,) = recording.instances
    assert coordinator.calls[-1] == ("close",)


@pytest.mark.contract
def test_a_retry_calls_failed_reset_and_ready_once_each(spark, crew, recording, tmp_path):
    """After a failed attempt, `failed`, `subtask_reset` and the next `ready` are called once each, in this order."""
    marker = tmp_path / "failed once"

    def work(gateway, batches):
        gateway.send("before")
        if not marker.exists():
            marker.touch()
            raise ValueError("on purpose")
        yield one_row(gateway.subtask)

    with crew.topology("t") as topology:
        rows = topology.coordinate("o", recording).map(spark.range(0, 1, 1, 1), work, "a long").collect()
    assert [row.a for row in rows] == [0]
    (coordinator,) = recording.instances
    first, second = [evaluation for (evaluation,) in coordinator.calls_named("ready")]
    assert (first.attempt_number, second.attempt_number) == (0, 1)
    assert [call[0] for call in coordinator.calls] == [
        "start", "ready", "event", "failed", "reset", "ready", "event", "finished", "close",
    ]  # fmt: skip
    assert coordinator.calls_named("reset") == [(0, -1)]
    assert "ValueError: on purpose" in coordinator.calls_named("failed")[0][1]


def test_an_evaluation_that_a_limit_ends_early_is_abandoned(cluster, cluster_crew, recording):
    """An evaluation that `limit` stops reading early is reported as abandoned, not as finished."""

    def work(gateway, batches):
        for batch in batches:
            while True:
                yield one_row(batch.num_rows)

    with cluster_crew.topology("t") as topology:
        operator = topology.coordinate("o", recording)
        assert operator.map(cluster.range(0, 4, 1, 1), work, "a long").limit(3).count() == 3
        (coordinator,) = recording.instances
        eventually(lambda: coordinator.calls_named("abandoned"), 20, "the abandoned evaluation is reported")
    assert not coordinator.calls_named("finished")
    assert not coordinator.calls_named("failed")


def test_a_dataset_of_a_closed_topology_fails_in_another_topology(cluster, cluster_crew, recording):
    """After a topology has closed, tasks of its datasets fail, because the coordinator no longer exists.

    The error says to run the action inside the `with` of the topology that created the dataset.
    """

    def work(gateway, batches):
        gateway.request(1)
        yield from batches

    with cluster_crew.topology("first") as topology:
        operator = topology.coordinate("o", recording)
        dataset = operator.map(cluster.range(0, 1, 1, 1), work, "id long")
    with (
        cluster_crew.topology("second"),
        pytest.raises(Exception, match="topology 'first' has ended.*inside its `with`"),
    ):
        dataset.collect()


def test_invalid_arguments_raise_an_error_that_says_what_to_do(cluster, cluster_crew, recording):
    """Invalid arguments, and use after the topology has ended, raise an error with the problem and the remedy."""

    def work(gateway, batches):
        yield from batches

    with cluster_crew.topology("t") as topology:
        with pytest.raises(stagecrew.errors.OperatorMisused, match="Pass a Coordinator class"):
            topology.coordinate("o", 3)
        operator = topology.coordinate("o", recording)
        with pytest.raises(stagecrew.errors.OperatorMisused, match="maps a DataFrame, not list"):
            operator.map([1], work, "id long")
        with pytest.raises(stagecrew.errors.OperatorMisused, match="binds a function"):
            operator.bind(3)
        late = operator.map(cluster.range(2), work, "id long")
    with pytest.raises(stagecrew.errors.TopologyError, match="bind the operator while the session runs"):
        operator.map(cluster.range(2), work, "id long")
    with pytest.raises(stagecrew.errors.TopologyError, match="only inside its `with`"):
        topology.coordinate("o", recording)
    with pytest.raises(Exception, match="outside of topology 't': run the action inside its `with`"):
        late.collect()


def test_an_event_that_cannot_be_sent_does_not_fail_the_task(cluster, cluster_crew, recording):
    """`send` raises EventRejected for an event that cannot be pickled or is too large, and the task continues."""

    def work(gateway, batches):
        errors = []
        for event in (threading.Lock(), b"x" * (17 << 20)):
            try:
                gateway.send(event)
            except stagecrew.errors.CoordinationError as error:
                errors.append(f"{type(error).__name__}: {error}")
        gateway.send("fine")
        yield pa.record_batch({"a": errors})

    with cluster_crew.topology("t") as topology:
        rows = topology.coordinate("o", recording).map(cluster.range(0, 1, 1, 1), work, "a string").collect()
    assert "EventRejected: cannot pickle a lock" in rows[0].a
    assert "EventRejected" in rows[1].a
    assert "spark.stagecrew.event.maxSize" in rows[1].a
    (coordinator,) = recording.instances
    assert [event for _, event in coordinator.calls_named("event")] == ["fine"]
