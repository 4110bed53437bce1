"""A task's gateway whose coordinator handles nothing: waits end in time, and their errors name the coordinator."""

from __future__ import annotations

import threading
import types

import pytest

import stagecrew
from stagecrew.wire.frames import Decoder, Frame
from stagecrew.wire.serialization import END, WINDOW, pack
from stagecrew.worker import evaluations
from stagecrew.worker.evaluations import Bound, TaskGateway


class Connection:
    """A connection on which nothing arrives: a wait takes its full time on the test's clock."""

    def __init__(self):
        self.now, self.waits, self.frames = 100.0, [], []
        self.handled = None
        self.changed = threading.Condition()

    def remove(self, gateway):
        pass

    def add(self, gateway):
        self.gateway = gateway

    def send(self, frames):
        self.frames += [frame.kind for frame in Decoder(1 << 24).feed(frames)]

    def wait(self, found, seconds):
        if (result := found()) is not None:
            return result
        self.waits.append(seconds)
        if self.handled is not None:
            self.now += 1.5
            self.gateway._handle(self.handled)
            self.handled = None
            return found()
        self.now += seconds
        return found()


@pytest.fixture
def connection(monkeypatch):
    """The connection. The gateway uses its clock."""
    made = Connection()
    monkeypatch.setattr(evaluations, "time", types.SimpleNamespace(monotonic=lambda: made.now, sleep=lambda _: None))
    return made


@pytest.fixture
def gateway(connection):
    """A gateway with a request.timeout of 30 s that has sent as many messages as may be unhandled."""
    context = types.SimpleNamespace(
        taskAttemptId=lambda: 1, attemptNumber=lambda: 0, stageId=lambda: 0, partitionId=lambda: 0
    )
    made = TaskGateway(connection, Bound("b", "the operator", "t", None, 1 << 20, 30.0), 0, context)
    made._flusher = object()  # so that no thread flushes later
    for _ in range(WINDOW):
        made.send(b"x")
    return made


def test_a_send_without_credit(gateway, connection):
    """A send requests credit, fails after request.timeout without progress, and names operator and backlog."""
    with pytest.raises(
        stagecrew.errors.CoordinationTimeout,
        match=f"'the operator' has {WINDOW} unhandled messages of this task .{2 * WINDOW} bytes.* within 30 s",
    ):
        gateway.send(b"x")
    assert connection.waits == [30.0]
    assert connection.frames[-1] == "CREDIT"


def test_a_send_continues_when_a_message_is_handled(gateway, connection):
    """Each handled message gives credit, for which a send waits."""
    connection.handled = Frame("HANDLED", {"sequence": 1})
    gateway.send(b"x")
    assert connection.waits == [30.0]


def test_credit_that_arrives_between_two_checks(gateway, connection):
    """If another thread reads the credit while a sender checks for it, the sender continues."""
    real_has_room = gateway._has_room

    def has_room_with_late_credit(size):
        found = real_has_room(size)
        gateway._handled = WINDOW  # the other reader, just after the check
        return found

    gateway._has_room = has_room_with_late_credit
    gateway.send(b"one more")
    assert connection.waits == []


def test_the_timeout_of_a_request_includes_all_its_waits(gateway, connection):
    """The waits for credit and for the reply together take at most the timeout of the request."""
    with pytest.raises(stagecrew.errors.CoordinationTimeout, match=r"within 0\.5 s"):
        gateway.request(b"x", timeout=0.5)
    assert connection.waits == [0.5]
    connection.waits.clear()
    connection.handled = Frame("HANDLED", {"sequence": 1})
    began = connection.now
    with pytest.raises(stagecrew.errors.CoordinationTimeout, match=r"did not reply within 2 s"):
        gateway.request(b"x", timeout=2.0)
    assert connection.waits == [2.0, 0.5]
    assert connection.now - began == 2.0


def test_a_reply_without_a_waiting_request(gateway, connection):
    """A late reply is dropped."""
    connection.handled = Frame("HANDLED", {"sequence": 1})
    with pytest.raises(stagecrew.errors.CoordinationTimeout):
        gateway.request(b"x", timeout=2.0)
    gateway._handle(Frame("REPLY", {"sequence": WINDOW + 1, "outcome": "ok", "payload": b"much"}))
    assert gateway._replies == {}


def test_more_events_are_requested_while_one_is_handled(gateway, connection):
    """Another waiting thread must not starve while this one handles a large event, or the last of many."""

    def arrive(*events):
        gateway._handle(Frame("EVENTS", {"first": 1, "payloads": events}))

    connection.wait = lambda found, _seconds: found() or arrive(pack(b"x" * 200_000, 1 << 20)) or found()
    assert next(gateway.events()) == b"x" * 200_000
    assert connection.frames.count("CREDIT_REQUEST") == 2
    arrive(*[b"\0"] * 512)
    events = gateway.events()
    for _ in range(511):
        next(events)
    assert connection.frames.count("CREDIT_REQUEST") == 2
    next(events)
    assert connection.frames.count("CREDIT_REQUEST") == 3


def test_held_back_messages_are_sent_before_the_next_event(gateway, connection):
    """Held back messages are sent even if the next event has arrived: the task may work on it for long."""
    gateway._handle(Frame("HANDLED", {"sequence": WINDOW}))
    gateway._handle(Frame("EVENTS", {"first": 1, "payloads": [b"\0", b"\0"]}))
    gateway.send(b"x")
    gateway.send(b"x")  # a quick message: it is held back
    assert gateway._unsent
    next(gateway.events())
    assert not gateway._unsent
    assert connection.frames[-1] == "EVENTS"


def test_the_end_reaches_all_receivers(gateway):
    """The end also reaches later calls."""
    gateway._handle(Frame("EVENTS", {"first": 1, "payloads": [b"\0", END]}))
    assert list(gateway.events()) == [b""]
    assert list(gateway.events()) == []


@pytest.mark.parametrize("call", [lambda gateway: next(gateway.events()), lambda gateway: gateway.request(b"x", 60)])
def test_a_thread_that_waits_when_the_evaluation_ends(gateway, connection, call):
    """A waiting thread is notified, and does not stay in its worker."""
    gateway._handle(Frame("HANDLED", {"sequence": WINDOW}))

    def wait(found, _seconds):
        assert found() is None
        connection.wait = type(connection).wait.__get__(connection)
        gateway._finish("abandoned", "enough")
        return found()

    connection.wait = wait
    with pytest.raises(stagecrew.errors.EvaluationEnded, match="has ended"):
        call(gateway)
