"""Coordination under load and when something fails: kills, resets, cancellation, streams. One master is enough."""

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

import pandas as pd
import psutil
import pyarrow as pa
import pytest
from pyspark import SparkContext, cloudpickle
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

import stagecrew
from coordinators import Noting, rows
from crewtools import LOCAL, LOCAL_CLUSTER, base, eventually

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
    """Work whose first attempts are killed while their first event is in transit."""
    from pyspark import TaskContext

    if TaskContext.get().attemptNumber() == 0:
        gateway.send("hello")
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in batches:
        pass
    yield rows(gateway.subtask)


@pytest.mark.long
def test_attempts_that_die_after_their_first_event_count_as_failed(cluster, coordinators):
    """The evaluations count as failed, not as abandoned.

    Spark reports the end of these attempts before the executor has read their events, because the executor's first
    evaluation takes long to set up.
    """
    with stagecrew.crew(cluster).topology("early") as topology:
        operator = topology.coordinate("o", lambda context: Noting(context, coordinators))
        operator.map(cluster.range(0, 8, 1, 8), dies_after_first_event, "a long").collect()
    (coordinator,) = coordinators
    assert [len(coordinator.named(name)) for name in ("finished", "failed", "abandoned")] == [8, 8, 0]


def flood(events: int, threads: int, kills: dict[int, int]) -> Any:
    """Work that sends this number of events from this number of threads. `kills` maps subtasks to the event of thread 0
    after which their first attempt is killed."""

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
        yield rows(gateway.subtask)

    return work


def check_flood(spark: Any, coordinators: list[Noting], events: int) -> None:
    """Four subtasks send this number of events each, from eight threads each. The first attempts of two are killed."""
    threads = 8
    per_thread = events // threads
    kills = {1: per_thread // 2, 3: per_thread // 5}
    with stagecrew.crew(spark).topology("flood") as topology:
        operator = topology.coordinate("o", lambda context: Noting(context, coordinators))
        operator.map(spark.range(0, 4, 1, 4), flood(events, threads, kills), "a long").collect()
        (coordinator,) = coordinators
    finished = [call[1] for call in coordinator.named("finished")]
    assert sorted(one.subtask for one in finished) == [0, 1, 2, 3]
    for evaluation in finished:
        by_thread = collections.defaultdict(list)
        for thread, number in coordinator.events[evaluation]:
            by_thread[thread].append(number)
        assert by_thread == {n: list(range(per_thread)) for n in range(threads)}
    failed = [call[1] for call in coordinator.named("failed")]
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
    """The same holds for more than 1,000,000 events."""
    check_flood(cluster, coordinators, 260_000)


class Sender(Noting):
    """Sends each evaluation `count` events from eight threads, at most 40,000 ahead of the task, then ends the stream."""

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
        yield rows(sum(numbers))

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Sender(context, coordinators, count))
        found = operator.map(cluster.range(0, 4, 1, 4), work, "a long").collect()
    assert [row.a for row in found] == [count] * 4
    assert sorted(call[1].subtask for call in coordinators[0].named("failed")) == [1, 3]


def test_large_events_arrive_in_both_directions(cluster, coordinators):
    """Events of a megabyte arrive, even when they exceed the window and the size of one request."""

    class Returning(Noting):
        def handle_event(self, evaluation, event):
            self.gateways[evaluation].send(event)

    def work(gateway, batches):
        for i in range(24):
            gateway.send(bytes([i]) * (1 << 20))
        events = gateway.events(timeout=60)
        for i in range(24):
            event = next(events)
            assert (event[0], len(event)) == (i, 1 << 20)
        yield rows(1)

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Returning(context, coordinators))
        assert operator.map(cluster.range(0, 2, 1, 2), work, "a long").count() == 2


def test_a_coordinator_and_a_task_that_flood_each_other_do_not_deadlock(cluster, coordinators):
    """A coordinator that sends two events for each one and a task that reads late neither deadlock nor lose events."""

    class Doubling(Noting):
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
        yield rows(1)

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Doubling(context, coordinators))
        assert operator.map(cluster.range(0, 2, 1, 2), work, "a long").count() == 2


@pytest.mark.parametrize("tasks", [8, pytest.param(64, marks=pytest.mark.long)])
def test_many_tasks_can_wait_for_the_same_event(sessions, coordinators, tasks):
    """All tasks wait for the same event without holding a thread of the driver, and all of them receive it."""
    spark = sessions.get(f"local[{tasks}]")

    class Starter(Noting):
        def ready(self, evaluation, gateway):
            super().ready(evaluation, gateway)
            if len(self.gateways) == tasks:
                for each in self.gateways.values():
                    each.send("go")

    def work(gateway, batches):
        assert next(gateway.events(timeout=120)) == "go"
        yield rows(gateway.subtask)

    with stagecrew.crew(spark).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Starter(context, coordinators))
        found = operator.map(spark.range(0, tasks, 1, tasks), work, "a long").collect()
    assert sorted(row.a for row in found) == list(range(tasks))


@pytest.mark.parametrize("seconds", [2, pytest.param(10, marks=pytest.mark.long)])
def test_no_event_is_lost_while_the_drivers_python_is_busy(cluster, coordinators, seconds):
    """For some seconds other threads hold the GIL in bursts. No event is lost and no evaluation fails."""
    until = time.monotonic() + seconds

    def busy():
        while time.monotonic() < until:
            sum(range(10_000_000))  # one bytecode, so the GIL is held throughout

    class Returning(Noting):
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
        yield rows(count)

    threads = [threading.Thread(target=busy, daemon=True) for _ in range(2)]
    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Returning(context, coordinators))
        dataset = operator.map(cluster.range(0, 2, 1, 2), work, "a long")
        for thread in threads:
            thread.start()
        found = dataset.collect()
    (coordinator,) = coordinators
    assert sorted(len(events) for events in coordinator.events.values()) == sorted(row.a for row in found)
    assert not coordinator.named("failed")
    for thread in threads:
        thread.join(30)


# -- Attempts


def test_subtasks_whose_output_is_lost_are_reset_and_ready_again(cluster, coordinators, tmp_path):
    """An executor that holds shuffle output is killed. The coordinator gets `subtask_reset`, then `ready`, for its subtasks."""
    marker = tmp_path / "killed"

    def work(gateway, batches):
        for batch in batches:
            gateway.send("hello")
            yield rows(*batch.column("id").to_pylist())

    def kill_executor(batches):
        if not marker.exists():
            marker.touch()
            os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
            time.sleep(60)
        yield from batches

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Noting(context, coordinators))
        bound = operator.map(cluster.range(0, 40, 1, 4), work, "a long")
        found = bound.repartition(2, "a").mapInArrow(kill_executor, "a long").collect()
    assert sorted(row.a for row in found) == list(range(40))
    (coordinator,) = coordinators
    reset_subtasks = {call[1] for call in coordinator.named("reset")}
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


@pytest.mark.long
def test_speculative_attempts_of_one_subtask_are_separate_evaluations(sessions, standalone, coordinators, tmp_path):
    """Two live evaluations of one subtask are both ready without a reset between. The slower one fails."""
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
        yield rows(gateway.subtask)

    with stagecrew.crew(spark).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Noting(context, coordinators))
        found = operator.map(spark.range(0, 8, 1, 8), work, "a long").collect()
        (coordinator,) = coordinators
        eventually(lambda: coordinator.named("failed"), 20, "the slower attempt fails")
    assert sorted(row.a for row in found) == list(range(8))
    calls = [call for call in coordinator.calls if call[0] != "close" and call[0] != "reset" and call[1].subtask == 0]
    assert [call[0] for call in calls] == ["ready", "ready", "finished", "failed"]
    loser, winner = calls[0][1], calls[1][1]
    assert (calls[2][1], calls[3][1]) == (winner, loser)
    assert not coordinator.named("reset")


def test_two_operators_in_one_stage_have_separate_coordinators(cluster, coordinators):
    """Chained operators run in separate processes. No event is lost, and each operator has its own coordinator."""

    def work(gateway, batches):
        for batch in batches:
            for value in batch.column(0).to_pylist():
                gateway.send(value)
            yield rows(*batch.column(0).to_pylist())

    with stagecrew.crew(cluster).topology("t") as topology:
        first = topology.coordinate("first", lambda context: Noting(context, coordinators))
        second = topology.coordinate("second", lambda context: Noting(context, coordinators))
        inner = first.map(cluster.range(0, 1000, 1, 4), work, "a long")
        assert second.map(inner, work, "a long").count() == 1000
    for coordinator in coordinators:
        assert sorted(coordinator.all_events()) == list(range(1000))
        assert sorted(call[1].subtask for call in coordinator.named("finished")) == [0, 1, 2, 3]


def test_a_subtask_keeps_its_number_under_a_cross_join(cluster, coordinators):
    """A subtask keeps its number where Spark renumbers the partitions."""

    def work(gateway, batches):
        for batch in batches:
            yield rows(*[gateway.subtask * 1000 + value for value in batch.column("id").to_pylist()])

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Noting(context, coordinators))
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


def waiting(gateway, batches):
    for _ in batches:
        pass
    gateway.send("waits")
    for _ in gateway.events():
        pass
    yield rows(1)


@pytest.mark.parametrize("ending", ["fail", "cancel", "end"])
def test_a_waiting_task_ends_within_a_second(cluster, coordinators, ending, journal):
    """A task that waits for an event ends within a second of its cancellation or of its topology's failure or end."""
    seconds_until_task_ends(cluster, coordinators, ending, journal)  # warm-up: Spark's JVM loads classes for up to a second
    coordinators.clear()
    assert seconds_until_task_ends(cluster, coordinators, ending, journal) < 1.0


def seconds_until_task_ends(cluster, coordinators, ending, journal) -> float:
    """Returns the seconds until Spark runs no task. Checks that the user's function ends within one second, every time."""
    crew = stagecrew.crew(cluster)
    topology = crew.topology("t").start()
    operator = topology.coordinate("o", lambda context: Noting(context, coordinators))

    def recorded(gateway, batches):
        try:
            yield from waiting(gateway, batches)
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
    eventually(lambda: len(coordinator.events) == 2, 60, "both tasks wait")
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

    eventually(lambda: running() == 0, 20, "no task runs")
    elapsed = time.time() - started
    function_ended = [entry["time"] - started for entry in journal.read(event="function ended") if entry["time"] >= started]
    assert len(function_ended) >= 2
    assert max(function_ended) < 1.0
    with pytest.raises(stagecrew.CoordinatorFailed) if ending == "fail" else contextlib.nullcontext():
        topology.close(cancel=True)
    return elapsed


def test_a_topology_fails_once_with_the_first_cause(cluster, coordinators, caplog):
    """The topology fails once, with the first cause and its traceback."""

    def work(gateway, batches):
        yield from waiting(gateway, batches)

    def fail(coordinator, n):
        try:
            raise KeyError(f"number {n}")
        except KeyError as error:
            coordinator.context.fail(error)

    with (
        pytest.raises(stagecrew.CoordinatorFailed, match="number") as caught,
        stagecrew.crew(cluster).topology("t") as topology,
    ):
        operator = topology.coordinate("o", lambda context: Noting(context, coordinators))
        dataset = operator.map(cluster.range(0, 2, 1, 2), work, "a long")

        def fail_from_threads():
            eventually(lambda: len(coordinators[0].events) == 2, 60, "both tasks wait")
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
    """Whichever callback raises, the topology fails with that exception. The factory's exception is raised at its call."""

    def fail(self, *args):
        raise ZeroDivisionError(callback)

    def factory(context):
        if callback == "factory":
            fail(None)
        coordinator = Noting(context, coordinators)
        if callback == "run_in_coordinator_thread":
            coordinator.start = lambda: context.run_in_coordinator_thread(fail, None)
        else:
            setattr(coordinator, callback, lambda *args: fail(None))
        return coordinator

    def work(gateway, batches):
        gateway.send(1)
        yield rows(gateway.subtask)

    expected = ZeroDivisionError if callback == "factory" else stagecrew.CoordinatorFailed
    with pytest.raises(expected, match=callback), stagecrew.crew(cluster).topology("t") as topology:
        topology.coordinate("o", factory).map(cluster.range(0, 1, 1, 1), work, "a long").collect()


def test_the_exit_is_bounded_when_a_coordinator_blocks_in_close(sessions, coordinators, caplog):
    """`spark.stagecrew.close.timeout` bounds the exit, and the log names the operator."""
    spark = sessions.get(LOCAL, **{"spark.stagecrew.close.timeout": "1s"})
    release = threading.Event()

    class Blocking(Noting):
        def close(self):
            release.wait(60)

    with stagecrew.crew(spark).topology("t") as topology:
        topology.coordinate("stuck", lambda context: Blocking(context, coordinators)).bind(lambda gateway: 1)
        started = time.monotonic()
    assert time.monotonic() - started < 5
    release.set()
    assert "the coordinator of operator 'stuck' has not closed within 1 s" in caplog.text


def test_an_open_inner_topology_is_closed_with_the_outer_one(cluster, coordinators):
    """The coordinators of an inner topology that is left open are closed with the outer topology."""
    crew = stagecrew.crew(cluster)
    with crew.topology("outer"):
        inner = crew.topology("inner").start()
        inner.coordinate("o", lambda context: Noting(context, coordinators)).bind(lambda gateway: 1)
    assert coordinators[0].calls == [("close",)]


@pytest.mark.long
def test_an_operator_name_and_a_bound_function_are_used_only_once(cluster, coordinators):
    """An operator's name is used once, and a bound function serves one dataset. Both errors say what to do."""
    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Noting(context, coordinators))
        with pytest.raises(stagecrew.OperatorMisused, match="has an operator 'o' already"):
            topology.coordinate("o", lambda context: Noting(context, coordinators))

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
            with pytest.raises(stagecrew.OperatorMisused, match="used on two datasets.*call bind\\(\\) once for each"):
                reuse()
        pairs = operator.bind(lambda gateway, values: (gateway.send(2), list(values))[1])
        rdd = cluster.sparkContext.parallelize(range(4), 2)
        mapped = rdd.mapPartitions(pairs)
        assert mapped.count() == mapped.map(lambda n: n).count() == 4
        with pytest.raises(stagecrew.OperatorMisused, match="two datasets"):
            cluster.sparkContext.parallelize(range(4), 2).mapPartitions(pairs).count()


# -- Checkpoints


@pytest.mark.parametrize("checkpoints", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_a_checkpoint_completes_when_the_events_it_counts_are_delivered(cluster, coordinators, monkeypatch, checkpoints):
    """When a checkpoint is complete, the tasks' mailboxes hold exactly the events that its state counts as sent.

    Meanwhile four threads send events at their own pace.
    """

    class Streaming(Noting):
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
                        gateway.send(self.sent).add_done_callback(self.done)
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
        yield rows(1)

    crew = stagecrew.crew(cluster)
    host, at_completion = crew.host(), []
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
        eventually(lambda: len(coordinator.gateways) == 2, 60, "both tasks run")
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


def test_session_coordinators_live_as_long_as_the_session(sessions, coordinators):
    """They are created and restored before Spark starts, start with it, and serve tasks outside any topology.

    They are closed when the session stops, as are the coordinators of topologies that are still open.
    """
    sessions.stop()
    lifecycle = []

    class Counter(Noting):
        total = 0

        def __init__(self, context):
            super().__init__(context, coordinators)
            lifecycle.append(("made", context.state, SparkContext._active_spark_context is None))
            with pytest.raises(stagecrew.NotInitialised):
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
        yield rows(gateway.request(1))

    restore = stagecrew.Checkpoint(4, {"counter/1": b"10"})
    builder = stagecrew.configure(base("local[2]"), coordinators={"counter": Counter}, restore=restore)
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
        with pytest.raises(stagecrew.OperatorMisused, match="no operator 'other', but 'counter'"):
            crew.operator("other")
        assert stagecrew.configure(base("local[2]"), coordinators={"counter": Counter}).getOrCreate() is not None
        with pytest.raises(stagecrew.ConfigurationError, match="not among them: more"):
            stagecrew.configure(base("local[2]"), coordinators={"more": Counter}).getOrCreate()
        coordinators[0].context.fail(ValueError("gone"))
        with pytest.raises(Exception, match="topology 'application' failed: ValueError: gone"):
            bound.first()
        with pytest.raises(stagecrew.CoordinatorFailed, match="gone"):
            crew.operator("counter")
        assert spark.range(3).count() == 3
        crew.topology("open").start().coordinate("o", lambda context: Noting(context, coordinators)).bind(lambda gateway: 1)
    finally:
        spark.stop()
    assert all(coordinator.calls[-1] == ("close",) for coordinator in coordinators)


def test_corrupt_coordinator_state_fails_before_spark_starts(sessions, coordinators):
    """`getOrCreate` names the coordinator that cannot be restored and creates no SparkContext."""
    sessions.stop()

    class Picky(Noting):
        def __init__(self, context):
            super().__init__(context, coordinators)

        def reset_to_checkpoint(self, checkpoint_id, state):
            int(state)

    restore = stagecrew.Checkpoint(4, {"counter/1": b"garbage"})
    builder = stagecrew.configure(base("local[2]"), coordinators={"counter": Picky}, restore=restore)
    with pytest.raises(
        stagecrew.CoordinatorFailed, match="'counter' cannot be made, or restored from checkpoint 4: ValueError"
    ):
        builder.getOrCreate()
    assert SparkContext._active_spark_context is None
    eventually(lambda: "stagecrew-counter" not in {one.name for one in threading.enumerate()}, 5, "its thread ends")
    for invalid in ({"counter": 3}, {3: Picky}):
        with pytest.raises(stagecrew.OperatorMisused, match="coordinators= takes factories"):
            stagecrew.configure(base("local[2]"), coordinators=invalid)


# -- Streams


def test_a_coordinator_serves_every_micro_batch_of_a_query(sessions, coordinators, tmp_path):
    """A coordinator serves every micro-batch of a query inside its topology."""
    spark = sessions.get(LOCAL)

    class Summing(Noting):
        total = 0

        def handle_request(self, evaluation, request):
            self.total += request
            return self.total

    def work(gateway, batches):
        for batch in batches:
            gateway.request(batch.num_rows)
            yield rows(*batch.column("value").to_pylist())

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
    evaluations = [call[1] for call in coordinators[0].named("ready")]
    assert len({one.stage for one in evaluations}) > 1
    assert coordinators[0].total >= count > 0


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


# -- Every entry point


def test_bound_functions_work_at_every_entry_point(sessions, coordinators):
    """A function from `bind` reaches its coordinator from UDFs, pandas, Arrow, groups, UDTFs, data sources and RDDs."""
    spark = sessions.get(LOCAL)

    class Doubling(Noting):
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
            "arrow_udf": numbers.select(f.arrow_udf(operator.bind(arrow), "long")("id")),
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
