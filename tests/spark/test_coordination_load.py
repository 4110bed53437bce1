"""Coordination under load: many events, large events, many tasks, a busy driver, checkpoints. One master is enough."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
from pyspark import cloudpickle

import stagecrew
from support.coordination import RecordingCoordinator, batch_of, executor_pid
from support.sessions import LOCAL_CLUSTER
from support.spark_storage import executor_ids
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


# -- Load


def dies_after_first_event(gateway: Any, batches: Any) -> Any:
    """Work that, in the first attempt of each task, is killed while its first event is in transit."""
    from pyspark import TaskContext

    if TaskContext.get().attemptNumber() == 0:
        gateway.send("hello")
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in batches:
        pass
    yield batch_of(gateway.subtask)


@pytest.mark.long
def test_attempts_that_die_after_their_first_event_count_as_failed(cluster, coordinators):
    """Evaluations whose worker dies after sending its first event count as failed, not as abandoned.

    Spark reports the end of these attempts before the executor has read their events, because the executor's first
    evaluation takes a long time to set up.
    """
    with stagecrew.crew(cluster).topology("early") as topology:
        operator = topology.coordinate("o", lambda context: RecordingCoordinator(context, coordinators))
        operator.map(cluster.range(0, 8, 1, 8), dies_after_first_event, "a long").collect()
    (coordinator,) = coordinators
    assert [len(coordinator.calls_named(name)) for name in ("finished", "failed", "abandoned")] == [8, 8, 0]


def flood(events: int, threads: int, kills: dict[int, int]) -> Any:
    """Returns work that sends `events` events per subtask from `threads` threads.

    `kills` maps a subtask to an event number: after thread 0 has sent this event, the first attempt is killed.
    """

    def work(gateway, batches):
        from pyspark import TaskContext

        for _ in batches:
            pass
        dies_at = kills.get(gateway.subtask) if TaskContext.get().attemptNumber() == 0 else None

        def send(thread):
            for number in range(events // threads):
                gateway.send((thread, number))
                if thread == 0 and number == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        senders = [threading.Thread(target=send, args=(n,)) for n in range(threads)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        yield batch_of(gateway.subtask)

    return work


def check_flood(spark: Any, coordinators: list[RecordingCoordinator], events: int) -> None:
    """Checks that the events of four subtasks arrive once and in order. Each subtask sends `events` events.

    Each subtask sends from eight threads. The first attempts of two subtasks are killed.
    """
    threads = 8
    per_thread = events // threads
    kills = {1: per_thread // 2, 3: per_thread // 5}
    with stagecrew.crew(spark).topology("flood") as topology:
        operator = topology.coordinate("o", lambda context: RecordingCoordinator(context, coordinators))
        operator.map(spark.range(0, 4, 1, 4), flood(events, threads, kills), "a long").collect()
        (coordinator,) = coordinators
    finished = [call[1] for call in coordinator.calls_named("finished")]
    assert sorted(one.subtask for one in finished) == [0, 1, 2, 3]
    for evaluation in finished:
        by_thread = collections.defaultdict(list)
        for thread, number in coordinator.events[evaluation]:
            by_thread[thread].append(number)
        assert by_thread == {n: list(range(per_thread)) for n in range(threads)}
    failed = [call[1] for call in coordinator.calls_named("failed")]
    assert sorted(one.subtask for one in failed) == [1, 3]
    for evaluation in failed:  # a killed evaluation delivered a prefix of each thread's events
        by_thread = collections.defaultdict(list)
        for thread, number in coordinator.events[evaluation]:
            by_thread[thread].append(number)
        for numbers in by_thread.values():
            assert numbers == list(range(len(numbers)))


def test_events_of_many_threads_arrive_once_and_in_order(cluster, coordinators):
    """40,000 events arrive once and in order per thread and evaluation, although some attempts are killed."""
    check_flood(cluster, coordinators, 10_000)


@pytest.mark.long
def test_a_million_events_arrive_once_and_in_order(cluster, coordinators):
    """1,040,000 events arrive once and in order per thread and evaluation, although some attempts are killed."""
    check_flood(cluster, coordinators, 260_000)


class Sender(RecordingCoordinator):
    """Sends each evaluation `count` events from eight threads, at most 40,000 ahead of the task, then ends the
    stream."""

    def __init__(self, context, coordinators, count):
        super().__init__(context, coordinators)
        self.count = count
        self.received: collections.Counter[stagecrew.Evaluation] = collections.Counter()

    def ready(self, evaluation, gateway):
        super().ready(evaluation, gateway)
        threading.Thread(target=self.send, args=(evaluation, gateway), daemon=True).start()

    def handle_event(self, evaluation, event):
        self.received[evaluation] = event

    def send(self, evaluation, gateway):
        def send_from(thread):
            for number in range(self.count // 8):
                while 8 * number > self.received[evaluation] + 40_000:
                    if evaluation not in self.gateways:
                        return  # the evaluation has ended
                    time.sleep(0.005)
                gateway.send((thread, number))

        threads = [threading.Thread(target=send_from, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gateway.close()


@pytest.mark.parametrize("count", [5000, pytest.param(260_000, marks=pytest.mark.long)])
def test_events_to_tasks_arrive_once_and_in_the_order_of_each_thread(cluster, coordinators, count):
    """Eight threads of the coordinator send to each of four tasks, two of which are killed and retried.

    Each finished task receives every event once, in the order of its thread.
    """

    def work(gateway, batches):
        from pyspark import TaskContext

        dies_at = count // 3 if gateway.subtask in (1, 3) and TaskContext.get().attemptNumber() == 0 else None
        numbers = [0] * 8
        for received, (thread, number) in enumerate(gateway.events(timeout=60), 1):
            assert number == numbers[thread]
            numbers[thread] += 1
            if received == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if received % 1000 == 0:
                gateway.send(received)
        assert numbers == [count // 8] * 8
        yield batch_of(sum(numbers))

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Sender(context, coordinators, count))
        found = operator.map(cluster.range(0, 4, 1, 4), work, "a long").collect()
    assert [row.a for row in found] == [count] * 4
    assert sorted(call[1].subtask for call in coordinators[0].calls_named("failed")) == [1, 3]


def test_large_events_arrive_in_both_directions(cluster, coordinators):
    """Events of a megabyte arrive, even when they exceed the window and the size of one request."""

    class Returning(RecordingCoordinator):
        def handle_event(self, evaluation, event):
            self.gateways[evaluation].send(event)

    def work(gateway, batches):
        for i in range(24):
            gateway.send(bytes([i]) * (1 << 20))
        events = gateway.events(timeout=60)
        for i in range(24):
            event = next(events)
            assert (event[0], len(event)) == (i, 1 << 20)
        yield batch_of(1)

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Returning(context, coordinators))
        assert operator.map(cluster.range(0, 2, 1, 2), work, "a long").count() == 2


def test_large_events_that_cross_each_other_do_not_deadlock(cluster, coordinators):
    """A task sends events of a megabyte between those that it receives. Sockets have room for much less."""
    count, size = 40, 1 << 20

    class Replying(RecordingCoordinator):
        def handle_event(self, evaluation, event):
            for _ in range(4):
                self.gateways[evaluation].send(event)

    def work(gateway, batches):
        payload = b"x" * size
        for _ in range(2):
            gateway.send(payload)
        for received, event in enumerate(gateway.events(timeout=60), 1):
            assert len(event) == size
            if received == 4 * count:
                break
            if received % 4 == 0 and received + 4 < 4 * count:
                gateway.send(payload)
        yield batch_of(received)

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Replying(context, coordinators))
        rows = operator.map(cluster.range(0, 2, 1, 2), work, "a long").collect()
    assert [row.a for row in rows] == [4 * count] * 2
    assert coordinators[0].calls_named("failed") == []


def test_a_task_that_does_not_read_delays_no_other_task_of_its_executor(cluster, coordinators, tmp_path):
    """While a task computes, its events fill its socket. Requests of another task on the same executor go on."""

    class Flooding(RecordingCoordinator):
        def __init__(self, context, instances):
            super().__init__(context, instances)
            self.tasks = collections.Counter()
            self.flooded = collections.defaultdict(Future)  # by executor

        def handle_request(self, evaluation, request):
            if request == "role":
                self.tasks[evaluation.executor] += 1
                return "computes" if self.tasks[evaluation.executor] == 1 else "requests"
            return self.flooded[evaluation.executor] if request == "flooded" else request

        def handle_event(self, evaluation, event):
            for _ in range(1 if event == "begins" else 8):
                self.gateways[evaluation].send(b"x" * (1 << 20))
            if event == "computes":
                self.flooded[evaluation.executor].set_result(True)

    def work(gateway, batches):
        done = tmp_path / f"done-{executor_pid()}"
        if gateway.request("role") == "computes":
            events = gateway.events(timeout=60)
            gateway.send("begins")
            next(events)
            gateway.send("computes")
            with contextlib.suppress(AssertionError):
                eventually(done.exists, 15)
            assert sum(len(next(events)) for _ in range(8)) == 8 << 20
            yield batch_of(-1)
        else:
            assert gateway.request("flooded", timeout=60)
            began = time.monotonic()
            assert all(gateway.request(number) == number for number in range(100))
            milliseconds = int(1000 * (time.monotonic() - began))
            assert not done.exists()
            done.touch()
            yield batch_of(milliseconds)

    eventually(lambda: len(executor_ids(cluster)) == 2, 60, "both executors are registered")
    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Flooding(context, coordinators))
        began = time.monotonic()
        rows = [row.a for row in operator.map(cluster.range(0, 4, 1, 4), work, "a long").collect()]
        elapsed = time.monotonic() - began
    assert coordinators[0].calls_named("failed") == []
    assert list(coordinators[0].tasks.values()) == [2, 2]
    assert rows.count(-1) == 2
    assert max(rows) < 5000
    assert elapsed < 12  # no task waited until another one read after 15 s


def test_a_coordinator_and_a_task_that_flood_each_other_do_not_deadlock(cluster, coordinators):
    """A coordinator that sends every event back twice, and a task that reads late, do not deadlock or lose events."""

    class Doubling(RecordingCoordinator):
        def handle_event(self, evaluation, event):
            for _ in range(2):
                self.gateways[evaluation].send(event)

    def work(gateway, batches):
        total = 10_000  # more than the window
        sender = threading.Thread(target=lambda: [gateway.send(i) for i in range(total)])
        sender.start()
        if gateway.subtask == 0:
            sender.join()  # this task sends all before it reads; the other task reads while it sends
        events = gateway.events(timeout=60)
        for i in range(total):
            assert next(events) == next(events) == i
        yield batch_of(1)

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Doubling(context, coordinators))
        assert operator.map(cluster.range(0, 2, 1, 2), work, "a long").count() == 2


@pytest.mark.parametrize("seconds", [2, pytest.param(10, marks=pytest.mark.long)])
def test_no_event_is_lost_while_the_drivers_python_is_busy(cluster, coordinators, seconds):
    """While other threads of the driver hold the GIL in bursts, no event is lost and no evaluation fails."""
    until = time.monotonic() + seconds

    def busy():
        while time.monotonic() < until:
            sum(range(10_000_000))  # one bytecode, so the GIL is held throughout

    class Returning(RecordingCoordinator):
        def handle_event(self, evaluation, event):
            super().handle_event(evaluation, event)
            self.gateways[evaluation].send(event)

    def work(gateway, batches):
        events = gateway.events(timeout=60)
        deadline = time.monotonic() + 0.8 * seconds
        count = 0
        while time.monotonic() < deadline:
            for i in range(100):
                gateway.send(count + i)
            assert [next(events) for _ in range(100)] == list(range(count, count + 100))
            count += 100
        yield batch_of(count)

    threads = [threading.Thread(target=busy, daemon=True) for _ in range(2)]
    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Returning(context, coordinators))
        dataset = operator.map(cluster.range(0, 2, 1, 2), work, "a long")
        for thread in threads:
            thread.start()
        found = dataset.collect()
    (coordinator,) = coordinators
    assert sorted(len(events) for events in coordinator.events.values()) == sorted(row.a for row in found)
    assert not coordinator.calls_named("failed")
    for thread in threads:
        thread.join(30)


# -- Checkpoints


@pytest.mark.parametrize("checkpoints", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_a_checkpoint_completes_when_the_events_it_counts_are_delivered(
    cluster, coordinators, monkeypatch, checkpoints
):
    """When a checkpoint is complete, the tasks' mailboxes hold exactly the events that its state counts as sent.

    Meanwhile four threads send events at their own pace.
    """

    class Streaming(RecordingCoordinator):
        def __init__(self, context, coordinators):
            super().__init__(context, coordinators)
            self.lock = threading.Lock()
            self.sent = self.accepted = 0
            self.requested = None
            self.stop = False

        def push(self):
            while not self.stop:
                with self.lock:
                    for gateway in tuple(self.gateways.values()):
                        gateway.send_acknowledged(self.sent).add_done_callback(self.done)
                        self.sent += 1
                    if self.requested is not None and random.random() < 0.2:
                        # The checkpoint is taken here: the lock keeps other threads from sending.
                        self.requested.set_result(b"%d" % self.sent)
                        self.requested = None
                time.sleep(0.001)

        def done(self, future):
            assert future.exception() is None
            self.accepted += 1  # no lock needed: one thread reads the acknowledgements

        def checkpoint(self, checkpoint_id):
            future = Future()
            with self.lock:
                self.requested = future
            return future

    def work(gateway, batches):
        for event in gateway.events(timeout=60):
            if event == "stop":
                break
        yield batch_of(1)

    crew = stagecrew.crew(cluster)
    host, at_completion = crew.connection.host(), []
    original = host.checkpoint

    def checkpoint(binding, id_):
        future = original(binding, id_)
        future.add_done_callback(lambda _: at_completion.append(coordinators[0].accepted))
        return future

    monkeypatch.setattr(host, "checkpoint", checkpoint)
    with crew.topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Streaming(context, coordinators))
        dataset = operator.map(cluster.range(0, 2, 1, 2), work, "a long")
        runner = threading.Thread(target=topology.wrap(dataset.collect))
        runner.start()
        (coordinator,) = coordinators
        eventually(lambda: len(coordinator.gateways) == 2, 60, "both tasks are running")
        threads = [threading.Thread(target=coordinator.push) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            states = [int(topology.checkpoint().states["o/1"]) for _ in range(checkpoints)]
        finally:
            coordinator.stop = True
            for thread in threads:
                thread.join()
        for gateway in tuple(coordinator.gateways.values()):
            gateway.send("stop")
        runner.join(60)
    assert states == at_completion
    assert sorted(set(states)) == states


@pytest.mark.parametrize("tasks", [8, pytest.param(64, marks=pytest.mark.long)])
def test_many_tasks_can_wait_for_the_same_event(sessions, coordinators, tasks):
    """All tasks wait for the same event without holding a thread of the driver, and all of them receive it."""
    spark = sessions.get(f"local[{tasks}]")

    class Starter(RecordingCoordinator):
        def ready(self, evaluation, gateway):
            super().ready(evaluation, gateway)
            if len(self.gateways) == tasks:
                for each in self.gateways.values():
                    each.send("go")

    def work(gateway, batches):
        assert next(gateway.events(timeout=120)) == "go"
        yield batch_of(gateway.subtask)

    with stagecrew.crew(spark).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Starter(context, coordinators))
        found = operator.map(spark.range(0, tasks, 1, tasks), work, "a long").collect()
    assert sorted(row.a for row in found) == list(range(tasks))
