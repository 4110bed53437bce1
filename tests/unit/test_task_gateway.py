"""A task's gateway whose coordinator handles nothing: whoever waits gives up in time, and says whom it waited for."""

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
    """To an executor from which nothing comes: a wait takes as long as it may, by the test's clock."""

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
            self.gateway.took(self.handled)
            self.handled = None
            return found()
        self.now += seconds
        return found()


@pytest.fixture
def connection(monkeypatch):
    """The connection, whose clock is the gateway's too."""
    made = Connection()
    monkeypatch.setattr(evaluations, "time", types.SimpleNamespace(monotonic=lambda: made.now, sleep=lambda _: None))
    return made


@pytest.fixture
def gateway(connection):
    """A gateway with a request.timeout of 30 s that has sent as much as may be unhandled."""
    context = types.SimpleNamespace(
        taskAttemptId=lambda: 1, attemptNumber=lambda: 0, stageId=lambda: 0, partitionId=lambda: 0
    )
    made = TaskGateway(connection, Bound("b", "the operator", "t", None, 1 << 20, 30.0), 0, context)
    made._flusher = object()  # nothing is flushed later
    for _ in range(WINDOW):
        made.send(b"x")
    return made


def test_a_send_that_finds_no_room(gateway, connection):
    """It asks for room, gives up after request.timeout without progress, and names who is slow, and how far behind."""
    with pytest.raises(
        stagecrew.RequestTimeout,
        match=f"'the operator' has {WINDOW} messages of this task, of {2 * WINDOW} bytes.* within 30 s",
    ):
        gateway.send(b"x")
    assert connection.waits == [30.0]
    assert connection.frames[-1] == "CREDIT"


def test_a_send_goes_on_when_something_is_handled(gateway, connection):
    """What is handled makes room, and is what a send waits for."""
    connection.handled = Frame("HANDLED", {"sequence": 1})
    gateway.send(b"x")
    assert connection.waits == [30.0]


def test_room_that_comes_between_two_looks(gateway, connection):
    """What another thread reads while a sender looks for room is not missed: the sender goes on."""
    look = gateway._has_room

    def looks(size):
        found = look(size)
        gateway._handled = WINDOW  # by whoever reads, behind the look
        return found

    gateway._has_room = looks
    gateway.send(b"one more")
    assert connection.waits == []


def test_the_timeout_of_a_request_is_for_all_that_it_waits_for(gateway, connection):
    """Room and reply together: no request takes longer than was asked for."""
    with pytest.raises(stagecrew.RequestTimeout, match=r"within 0\.5 s"):
        gateway.request(b"x", timeout=0.5)
    assert connection.waits == [0.5]
    connection.waits.clear()
    connection.handled = Frame("HANDLED", {"sequence": 1})
    began = connection.now
    with pytest.raises(stagecrew.RequestTimeout, match=r"has not answered within 2 s"):
        gateway.request(b"x", timeout=2.0)
    assert connection.waits == [2.0, 0.5]
    assert connection.now - began == 2.0


def test_a_reply_that_nobody_waits_for(gateway, connection):
    """It is not kept."""
    connection.handled = Frame("HANDLED", {"sequence": 1})
    with pytest.raises(stagecrew.RequestTimeout):
        gateway.request(b"x", timeout=2.0)
    gateway.took(Frame("REPLY", {"sequence": WINDOW + 1, "outcome": "ok", "payload": b"much"}))
    assert gateway._replies == {}


def test_more_is_asked_for_while_the_last_is_worked_on(gateway, connection):
    """Another thread that waits must not starve while what this one took is large, or the last of many."""

    def arrive(*events):
        gateway.took(Frame("EVENTS", {"first": 1, "payloads": events}))

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


def test_what_was_kept_back_is_sent_before_a_task_takes_its_next_event(gateway, connection):
    """Also when that is here already: the task may work on it for long."""
    gateway.took(Frame("HANDLED", {"sequence": WINDOW}))
    gateway.took(Frame("EVENTS", {"first": 1, "payloads": [b"\0", b"\0"]}))
    gateway.send(b"x")
    gateway.send(b"x")  # in a hurry: it is kept back
    assert gateway._kept
    next(gateway.events())
    assert not gateway._kept
    assert connection.frames[-1] == "EVENTS"


def test_the_end_is_for_all_who_receive(gateway):
    """And for whoever asks again."""
    gateway.took(Frame("EVENTS", {"first": 1, "payloads": [b"\0", END]}))
    assert list(gateway.events()) == [b""]
    assert list(gateway.events()) == []


@pytest.mark.parametrize("call", [lambda gateway: next(gateway.events()), lambda gateway: gateway.request(b"x", 60)])
def test_a_thread_that_waits_when_the_evaluation_ends(gateway, connection, call):
    """It is told, and not left behind in its worker."""
    gateway.took(Frame("HANDLED", {"sequence": WINDOW}))

    def wait(found, _seconds):
        assert found() is None
        connection.wait = type(connection).wait.__get__(connection)
        gateway.finish("abandoned", "enough")
        return found()

    connection.wait = wait
    with pytest.raises(stagecrew.EvaluationEnded, match="has ended"):
        call(gateway)
