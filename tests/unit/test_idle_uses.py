"""What uses of operators cost that nobody evaluates any more: no thread, no timer, little memory, and nothing in a checkpoint's time."""

from __future__ import annotations

import gc
import threading
import tracemalloc

import pytest

import stagecrew
from crewtools import eventually
from stagecrew.coordination import pool
from stagecrew.coordination.host import Host
from stagecrew.coordination.operators import Operators
from stagecrew.coordination.pool import TIMERS
from stagecrew.operators.alignment import AlignmentCoordinator
from stagecrew.operators.splits import SplitCoordinator
from stagecrew.operators.superstep_coordinator import SuperstepCoordinator
from stagecrew.wire.frames import encode
from unit_scopes import Nowhere, Scope


class Asked(stagecrew.Coordinator):
    """Counts how often its state is taken."""

    taken = 0

    def checkpoint(self, checkpoint_id):
        Asked.taken += 1
        return b"state"

    def handle_event(self, evaluation, event):
        pass


@pytest.fixture
def uses():
    """Uses of the operators of one topology: binds and evaluates as many as it is told."""
    host = Host(Nowhere(), 1 << 20, 30.0)
    operators = Operators(Scope(), lambda: 30.0)
    numbers = iter(range(1 << 30))

    def make(count, factory, name="o"):
        for at in range(count):
            number, binding = next(numbers), operators.add(name, factory, host)
            evaluate(host, binding, number)
            if at % 500 == 0:
                look(host)
        look(host)
        return operators, host

    yield make
    operators.close("the topology ends")


def evaluate(host, binding, number):
    """One evaluation begins and finishes."""
    fields = dict.fromkeys(("subtask", "attempt", "number", "stage", "partition", "stage_attempt"), 0)
    host.received("1", encode("READY", evaluation=number, binding=binding, partitions=1, **fields))
    host.received("1", encode("FINISH", evaluation=number, sequence=1, outcome="finished", reason=""))


def look(host):
    """What is told to the driver's JVM once a second, until nothing is new."""
    eventually(lambda: host.statistics() is None, 30)


def test_a_use_takes_2_kb_and_no_thread(uses):
    """3,000 uses more take at most 2 kB each, beside the coordinator's own state, and the threads are as many as before."""
    operators, _ = uses(600, stagecrew.Coordinator)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        uses(3000, stagecrew.Coordinator)
        gc.collect()
        each = (tracemalloc.get_traced_memory()[0] - before) / 3000
    finally:
        tracemalloc.stop()
    assert each <= 2048, each
    assert sum(thread.name.startswith("stagecrew-coordinator") for thread in threading.enumerate()) <= 20
    assert len(operators.checkpoint(None, 60).states) == 3600


@pytest.mark.parametrize(
    "factory",
    [
        lambda context: SplitCoordinator(context, iter([1, 2]), 60.0),
        lambda context: SuperstepCoordinator(context, None, 60.0, 1 << 20),
        lambda context: AlignmentCoordinator(context, 1, 0.1),
    ],
    ids=["splits", "supersteps", "alignment"],
)
def test_an_idle_use_has_no_thread_and_no_timer(uses, factory, monkeypatch):
    """When no evaluation of 100 uses is live, their threads end, and nothing waits for a time."""
    monkeypatch.setattr(pool, "_IDLE", 0.05)
    before = {thread for thread in threading.enumerate() if thread.name.startswith("stagecrew")}
    uses(100, factory)
    eventually(lambda: not [timer for _, _, timer in TIMERS._due if timer.f is not None], 20, "timers end")
    eventually(
        lambda: {one for one in threading.enumerate() if one.name.startswith("stagecrew")} <= before, 20, "threads end"
    )


def test_a_checkpoint_asks_only_what_was_called(uses):
    """Of 1,000 uses those are asked for their state that were called since the last checkpoint; all states are in each."""
    operators, host = uses(1000, Asked)
    Asked.taken = 0
    first = operators.checkpoint(None, 30)
    assert (Asked.taken, len(first.states)) == (1000, 1000)
    assert (operators.checkpoint(None, 30).states, Asked.taken) == (first.states, 1000)
    for number, binding in enumerate(list(operators._bindings.values())[:3]):
        evaluate(host, binding.id, 1 << 40 | number)
    assert (operators.checkpoint(None, 30).states, Asked.taken) == (first.states, 1003)
    operators.reset(first)
    assert (operators.checkpoint(None, 30).states, Asked.taken) == (first.states, 2003)


def test_a_checkpoint_that_fails_asks_again(uses):
    """What was asked in vain is asked in the next checkpoint."""
    fails = [True]

    class Failing(stagecrew.Coordinator):
        def checkpoint(self, checkpoint_id):
            if fails.pop():
                from concurrent.futures import Future

                declined = Future()
                declined.set_exception(ValueError("not now"))
                return declined
            fails.append(False)
            return b"x"

    operators, _ = uses(1, Failing)
    uses(5, Asked)
    Asked.taken = 0
    with pytest.raises(stagecrew.CheckpointFailed, match="not now"):
        operators.checkpoint(None, 30)
    fails.append(False)
    assert set(operators.checkpoint(None, 30).states.values()) == {b"x", b"state"}
