"""TaskGateway against a fake connection and clock: flow control, timeouts, event credit, batching, and the end."""

from __future__ import annotations

import contextlib
import threading
import types

import pytest

import stagecrew
from stagecrew.wire.frames import Decoder, Frame
from stagecrew.wire.serialization import END, WINDOW, pack
from stagecrew.worker import task_gateway
from stagecrew.worker.task_gateway import Bound, TaskGateway


class FakeConnection:
    """A fake connection on which nothing arrives. Each wait advances the fake clock by its full timeout.

    If `next_frame` is set, that frame arrives after `delay` seconds of the next wait, if the wait is not shorter.
    """

    def __init__(self):
        self.now, self.waits, self.frames = 100.0, [], []
        self.next_frame, self.delay, self.is_broken = None, 0.5, False
        self.changed = threading.Condition()

    def remove(self, gateway):
        self.gateway = None

    def add(self, gateway):
        self.gateway = gateway

    def send(self, *frames):
        if self.is_broken:
            raise stagecrew.errors.EvaluationEnded("the connection is broken")
        self.frames += [frame.kind for frame in Decoder(1 << 24).feed(b"".join(frames))]

    def wait(self, found, seconds):
        if (result := found()) is not None:
            return result
        self.waits.append(seconds)
        if self.next_frame is not None and seconds >= self.delay:
            self.now += self.delay
            self.gateway._handle(self.next_frame)
            self.next_frame = None
            return found()
        self.now += seconds
        return found()


@pytest.fixture
def connection(monkeypatch):
    """A fake connection whose clock replaces `time` in the gateway's module."""
    made = FakeConnection()
    monkeypatch.setattr(task_gateway, "time", types.SimpleNamespace(monotonic=lambda: made.now, sleep=lambda _: None))
    return made


@pytest.fixture
def gateway(connection):
    """A gateway whose send window is full: it has sent WINDOW messages, and the coordinator has handled none of them. Its
    request timeout is 30 s."""
    context = types.SimpleNamespace(
        taskAttemptId=lambda: 1, attemptNumber=lambda: 0, stageId=lambda: 0, partitionId=lambda: 0
    )
    made = TaskGateway(connection, Bound("b", "the operator", "t", None, 1 << 20, 30.0), 0, context)
    made._flusher = object()  # so that no thread flushes later
    for _ in range(WINDOW):
        made.send(b"x")
    return made


def test_a_send_without_room_fails_after_the_request_timeout(gateway, connection):
    """If the send window stays full, a send requests a HANDLED report. After the request timeout, it fails with an error
    that names the operator and the backlog."""
    with pytest.raises(
        stagecrew.errors.CoordinationTimeout,
        match=f"'the operator' has {WINDOW} unhandled messages of this task .{2 * WINDOW} bytes.* within 30 s",
    ):
        gateway.send(b"x")
    assert connection.waits == [30.0]
    assert connection.frames[-1] == "ASK_HANDLED"


def test_a_send_continues_when_a_message_is_handled(gateway, connection):
    """A send that waits for room continues as soon as one message is handled."""
    connection.next_frame = Frame("HANDLED", {"sequence": 1})
    gateway.send(b"x")
    assert connection.waits == [30.0]


def test_room_that_appears_just_after_the_check_is_noticed(gateway, connection):
    """If another thread receives HANDLED between the sender's check and its wait, the sender does not wait."""
    real_has_room = gateway._has_room

    def has_room_just_before_handled(size):
        found = real_has_room(size)
        gateway._handled = WINDOW  # as if another thread had received HANDLED just after the check
        return found

    gateway._has_room = has_room_just_before_handled
    gateway.send(b"one more")
    assert connection.waits == []


def test_the_timeout_of_a_request_includes_all_its_waits(gateway, connection):
    """A request waits for room and for its reply, and both waits together take at most its timeout."""
    with pytest.raises(stagecrew.errors.CoordinationTimeout, match=r"within 0\.5 s"):
        gateway.request(b"x", timeout=0.5)
    assert connection.waits == [0.5]
    connection.waits.clear()
    connection.next_frame = Frame("HANDLED", {"sequence": 1})
    began = connection.now
    with pytest.raises(stagecrew.errors.CoordinationTimeout, match=r"did not reply within 2 s"):
        gateway.request(b"x", timeout=2.0)
    assert connection.waits == [2.0, 1.5]
    assert connection.now - began == 2.0


def test_a_late_reply_is_dropped(gateway, connection):
    """A reply that arrives after its request has timed out is dropped."""
    connection.next_frame = Frame("HANDLED", {"sequence": 1})
    with pytest.raises(stagecrew.errors.CoordinationTimeout):
        gateway.request(b"x", timeout=2.0)
    gateway._handle(Frame("REPLY", {"sequence": WINDOW + 1, "outcome": "ok", "payload": b"much"}))
    assert gateway._replies == {}


def test_more_events_are_requested_while_one_is_handled(gateway, connection):
    """If credit is low when a thread takes the last event, the gateway grants more credit immediately. Otherwise
    other waiting threads would starve while this thread handles the event."""

    def arrive(*events):
        gateway._handle(Frame("EVENTS", {"first": 1, "payloads": events}))

    connection.wait = lambda found, _seconds: found() or arrive(pack(b"x" * 200_000, 1 << 20)) or found()
    assert next(gateway.events()) == b"x" * 200_000
    assert connection.frames.count("CREDIT") == 2
    arrive(*[b"\0"] * 512)
    events = gateway.events()
    for _ in range(511):
        next(events)
    assert connection.frames.count("CREDIT") == 2
    next(events)
    assert connection.frames.count("CREDIT") == 3


def test_buffered_messages_are_sent_before_the_next_event_is_returned(gateway, connection):
    """Buffered messages are flushed even if the next event has already arrived, because the task may work on that event
    for a long time."""
    gateway._handle(Frame("HANDLED", {"sequence": WINDOW}))
    gateway._handle(Frame("EVENTS", {"first": 1, "payloads": [b"\0", b"\0"]}))
    gateway.send(b"x")
    gateway.send(b"x")  # sent right after the previous one, so it is buffered
    assert gateway._unsent
    next(gateway.events())
    assert not gateway._unsent
    assert connection.frames[-1] == "EVENTS"


def test_the_end_reaches_all_receivers(gateway):
    """After the coordinator closes its gateway, every current and later `events()` iterator ends."""
    gateway._handle(Frame("EVENTS", {"first": 1, "payloads": [b"\0", END]}))
    assert list(gateway.events()) == [b""]
    assert list(gateway.events()) == []


@pytest.mark.parametrize("call", [lambda gateway: next(gateway.events()), lambda gateway: gateway.request(b"x", 60)])
def test_the_end_of_an_evaluation_wakes_a_waiting_thread(gateway, connection, call):
    """When the evaluation ends, a waiting thread gets EvaluationEnded, so it does not stay in the worker process."""
    gateway._handle(Frame("HANDLED", {"sequence": WINDOW}))

    def wait(found, _seconds):
        assert found() is None
        connection.wait = type(connection).wait.__get__(connection)
        gateway._finish("abandoned", "enough")
        return found()

    connection.wait = wait
    with pytest.raises(stagecrew.errors.EvaluationEnded, match="has ended"):
        call(gateway)


def test_a_failed_evaluation_waits_until_the_driver_has_its_last_events(gateway, connection):
    """`_finish` waits until the driver has acknowledged the failure. Otherwise Spark could report the failure before the
    driver has the last events."""
    connection.next_frame = Frame("REPLY", {"sequence": WINDOW + 1, "outcome": "ok", "payload": b""})
    gateway._finish("failed", "ValueError: on purpose")
    assert connection.frames[-1] == "FINISH"
    assert connection.waits == [1.0]
    assert connection.next_frame is None


def test_the_reason_of_a_failure_can_be_any_text(gateway, connection):
    """A failure whose message has a lone surrogate is reported. No encoding error replaces the user's exception."""
    gateway._finish("failed", "ValueError: no file \udcff")
    assert connection.frames[-1] == "FINISH"


@pytest.mark.parametrize("reply", [None, Frame("ABORT", {"reason": "Spark has killed its attempt"})])
def test_a_failed_evaluation_waits_for_a_short_time_only(gateway, connection, reply):
    """`_finish` returns even if the driver does not acknowledge the failure, or if the attempt was killed."""
    connection.next_frame = reply
    gateway._finish("failed", "ValueError: on purpose")
    assert connection.waits == [1.0]


@pytest.mark.parametrize("outcome", ["finished", "failed"])
def test_a_gateway_that_ends_on_a_broken_connection_leaves_nothing(connection, outcome):
    """If the connection is broken when an evaluation ends, its gateway is removed, and its flusher thread ends."""
    context = types.SimpleNamespace(
        taskAttemptId=lambda: 1, attemptNumber=lambda: 0, stageId=lambda: 0, partitionId=lambda: 0
    )
    made = TaskGateway(connection, Bound("b", "the operator", "t", None, 1 << 20, 30.0), 0, context)
    made._start_flusher()
    connection.is_broken = True
    with pytest.raises(stagecrew.errors.EvaluationEnded) if outcome == "finished" else contextlib.nullcontext():
        made._finish(outcome, "")
    assert connection.gateway is None
    made._flusher.join(10)
    assert not made._flusher.is_alive()
