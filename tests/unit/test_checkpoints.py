"""Checkpoints and resets of coordinators, with the harness of `stagecrew.testing` and without Spark.

The cut of a checkpoint is the moment whose state it contains: events of the coordinator are sent before or after it.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stagecrew
from stagecrew.testing import CoordinatorHarness


class Counting(stagecrew.Coordinator):
    """Passes each event on to every task. Its state is two counts: events handled and events sent."""

    def __init__(self, context):
        super().__init__(context)
        self.handled, self.sent = 0, 0
        self.gateways = {}
        self.calls: list[Any] = []
        self.state: Any = None  # if set, `checkpoint` returns this instead

    def start(self):
        self.calls.append("start")

    def ready(self, evaluation, gateway):
        self.gateways[evaluation] = gateway

    def failed(self, evaluation, reason):
        self.calls.append(("failed", evaluation.id))
        del self.gateways[evaluation]

    def handle_event(self, evaluation, event):
        self.handled += 1
        self.send(event)

    def send(self, event):
        for gateway in self.gateways.values():
            gateway.send(event)
        self.sent += 1

    def checkpoint(self, checkpoint_id):
        if isinstance(self.state, Exception):
            raise self.state
        return self.state if self.state is not None else b"%d %d" % (self.handled, self.sent)

    def checkpoint_complete(self, checkpoint_id):
        self.calls.append(("complete", checkpoint_id))

    def checkpoint_aborted(self, checkpoint_id):
        self.calls.append(("aborted", checkpoint_id))

    def reset_to_checkpoint(self, checkpoint_id, state):
        self.calls.append(("restored", checkpoint_id, state))
        self.handled, self.sent = map(int, state.split())

    def close(self):
        self.calls.append("close")


@pytest.fixture
def harness():
    """A harness with a `Counting` coordinator."""
    with CoordinatorHarness(Counting) as made:
        yield made
    assert made.coordinator.calls[-1] == "close"


def test_a_state_that_is_available_immediately_is_in_the_checkpoint(harness):
    """A checkpoint contains the state, and the coordinator is notified that it is complete. Ids must increase."""
    task = harness.evaluation(0)
    task.send("a")
    checkpoint = harness.checkpoint()
    assert (checkpoint.id, checkpoint.states) == (1, {"operator/1": b"1 1"})
    assert harness.coordinator.calls == ["start", ("complete", 1)]
    assert harness.checkpoint(7).id == 7
    with pytest.raises(stagecrew.errors.CheckpointFailed, match="is not newer than checkpoint 7"):
        harness.checkpoint(7)


def test_the_cut_of_a_checkpoint_is_where_its_future_completes(harness):
    """Events sent before the cut are delivered. Events sent after the cut are held back until the checkpoint ends."""
    task = harness.evaluation(0)
    coordinator = harness.coordinator
    coordinator.state = Future()
    seen = []

    def meanwhile():
        coordinator.send("before")
        coordinator.state.set_result(b"at the cut")
        coordinator.send("after")
        seen.append(task.events())

    checkpoint = harness.checkpoint(meanwhile=meanwhile)
    assert checkpoint.states == {"operator/1": b"at the cut"}
    assert seen == [["before"]]
    assert task.events() == ["after"]


def test_a_coordinator_that_gives_no_state_in_time_aborts_the_checkpoint(harness):
    """If a coordinator gives no state in time, the checkpoint is aborted, and the error names the coordinator.

    The coordinator is notified of the abort, and its events are no longer held back.
    """
    task = harness.evaluation(0)
    coordinator = harness.coordinator
    coordinator.state = late = Future()
    with pytest.raises(
        stagecrew.errors.CheckpointFailed, match="not complete within 0 s: .* for the coordinators of 'operator'"
    ):
        harness.checkpoint()
    coordinator.send("a")
    assert task.events() == ["a"]
    assert coordinator.calls == ["start", ("aborted", 1)]
    coordinator.state = None
    assert harness.checkpoint().states == {"operator/1": b"0 1"}
    late.set_result(b"late")  # the state arrives after the abort, and no event may be held back
    coordinator.send("b")
    assert task.events() == ["b"]
    assert harness.failure is None


def test_an_aborted_checkpoint_delivers_the_events_after_its_cut(harness):
    """Events after the cut are held back until the checkpoint is aborted, and are then delivered."""
    task = harness.evaluation(0)
    task.acknowledges = False
    coordinator = harness.coordinator
    coordinator.state = Future()
    coordinator.send("before")

    def meanwhile():
        coordinator.state.set_result(b"")
        coordinator.send("after")
        assert task.events() == ["before"]

    with pytest.raises(stagecrew.errors.CheckpointFailed, match="for the coordinators of 'operator'"):
        harness.checkpoint(meanwhile=meanwhile)
    assert task.events() == ["after"]
    assert coordinator.calls == ["start", ("aborted", 1)]


def test_checkpoints_of_two_threads_run_one_after_the_other(harness):
    """If another thread starts a checkpoint, it waits until the first checkpoint is complete."""
    second = []

    def other():
        second.append(harness.operators.checkpoint(None, 10))

    thread = threading.Thread(target=other)

    def meanwhile():
        thread.start()
        thread.join(0.05)
        assert not second

    first = harness.checkpoint(meanwhile=meanwhile)
    deadline = time.monotonic() + 10
    while not second and time.monotonic() < deadline:
        harness.run()
    thread.join(10)
    assert (first.id, second[0].id) == (1, 2)


def test_a_failed_future_or_an_invalid_state_fails_only_the_checkpoint(harness):
    """A future that fails, or whose result is not bytes, fails only the checkpoint.

    An exception raised by `checkpoint` itself also fails the coordinator.
    """
    coordinator = harness.coordinator
    coordinator.state = Future()
    coordinator.state.set_exception(OSError("no room"))
    with pytest.raises(stagecrew.errors.CheckpointFailed, match="provided no state: OSError: no room") as caught:
        harness.checkpoint()
    assert isinstance(caught.value.__cause__, OSError)
    assert harness.failure is None
    coordinator.state = Future()
    coordinator.state.set_result("text")
    with pytest.raises(stagecrew.errors.CheckpointFailed, match="returned a str as its state"):
        harness.checkpoint()
    assert coordinator.calls == ["start", ("aborted", 1), ("aborted", 2)]
    assert harness.failure is None
    harness.coordinator.state = ValueError("in the callback")
    with pytest.raises(stagecrew.errors.CheckpointFailed, match="ValueError: in the callback"):
        harness.checkpoint()
    assert isinstance(harness.failure, ValueError)


def test_a_checkpoint_waits_for_events_before_its_cut(harness):
    """A checkpoint fails if a live task does not acknowledge an event before the cut in time."""
    task = harness.evaluation(0)
    task.acknowledges = False
    harness.coordinator.send("a")
    with pytest.raises(stagecrew.errors.CheckpointFailed, match="for the coordinators of 'operator'"):
        harness.checkpoint()
    checkpoint = harness.checkpoint(meanwhile=lambda: task.fail())
    assert checkpoint.states == {"operator/1": b"0 1"}
    # The coordinator is notified of the failure before the checkpoint is complete.
    assert harness.coordinator.calls == ["start", ("aborted", 1), ("failed", 1), ("complete", 2)]


def test_events_to_an_evaluation_that_begins_after_the_cut_are_held_back(harness):
    """Events to an evaluation that begins after the cut are delivered only when the checkpoint is complete."""
    coordinator = harness.coordinator
    coordinator.state = Future()
    first = harness.evaluation(0)
    first.acknowledges = False
    coordinator.send("before")
    seen = []

    def meanwhile():
        coordinator.state.set_result(b"")
        second = harness.evaluation(1)
        coordinator.send("after")
        seen.append((second, second.events(), first.events()))
        first.send_frame("ACCEPTED", sequence=1)

    harness.checkpoint(meanwhile=meanwhile)
    ((second, late, early),) = seen
    assert (late, early) == ([], ["before"])
    assert second.events() == first.events() == ["after"]


def test_a_reset_starts_a_new_coordinator_from_the_checkpoint(harness):
    """A reset closes the old coordinator, aborts its evaluations, and restores a new one from the checkpoint."""
    task = harness.evaluation(0)
    task.send("a")
    checkpoint = harness.checkpoint()
    task.send("b")
    old = harness.coordinator
    harness.reset(checkpoint)
    assert old.calls[-1] == "close"
    assert harness.coordinator is not old
    assert harness.coordinator.calls == [("restored", 1, b"1 1"), "start"]
    assert "reset" in task.abort_reason
    task.send("from an old evaluation")
    assert harness.coordinator.handled == 1
    restarted = harness.evaluation(0)
    restarted.send("c")
    assert harness.checkpoint().states == {"operator/1": b"2 2"}
    harness.reset(checkpoint)
    harness.reset(checkpoint)
    harness.reset()
    assert harness.coordinator.calls == ["start"]
    assert harness.coordinator.handled == 0


def test_a_reset_during_a_checkpoint_fails_the_checkpoint(harness):
    """A checkpoint fails if its coordinator is reset. The error says so, and no event is held back afterwards."""
    harness.coordinator.state = Future()
    old = harness.coordinator
    with pytest.raises(stagecrew.errors.CheckpointFailed, match="was reset during the checkpoint"):
        harness.checkpoint(meanwhile=harness.reset)
    old.state.set_result(b"late")
    task = harness.evaluation(0)
    harness.coordinator.send("a")
    assert task.events() == ["a"]


def test_a_corrupt_state_fails_the_topology(harness):
    """If `reset_to_checkpoint` raises because the state is corrupt, the topology fails."""
    harness.reset(stagecrew.Checkpoint(3, {"operator/1": b"garbage"}))
    assert isinstance(harness.failure, ValueError)
    with pytest.raises(stagecrew.errors.CoordinatorFailed):
        harness.checkpoint()


def test_the_cut_is_exact():
    """Under load, the state in each of 1,000 checkpoints counts exactly the events that were delivered to each task."""
    rng = random.Random(7)
    with CoordinatorHarness(Counting) as harness:
        coordinator = harness.coordinator
        tasks = [harness.evaluation(n) for n in range(4)]
        arrived = dict.fromkeys(tasks, 0)
        for number in range(1000):
            coordinator.state = Future()

            def meanwhile(number=number):
                for _ in range(rng.randrange(5)):
                    coordinator.send("before")
                    if rng.random() < 0.3:
                        rng.choice(tasks).send("from a task")
                coordinator.state.set_result(b"%d" % coordinator.sent)
                for _ in range(rng.randrange(5)):
                    coordinator.send("after")
                    if rng.random() < 0.3:
                        rng.choice(tasks).send("from a task")
                for task in tasks:
                    arrived[task] += len(task.events())

            checkpoint = harness.checkpoint(meanwhile=meanwhile)
            assert set(arrived.values()) == {int(checkpoint.states["operator/1"])}
            for task in tasks:
                arrived[task] += len(task.events())
            assert set(arrived.values()) == {coordinator.sent}


@given(st.integers(0, 2**40), st.dictionaries(st.text(), st.none() | st.binary()))
def test_a_checkpoint_is_the_same_after_serialization(id_, states):
    """`from_bytes` reverses `to_bytes`."""
    assert stagecrew.Checkpoint.from_bytes(stagecrew.Checkpoint(id_, states).to_bytes()) == stagecrew.Checkpoint(
        id_, states
    )


@given(st.data())
def test_corrupt_checkpoint_bytes_are_detected(data):
    """`from_bytes` raises ConfigurationError if a byte was changed or bytes are missing at the end."""
    good = stagecrew.Checkpoint(1, {"a/1": b"state"}).to_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    flipped = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    for bad in (flipped, good[:at], b""):
        with pytest.raises(stagecrew.errors.ConfigurationError):
            stagecrew.Checkpoint.from_bytes(bad)


def test_call_async_repeats_with_a_period(harness):
    """`call_async` with a period repeats the call one period after each one ends, until the coordinator is closed."""
    results = []
    harness.coordinator.context.call_async(lambda: harness.now, lambda *result: results.append(result), period=2.0)
    harness.run()
    harness.advance(5)
    assert results == [(0.0, None), (2.0, None), (4.0, None)]
    harness.reset()
    harness.advance(5)
    assert len(results) == 3
    harness.coordinator.context.call_async(lambda: 1 / 0, lambda *result: results.append(result))
    harness.run()
    assert isinstance(results[-1][1], ZeroDivisionError)


def test_every_calls_at_intervals_on_the_coordinators_thread(harness):
    """`every` calls after one interval, and then one interval after each call ends, until the coordinator is closed."""
    times = []
    harness.coordinator.context.every(2.0, lambda: times.append(harness.now))
    harness.run()
    assert times == []
    harness.advance(7)
    assert times == [2.0, 4.0, 6.0]
    harness.reset()
    harness.advance(5)
    assert len(times) == 3


def test_a_late_acknowledgement_fails_only_its_attempt(harness):
    """Only the attempt that does not acknowledge an event within spark.stagecrew.ack.timeout fails."""
    silent, other = harness.evaluation(0), harness.evaluation(1)
    silent.acknowledges = False
    harness.coordinator.send("a")
    harness.advance(29)
    assert silent.abort_reason is None
    harness.advance(2)
    assert "did not acknowledge an event within 30.0 s" in silent.abort_reason
    assert other.abort_reason is None
    assert harness.coordinator.calls == ["start", ("failed", 1)]


def test_a_restored_coordinator_is_notified_when_a_subtask_begins_again():
    """`subtask_reset` is called when a subtask begins again that had begun before the restored checkpoint.

    This holds for a reset in the same session and in a new one. A subtask that had not begun is not reset.
    """

    class RecordsResets(stagecrew.Coordinator):
        def __init__(self, context):
            super().__init__(context)
            self.resets = []

        def checkpoint(self, checkpoint_id):
            return b"state"

        def subtask_reset(self, subtask, checkpoint_id):
            self.resets.append(subtask)

    def resets_of_next_evaluations(harness):
        for subtask in (0, 1, 70):
            harness.evaluation(subtask=subtask).finish()
        return harness.coordinator.resets

    with CoordinatorHarness(RecordsResets) as harness:
        harness.evaluation(subtask=0).finish()
        harness.evaluation(subtask=70)
        checkpoint = stagecrew.Checkpoint.from_bytes(harness.checkpoint().to_bytes())
        assert checkpoint.subtasks == {"operator/1": 1 | 1 << 70}
        harness.reset(checkpoint)
        assert resets_of_next_evaluations(harness) == [0, 70]
        harness.reset()
        assert resets_of_next_evaluations(harness) == []
    with CoordinatorHarness(RecordsResets) as harness:
        harness.reset(checkpoint)
        assert resets_of_next_evaluations(harness) == [0, 70]
