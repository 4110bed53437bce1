"""Idle uses of operators have no thread and no timer, need little memory, and do not slow down checkpoints."""

from __future__ import annotations

import gc
import threading
import tracemalloc

import pytest

import stagecrew
from stagecrew.coordination import pool
from stagecrew.coordination.host import Host
from stagecrew.coordination.operators import Operators
from stagecrew.coordination.pool import TIMERS
from stagecrew.operators.alignment import AlignmentCoordinator
from stagecrew.operators.splits import SplitCoordinator
from stagecrew.operators.superstep_coordinator import SuperstepCoordinator
from stagecrew.wire.frames import encode
from support.operator_fakes import DroppingWire, FakeTopology
from support.waiting import eventually

pytestmark = pytest.mark.slow


class CountsCheckpoints(stagecrew.Coordinator):
    """Counts the checkpoints that its instances were asked for."""

    requests = 0

    def checkpoint(self, checkpoint_id):
        CountsCheckpoints.requests += 1
        return b"state"

    def handle_event(self, evaluation, event):
        pass


@pytest.fixture
def uses():
    """Creates a given number of uses in one topology, with one finished evaluation each. Returns the operators
    and their host."""
    host = Host(DroppingWire(), 1 << 20, 30.0)
    operators = Operators(FakeTopology(), lambda: 30.0)
    numbers = iter(range(1 << 30))

    def make(count, factory, name="o"):
        for index in range(count):
            number, binding = next(numbers), operators.add(name, factory, host)
            evaluate(host, binding, number)
            if index % 500 == 0:
                report_statistics(host)
        report_statistics(host)
        return operators, host

    yield make
    operators.close("the topology ends")


def evaluate(host, binding, number):
    """Begins and finishes one evaluation."""
    fields = dict.fromkeys(("subtask", "attempt", "number", "stage", "partition", "stage_attempt"), 0)
    host.received("1", encode("READY", evaluation=number, binding=binding, partitions=1, **fields))
    host.received("1", encode("FINISH", evaluation=number, sequence=1, outcome="finished", reason=""))


def report_statistics(host):
    """Reports statistics, as the reporter does every second, until nothing new is left to report."""
    eventually(lambda: host.statistics() is None, 30)


def test_a_use_takes_at_most_2_kb_and_no_thread(uses):
    """3,000 further uses take at most 2 KiB each (the coordinators have no state of their own) and start no threads."""
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
    """When none of the 100 uses has a live evaluation, their threads have ended and no timer is set."""
    monkeypatch.setattr(pool, "_IDLE", 0.05)
    before = {thread for thread in threading.enumerate() if thread.name.startswith("stagecrew")}
    uses(100, factory)
    eventually(lambda: not [timer for _, _, timer in TIMERS._due if timer.f is not None], 20, "timers end")
    eventually(
        lambda: {thread for thread in threading.enumerate() if thread.name.startswith("stagecrew")} <= before,
        20,
        "threads end",
    )


def test_a_checkpoint_asks_only_coordinators_that_were_called(uses):
    """A checkpoint asks only the coordinators called since the last one, but contains the states of all 1,000 uses."""
    operators, host = uses(1000, CountsCheckpoints)
    CountsCheckpoints.requests = 0
    first = operators.checkpoint(None, 30)
    assert (CountsCheckpoints.requests, len(first.states)) == (1000, 1000)
    assert (operators.checkpoint(None, 30).states, CountsCheckpoints.requests) == (first.states, 1000)
    for number, binding in enumerate(list(operators._table.used.values())[:3]):
        evaluate(host, binding.id, 1 << 40 | number)
    assert (operators.checkpoint(None, 30).states, CountsCheckpoints.requests) == (first.states, 1003)
    operators.reset(first)
    assert (operators.checkpoint(None, 30).states, CountsCheckpoints.requests) == (first.states, 2003)


def test_after_a_failed_checkpoint_coordinators_are_asked_again(uses):
    """The checkpoint after a failed one asks the same coordinators again."""
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
    uses(5, CountsCheckpoints)
    CountsCheckpoints.requests = 0
    with pytest.raises(stagecrew.errors.CheckpointFailed, match="not now"):
        operators.checkpoint(None, 30)
    fails.append(False)
    assert set(operators.checkpoint(None, 30).states.values()) == {b"x", b"state"}
