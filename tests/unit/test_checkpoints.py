"""Checkpoints and resets of coordinators, and the harness of `stagecrew.testing` that drives them: no Spark, no threads."""

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
    """Its state is how many events it handled and sent; each event is sent on to every task."""

    def __init__(self, context):
        super().__init__(context)
        self.handled, self.sent = 0, 0
        self.gateways = {}
        self.heard: list[Any] = []
        self.state: Any = None  # what checkpoint answers instead

    def start(self):
        self.heard.append("start")

    def ready(self, evaluation, gateway):
        self.gateways[evaluation] = gateway

    def failed(self, evaluation, reason):
        self.heard.append(("failed", evaluation.id))
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
        self.heard.append(("complete", checkpoint_id))

    def checkpoint_aborted(self, checkpoint_id):
        self.heard.append(("aborted", checkpoint_id))

    def reset_to_checkpoint(self, checkpoint_id, state):
        self.heard.append(("restored", checkpoint_id, state))
        self.handled, self.sent = map(int, state.split())

    def close(self):
        self.heard.append("close")


@pytest.fixture
def harness():
    """A harness with that coordinator."""
    with CoordinatorHarness(Counting) as made:
        yield made
    assert made.coordinator.heard[-1] == "close"


def test_at_once(harness):
    """A state that is there at once is in the checkpoint, and the coordinator hears that it is complete."""
    task = harness.evaluation(0)
    task.send("a")
    taken = harness.checkpoint()
    assert (taken.id, taken.states) == (1, {"operator/1": b"1 1"})
    assert harness.coordinator.heard == ["start", ("complete", 1)]
    assert harness.checkpoint(7).id == 7
    with pytest.raises(stagecrew.CheckpointFailed, match="is not newer than checkpoint 7"):
        harness.checkpoint(7)


def test_late(harness):
    """The cut is where the future is completed: what is sent before goes out, what is sent after is kept back until the end."""
    task = harness.evaluation(0)
    coordinator = harness.coordinator
    coordinator.state = Future()
    seen = []

    def meanwhile():
        coordinator.send("before")
        coordinator.state.set_result(b"at the cut")
        coordinator.send("after")
        seen.append(task.events())

    taken = harness.checkpoint(meanwhile=meanwhile)
    assert taken.states == {"operator/1": b"at the cut"}
    assert seen == [["before"]]
    assert task.events() == ["after"]


def test_never(harness):
    """A coordinator that gives no state in time is named; it hears that the checkpoint was aborted, and what it sends goes out."""
    task = harness.evaluation(0)
    coordinator = harness.coordinator
    coordinator.state = never = Future()
    with pytest.raises(
        stagecrew.CheckpointFailed, match="not complete within 0 s: .* for the coordinators of 'operator'"
    ):
        harness.checkpoint()
    coordinator.send("a")
    assert task.events() == ["a"]
    assert coordinator.heard == ["start", ("aborted", 1)]
    coordinator.state = None
    assert harness.checkpoint().states == {"operator/1": b"0 1"}
    never.set_result(b"late")  # of the one that was aborted: it holds nothing back
    coordinator.send("b")
    assert task.events() == ["b"]
    assert harness.failure is None


def test_given_up_behind_its_cut(harness):
    """What was kept back behind the cut goes out when the checkpoint is given up."""
    task = harness.evaluation(0)
    task.acknowledges = False
    coordinator = harness.coordinator
    coordinator.state = Future()
    coordinator.send("before")

    def meanwhile():
        coordinator.state.set_result(b"")
        coordinator.send("after")
        assert task.events() == ["before"]

    with pytest.raises(stagecrew.CheckpointFailed, match="for the coordinators of 'operator'"):
        harness.checkpoint(meanwhile=meanwhile)
    assert task.events() == ["after"]
    assert coordinator.heard == ["start", ("aborted", 1)]


def test_two_threads_take_checkpoints(harness):
    """One waits for the other: a checkpoint that another takes meanwhile comes behind it."""
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


def test_exceptional(harness):
    """A future that fails declines the checkpoint, and nothing else; a state that is no bytes too."""
    coordinator = harness.coordinator
    coordinator.state = Future()
    coordinator.state.set_exception(OSError("no room"))
    with pytest.raises(stagecrew.CheckpointFailed, match="gave no state: OSError: no room") as caught:
        harness.checkpoint()
    assert isinstance(caught.value.__cause__, OSError)
    assert harness.failure is None
    coordinator.state = Future()
    coordinator.state.set_result("text")
    with pytest.raises(stagecrew.CheckpointFailed, match="returned a str as its state"):
        harness.checkpoint()
    assert coordinator.heard == ["start", ("aborted", 1), ("aborted", 2)]
    assert harness.failure is None
    harness.coordinator.state = ValueError("in the callback")
    with pytest.raises(stagecrew.CheckpointFailed, match="ValueError: in the callback"):
        harness.checkpoint()
    assert isinstance(harness.failure, ValueError)


def test_an_event_that_is_not_acknowledged(harness):
    """A checkpoint waits for what was sent before its cut; one whose attempt has failed is not waited for."""
    task = harness.evaluation(0)
    task.acknowledges = False
    harness.coordinator.send("a")
    with pytest.raises(stagecrew.CheckpointFailed, match="for the coordinators of 'operator'"):
        harness.checkpoint()
    taken = harness.checkpoint(meanwhile=lambda: task.fail())
    assert taken.states == {"operator/1": b"0 1"}
    # The failure is heard before the checkpoint is complete.
    assert harness.coordinator.heard == ["start", ("aborted", 1), ("failed", 1), ("complete", 2)]


def test_an_evaluation_that_begins_behind_the_cut(harness):
    """What is sent to it is kept back as well."""
    coordinator = harness.coordinator
    coordinator.state = Future()
    first = harness.evaluation(0)
    first.acknowledges = False
    coordinator.send("before")
    found = []

    def meanwhile():
        coordinator.state.set_result(b"")
        second = harness.evaluation(1)
        coordinator.send("after")
        found.append((second, second.events(), first.events()))
        first.send_frame("ACCEPTED", sequence=1)

    harness.checkpoint(meanwhile=meanwhile)
    ((second, late, early),) = found
    assert (late, early) == ([], ["before"])
    assert second.events() == first.events() == ["after"]


def test_reset(harness):
    """A new instance begins as of the checkpoint; no evaluation of before gets an answer; the old one is closed."""
    task = harness.evaluation(0)
    task.send("a")
    taken = harness.checkpoint()
    task.send("b")
    old = harness.coordinator
    harness.reset(taken)
    assert old.heard[-1] == "close"
    assert harness.coordinator is not old
    assert harness.coordinator.heard == [("restored", 1, b"1 1"), "start"]
    assert "reset" in task.abort_reason
    task.send("of an old evaluation")
    assert harness.coordinator.handled == 1
    again = harness.evaluation(0)
    again.send("c")
    assert harness.checkpoint().states == {"operator/1": b"2 2"}
    harness.reset(taken)
    harness.reset(taken)
    harness.reset()
    assert harness.coordinator.heard == ["start"]
    assert harness.coordinator.handled == 0


def test_a_reset_while_a_checkpoint_is_taken(harness):
    """The checkpoint fails by name, and holds nothing back."""
    harness.coordinator.state = Future()
    old = harness.coordinator
    with pytest.raises(stagecrew.CheckpointFailed, match="was reset during the checkpoint"):
        harness.checkpoint(meanwhile=harness.reset)
    old.state.set_result(b"late")
    task = harness.evaluation(0)
    harness.coordinator.send("a")
    assert task.events() == ["a"]


def test_a_state_that_is_corrupt(harness):
    """A coordinator that cannot be restored fails the topology."""
    harness.reset(stagecrew.Checkpoint(3, {"operator/1": b"garbage"}))
    assert isinstance(harness.failure, ValueError)
    with pytest.raises(stagecrew.CoordinatorFailed):
        harness.checkpoint()


def test_the_cut_is_exact():
    """Over 1,000 checkpoints under load: what the state counts as sent is in the mailboxes, and nothing else, when it is complete."""
    choice = random.Random(7)
    with CoordinatorHarness(Counting) as harness:
        coordinator = harness.coordinator
        tasks = [harness.evaluation(n) for n in range(4)]
        arrived = dict.fromkeys(tasks, 0)
        for number in range(1000):
            coordinator.state = Future()

            def meanwhile(number=number):
                for _ in range(choice.randrange(5)):
                    coordinator.send("before")
                    if choice.random() < 0.3:
                        choice.choice(tasks).send("from a task")
                coordinator.state.set_result(b"%d" % coordinator.sent)
                for _ in range(choice.randrange(5)):
                    coordinator.send("after")
                    if choice.random() < 0.3:
                        choice.choice(tasks).send("from a task")
                for task in tasks:
                    arrived[task] += len(task.events())

            taken = harness.checkpoint(meanwhile=meanwhile)
            assert set(arrived.values()) == {int(taken.states["operator/1"])}
            for task in tasks:
                arrived[task] += len(task.events())
            assert set(arrived.values()) == {coordinator.sent}


@given(st.integers(0, 2**40), st.dictionaries(st.text(), st.none() | st.binary()))
def test_bytes_of_a_checkpoint(id_, states):
    """They are read as they were written."""
    assert stagecrew.Checkpoint.from_bytes(stagecrew.Checkpoint(id_, states).to_bytes()) == stagecrew.Checkpoint(
        id_, states
    )


@given(st.data())
def test_corrupt_bytes_of_a_checkpoint(data):
    """One byte that differs, or is missing, is found."""
    good = stagecrew.Checkpoint(1, {"a/1": b"state"}).to_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    flipped = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    for bad in (flipped, good[:at], b""):
        with pytest.raises(stagecrew.CheckpointCorrupt):
            stagecrew.Checkpoint.from_bytes(bad)


def test_periodic_calls(harness):
    """`call_async` calls again so long after each end, by the harness's clock, until the coordinator is closed."""
    results = []
    harness.coordinator.context.call_async(lambda: harness.now, lambda *one: results.append(one), period=2.0)
    harness.run()
    harness.advance(5)
    assert results == [(0.0, None), (2.0, None), (4.0, None)]
    harness.reset()
    harness.advance(5)
    assert len(results) == 3
    harness.coordinator.context.call_async(lambda: 1 / 0, lambda *one: results.append(one))
    harness.run()
    assert isinstance(results[-1][1], ZeroDivisionError)


def test_calls_every_so_often(harness):
    """`every` calls on the coordinator's thread, so long after its begin and after each end, until the coordinator is closed."""
    times = []
    harness.coordinator.context.every(2.0, lambda: times.append(harness.now))
    harness.run()
    assert times == []
    harness.advance(7)
    assert times == [2.0, 4.0, 6.0]
    harness.reset()
    harness.advance(5)
    assert len(times) == 3


def test_a_late_acknowledgement_by_the_clock(harness):
    """It fails that attempt after spark.stagecrew.ack.timeout, and nothing else."""
    silent, other = harness.evaluation(0), harness.evaluation(1)
    silent.acknowledges = False
    harness.coordinator.send("a")
    harness.advance(29)
    assert silent.abort_reason is None
    harness.advance(2)
    assert "did not acknowledge an event within 30.0 s" in silent.abort_reason
    assert other.abort_reason is None
    assert harness.coordinator.heard == ["start", ("failed", 1)]


def test_a_restored_coordinator_hears_that_a_subtask_begins_anew():
    """The next evaluation of a subtask that had begun before the checkpoint is a reset to the restored coordinator, too: in the same
    process, in a new one, and for a use that claims its state; a subtask that had not begun is none."""

    class Notes(stagecrew.Coordinator):
        def __init__(self, context):
            super().__init__(context)
            self.resets = []

        def checkpoint(self, checkpoint_id):
            return b"state"

        def subtask_reset(self, subtask, checkpoint_id):
            self.resets.append(subtask)

    def next_evaluations(harness):
        for subtask in (0, 1, 70):
            harness.evaluation(subtask=subtask).finish()
        return harness.coordinator.resets

    with CoordinatorHarness(Notes) as harness:
        harness.evaluation(subtask=0).finish()
        harness.evaluation(subtask=70)
        taken = stagecrew.Checkpoint.from_bytes(harness.checkpoint().to_bytes())
        assert taken.subtasks == {"operator/1": 1 | 1 << 70}
        harness.reset(taken)
        assert next_evaluations(harness) == [0, 70]
        harness.reset()
        assert next_evaluations(harness) == []
    with CoordinatorHarness(Notes) as harness:
        harness.reset(taken)
        assert next_evaluations(harness) == [0, 70]
