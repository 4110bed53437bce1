"""The operators of a topology on real threads, without Spark. The connection to executors drops all frames."""

from __future__ import annotations

import contextlib
import threading

import pytest

import stagecrew
from stagecrew.coordination import pool
from stagecrew.coordination.host import Host
from stagecrew.coordination.operators import Operators
from stagecrew.wire.frames import encode
from support.operator_fakes import DroppingWire
from support.waiting import eventually


class RecordingTopology:
    """A fake topology that records why it was cancelled."""

    name = id = "t"
    is_active = True

    def __init__(self):
        self.cancelled = []

    def streaming_query(self):
        """Returns None, because no query is running."""

    def cancel_failed(self, cause):
        self.cancelled.append(cause)


class RecordsGateways(stagecrew.Coordinator):
    """Records the gateway of each evaluation."""

    def __init__(self, context):
        super().__init__(context)
        self.gateways = []

    def ready(self, evaluation, gateway):
        self.gateways.append(gateway)

    def failed(self, evaluation, reason):
        pass


def create_operators(factory):
    """Creates operators with one binding. Returns the topology, the operators, the host and the binding's id."""
    topology = RecordingTopology()
    operators = Operators(topology, lambda: 5.0)
    host = Host(DroppingWire(), 1 << 20, 30.0)
    operators.name_operator("o")
    return topology, operators, host, operators.add("o", factory, host)


def ready_frame(evaluation, binding):
    """A frame that begins an evaluation of subtask 0."""
    return encode(
        "READY", evaluation=evaluation, binding=binding, subtask=0, attempt=1, number=0, stage=0, partition=0,
        stage_attempt=0, partitions=1,
    )  # fmt: skip


def test_send_and_fail_during_a_reset(monkeypatch):
    """A coordinator can send and call `fail` in another thread while it is reset.

    The topology fails at most once, because of that call. It does not fail if the reset was first. Nothing hangs, and
    every thread ends. The test does 1,000 such resets.
    """
    monkeypatch.setattr(pool, "_IDLE", 0.05)
    before = set(threading.enumerate())
    failed = 0
    for number in range(1000):
        coordinators = []

        def factory(context, coordinators=coordinators):
            coordinators.append(RecordsGateways(context))
            return coordinators[-1]

        topology, operators, host, binding = create_operators(factory)
        host.received("1", ready_frame(number, binding))
        cause = KeyError(number)
        begin = threading.Barrier(2)

        def send_and_fail(begin=begin, coordinators=coordinators, cause=cause):
            begin.wait(10)
            for gateway in coordinators[0].gateways:
                gateway.send("x")
            coordinators[0].context.fail(cause)
            for gateway in coordinators[0].gateways:
                gateway.send("y")

        thread = threading.Thread(target=send_and_fail)
        thread.start()
        begin.wait(10)
        with contextlib.suppress(stagecrew.errors.CoordinatorFailed):
            operators.reset(None)
        thread.join(10)
        assert not thread.is_alive()
        assert topology.cancelled == ([cause] if operators.cause is not None else [])
        assert operators.cause in (None, cause)
        failed += operators.cause is not None
        operators.close("the topology has ended")
        assert coordinators[0].context.state == "closed"
    eventually(lambda: set(threading.enumerate()) <= before, 10)
    assert failed < 1000 or failed > 0  # both orders are possible


def test_a_blocking_close_in_a_reset(caplog):
    """If a coordinator's `close` blocks during a reset, the next coordinator begins after the close timeout.

    A warning names the operator.
    """
    go, begun = threading.Event(), [threading.Event(), threading.Event()]
    instances = []

    class Blocking(RecordsGateways):
        def start(self):
            instances.append(self)
            begun[len(instances) - 1].set()

        def close(self):
            go.wait(30)

    topology = RecordingTopology()
    operators = Operators(topology, lambda: 0.2)
    host = Host(DroppingWire(), 1 << 20, 30.0)
    operators.add("o", Blocking, host)
    assert begun[0].wait(10)
    operators.reset(None)
    try:
        assert begun[1].wait(10)
        assert "the coordinator of operator 'o' did not close within 0.2 s" in caplog.text
        assert not topology.cancelled
    finally:
        go.set()
        operators.close("the topology has ended")


def test_an_exit_during_a_blocking_callback(caplog):
    """If a coordinator's callback blocks, the exit of its topology ends after the close timeout, and a warning names
    the operator."""
    go = threading.Event()

    class Blocking(RecordsGateways):
        def handle_event(self, evaluation, event):
            go.wait(30)

    _, operators, host, binding = create_operators(Blocking)
    host.received("1", ready_frame(1, binding))
    host.received("1", encode("EVENTS", evaluation=1, first=1, payloads=[b"\0x"]))
    operators._close_timeout = lambda: 0.2
    try:
        operators.close("the topology has ended")
        assert "the coordinator of operator 'o' did not close within 0.2 s" in caplog.text
    finally:
        go.set()


def test_prepared_coordinators_are_in_a_checkpoint():
    """A checkpoint contains the states of coordinators from the session builder, even if no dataset is bound to them.

    A checkpoint id that is not newer than the last one is refused.
    """
    operators = Operators(RecordingTopology(), lambda: 5.0)
    host = Host(DroppingWire(), 1 << 20, 30.0)

    class Stateful(RecordsGateways):
        def checkpoint(self, checkpoint_id):
            return b"state"

    operators.prepare("o", Stateful)
    operators.begin(host)
    assert operators.checkpoint(None, 10).states == {"o/unused": b"state"}
    operators.close("the session stops")
    with pytest.raises(stagecrew.errors.CheckpointFailed, match="is not newer than checkpoint 1"):
        operators.checkpoint(1, 10)


def test_a_failed_topology_refuses_bindings():
    """Binding an operator of a failed topology raises the topology's error, even if the topology fails during the
    binding."""
    _, operators, host, _ = create_operators(RecordsGateways)
    operators.fail(KeyError("k"))
    with pytest.raises(stagecrew.errors.CoordinatorFailed, match="KeyError: 'k'"):
        operators.add("o", RecordsGateways, host)

    def failing(context):
        operators.fail(KeyError("while it is made"))
        return RecordsGateways(context)

    _, operators, host, _ = create_operators(RecordsGateways)
    with pytest.raises(stagecrew.errors.CoordinatorFailed, match="while it is made"):
        operators.add("o", failing, host)
    operators.close("the topology has ended")


@pytest.mark.parametrize("moment", ["the factory runs", "the binding is not served yet"])
@pytest.mark.parametrize("method", ["add", "add_transient"])
def test_a_topology_that_ends_while_an_operator_is_used(method, moment, monkeypatch):
    """If another thread ends the topology while a use is created, the use is refused, and its coordinator closes once.

    Nothing of the use is left.
    """
    closes = []
    operators, host = Operators(RecordingTopology(), lambda: 5.0), Host(DroppingWire(), 1 << 20, 30.0)

    def end_topology():
        other = threading.Thread(target=operators.close, args=("the topology has ended",))
        other.start()
        other.join(10)
        assert not other.is_alive()

    class Closes(RecordsGateways):
        def __init__(self, context):
            super().__init__(context)
            if moment == "the factory runs":
                end_topology()

        def close(self):
            closes.append(self)

    if moment == "the binding is not served yet":
        add = host.add
        monkeypatch.setattr(host, "add", lambda binding: (end_topology(), add(binding)))
    with pytest.raises(stagecrew.errors.TopologyError, match="topology 't' has ended in another thread"):
        getattr(operators, method)("o", Closes, host)
    assert len(closes) == 1
    assert not host._liveness.bindings
    assert operators._table.all() == []
    operators.last_statistics()
    assert b"active" not in (host.statistics() or b"")
