"""The agent process: its end on SIGTERM, its reports of errors, and what child processes of its listeners inherit."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stagecrew import Listener, Scope
from stagecrew.observability.error_summary import error_line
from stagecrew.wire.channel import Channel
from stagecrew.wire.frames import Decoder, encode
from stagecrew.worker.agent import Agent

pytestmark = [
    pytest.mark.timeout(60, method="thread"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # the agent here is a fork
]

WELCOME = {
    "application": "app-1",
    "executor": "7",
    "host": "localhost",
    "configuration": {},
    "openTimeout": 30.0,
    "closeTimeout": 30.0,
}


class Server(Listener):
    """A listener whose `open` returns immediately."""

    scope = Scope.EXECUTOR

    def __init__(self, log: Any) -> None:
        self.log = log

    def open(self, context):
        self.log(f"opened {context.topology}")

    def close(self, context):
        self.log(f"closed {context.topology}")

    def __reduce__(self):
        return "server"


class Stubborn(Server):
    """A listener whose `open` catches every `Exception` and continues."""

    def open(self, context):
        self.log("stubborn opens")
        end = time.monotonic() + 50
        while time.monotonic() < end:
            try:
                time.sleep(50)
            except Exception:
                continue


class SlowToClose(Server):
    """A listener whose `close` takes a second."""

    def close(self, context):
        self.log("closing")
        time.sleep(1)
        self.log("closed slowly")


class Forks(Server):
    """A listener whose `open` forks a child. The child's loop catches every `Exception` and continues."""

    def open(self, context):
        pid = os.fork()
        if pid == 0:
            try:
                self.log("child runs")
                Stubborn.open(self, context)
            finally:
                os._exit(0)
        self.pid = pid
        self.log(f"forked {pid}")


def open_request(topology: str, name: str) -> bytes:
    """A request to open one of the listeners of this module."""
    entry = {"index": 0, "kind": "name", "name": None, "target": f"agent_test_listeners:{name}"}
    return encode("OPEN", topology=topology, body=json.dumps({"name": topology, "listeners": [entry]}), blobs=[])


@pytest.fixture
def agent(monkeypatch):
    """An agent in its own process. The test sends it frames, reads its frames and waits for lines of its listeners."""
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    module = ModuleType("agent_test_listeners")

    def log(line: str) -> None:
        os.write(writing, line.encode() + b"\n")

    for listener in (Server, Stubborn, SlowToClose, Forks, FailsToOpen, Exits, Large):
        setattr(module, listener.__name__.lower(), listener(log))
    monkeypatch.setitem(sys.modules, "agent_test_listeners", module)
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            theirs.close()
            channel = Channel(ours, 1 << 20, 10.0)
            channel.welcome = WELCOME
            Agent(channel).run()
            code = 0
        finally:
            os._exit(code)
    ours.close()
    lines: list[str] = []
    partial = [b""]

    def wait_for_line(line: str) -> str:
        """Waits until a listener has written a line with this prefix, and returns the line."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for written in lines:
                if written.startswith(line):
                    return written
            if select.select([reading], [], [], 0.1)[0]:
                *complete, partial[0] = (partial[0] + os.read(reading, 1 << 16)).split(b"\n")
                lines.extend(part.decode() for part in complete)
        raise AssertionError(f"no line begins with {line!r}, but there are {lines}")

    def read_frames() -> list[Any]:
        """Returns all frames until the end of the stream."""
        frames, decoder = [], Decoder(1 << 20)
        theirs.settimeout(20)
        while data := theirs.recv(1 << 16):
            frames.extend(decoder.feed(data))
        return frames

    def read_opened(topology: str) -> Any:
        """Reads frames until the OPENED of this topology. Returns its body."""
        decoder = Decoder(1 << 23)
        theirs.settimeout(20)
        while True:
            for frame in decoder.feed(theirs.recv(1 << 16)):
                if frame.kind == "OPENED" and frame["topology"] == topology:
                    return json.loads(frame["body"])

    def exit_code() -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    yield SimpleNamespace(
        pid=pid,
        send=theirs.sendall,
        wait_for_line=wait_for_line,
        read_frames=read_frames,
        read_opened=read_opened,
        exit_code=exit_code,
        disconnect=theirs.close,
        lines=lines,
    )
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
    theirs.close()
    os.close(reading)
    os.close(writing)


def test_sigterm_during_an_open_closes_all_listeners_and_ends_the_agent(agent):
    """SIGTERM interrupts even an `open` that catches every `Exception`. The agent sends no OPENED for this open."""
    agent.send(open_request("first", "server"))
    agent.wait_for_line("opened first")
    agent.send(open_request("second", "stubborn"))
    agent.wait_for_line("stubborn opens")
    os.kill(agent.pid, signal.SIGTERM)
    frames = agent.read_frames()
    assert agent.exit_code() == 0
    agent.wait_for_line("closed first")
    assert agent.lines[-2:] == ["closed second", "closed first"]
    assert [frame["topology"] for frame in frames if frame.kind == "OPENED"] == ["first"]
    assert frames[-1].kind == "GOODBYE"


class FailsToOpen(Server):
    """A listener whose `open` raises."""

    def open(self, context):
        return {}["dsn"]


class Exits(Server):
    """A listener whose `open` calls `sys.exit`."""

    def open(self, context):
        sys.exit(3)


class Large(Server):
    """A listener whose pickled value is larger than a frame may be."""

    def __reduce__(self):
        return bytes, (b"x" * (2 << 20),)


@pytest.mark.parametrize(
    ("name", "first", "frames"),
    [
        ("failstoopen", "KeyError: 'dsn'", ["open"]),
        (
            "absent",
            "stagecrew.errors.ListenerError: 'agent_test_listeners:absent' in spark.stagecrew.listeners",
            [],
        ),
    ],
)
def test_the_error_of_an_open_starts_with_its_message(agent, name, first, frames):
    """The reported error begins with the exception's message. Its traceback contains only frames of the user's code."""
    agent.send(open_request("t", name))
    agent.send(open_request("next", "server"))
    agent.wait_for_line("opened next")
    os.kill(agent.pid, signal.SIGTERM)
    opened = next(frame for frame in agent.read_frames() if frame.kind == "OPENED")
    text = json.loads(opened["body"])["error"]
    assert text.splitlines()[0].startswith(first)
    assert error_line(text).startswith(first)
    assert re.findall(r'File ".*", line \d+, in (\w+)', text) == frames


def test_a_listener_that_exits_fails_alone(agent):
    """If `open` calls `sys.exit`, only this open fails. The agent and its other listeners continue."""
    agent.send(open_request("t1", "server"))
    assert agent.read_opened("t1")["error"] is None
    agent.send(open_request("t2", "exits"))
    assert "SystemExit: 3" in agent.read_opened("t2")["error"]
    agent.send(encode("CLOSE", topology="t1"))
    agent.wait_for_line("closed t1")


def test_a_value_that_is_too_large_for_the_channel_is_not_sent(agent):
    """A value that is larger than a frame may be is not sent. Workers get an error with the reason and the remedy."""
    agent.send(open_request("t1", "large"))
    (listener,) = agent.read_opened("t1")["listeners"]
    assert listener["value"] is None
    assert "takes 2097" in listener["problem"]
    assert "more than spark.stagecrew.channel.maxFrame" in listener["problem"]


def test_sigterm_while_idle_closes_the_listeners_and_ends_the_agent(agent):
    """On SIGTERM, an idle agent closes its listeners, sends GOODBYE and exits with 0."""
    agent.send(open_request("first", "server"))
    agent.wait_for_line("opened first")
    os.kill(agent.pid, signal.SIGTERM)
    agent.wait_for_line("closed first")
    assert agent.read_frames()[-1].kind == "GOODBYE"
    assert agent.exit_code() == 0


def test_sigterm_does_not_interrupt_a_close(agent):
    """On SIGTERM during a `close`, the agent ends after this `close` has returned. A second SIGTERM changes nothing."""
    agent.send(open_request("first", "server"))
    agent.send(open_request("second", "slowtoclose"))
    agent.send(encode("CLOSE", topology="second"))
    agent.wait_for_line("closing")
    os.kill(agent.pid, signal.SIGTERM)
    os.kill(agent.pid, signal.SIGTERM)
    agent.wait_for_line("closed first")
    assert agent.lines[-2:] == ["closed slowly", "closed first"]
    assert agent.exit_code() == 0


def test_a_child_that_a_listener_forks_ends_on_sigterm(agent):
    """A child that a listener forks ends on SIGTERM, even if it catches every `Exception`.

    The child does not keep the agent's channel open.
    """
    agent.send(open_request("first", "forks"))
    child = int(agent.wait_for_line("forked").split()[1])
    agent.wait_for_line("child runs")
    agent.wait_for_line("stubborn opens")
    os.kill(agent.pid, signal.SIGKILL)
    agent.read_frames()  # reaches the end of the stream while the child is alive
    assert agent.exit_code() == -signal.SIGKILL
    os.kill(child, 0)
    os.kill(child, signal.SIGTERM)
    deadline = time.monotonic() + 20
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)
    assert "closed first" not in agent.lines


def is_running(pid: int) -> bool:
    """Returns whether the process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
