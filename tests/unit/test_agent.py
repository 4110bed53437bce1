"""The agent: what it does when it is asked to end, and what its children hold."""

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
    """One that opens quickly."""

    scope = Scope.EXECUTOR

    def __init__(self, say: Any) -> None:
        self.say = say

    def open(self, context):
        self.say(f"opened {context.topology}")

    def close(self, context):
        self.say(f"closed {context.topology}")

    def __reduce__(self):
        return "server"


class Stubborn(Server):
    """One whose open goes on after any `Exception`."""

    def open(self, context):
        self.say("stubborn opens")
        end = time.monotonic() + 50
        while time.monotonic() < end:
            try:
                time.sleep(50)
            except Exception:
                continue


class SlowToClose(Server):
    """One that takes its time."""

    def close(self, context):
        self.say("closing")
        time.sleep(1)
        self.say("closed slowly")


class Forks(Server):
    """One whose open leaves a child behind, with a loop that goes on after any `Exception`."""

    def open(self, context):
        pid = os.fork()
        if pid == 0:
            try:
                self.say("child runs")
                Stubborn.open(self, context)
            finally:
                os._exit(0)
        self.pid = pid
        self.say(f"forked {pid}")


def opening(topology: str, name: str) -> bytes:
    """The request to open one of the listeners here."""
    entry = {"index": 0, "kind": "name", "name": None, "target": f"of_the_agent:{name}"}
    return encode("OPEN", topology=topology, body=json.dumps({"name": topology, "listeners": [entry]}), blobs=[])


@pytest.fixture
def agent(monkeypatch):
    """An agent in a process of its own: `say` a frame, what it `heard` it say, the frames it `sent`."""
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    module = ModuleType("of_the_agent")

    def say(line: str) -> None:
        os.write(writing, line.encode() + b"\n")

    for listener in (Server, Stubborn, SlowToClose, Forks, Unset):
        setattr(module, listener.__name__.lower(), listener(say))
    monkeypatch.setitem(sys.modules, "of_the_agent", module)
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
    left = [b""]

    def heard(line: str) -> str:
        """Waits until a listener says something that begins so."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for one in lines:
                if one.startswith(line):
                    return one
            if select.select([reading], [], [], 0.1)[0]:
                *whole, left[0] = (left[0] + os.read(reading, 1 << 16)).split(b"\n")
                lines.extend(one.decode() for one in whole)
        raise AssertionError(f"{line!r} was not said, but {lines}")

    def sent() -> list[Any]:
        """All frames up to the end of the stream."""
        frames, decoder = [], Decoder(1 << 20)
        theirs.settimeout(20)
        while data := theirs.recv(1 << 16):
            frames.extend(decoder.feed(data))
        return frames

    def exit_code() -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    yield SimpleNamespace(
        pid=pid, say=theirs.sendall, heard=heard, sent=sent, exit_code=exit_code, hang_up=theirs.close, lines=lines
    )
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
    theirs.close()
    os.close(reading)
    os.close(writing)


def test_sigterm_during_an_open_ends_the_agent(agent):
    """Also when the open goes on after any `Exception`: everything is closed, and no failed open is answered."""
    agent.say(opening("first", "server"))
    agent.heard("opened first")
    agent.say(opening("second", "stubborn"))
    agent.heard("stubborn opens")
    os.kill(agent.pid, signal.SIGTERM)
    frames = agent.sent()
    assert agent.exit_code() == 0
    agent.heard("closed first")
    assert agent.lines[-2:] == ["closed second", "closed first"]
    assert [frame["topology"] for frame in frames if frame.kind == "OPENED"] == ["first"]
    assert frames[-1].kind == "GOODBYE"


class Unset(Server):
    """One whose open raises."""

    def open(self, context):
        return {}["dsn"]


@pytest.mark.parametrize(
    ("name", "first", "frames"),
    [
        ("unset", "KeyError: 'dsn'", ["open"]),
        ("absent", "stagecrew.errors.ListenerNotImportable: 'of_the_agent:absent' in spark.stagecrew.listeners", []),
    ],
)
def test_the_error_of_an_open_begins_with_its_sentence(agent, name, first, frames):
    """The traceback follows, with the frames of the user's code alone."""
    agent.say(opening("t", name))
    agent.say(opening("next", "server"))
    agent.heard("opened next")
    os.kill(agent.pid, signal.SIGTERM)
    opened = next(frame for frame in agent.sent() if frame.kind == "OPENED")
    text = json.loads(opened["body"])["error"]
    assert text.splitlines()[0].startswith(first)
    assert error_line(text).startswith(first)
    assert re.findall(r'File ".*", line \d+, in (\w+)', text) == frames


def test_sigterm_while_it_waits_ends_the_agent(agent):
    """What is open is closed."""
    agent.say(opening("first", "server"))
    agent.heard("opened first")
    os.kill(agent.pid, signal.SIGTERM)
    agent.heard("closed first")
    assert agent.sent()[-1].kind == "GOODBYE"
    assert agent.exit_code() == 0


def test_sigterm_does_not_interrupt_a_close(agent):
    """Then the agent ends; a second one has nothing to add."""
    agent.say(opening("first", "server"))
    agent.say(opening("second", "slowtoclose"))
    agent.say(encode("CLOSE", topology="second"))
    agent.heard("closing")
    os.kill(agent.pid, signal.SIGTERM)
    os.kill(agent.pid, signal.SIGTERM)
    agent.heard("closed first")
    assert agent.lines[-2:] == ["closed slowly", "closed first"]
    assert agent.exit_code() == 0


def test_a_child_that_a_listener_forks(agent):
    """It ends at SIGTERM though its loop goes on after any `Exception`, and does not keep the channel open."""
    agent.say(opening("first", "forks"))
    child = int(agent.heard("forked").split()[1])
    agent.heard("child runs")
    agent.heard("stubborn opens")
    os.kill(agent.pid, signal.SIGKILL)
    agent.sent()  # up to the end of the stream, while the child lives
    assert agent.exit_code() == -signal.SIGKILL
    os.kill(child, 0)
    os.kill(child, signal.SIGTERM)
    deadline = time.monotonic() + 20
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)
    assert "closed first" not in agent.lines


def is_running(pid: int) -> bool:
    """Whether it is more than an entry that nobody has waited for."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
