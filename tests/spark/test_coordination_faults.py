"""Coordination at its limits and with broken connections. Only the attempt or topology concerned fails."""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle

import stagecrew
from stagecrew.wire.serialization import WINDOW
from support.coordination import RecordingCoordinator, batch_of, executor_pid, wait_for_stop
from support.processes import kill, stop
from support.sessions import LOCAL_CLUSTER
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: Small values, so that the tests reach each limit. Attempts may fail often.
SETTINGS = {
    "spark.task.maxFailures": "2000",
    "spark.stagecrew.mailbox.events": "50",
    "spark.stagecrew.ack.timeout": "2s",
    "spark.stagecrew.event.maxSize": "64k",
    "spark.stagecrew.request.timeout": "30s",
}


@pytest.fixture
def small_limits(sessions):
    """A session on a cluster of two executors, with small limits."""
    return sessions.get(LOCAL_CLUSTER, **SETTINGS)


@pytest.fixture
def cluster(sessions):
    """A session with the default limits."""
    return sessions.get(LOCAL_CLUSTER, **{"spark.task.maxFailures": "30"})


@pytest.fixture
def coordinators():
    """The coordinators that the test has created."""
    return []


def start_collect(topology, dataset, outcome):
    """Starts a thread that runs the dataset in the topology and appends the rows or the exception to `outcome`."""

    def collect():
        try:
            outcome.append(dataset.collect())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=topology.wrap(collect))
    thread.start()
    return thread


# -- Limits


def test_a_full_mailbox_fails_only_its_attempt(small_limits, coordinators):
    """An attempt that does not receive its events fails because its mailbox is full, and no other attempt fails.

    The future of the event that did not fit raises the same reason.
    """
    futures = []

    class Flooding(RecordingCoordinator):
        def ready(self, evaluation, gateway):
            super().ready(evaluation, gateway)
            if evaluation.subtask == 0 and evaluation.attempt_number == 0:
                futures.extend(gateway.send_acknowledged(n) for n in range(60))
            gateway.send("go")

        def handle_request(self, evaluation, request):
            return never

    def work(gateway, batches):
        from pyspark import TaskContext

        if gateway.subtask == 0 and TaskContext.get().attemptNumber() == 0:
            gateway.request("waits, and takes no events")
        assert next(gateway.events(timeout=30)) == "go"
        yield batch_of(gateway.subtask)

    never: Future[Any] = Future()
    with stagecrew.crew(small_limits).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Flooding(context, coordinators))
        found = operator.map(small_limits.range(0, 2, 1, 2), work, "a long").collect()
    assert sorted(row.a for row in found) == [0, 1]
    ((_, evaluation, reason),) = coordinators[0].calls_named("failed")
    assert evaluation.subtask == 0
    assert "its mailbox is full: " in reason
    with pytest.raises(stagecrew.errors.EvaluationEnded, match="its mailbox is full"):
        futures[-1].result(0)


def test_attempts_on_an_unresponsive_executor_fail_after_the_ack_timeout(small_limits, coordinators):
    """Attempts on an executor stopped by SIGSTOP fail after spark.stagecrew.ack.timeout. Only they fail.

    Spark retries these attempts, and the job succeeds.
    """

    def work(gateway, batches):
        gateway.send(executor_pid())
        wait_for_stop(gateway)
        yield batch_of(gateway.subtask)

    outcome: list[Any] = []
    with stagecrew.crew(small_limits).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: RecordingCoordinator(context, coordinators))
        dataset = operator.map(small_limits.range(0, 4, 1, 4), work, "a long")
        thread = start_collect(topology, dataset, outcome)
        (coordinator,) = coordinators
        eventually(lambda: len(coordinator.events) == 4, 60, "all tasks are running")
        executors = {evaluation: pid for evaluation, (pid,) in coordinator.events.items()}
        assert len(set(executors.values())) == 2
        stopped_pid = executors[next(iter(executors))]
        stop(stopped_pid)
        began = time.monotonic()
        try:
            sent = {
                evaluation: gateway.send_acknowledged("x")
                for evaluation, gateway in tuple(coordinator.gateways.items())
            }
            on_stopped_executor = {evaluation for evaluation, pid in executors.items() if pid == stopped_pid}
            eventually(
                lambda: len(coordinator.calls_named("failed")) == len(on_stopped_executor),
                20,
                "the attempts on the stopped executor have failed",
            )
            elapsed = time.monotonic() - began
        finally:
            kill(stopped_pid, signal.SIGCONT)
        assert {evaluation for _, evaluation, _ in coordinator.calls_named("failed")} == on_stopped_executor
        assert all("did not acknowledge an event within 2.0 s" in call[2] for call in coordinator.calls_named("failed"))
        assert 1.9 < elapsed < 10
        for evaluation, future in sent.items():
            assert (future.exception(10) is not None) == (evaluation in on_stopped_executor)
        eventually(
            lambda: len(coordinator.events) == 4 + len(on_stopped_executor), 60, "the failed attempts are retried"
        )
        for gateway in tuple(coordinator.gateways.values()):
            gateway.send("stop")
        thread.join(60)
    assert sorted(row.a for row in outcome[0]) == [0, 1, 2, 3]
    assert len(coordinator.calls_named("failed")) == len(on_stopped_executor)


def test_large_and_unpicklable_values_raise_where_they_are_sent(small_limits, coordinators):
    """A value that is too large or cannot be pickled raises where it is sent, and a reply where it is awaited.

    For an event or a request that is too large, the task's error names the setting. Nothing else fails.
    """
    raised = []

    class Large(RecordingCoordinator):
        def ready(self, evaluation, gateway):
            super().ready(evaluation, gateway)
            for event, error in (
                (b"x" * 70_000, stagecrew.errors.EventRejected),
                ((n for n in ()), stagecrew.errors.EventRejected),
            ):
                with pytest.raises(error):
                    gateway.send(event)
                raised.append(error)

        def handle_request(self, evaluation, request):
            return b"x" * 70_000 if request == "large" else (n for n in ())

    def work(gateway, batches):
        large, generator = b"x" * 70_000, (n for n in ())
        for call in (gateway.send, gateway.request):
            with pytest.raises(stagecrew.errors.EventRejected, match="65536 bytes of spark.stagecrew.event.maxSize"):
                call(large)
            with pytest.raises(stagecrew.errors.EventRejected, match="cannot pickle a generator"):
                call(generator)
        with pytest.raises(stagecrew.errors.RequestFailed, match="EventRejected") as caught:
            gateway.request("large")
        assert isinstance(caught.value.__cause__, stagecrew.errors.EventRejected)
        with pytest.raises(stagecrew.errors.RequestFailed, match="EventRejected"):
            gateway.request("generator")
        gateway.send(b"x" * 60_000)
        yield batch_of(1)

    with stagecrew.crew(small_limits).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Large(context, coordinators))
        assert operator.map(small_limits.range(0, 1, 1, 1), work, "a long").count() == 1
    assert len(raised) == 2
    assert [len(event) for event in coordinators[0].all_events()] == [60_000]
    assert not coordinators[0].calls_named("failed")


def test_an_event_size_larger_than_a_frame_is_refused(sessions):
    """If the event size exceeds the frame size, binding the first operator raises an error that names both settings."""
    spark = sessions.get(
        "local[2,4]", **{"spark.stagecrew.event.maxSize": "70m", "spark.stagecrew.channel.maxFrame": "64m"}
    )
    with (
        pytest.raises(stagecrew.errors.ConfigurationError, match="event.maxSize=70m does not fit into .*maxFrame=64m"),
        stagecrew.crew(spark).topology("t") as topology,
    ):
        topology.coordinate("o", stagecrew.Coordinator).bind(len)


def test_a_large_event_waits_only_until_the_window_has_room(cluster, coordinators):
    """An event larger than the free part of the window waits until the earlier events are handled, and no longer."""

    def work(gateway, batches):
        started = time.monotonic()
        gateway.send("small")
        gateway.send(b"x" * (9 << 20))
        gateway.send(b"y" * (15 << 20))
        gateway.send("small")
        assert time.monotonic() - started < 20
        yield batch_of(1)

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: RecordingCoordinator(context, coordinators))
        assert operator.map(cluster.range(0, 1, 1, 1), work, "a long").count() == 1
    assert [len(event) for event in coordinators[0].all_events()] == [5, 9 << 20, 15 << 20, 5]


# -- Threads of one task


def test_a_thread_that_waits_to_send_does_not_block_a_receiver(cluster, coordinators, tmp_path):
    """While one thread of a task waits for room to send, another thread can receive, so the coordinator continues."""
    received = tmp_path / "goes on"

    class Blocking(RecordingCoordinator):
        def handle_event(self, evaluation, event):
            if event == 0:
                self.gateways[evaluation].send("there is much")
                eventually(received.exists, 60, "the task has received the event")
            super().handle_event(evaluation, event)

    def work(gateway, batches):
        sender = threading.Thread(target=lambda: [gateway.send(n) for n in range(10_000)])
        sender.start()
        eventually(
            lambda: gateway._room_requested_at >= WINDOW, 30, "the sender has used up its window and requested room"
        )
        assert next(gateway.events(timeout=30)) == "there is much"
        Path(received).touch()
        sender.join()
        yield batch_of(1)

    crew = stagecrew.crew(cluster)
    with crew.topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Blocking(context, coordinators))
        assert operator.map(cluster.range(0, 1, 1, 1), work, "a long").count() == 1
    assert coordinators[0].all_events() == list(range(10_000))


def test_threads_of_one_task_get_their_own_replies(cluster, coordinators):
    """Concurrent threads get the replies to their own requests, while another thread gets every event once."""

    class Answering(RecordingCoordinator):
        def ready(self, evaluation, gateway):
            super().ready(evaluation, gateway)
            for number in range(400):
                gateway.send(number)
            gateway.close()

        def handle_request(self, evaluation, request):
            return ("reply", request)

    def work(gateway, batches):
        mismatches, received = [], []

        def request_all(thread):
            mismatches.extend(n for n in range(100) if gateway.request((thread, n)) != ("reply", (thread, n)))

        def receive_all():
            received.extend(gateway.events(timeout=30))

        threads = [threading.Thread(target=request_all, args=(n,)) for n in range(4)]
        threads += [threading.Thread(target=receive_all)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert mismatches == []
        assert received == list(range(400))
        yield batch_of(len(received))

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Answering(context, coordinators))
        assert [row.a for row in operator.map(cluster.range(0, 2, 1, 2), work, "a long").collect()] == [400, 400]


# -- Ends


def test_an_evaluation_abandoned_while_it_waits_is_notified(cluster, coordinators, tmp_path):
    """A waiting task whose rows are no longer needed gets EvaluationEnded and does not wait in its worker
    indefinitely."""
    ended = tmp_path / "ended"

    def work(gateway, batches):
        yield batch_of(*range(3))
        try:
            yield batch_of(*range(12_500))  # more than Python's buffer holds, less than the socket's buffer holds
        except GeneratorExit:  # the limit had its three rows before these
            Path(ended).write_text("did not wait")
            raise
        try:
            for _ in gateway.events():
                pass
        except stagecrew.errors.EvaluationEnded as error:
            Path(ended).write_text(str(error))
            raise

    for _ in range(5):
        coordinators.clear()
        with stagecrew.crew(cluster).topology("t") as topology:
            operator = topology.coordinate("o", lambda context: RecordingCoordinator(context, coordinators))
            found = operator.map(cluster.range(0, 1, 1, 1), work, "a long").limit(3).collect()
            assert len(found) == 3
            outcome = eventually(lambda: ended.exists() and ended.read_text(), 10, "the evaluation has ended")
        assert [call[0] for call in coordinators[0].calls] == ["ready", "abandoned", "close"]
        if outcome != "did not wait":
            break
        ended.unlink()
    assert "Spark needed no more of its rows" in outcome


@pytest.mark.parametrize("how", ["with", "close"])
def test_an_exception_after_the_job_still_fails_the_topology(cluster, coordinators, how):
    """If an event handler raises long after its job has ended, the `with` or `close()` raises, and only once."""

    job_has_ended = threading.Event()

    class Slow(RecordingCoordinator):
        def handle_event(self, evaluation, event):
            assert job_has_ended.wait(60)
            eventually(lambda: not topology.is_active, 60, "the topology is closing")
            raise ZeroDivisionError("late")

    def work(gateway, batches):
        gateway.send(1)
        yield batch_of(1)

    def run(topology):
        operator = topology.coordinate("o", lambda context: Slow(context, coordinators))
        assert operator.map(cluster.range(0, 1, 1, 1), work, "a long").count() == 1
        job_has_ended.set()

    topology = stagecrew.crew(cluster).topology("t")
    with pytest.raises(stagecrew.errors.CoordinatorFailed, match="ZeroDivisionError: late"):
        if how == "with":
            with topology:
                run(topology)
        else:
            topology.start()
            run(topology)
            topology.close()
    assert not topology.is_active
    topology.close()


def test_a_coordinator_failure_ends_an_exit_that_waits_for_a_query(cluster, coordinators):
    """An exit that waits for a streaming query ends when the coordinator fails, and raises the failure."""
    requested = threading.Event()

    class Failing(RecordingCoordinator):
        def handle_request(self, evaluation, request):
            requested.set()
            return never

    never: Future[Any] = Future()

    def work(gateway, batches):
        gateway.request("waits")
        yield from batches

    began = time.monotonic()
    with (
        pytest.raises(stagecrew.errors.CoordinatorFailed, match="while it closes"),
        stagecrew.crew(cluster).topology("t") as topology,
    ):
        operator = topology.coordinate("o", lambda context: Failing(context, coordinators))
        rate = cluster.readStream.format("rate").option("numPartitions", 1).load().select("value")
        bound = operator.bind(work)
        rate.mapInArrow(bound, "value long").writeStream.format("noop").start()

        def fail_during_exit():
            assert requested.wait(60)
            eventually(lambda: not topology.is_active, 60, "the exit has begun")
            time.sleep(0.2)  # until the exit waits for the query, which a test cannot observe
            coordinators[0].context.fail(ValueError("while it closes"))

        threading.Thread(target=fail_during_exit).start()
    assert time.monotonic() - began < 60
    assert not cluster.streams.active


def test_every_event_is_handled_when_the_action_returns(cluster, coordinators):
    """A checkpoint right after an action includes every event of the action, however slowly events are handled."""

    class Counting(RecordingCoordinator):
        count = 0

        def handle_event(self, evaluation, event):
            time.sleep(0.001)
            self.count += 1

        def checkpoint(self, checkpoint_id):
            return b"%d" % self.count

    def work(gateway, batches):
        for number in range(300):
            gateway.send(number)
        yield batch_of(1)

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Counting(context, coordinators))
        assert operator.map(cluster.range(0, 4, 1, 4), work, "a long").count() == 4
        assert topology.checkpoint().states == {"o/1": b"1200"}


def test_a_broken_driver_channel_fails_the_topology_only(cluster, coordinators):
    """When the driver's channel breaks, the topology fails for this reason, waiting tasks end, and the next topology
    works."""

    def work(gateway, batches):
        gateway.send("waits")
        for _ in gateway.events(timeout=90):
            pass
        yield batch_of(1)

    crew = stagecrew.crew(cluster)
    with (
        pytest.raises(
            stagecrew.errors.CoordinatorFailed,
            match="the connection from coordinators to executors broke: the driver's JVM closed the channel",
        ),
        crew.topology("t") as topology,
    ):
        operator = topology.coordinate("o", lambda context: RecordingCoordinator(context, coordinators))

        def break_channel():
            eventually(lambda: coordinators and len(coordinators[0].events) == 2, 60, "both tasks are waiting")
            crew.connection._channel._channel.shutdown()

        threading.Thread(target=break_channel).start()
        operator.map(cluster.range(0, 2, 1, 2), work, "a long").collect()

    def double_in_coordinator(gateway, batches):
        yield batch_of(gateway.request(20))

    class Doubling(RecordingCoordinator):
        def handle_request(self, evaluation, request):
            return 2 * request

    with crew.topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Doubling(context, coordinators))
        assert operator.map(cluster.range(0, 1, 1, 1), double_in_coordinator, "a long").first().a == 40


# -- Resets


@pytest.mark.long
def test_resets_are_safe_while_other_threads_send_and_fail(small_limits, coordinators):
    """1,000 resets replace the coordinator while other threads send and call `fail` on closed coordinators.

    The topology survives, and no evaluation of a replaced coordinator succeeds.
    """
    started: queue.SimpleQueue[RecordingCoordinator] = queue.SimpleQueue()
    coordinator_by_evaluation: dict[int, RecordingCoordinator] = {}
    gateways: list[stagecrew.Gateway] = []
    stop = threading.Event()
    sent = [0]

    class Quick(RecordingCoordinator):
        def start(self):
            started.put(self)

        def ready(self, evaluation, gateway):
            super().ready(evaluation, gateway)
            coordinator_by_evaluation[evaluation.id] = self
            gateways.append(gateway)

    def send_and_fail():
        while not stop.is_set():
            for gateway in gateways[-4:]:
                gateway.send("x")
                sent[0] += 1
            for coordinator in coordinators[-20:-1]:
                if coordinator.context.state == "closed":
                    coordinator.context.fail(ValueError("from a replaced coordinator"))  # has no effect
                    coordinator.context.run_in_coordinator_thread(int)
            time.sleep(0.002)

    def work(gateway, batches):
        wait_for_stop(gateway)
        yield batch_of(gateway.id)

    outcome: list[Any] = []
    with stagecrew.crew(small_limits).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Quick(context, coordinators))
        thread = start_collect(topology, operator.map(small_limits.range(0, 2, 1, 2), work, "a long"), outcome)
        threads = [threading.Thread(target=send_and_fail) for _ in range(3)]
        for sender in threads:
            sender.start()
        try:
            eventually(lambda: len(gateways) >= 2, 60, "both tasks are running")
            for _ in range(1000):
                started.get(timeout=30)  # the previous coordinator has started
                topology.reset()
            started.get(timeout=30)
            eventually(lambda: len(coordinators[-1].gateways) == 2, 60, "both tasks have reached the last coordinator")
        finally:
            stop.set()
            for sender in threads:
                sender.join()
        for gateway in coordinators[-1].gateways.values():
            gateway.send("stop")
        thread.join(60)
    assert len(coordinators) == 1001
    assert sent[0] > 100
    ids = [row.a for row in outcome[0]]
    assert len(ids) == 2
    assert {coordinator_by_evaluation[id_] for id_ in ids} == {coordinators[-1]}
    assert len(coordinator_by_evaluation) >= 4, "no evaluation of a replaced coordinator"
