"""A worker's connection for evaluations, when the executor stalls, and with waits of any length."""

from __future__ import annotations

import itertools
import math
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from stagecrew.errors import EvaluationEnded
from stagecrew.wire.channel import Channel
from stagecrew.wire.frames import encode
from stagecrew.worker import connection as connection_module
from stagecrew.worker import evaluations
from stagecrew.worker.connection import Connection
from stagecrew.worker.task_gateway import Bound
from support.waiting import eventually

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A connection whose writes time out after 0.2 s, the executor's end, and the frames of evaluation 1."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours, 1 << 20, 0.2)
    monkeypatch.setattr(connection_module.Channel, "connect", lambda address_file, role: channel)
    connection, frames = Connection("address_file"), []
    connection.add(SimpleNamespace(id=1, _handle=frames.append))
    yield SimpleNamespace(connection=connection, executor=theirs, frames=frames)
    ours.close()
    theirs.close()


class Abandonable:
    """A fake gateway that records how its evaluation ended."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def _finish(self, outcome: str, reason: str) -> None:
        self.ends.append(outcome)


@pytest.mark.parametrize("read", [0, 1, 2, 3])
def test_an_iterator_that_is_dropped_ends_its_evaluation(monkeypatch: pytest.MonkeyPatch, read: int) -> None:
    """If Spark reads only some of the rows of an evaluation, or none, the evaluation is abandoned."""
    gateway = Abandonable()
    monkeypatch.setattr(evaluations, "connected", lambda address_file: None)
    monkeypatch.setattr(evaluations, "TaskGateway", lambda *_: gateway)
    context = SimpleNamespace(getLocalProperty=lambda _: "file")
    monkeypatch.setattr("pyspark.TaskContext.get", lambda: context)
    rows = evaluations.evaluate(Bound("b", "o", "t", None, 1 << 20, 30.0), lambda gateway: iter([1, 2]))
    assert list(itertools.islice(rows, read)) == [1, 2][:read]
    del rows
    assert gateway.ends == (["finished"] if read == 3 else ["abandoned"])


def test_nothing_is_sent_after_a_write_that_broke(made: Any) -> None:
    """After a write that timed out within a frame, later writes fail. Otherwise their bytes would end the frame."""
    woken: list[str] = []

    def wait() -> None:
        try:
            made.connection.wait(lambda: None, None)
        except EvaluationEnded as error:
            woken.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: made.connection._is_reading)
    for frames in (b"x" * (8 << 20), b"next"):
        with pytest.raises(EvaluationEnded, match="the connection to the executor broke"):
            made.connection.send(frames)
    thread.join(10)
    assert woken
    received = b""
    while data := made.executor.recv(1 << 20):
        received += data
    assert set(received) == {ord("x")}


@pytest.mark.parametrize("seconds", [math.inf, 3e9, None])
def test_a_wait_can_have_any_length(made: Any, seconds: float | None) -> None:
    """A wait without a limit, or of a century, ends when a frame arrives. This holds for the thread that reads, and for
    a thread that waits for it."""
    results: list[Any] = []

    def wait() -> None:
        results.append(made.connection.wait(lambda: made.frames or None, seconds))

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    eventually(lambda: made.connection._is_reading)
    made.executor.sendall(encode("ABORT", evaluation=1, reason="r"))
    for thread in threads:
        thread.join(10)
    assert len(results) == 2


class Interrupted(Exception):
    """Raised by a signal handler of the user."""


@pytest.mark.parametrize("point", ["poll", "receive", "handle"])
def test_an_exception_of_a_signal_handler_loses_no_message_silently(
    made: Any, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """A wait that was interrupted before it read can be repeated. If messages were lost, later waits fail."""
    channel, handle = made.connection._channel, made.frames.append

    def interrupt(*_: Any) -> None:
        monkeypatch.undo()
        made.connection._gateways[1]._handle = handle
        raise Interrupted

    if point == "poll":
        monkeypatch.setattr(channel, "_await", interrupt)
    elif point == "receive":
        receive = channel.receive
        monkeypatch.setattr(channel, "receive", lambda: interrupt(receive()))
    else:
        made.connection._gateways[1]._handle = interrupt
    made.executor.sendall(encode("ABORT", evaluation=1, reason="r"))
    with pytest.raises(Interrupted):
        made.connection.wait(lambda: made.frames or None, 5)
    if point == "poll":
        assert len(made.connection.wait(lambda: made.frames or None, 5)) == 1
    else:
        with pytest.raises(EvaluationEnded, match="interrupted a thread while it received messages"):
            made.connection.wait(lambda: made.frames or None, 5)
        assert made.executor.recv(1) == b""
