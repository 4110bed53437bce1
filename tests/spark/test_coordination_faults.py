"""Coordination at its limits, and where the way breaks: what fails is that attempt, or that topology, and it says why."""

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
from coordinators import Noting, executor_of_this_worker, rows, until_stop
from crewtools import LOCAL_CLUSTER, eventually, kill
from stagecrew.wire.serialization import WINDOW

cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: Small, so that each is reached; and attempts may fail often.
SETTINGS = {
    "spark.task.maxFailures": "2000",
    "spark.stagecrew.mailbox.events": "50",
    "spark.stagecrew.ack.timeout": "2s",
    "spark.stagecrew.event.maxSize": "64k",
    "spark.stagecrew.request.timeout": "30s",
}


@pytest.fixture
def small(sessions):
    """A session on a cluster of two executors, with small limits."""
    return sessions.get(LOCAL_CLUSTER, **SETTINGS)


@pytest.fixture
def cluster(sessions):
    """A session with the limits that users have."""
    return sessions.get(LOCAL_CLUSTER, **{"spark.task.maxFailures": "30"})


@pytest.fixture
def made():
    """The coordinators that a test made."""
    return []


def running(topology, dataset, outcome):
    """A thread that runs the dataset inside the topology; what came of it is in `outcome`."""

    def collect():
        try:
            outcome.append(dataset.collect())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=topology.wrap(collect))
    thread.start()
    return thread


# -- Limits


def test_a_full_mailbox(small, made):
    """It fails the attempt that does not take its events, with that reason, and no other; whoever sent them learns of it."""
    futures = []

    class Flooding(Noting):
        def ready(self, evaluation, gateway):
            super().ready(evaluation, gateway)
            if evaluation.subtask == 0 and evaluation.attempt_number == 0:
                futures.extend(gateway.send(n) for n in range(60))
            gateway.send("go")

        def handle_request(self, evaluation, request):
            return never

    def work(gateway, batches):
        from pyspark import TaskContext

        if gateway.subtask == 0 and TaskContext.get().attemptNumber() == 0:
            gateway.request("waits, and takes no events")
        assert next(gateway.events(timeout=30)) == "go"
        yield rows(gateway.subtask)

    never: Future[Any] = Future()
    with stagecrew.crew(small).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Flooding(context, made))
        found = operator.map(small.range(0, 2, 1, 2), work, "a long").collect()
    assert sorted(row.a for row in found) == [0, 1]
    ((_, evaluation, reason),) = made[0].named("failed")
    assert evaluation.subtask == 0
    assert "its mailbox is full: " in reason
    with pytest.raises(stagecrew.EvaluationEnded, match="its mailbox is full"):
        futures[-1].result(0)


def test_an_executor_that_does_not_acknowledge(small, made):
    """One that stands still fails the attempts there after spark.stagecrew.ack.timeout, and nothing else; they come again."""

    def work(gateway, batches):
        gateway.send(executor_of_this_worker())
        until_stop(gateway)
        yield rows(gateway.subtask)

    outcome: list[Any] = []
    with stagecrew.crew(small).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Noting(context, made))
        dataset = operator.map(small.range(0, 4, 1, 4), work, "a long")
        thread = running(topology, dataset, outcome)
        (coordinator,) = made
        eventually(lambda: len(coordinator.events) == 4, 60, "all run")
        executors = {evaluation: pid for evaluation, (pid,) in coordinator.events.items()}
        assert len(set(executors.values())) == 2
        stopped = executors[next(iter(executors))]
        kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        try:
            sent = {one: gateway.send("x") for one, gateway in tuple(coordinator.gateways.items())}
            there = {one for one, pid in executors.items() if pid == stopped}
            eventually(lambda: len(coordinator.named("failed")) == len(there), 20, "those there have failed")
            took = time.monotonic() - began
        finally:
            kill(stopped, signal.SIGCONT)
        assert {evaluation for _, evaluation, _ in coordinator.named("failed")} == there
        assert all("has not said within 2.0 s that it has an event" in call[2] for call in coordinator.named("failed"))
        assert 1.9 < took < 10
        for evaluation, future in sent.items():
            assert (future.exception(10) is not None) == (evaluation in there)
        eventually(lambda: len(coordinator.events) == 4 + len(there), 60, "they run again")
        for gateway in tuple(coordinator.gateways.values()):
            gateway.send("stop")
        thread.join(60)
    assert sorted(row.a for row in outcome[0]) == [0, 1, 2, 3]
    assert len(coordinator.named("failed")) == len(there)


def test_what_is_too_large_or_cannot_be_pickled(small, made):
    """Events, requests, replies, both ways: an error where it is sent, that names the setting, and nothing else fails."""
    seen = []

    class Large(Noting):
        def ready(self, evaluation, gateway):
            super().ready(evaluation, gateway)
            for event, error in (
                (b"x" * 70_000, stagecrew.EventTooLarge),
                ((n for n in ()), stagecrew.EventNotPicklable),
            ):
                with pytest.raises(error):
                    gateway.send(event)
                seen.append(error)

        def handle_request(self, evaluation, request):
            return b"x" * 70_000 if request == "large" else (n for n in ())

    def work(gateway, batches):
        large, generator = b"x" * 70_000, (n for n in ())
        for call in (gateway.send, gateway.request):
            with pytest.raises(stagecrew.EventTooLarge, match="65536 of spark.stagecrew.event.maxSize"):
                call(large)
            with pytest.raises(stagecrew.EventNotPicklable, match="a generator cannot travel"):
                call(generator)
        with pytest.raises(stagecrew.RequestFailed, match="EventTooLarge") as caught:
            gateway.request("large")
        assert isinstance(caught.value.__cause__, stagecrew.EventTooLarge)
        with pytest.raises(stagecrew.RequestFailed, match="EventNotPicklable"):
            gateway.request("generator")
        gateway.send(b"x" * 60_000)
        yield rows(1)

    with stagecrew.crew(small).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Large(context, made))
        assert operator.map(small.range(0, 1, 1, 1), work, "a long").count() == 1
    assert len(seen) == 2
    assert [len(event) for event in made[0].all_events()] == [60_000]
    assert not made[0].named("failed")


def test_an_event_size_that_does_not_fit_into_a_frame(sessions):
    """It is refused where the first operator is bound, by both names."""
    spark = sessions.get(
        "local[2,4]", **{"spark.stagecrew.event.maxSize": "70m", "spark.stagecrew.channel.maxFrame": "64m"}
    )
    with (
        pytest.raises(stagecrew.ConfigurationError, match="event.maxSize=70m does not fit into .*maxFrame=64m"),
        stagecrew.crew(spark).topology("t") as topology,
    ):
        topology.coordinate("o", stagecrew.Coordinator).bind(len)


def test_large_events_behind_small_ones(cluster, made):
    """An event larger than what is left of the window waits until the small one before it is handled, and no longer."""

    def work(gateway, batches):
        started = time.monotonic()
        gateway.send("small")
        gateway.send(b"x" * (9 << 20))
        gateway.send(b"y" * (15 << 20))
        gateway.send("small")
        assert time.monotonic() - started < 20
        yield rows(1)

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Noting(context, made))
        assert operator.map(cluster.range(0, 1, 1, 1), work, "a long").count() == 1
    assert [len(event) for event in made[0].all_events()] == [5, 9 << 20, 15 << 20, 5]


# -- Threads of one task


def test_a_thread_that_has_no_room_holds_up_no_other(cluster, made, tmp_path):
    """While one thread of a task waits for room to send, another receives, and what it does makes room."""
    goes_on = tmp_path / "goes on"

    class Blocking(Noting):
        def handle_event(self, evaluation, event):
            if event == 0:
                self.gateways[evaluation].send("there is much")
                eventually(goes_on.exists, 60, "the task has received it")
            super().handle_event(evaluation, event)

    def work(gateway, batches):
        sender = threading.Thread(target=lambda: [gateway.send(n) for n in range(10_000)])
        sender.start()
        eventually(
            lambda: gateway._asked_at >= WINDOW, 30, "it has sent as much as may be unhandled, and asked for room"
        )
        assert next(gateway.events(timeout=30)) == "there is much"
        Path(goes_on).touch()
        sender.join()
        yield rows(1)

    crew = stagecrew.crew(cluster)
    with crew.topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Blocking(context, made))
        assert operator.map(cluster.range(0, 1, 1, 1), work, "a long").count() == 1
    assert made[0].all_events() == list(range(10_000))


def test_threads_of_one_task_request_and_receive(cluster, made):
    """Each request gets its own reply, each event one receiver, whichever threads ask at once."""

    class Answering(Noting):
        def ready(self, evaluation, gateway):
            super().ready(evaluation, gateway)
            for number in range(400):
                gateway.send(number)
            gateway.close()

        def handle_request(self, evaluation, request):
            return ("reply", request)

    def work(gateway, batches):
        wrong, received = [], []

        def asks(thread):
            wrong.extend(n for n in range(100) if gateway.request((thread, n)) != ("reply", (thread, n)))

        def receives():
            received.extend(gateway.events(timeout=30))

        threads = [threading.Thread(target=asks, args=(n,)) for n in range(4)]
        threads += [threading.Thread(target=receives)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert received == list(range(400))
        yield rows(len(received))

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Answering(context, made))
        assert [row.a for row in operator.map(cluster.range(0, 2, 1, 2), work, "a long").collect()] == [400, 400]


# -- Ends


def test_one_that_is_cut_short_while_it_waits(cluster, made, tmp_path):
    """Nobody needs its rows any more: it is told so, and does not wait for ever in its worker."""
    ended = tmp_path / "ended"

    def work(gateway, batches):
        yield rows(*range(3))
        try:
            yield rows(*range(12_500))  # more than Python's buffer holds, less than the socket's
        except GeneratorExit:  # the three rows were there, and enough, before these
            Path(ended).write_text("did not wait")
            raise
        try:
            for _ in gateway.events():
                pass
        except stagecrew.EvaluationEnded as error:
            Path(ended).write_text(str(error))
            raise

    for _ in range(5):
        made.clear()
        with stagecrew.crew(cluster).topology("t") as topology:
            operator = topology.coordinate("o", lambda context: Noting(context, made))
            found = operator.map(cluster.range(0, 1, 1, 1), work, "a long").limit(3).collect()
            assert len(found) == 3
            said = eventually(lambda: ended.exists() and ended.read_text(), 10, "its evaluation has ended")
        assert [call[0] for call in made[0].calls] == ["ready", "abandoned", "close"]
        if said != "did not wait":
            break
        ended.unlink()
    assert "Spark needed no more of its rows" in said


@pytest.mark.parametrize("way", ["with", "close"])
def test_what_is_late_fails_the_topology_too(cluster, made, way):
    """An event that is handled, and raises, when its job has long ended: the `with` raises, or `close()`, once."""

    job_is_over = threading.Event()

    class Slow(Noting):
        def handle_event(self, evaluation, event):
            assert job_is_over.wait(60)
            eventually(lambda: not topology.is_active, 60, "the topology closes")
            raise ZeroDivisionError("late")

    def work(gateway, batches):
        gateway.send(1)
        yield rows(1)

    def run(topology):
        operator = topology.coordinate("o", lambda context: Slow(context, made))
        assert operator.map(cluster.range(0, 1, 1, 1), work, "a long").count() == 1
        job_is_over.set()

    topology = stagecrew.crew(cluster).topology("t")
    with pytest.raises(stagecrew.CoordinatorFailed, match="ZeroDivisionError: late"):
        if way == "with":
            with topology:
                run(topology)
        else:
            topology.start()
            run(topology)
            topology.close()
    assert not topology.is_active
    topology.close()


def test_a_failure_while_the_exit_waits_for_a_query(cluster, made):
    """The exit that waits for a streaming query ends by it, and raises it."""
    asked = threading.Event()

    class Failing(Noting):
        def handle_request(self, evaluation, request):
            asked.set()
            return never

    never: Future[Any] = Future()

    def work(gateway, batches):
        gateway.request("waits")
        yield from batches

    began = time.monotonic()
    with (
        pytest.raises(stagecrew.CoordinatorFailed, match="while it closes"),
        stagecrew.crew(cluster).topology("t") as topology,
    ):
        operator = topology.coordinate("o", lambda context: Failing(context, made))
        rate = cluster.readStream.format("rate").option("numPartitions", 1).load().select("value")
        bound = operator.bind(work)
        rate.mapInArrow(bound, "value long").writeStream.format("noop").start()

        def fails():
            assert asked.wait(60)
            eventually(lambda: not topology.is_active, 60, "the exit has begun")
            time.sleep(0.2)  # and waits for the query: from outside it looks the same
            made[0].context.fail(ValueError("while it closes"))

        threading.Thread(target=fails).start()
    assert time.monotonic() - began < 60
    assert not cluster.streams.active


def test_all_that_was_sent_has_arrived_when_the_job_ends(cluster, made):
    """A checkpoint that is taken right behind the action has every event of it, however slowly they are handled."""

    class Counting(Noting):
        count = 0

        def handle_event(self, evaluation, event):
            time.sleep(0.001)
            self.count += 1

        def checkpoint(self, checkpoint_id):
            return b"%d" % self.count

    def work(gateway, batches):
        for number in range(300):
            gateway.send(number)
        yield rows(1)

    with stagecrew.crew(cluster).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Counting(context, made))
        assert operator.map(cluster.range(0, 4, 1, 4), work, "a long").count() == 4
        assert topology.checkpoint().states == {"o/1": b"1200"}


def test_a_way_that_breaks(cluster, made):
    """When the driver's channel breaks the topology fails and says so, tasks that wait end, and the next topology works."""

    def work(gateway, batches):
        gateway.send("waits")
        for _ in gateway.events(timeout=90):
            pass
        yield rows(1)

    crew = stagecrew.crew(cluster)
    with (
        pytest.raises(
            stagecrew.CoordinatorFailed,
            match="the way from coordinators to executors broke: the driver's JVM closed the channel",
        ),
        crew.topology("t") as topology,
    ):
        operator = topology.coordinate("o", lambda context: Noting(context, made))

        def breaks():
            eventually(lambda: made and len(made[0].events) == 2, 60, "both wait")
            crew._channel._channel.shutdown()

        threading.Thread(target=breaks).start()
        operator.map(cluster.range(0, 2, 1, 2), work, "a long").collect()

    def says(gateway, batches):
        yield rows(gateway.request(20))

    class Doubling(Noting):
        def handle_request(self, evaluation, request):
            return 2 * request

    with crew.topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Doubling(context, made))
        assert operator.map(cluster.range(0, 1, 1, 1), says, "a long").first().a == 40


# -- Resets


@pytest.mark.long
def test_resets_while_threads_send_and_fail_is_called(small, made):
    """1,000 coordinators take over one from the other while foreign threads send, and call what is closed: the topology lives,
    and no evaluation of an instance that was reset succeeds."""
    started: queue.SimpleQueue[Noting] = queue.SimpleQueue()
    known: dict[int, Noting] = {}
    gateways: list[stagecrew.Gateway] = []
    over = threading.Event()
    sent = [0]

    class Quick(Noting):
        def start(self):
            started.put(self)

        def ready(self, evaluation, gateway):
            super().ready(evaluation, gateway)
            known[evaluation.id] = self
            gateways.append(gateway)

    def foreign():
        while not over.is_set():
            for gateway in gateways[-4:]:
                gateway.send("x")
                sent[0] += 1
            for coordinator in made[-20:-1]:
                if coordinator.context.state == "closed":
                    coordinator.context.fail(ValueError("of one that was reset"))  # nothing
                    coordinator.context.run_in_coordinator_thread(int)
            time.sleep(0.002)

    def work(gateway, batches):
        until_stop(gateway)
        yield rows(gateway.id)

    outcome: list[Any] = []
    with stagecrew.crew(small).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: Quick(context, made))
        thread = running(topology, operator.map(small.range(0, 2, 1, 2), work, "a long"), outcome)
        threads = [threading.Thread(target=foreign) for _ in range(3)]
        for one in threads:
            one.start()
        try:
            eventually(lambda: len(gateways) >= 2, 60, "both run")
            for _ in range(1000):
                started.get(timeout=30)  # the one before has begun
                topology.reset()
            started.get(timeout=30)
            eventually(lambda: len(made[-1].gateways) == 2, 60, "both run under the last")
        finally:
            over.set()
            for one in threads:
                one.join()
        for gateway in made[-1].gateways.values():
            gateway.send("stop")
        thread.join(60)
    assert len(made) == 1001
    assert sent[0] > 100
    ids = [row.a for row in outcome[0]]
    assert len(ids) == 2
    assert {known[id_] for id_ in ids} == {made[-1]}
    assert len(known) >= 4, "no evaluation of an instance that was reset"
