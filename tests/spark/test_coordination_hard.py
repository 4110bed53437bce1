"""Coordination when much happens at once, or goes wrong: load, kills, resets, cancellation, streams. One master is enough."""

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
from coordinators import Noting, rows
from crewtools import LOCAL, LOCAL_CLUSTER, base, eventually
from pyspark import SparkContext, cloudpickle
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

import stagecrew

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def cluster(sessions):
    """A session on a cluster of two executors, in which attempts may fail often."""
    return sessions.get(LOCAL_CLUSTER, **{"spark.task.maxFailures": "30"})


@pytest.fixture
def made():
    """The coordinators that a test made."""
    return []


# -- Much at once


def dies_at_once(gateway: Any, batches: Any) -> Any:
    """Work whose first attempts are killed while their first words are on their way."""
    from pyspark import TaskContext

    if TaskContext.get().attemptNumber() == 0:
        gateway.send("hello")
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in batches:
        pass
    yield rows(gateway.subtask)


@pytest.mark.long
def test_workers_that_die_at_their_first_word(cluster, made):
    """Spark hears of their end before the executor has read what they said (its first evaluation takes long to set up): they
    failed, and were not cut short."""
    with stagecrew.crew(cluster).topology("early") as topology:
        operator = topology.coordinate("o", lambda context: Noting(context, made))
        operator.map(cluster.range(0, 8, 1, 8), dies_at_once, "a long").collect()
    (coordinator,) = made
    assert [len(coordinator.named(name)) for name in ("finished", "failed", "abandoned")] == [8, 8, 0]


def flood(events: int, threads: int, kills: dict[int, int]) -> Any:
    """Work that sends so many events from so many threads; the first attempts of some subtasks die at their n-th event."""

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


def flooded(spark: Any, made: list[Noting], events: int) -> None:
    """Four subtasks send so many events each, from eight threads each; the first attempts of two are killed."""
    threads = 8
    per_thread = events // threads
    kills = {1: per_thread // 2, 3: per_thread // 5}
    with stagecrew.crew(spark).topology("flood") as topology:
        operator = topology.coordinate("o", lambda context: Noting(context, made))
        operator.map(spark.range(0, 4, 1, 4), flood(events, threads, kills), "a long").collect()
        (coordinator,) = made
    finished = [call[1] for call in coordinator.named("finished")]
    assert sorted(one.subtask for one in finished) == [0, 1, 2, 3]
    for evaluation in finished:
        by_thread = collections.defaultdict(list)
        for thread, number in coordinator.events[evaluation]:
            by_thread[thread].append(number)
        assert by_thread == {n: list(range(per_thread)) for n in range(threads)}
    failed = [call[1] for call in coordinator.named("failed")]
    assert sorted(one.subtask for one in failed) == [1, 3]
    for evaluation in failed:  # what came of one that was killed is a beginning, of each thread
        by_thread = collections.defaultdict(list)
        for thread, number in coordinator.events[evaluation]:
            by_thread[thread].append(number)
        for numbers in by_thread.values():
            assert numbers == list(range(len(numbers)))


def test_many_events_of_many_threads(cluster, made):
    """FIFO per thread and evaluation, nothing lost, nothing doubled, with attempts being killed: 40,000 events."""
    flooded(cluster, made, 10_000)


@pytest.mark.long
def test_a_million_events(cluster, made):
    """The same with more than 1,000,000."""
    flooded(cluster, made, 260_000)


class Sender(Noting):
    """Sends each evaluation so many events from eight threads, no more than its mailbox holds ahead of it; then ends the stream."""

    def __init__(self, context, made, count):
        super().__init__(context, made)
        self.count = count
        self.taken: collections.Counter[stagecrew.Evaluation] = collections.Counter()

    def ready(self, evaluation, gateway):
        super().ready(evaluation, gateway)
        threading.Thread(target=self.send, args=(evaluation, gateway), daemon=True).start()

    def handle_event(self, evaluation, event):
        self.taken[evaluation] = event

    def send(self, evaluation, gateway):
        def some(thread):
            for number in range(self.count // 8):
                while 8 * number > self.taken[evaluation] + 40_000:
                    if evaluation not in self.gateways:
                        return  # it has died
                    time.sleep(0.005)
                gateway.send((thread, number))

        threads = [threading.Thread(target=some, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gateway.close()


@pytest.mark.parametrize("count", [5000, pytest.param(260_000, marks=pytest.mark.long)])
def test_many_events_to_tasks(cluster, made, count):
    """From eight threads of the coordinator to each of four tasks, of which two are killed and come again: in the order of each
    thread, all, once."""

    def work(gateway, batches):
        from pyspark import TaskContext

        dies_at = count // 3 if gateway.subtask in (1, 3) and TaskContext.get().attemptNumber() == 0 else None
        numbers = [0] * 8
        for taken, (thread, number) in enumerate(gateway.events(timeout=60), 1):
            assert number == numbers[thread]
            numbers[thread] += 1
            if taken == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if taken % 1000 == 0:
                gateway.send(taken)
        assert numbers == [count // 8] * 8
        yield rows(sum(numbers))

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Sender(context, made, count))
        found = operator.map(cluster.range(0, 4, 1, 4), work, "a long").collect()
    assert [row.a for row in found] == [count] * 4
    assert sorted(call[1].subtask for call in made[0].named("failed")) == [1, 3]


def test_large_events_both_ways(cluster, made):
    """Events of a megabyte arrive, more of them than the window or what is asked for at once holds."""

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
        operator = topology.coordinate("o", lambda context: Returning(context, made))
        assert operator.map(cluster.range(0, 2, 1, 2), work, "a long").count() == 2


def test_both_flood_each_other(cluster, made):
    """A coordinator that answers each event with two and a task that reads late: no deadlock, nothing lost."""

    class Doubling(Noting):
        def handle_event(self, evaluation, event):
            for _ in range(2):
                self.gateways[evaluation].send(event)

    def work(gateway, batches):
        total = 10_000  # more than the window
        sender = threading.Thread(target=lambda: [gateway.send(i) for i in range(total)])
        sender.start()
        if gateway.subtask == 0:
            sender.join()  # the coordinator takes it though nobody reads its events; the other reads at the same time
        events = gateway.events(timeout=60)
        for i in range(total):
            assert next(events) == next(events) == i
        yield rows(1)

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Doubling(context, made))
        assert operator.map(cluster.range(0, 2, 1, 2), work, "a long").count() == 2


@pytest.mark.parametrize("tasks", [8, pytest.param(64, marks=pytest.mark.long)])
def test_many_tasks_wait_on_two_cores(sessions, made, tasks):
    """All wait for the same event, hold no thread of the driver, and all get it."""
    spark = sessions.get(f"local[{tasks}]")

    class Starter(Noting):
        def ready(self, evaluation, gateway):
            super().ready(evaluation, gateway)
            if len(self.gateways) == tasks:
                for one in self.gateways.values():
                    one.send("go")

    def work(gateway, batches):
        assert next(gateway.events(timeout=120)) == "go"
        yield rows(gateway.subtask)

    with stagecrew.crew(spark).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Starter(context, made))
        found = operator.map(spark.range(0, tasks, 1, tasks), work, "a long").collect()
    assert sorted(row.a for row in found) == list(range(tasks))


@pytest.mark.parametrize("seconds", [2, pytest.param(10, marks=pytest.mark.long)])
def test_a_driver_whose_python_is_busy(cluster, made, seconds):
    """Seconds in which others hold the GIL in bursts: nothing is lost, nobody fails."""
    until = time.monotonic() + seconds

    def busy():
        while time.monotonic() < until:
            sum(range(10_000_000))  # one bytecode: the GIL is held all the while

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
        operator = topology.coordinate("o", lambda context: Returning(context, made))
        dataset = operator.map(cluster.range(0, 2, 1, 2), work, "a long")
        for thread in threads:
            thread.start()
        found = dataset.collect()
    (coordinator,) = made
    assert sorted(len(events) for events in coordinator.events.values()) == sorted(row.a for row in found)
    assert not coordinator.named("failed")
    for thread in threads:
        thread.join(30)


# -- Attempts


def test_what_had_succeeded_is_lost(cluster, made, tmp_path):
    """After an executor that holds shuffle output is killed the coordinator hears reset and ready of those subtasks anew."""
    marker = tmp_path / "killed"

    def work(gateway, batches):
        for batch in batches:
            gateway.send("hello")
            yield rows(*batch.column("id").to_pylist())

    def kills(batches):
        if not marker.exists():
            marker.touch()
            os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
            time.sleep(60)
        yield from batches

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Noting(context, made))
        bound = operator.map(cluster.range(0, 40, 1, 4), work, "a long")
        found = bound.repartition(2, "a").mapInArrow(kills, "a long").collect()
    assert sorted(row.a for row in found) == list(range(40))
    (coordinator,) = made
    again = {call[1] for call in coordinator.named("reset")}
    assert again
    for subtask in range(4):
        mine = [
            call[0]
            for call in coordinator.calls
            if (call[0] == "reset" and call[1] == subtask)
            or (call[0] != "close" and call[0] != "reset" and call[1].subtask == subtask)
        ]
        assert mine == (
            ["ready", "finished", "reset", "ready", "finished"] if subtask in again else ["ready", "finished"]
        )


@pytest.mark.long
def test_speculation(sessions, standalone, made, tmp_path):
    """Two live evaluations of one subtask: both are ready without a reset between, the loser is heard to fail."""
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
                for _ in gateway.events(timeout=120):  # the first attempt waits until it is killed
                    pass
        yield rows(gateway.subtask)

    with stagecrew.crew(spark).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Noting(context, made))
        found = operator.map(spark.range(0, 8, 1, 8), work, "a long").collect()
        (coordinator,) = made
        eventually(lambda: coordinator.named("failed"), 20, "the loser is heard to fail")
    assert sorted(row.a for row in found) == list(range(8))
    mine = [call for call in coordinator.calls if call[0] != "close" and call[0] != "reset" and call[1].subtask == 0]
    assert [call[0] for call in mine] == ["ready", "ready", "finished", "failed"]
    loser, winner = mine[0][1], mine[1][1]
    assert (mine[2][1], mine[3][1]) == (winner, loser)
    assert not coordinator.named("reset")


def test_two_operators_in_one_stage(cluster, made):
    """Chained, each in a process of its own: nothing is lost, and each has its own coordinator."""

    def work(gateway, batches):
        for batch in batches:
            for value in batch.column(0).to_pylist():
                gateway.send(value)
            yield rows(*batch.column(0).to_pylist())

    with stagecrew.crew(cluster).topology("t") as topology:
        first = topology.coordinate("first", lambda context: Noting(context, made))
        second = topology.coordinate("second", lambda context: Noting(context, made))
        inner = first.map(cluster.range(0, 1000, 1, 4), work, "a long")
        assert second.map(inner, work, "a long").count() == 1000
    for coordinator in made:
        assert sorted(coordinator.all_events()) == list(range(1000))
        assert sorted(call[1].subtask for call in coordinator.named("finished")) == [0, 1, 2, 3]


def test_identity_under_a_cross_join(cluster, made):
    """A subtask keeps its number where Spark numbers partitions anew."""

    def work(gateway, batches):
        for batch in batches:
            yield rows(*[gateway.subtask * 1000 + value for value in batch.column("id").to_pylist()])

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Noting(context, made))
        bound = operator.map(cluster.range(0, 40, 1, 4), work, "a long")
        other = cluster.range(0, 3, 1, 3)
        expected = sorted([n // 10 * 1000 + n for n in range(40)] * 3)
        for crossed in (
            other.crossJoin(bound),
            bound.crossJoin(other),
            # A Cartesian product, which numbers the pairs of partitions.
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


@pytest.mark.parametrize("how", ["fail", "cancel", "end"])
def test_a_task_that_waits_ends_at_once(cluster, made, how, journal):
    """Within a second of its cancellation, or the failure or the end of its topology, a task that waits for an event has ended."""
    ends_a_wait(cluster, made, how, journal)  # Spark's JVM loads what it has for such an end: up to a second of its own
    made.clear()
    assert ends_a_wait(cluster, made, how, journal) < 1.0


def ends_a_wait(cluster, made, how, journal) -> float:
    """Seconds until Spark shows no task any more; the user's function is over within one, the first time too."""
    crew = stagecrew.crew(cluster)
    topology = crew.topology("t").start()
    operator = topology.coordinate("o", lambda context: Noting(context, made))

    def noted(gateway, batches):
        try:
            yield from waiting(gateway, batches)
        finally:
            journal.write(event="over")

    dataset = operator.map(cluster.range(0, 2, 1, 2), noted, "a long")
    outcome: list[Any] = []

    def collect():
        try:
            outcome.append(dataset.collect())
        except Exception as error:
            outcome.append(error)

    runner = threading.Thread(target=topology.wrap(collect))
    runner.start()
    (coordinator,) = made
    eventually(lambda: len(coordinator.events) == 2, 60, "both wait")
    tracker = cluster.sparkContext.statusTracker()
    (stage,) = tracker.getActiveStageIds()
    started = time.time()
    if how == "fail":
        coordinator.context.fail(ValueError("on purpose"))
    elif how == "cancel":
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
    took = time.time() - started
    over = [entry["time"] - started for entry in journal.read(event="over") if entry["time"] >= started]
    assert len(over) >= 2
    assert max(over) < 1.0
    with pytest.raises(stagecrew.CoordinatorFailed) if how == "fail" else contextlib.nullcontext():
        topology.close(cancel=True)
    return took


def test_fail_many_times_from_many_threads(cluster, made, caplog):
    """The topology fails once, by the first cause, with its traceback."""

    def work(gateway, batches):
        yield from waiting(gateway, batches)

    def break_it(coordinator, n):
        try:
            raise KeyError(f"number {n}")
        except KeyError as error:
            coordinator.context.fail(error)

    with (
        pytest.raises(stagecrew.CoordinatorFailed, match="number") as caught,
        stagecrew.crew(cluster).topology("t") as topology,
    ):
        operator = topology.coordinate("o", lambda context: Noting(context, made))
        dataset = operator.map(cluster.range(0, 2, 1, 2), work, "a long")

        def fails():
            eventually(lambda: len(made[0].events) == 2, 60, "both wait")
            threads = [threading.Thread(target=break_it, args=(made[0], n)) for n in range(16)]
            for thread in threads:
                thread.start()

        threading.Thread(target=fails).start()
        dataset.collect()
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.__traceback__ is not None
    (said,) = [record for record in caplog.records if "failed; the topology is cancelled" in record.message]
    assert said.exc_info[1] is caught.value.__cause__


@pytest.mark.parametrize(
    "callback", ["factory", "start", "ready", "handle_event", "finished", "run_in_coordinator_thread"]
)
def test_a_callback_that_raises(cluster, made, callback):
    """In whichever callback: the topology fails with that exception; the factory's own is raised where it is called."""

    def raises(self, *args):
        raise ZeroDivisionError(callback)

    def factory(context):
        if callback == "factory":
            raises(None)
        coordinator = Noting(context, made)
        if callback == "run_in_coordinator_thread":
            coordinator.start = lambda: context.run_in_coordinator_thread(raises, None)
        else:
            setattr(coordinator, callback, lambda *args: raises(None))
        return coordinator

    def work(gateway, batches):
        gateway.send(1)
        yield rows(gateway.subtask)

    expected = ZeroDivisionError if callback == "factory" else stagecrew.CoordinatorFailed
    with pytest.raises(expected, match=callback), stagecrew.crew(cluster).topology("t") as topology:
        topology.coordinate("o", factory).map(cluster.range(0, 1, 1, 1), work, "a long").collect()


def test_a_coordinator_that_blocks_in_close(sessions, made, caplog):
    """The exit is bounded by spark.stagecrew.close.timeout, and names the operator."""
    spark = sessions.get(LOCAL, **{"spark.stagecrew.close.timeout": "1s"})
    release = threading.Event()

    class Blocking(Noting):
        def close(self):
            release.wait(60)

    with stagecrew.crew(spark).topology("t") as topology:
        topology.coordinate("stuck", lambda context: Blocking(context, made)).bind(lambda gateway: 1)
        started = time.monotonic()
    assert time.monotonic() - started < 5
    release.set()
    assert "the coordinator of operator 'stuck' did not close within 1 s" in caplog.text


def test_an_inner_topology_that_is_left_open(cluster, made):
    """Its coordinators are closed with the outer one."""
    crew = stagecrew.crew(cluster)
    with crew.topology("outer"):
        inner = crew.topology("inner").start()
        inner.coordinate("o", lambda context: Noting(context, made)).bind(lambda gateway: 1)
    assert made[0].calls == [("close",)]


@pytest.mark.long
def test_what_is_unavailable(cluster, made):
    """Names are used once; a function that is bound serves one dataset; both say what to do."""
    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Noting(context, made))
        with pytest.raises(stagecrew.OperatorMisused, match="already has an operator 'o'"):
            topology.coordinate("o", lambda context: Noting(context, made))

        def work(gateway, batches):
            gateway.send(1)
            yield from batches

        bound = operator.bind(work)
        numbers = cluster.range(4)
        first = numbers.mapInArrow(bound, "id long")
        assert first.count() == first.count() == 4
        for again in (
            lambda: numbers.mapInArrow(bound, "id long"),
            lambda: cluster.range(2).mapInPandas(bound, "id long"),
        ):
            with pytest.raises(stagecrew.OperatorMisused, match="used on two datasets.*call bind\\(\\) once for each"):
                again()
        pairs = operator.bind(lambda gateway, values: (gateway.send(2), list(values))[1])
        one = cluster.sparkContext.parallelize(range(4), 2)
        mapped = one.mapPartitions(pairs)
        assert mapped.count() == mapped.map(lambda n: n).count() == 4
        with pytest.raises(stagecrew.OperatorMisused, match="two datasets"):
            cluster.sparkContext.parallelize(range(4), 2).mapPartitions(pairs).count()


# -- Resets and checkpoints


@pytest.mark.parametrize("checkpoints", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_checkpoints_under_load(cluster, made, monkeypatch, checkpoints):
    """With four threads that send at their own pace: when a checkpoint is complete exactly what its state counts as sent is in
    the tasks' mailboxes."""

    class Streaming(Noting):
        def __init__(self, context, made):
            super().__init__(context, made)
            self.lock = threading.Lock()
            self.sent = self.accepted = 0
            self.asked = None
            self.stop = False

        def push(self):
            while not self.stop:
                with self.lock:
                    for gateway in tuple(self.gateways.values()):
                        gateway.send_acknowledged(self.sent).add_done_callback(self.done)
                        self.sent += 1
                    if self.asked is not None and random.random() < 0.2:
                        # The cut is here: no other thread sends meanwhile.
                        self.asked.set_result(b"%d" % self.sent)
                        self.asked = None
                time.sleep(0.001)

        def done(self, future):
            assert future.exception() is None
            self.accepted += 1  # by one thread at a time: acknowledgements are read by one

        def checkpoint(self, checkpoint_id):
            future = Future()
            with self.lock:
                self.asked = future
            return future

    def work(gateway, batches):
        for event in gateway.events(timeout=60):
            if event == "stop":
                break
        yield rows(1)

    crew = stagecrew.crew(cluster)
    host, at_completion = crew.connection.host(), []
    original = host.checkpoint

    def checkpoint(binding, id_):
        future = original(binding, id_)
        future.add_done_callback(lambda _: at_completion.append(made[0].accepted))
        return future

    monkeypatch.setattr(host, "checkpoint", checkpoint)
    with crew.topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Streaming(context, made))
        dataset = operator.map(cluster.range(0, 2, 1, 2), work, "a long")
        runner = threading.Thread(target=topology.wrap(dataset.collect))
        runner.start()
        (coordinator,) = made
        eventually(lambda: len(coordinator.gateways) == 2, 60, "both run")
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


def test_coordinators_of_the_session(sessions, made):
    """They exist before Spark, are restored there, start with it, serve tasks outside of any topology, and are closed at its
    stop, as are those of topologies that are open then."""
    sessions.stop()
    seen = []

    class Counter(Noting):
        total = 0

        def __init__(self, context):
            super().__init__(context, made)
            seen.append(("made", context.state, SparkContext._active_spark_context is None))
            with pytest.raises(stagecrew.NotInitialised):
                context.fail(ValueError())

        def reset_to_checkpoint(self, checkpoint_id, state):
            seen.append(("restored", checkpoint_id, SparkContext._active_spark_context is None))
            self.total = int(state)

        def start(self):
            seen.append(("start", self.context.state))

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
        eventually(lambda: len(seen) == 3, 10, "it starts")
        assert seen == [("made", "uninitialised", True), ("restored", 4, True), ("start", "initialised")]
        crew = stagecrew.crew(spark)
        operator = crew.operator("counter")
        bound = operator.map(spark.range(0, 1, 1, 1), work, "a long")
        assert bound.first().a == 11
        with crew.topology("t"):
            assert bound.first().a == 12
        other = crew.operator("counter").map(
            spark.range(0, 1, 1, 1), work, "a long"
        )  # another use, another coordinator
        assert other.first().a == 1
        taken = crew.checkpoint()
        assert (taken.id, taken.states) == (5, {"counter/1": b"12", "counter/2": b"1"})
        with pytest.raises(stagecrew.OperatorMisused, match="no operator 'other', but 'counter'"):
            crew.operator("other")
        assert stagecrew.configure(base("local[2]"), coordinators={"counter": Counter}).getOrCreate() is not None
        with pytest.raises(stagecrew.ConfigurationError, match="not among them: more"):
            stagecrew.configure(base("local[2]"), coordinators={"more": Counter}).getOrCreate()
        made[0].context.fail(ValueError("gone"))
        with pytest.raises(Exception, match="topology 'application' failed: ValueError: gone"):
            bound.first()
        with pytest.raises(stagecrew.CoordinatorFailed, match="gone"):
            crew.operator("counter")
        assert spark.range(3).count() == 3
        crew.topology("open").start().coordinate("o", lambda context: Noting(context, made)).bind(lambda gateway: 1)
    finally:
        spark.stop()
    assert all(coordinator.calls[-1] == ("close",) for coordinator in made)


def test_a_corrupt_state_fails_before_spark_starts(sessions, made):
    """getOrCreate says which coordinator cannot be restored, and no SparkContext was made."""
    sessions.stop()

    class Picky(Noting):
        def __init__(self, context):
            super().__init__(context, made)

        def reset_to_checkpoint(self, checkpoint_id, state):
            int(state)

    restore = stagecrew.Checkpoint(4, {"counter/1": b"garbage"})
    builder = stagecrew.configure(base("local[2]"), coordinators={"counter": Picky}, restore=restore)
    with pytest.raises(
        stagecrew.CoordinatorFailed, match="'counter' cannot be created, or restored from checkpoint 4: ValueError"
    ):
        builder.getOrCreate()
    assert SparkContext._active_spark_context is None
    eventually(lambda: "stagecrew-counter" not in {one.name for one in threading.enumerate()}, 5, "its thread ends")
    for wrong in ({"counter": 3}, {3: Picky}):
        with pytest.raises(stagecrew.OperatorMisused, match="coordinators= takes factories"):
            stagecrew.configure(base("local[2]"), coordinators=wrong)


# -- Streams


def test_a_streaming_query(sessions, made, tmp_path):
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
        operator = topology.coordinate("o", lambda context: Summing(context, made))
        stream = spark.readStream.format("rate").option("rowsPerSecond", 100).option("numPartitions", 2).load()
        mapped = operator.map(stream.select("value"), work, "a long")
        query = (
            mapped.writeStream.format("memory").queryName("mapped").trigger(processingTime="500 milliseconds").start()
        )
        eventually(lambda: made[0].total > 150, 60, "some batches")
        query.stop()
        count = spark.table("mapped").agg(f.count("*").alias("n")).first().n
    evaluations = [call[1] for call in made[0].named("ready")]
    assert len({one.stage for one in evaluations}) > 1
    assert made[0].total >= count > 0


def test_several_coordinators_share_a_store(cluster):
    """Those of one topology see what the others put there."""

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


def test_bound_functions_at_every_entry_point(sessions, made):
    """A function of `bind` talks with its coordinator wherever PySpark calls one: UDFs, pandas, Arrow, groups, UDTFs, data sources."""
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
        operator = topology.coordinate("o", lambda context: Doubling(context, made))
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
    heard = [call for coordinator in made for call in coordinator.calls]
    assert {call[1].subtask for call in heard if call[0] == "ready"} == {None}
    assert not [call for call in heard if call[0] in ("failed", "reset")]
