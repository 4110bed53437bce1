"""Direct connections of the driver's Python to executors on its host, with fake executors and a fake driver's JVM."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagecrew.coordination import direct as direct_module
from stagecrew.coordination import direct_connections as connections_module
from stagecrew.coordination.channel import DriverChannel
from stagecrew.coordination.direct import DirectConnection
from stagecrew.coordination.pool import Pool, Timers
from stagecrew.wire.frames import decode_all, encode
from support.fake_channel import FakeServer
from support.waiting import eventually

pytestmark = pytest.mark.timeout(60)


class FakeHost:
    """Records the calls of a `DriverChannel`."""

    is_busy = False

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.deadline: float | None = None

    def due(self) -> float | None:
        """The deadline of an acknowledgement; None if none is awaited."""
        return self.deadline

    def expire(self) -> None:
        if self.deadline is not None:
            self.calls.append(("expire",))

    def statistics(self) -> None:
        """There are none."""

    def received(self, executor: str, frames: bytes, route: Any = None) -> None:
        self.calls.append(("received", executor, [frame.kind for frame in decode_all(frames)], route))

    def lost(self, executor: str, reason: str) -> None:
        self.calls.append(("lost", executor, reason))

    def is_lost(self, executor: str) -> bool:
        return any(call[1] == executor for call in self.named("lost"))

    def lost_route(self, route: Any, reason: str) -> None:
        self.calls.append(("lost_route", route.executor, reason))

    def broken(self, reason: str) -> None:
        self.calls.append(("broken", reason))

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in list(self.calls) if call[0] == name]


def greet(server: FakeServer, role: str = "driver", **welcome: str) -> None:
    """Accepts a client with this role."""
    server.listening.settimeout(10)
    server.challenge()
    hello: list[Any] = []
    eventually(lambda: hello or hello.extend(server.frames(0.01)), 10)
    assert (hello[0].kind, hello[0]["role"]) == ("HELLO", role)
    server.send("WELCOME", body=json.dumps(welcome))


def drain(server: FakeServer, kinds: int, seconds: float = 10) -> list[Any]:
    """Waits for this many frames."""
    found: list[Any] = []
    eventually(lambda: found.extend(server.frames(0.05)) or len(found) >= kinds, seconds)
    return found


REPLY = encode("REPLY", evaluation=1, sequence=1, outcome="ok", payload=b"x")
REQUEST = encode("REQUEST", evaluation=1, sequence=1, payload=b"y")


class World:
    """A driver's channel, the fake JVM of the driver, and a fake executor."""

    def __init__(self, folder: Path) -> None:
        (folder / "1").mkdir()
        self.jvm, self.executor = FakeServer(folder, maxFrame=32 << 20), FakeServer(folder / "1", maxFrame=32 << 20)
        self.host = FakeHost()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            future = pool.submit(DriverChannel, self.jvm.address_file, lambda wire: self.host, Pool("test", Timers()))
            greet(self.jvm)
            self.channel = future.result(10)

    def announce(self, executor: str = "1", address_file: str | None = None) -> None:
        """The executor announces its address file."""
        self.jvm.send(
            "ANNOUNCE",
            executor=executor,
            address_file=self.executor.address_file if address_file is None else address_file,
        )

    def connect(self) -> DirectConnection:
        """The driver connects to the executor, which sends a request."""
        self.announce()
        greet(self.executor, executor="1")
        return self.request()

    def request(self) -> DirectConnection:
        """The executor sends a request. Returns the route on which it arrived."""
        before = len(self.host.named("received"))
        self.executor.send("FROM", executor="1", frames=REQUEST)
        calls = eventually(lambda: self.host.named("received")[before:])
        ((_, executor, kinds, route),) = calls
        assert (executor, kinds) == ("1", ["REQUEST"])
        assert isinstance(route, DirectConnection)
        return route

    def close(self) -> None:
        self.channel.close()
        for server in (self.jvm, self.executor):
            server.__exit__()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def test_frames_of_an_executor_on_this_host_bypass_the_jvm(world: World) -> None:
    """Requests arrive on the direct connection, and replies to their route leave on it, without an envelope."""
    route = world.connect()
    world.channel.send(route, REPLY)
    world.channel.flush()
    assert drain(world.executor, 1)[0].kind == "REPLY"
    world.channel.send("1", REPLY)
    world.channel.flush()
    assert "TO" in [frame.kind for frame in drain(world.jvm, 1)]


def test_acknowledgements_expire_while_frames_arrive(world: World) -> None:
    """A missed acknowledgement is noticed although there are always frames to read."""
    frames = encode("FROM", executor="1", frames=REQUEST) * 1000
    stops = threading.Event()

    def send_always() -> None:
        while not stops.is_set():
            world.jvm.accepted[-1].sendall(frames)

    thread = threading.Thread(target=send_always)
    thread.start()
    try:
        eventually(lambda: world.host.named("received"))
        world.host.deadline = time.monotonic() + 0.1
        eventually(lambda: world.host.named("expire"), 20)
    finally:
        stops.set()
        thread.join(10)


@pytest.mark.parametrize("problem", ["another executor", "no file", "no address file"])
def test_an_executor_that_cannot_be_reached_directly_is_reached_through_the_jvm(world: World, problem: str) -> None:
    """The address file may be on another host, or that of another executor. Then nothing fails.

    The executor gets NO_DIRECT, because its first evaluations wait for the connection. Without an address file, they do
    not wait.
    """
    if problem == "another executor":
        world.announce()
        greet(world.executor, executor="2")
        eventually(lambda: world.executor.accepted[-1].recv(1) == b"", 10, "the driver has closed the connection")
    else:
        world.announce(address_file="" if problem == "no address file" else "/nowhere/channel.json")
    if problem != "no address file":
        (frame,) = drain(world.jvm, 1)
        assert (frame.kind, frame["executor"], bytes(frame["frames"])) == ("TO", "1", encode("NO_DIRECT"))
    world.jvm.send("FROM", executor="1", frames=REQUEST)
    eventually(lambda: world.host.named("received"))
    assert world.host.calls == [("received", "1", ["REQUEST"], None)]
    assert not world.jvm.frames(0.05)


def test_an_executor_that_does_not_read_delays_no_other(world: World) -> None:
    """Frames that the socket has no room for are kept in order. Meanwhile, frames for other executors are sent."""
    route = world.connect()
    payloads = [bytes([number]) * (1 << 20) for number in range(8)]
    began = time.monotonic()
    for number, payload in enumerate(payloads):
        world.channel.send(route, encode("REPLY", evaluation=1, sequence=number, outcome="ok", payload=payload))
        world.channel.flush()
    world.channel.send("2", REPLY)
    world.channel.flush()
    assert time.monotonic() - began < 5
    assert route.has_unsent
    assert "TO" in [frame.kind for frame in drain(world.jvm, 1)]
    replies = [frame for frame in drain(world.executor, 8) if frame.kind == "REPLY"]
    assert [bytes(frame["payload"]) for frame in replies] == payloads
    eventually(lambda: not route.has_unsent)


def test_an_executor_that_never_reads_is_dropped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an executor reads nothing, unsent bytes are limited. At the limit, the connection ends after a timeout."""
    monkeypatch.setattr(direct_module, "_MAX_WAIT_MS", 200)
    monkeypatch.setattr(connections_module, "_RECONNECT_PAUSE", 60.0)
    route = world.connect()
    large = encode("REPLY", evaluation=1, sequence=1, outcome="ok", payload=bytes(9 << 20))
    for _ in range(3):
        world.channel.send(route, large)
        world.channel.flush()
    ((_, executor, reason),) = eventually(lambda: world.host.named("lost_route"))
    assert executor == "1"
    assert "the connection from coordinators to executor 1 broke" in reason
    world.channel.send(route, REPLY)  # is dropped
    world.channel.flush()


def test_a_connection_that_ends_fails_its_evaluations_and_is_made_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluations of a broken connection fail. A little later, the driver connects again."""
    monkeypatch.setattr(connections_module, "_RECONNECT_PAUSE", 0.05)
    first = world.connect()
    world.executor.accepted.pop().close()
    eventually(lambda: world.host.named("lost_route"))
    greet(world.executor, executor="1")
    second = world.request()
    assert second is not first
    assert world.host.named("broken") == world.host.named("lost") == []


def test_a_failed_connection_is_made_again_and_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an executor on this host refuses direct connections, the driver tries again, with growing pauses."""
    monkeypatch.setattr(connections_module, "_RECONNECT_PAUSE", 0.05)
    pauses = []
    later = connections_module.TIMERS.later
    monkeypatch.setattr(
        connections_module.TIMERS, "later", lambda seconds, f: pauses.append(seconds) or later(seconds, f)
    )
    world.announce()
    for _ in range(3):
        greet(world.executor, executor="a process that is still starting")
    greet(world.executor, executor="1")
    world.request()
    assert pauses == [0.05, 0.1, 0.2]
    assert world.channel._directs._reconnects == {}


def test_a_second_announcement_replaces_a_planned_connection(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an executor announces itself before the driver connects again, the driver connects only once."""
    monkeypatch.setattr(connections_module, "_RECONNECT_PAUSE", 0.5)
    world.connect()
    world.executor.accepted.pop().close()
    eventually(lambda: world.channel._directs._reconnects)
    world.connect()
    world.executor.listening.settimeout(1)
    with pytest.raises(TimeoutError):
        world.executor.accept()


def test_a_lost_executor_is_fenced(world: World) -> None:
    """After Spark has lost an executor, nothing of it arrives any more, and the driver does not connect again."""
    world.connect()
    world.jvm.send("LOST", executor="1", reason="Spark removed it")
    eventually(lambda: world.host.named("lost"))
    assert world.host.calls[-2:] == [("lost_route", "1", "Spark removed it"), ("lost", "1", "Spark removed it")]
    assert eventually(lambda: world.executor.accepted[-1].recv(1 << 16) == b"")
    world.announce()
    world.jvm.send("FROM", executor="2", frames=REQUEST)
    eventually(lambda: world.host.calls[-1][0] == "received")
    world.executor.listening.settimeout(0.3)
    with pytest.raises(TimeoutError):
        world.executor.accept()


def test_a_newer_connection_replaces_the_earlier_one(world: World) -> None:
    """An executor that announces itself again, after its JVM reconnected, has one connection."""
    world.connect()
    world.announce()
    greet(world.executor, executor="1")
    world.request()
    assert [call[1:] for call in world.host.named("lost_route")] == [("1", "executor 1 has a newer connection")]
    assert len(world.channel._directs) == 1


def test_a_write_while_the_connection_is_dropped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that writes to a connection while the reading thread drops it gets no error."""
    route = world.connect()
    directs = world.channel._directs
    poller, errors, writers = directs._poller, [], []

    def write() -> None:
        try:
            with directs._sending:
                directs.write(route, [encode("REPLY", evaluation=1, sequence=1, outcome="ok", payload=bytes(8 << 20))])
        except BaseException as error:
            errors.append(error)

    class SlowPoller:
        """Another thread writes while the descriptor is no longer registered."""

        def __getattr__(self, name: str) -> Any:
            return getattr(poller, name)

        def unregister(self, descriptor: int) -> None:
            poller.unregister(descriptor)
            writers.append(threading.Thread(target=write))
            writers[0].start()
            writers[0].join(0.3)

    monkeypatch.setattr(directs, "_poller", SlowPoller())
    world.jvm.send("LOST", executor="1", reason="Spark removed it")
    eventually(lambda: world.host.named("lost"))
    writers[0].join(10)
    assert errors == []


def test_without_the_drivers_jvm_there_is_no_direct_connection(world: World) -> None:
    """If the driver's JVM is lost, everything fails, and executors see the end of their connections."""
    world.connect()
    world.jvm.accepted.pop().close()
    eventually(lambda: world.host.named("broken"))
    assert eventually(lambda: world.executor.accepted[-1].recv(1 << 16) == b"")


def test_close_ends_every_connection_and_thread(tmp_path: Path) -> None:
    """After `close`, both servers see the end, and no thread of the channel is left."""
    before = set(threading.enumerate())
    world = World(tmp_path)
    world.connect()
    world.channel.close()
    for server in (world.jvm, world.executor):
        assert eventually(lambda server=server: server.accepted[-1].recv(1 << 16) == b"")
    assert not {t for t in set(threading.enumerate()) - before if t.name.startswith("stagecrew-co")}
    world.close()


def test_close_waits_for_a_thread_that_is_sending(world: World) -> None:
    """No descriptor is closed while a thread writes to it. Otherwise the thread could write to another file."""
    route = world.connect()
    with world.channel._sending:
        closing = threading.Thread(target=world.channel.close)
        closing.start()
        closing.join(0.5)
        assert route.fileno() != -1
    closing.join(10)
    assert route.fileno() == -1


def test_a_connection_that_is_made_while_the_channel_closes_is_closed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` does not wait for an executor that is being connected, and leaves no connection to it open."""
    connecting, closed = threading.Event(), threading.Event()

    def connect(executor: str, address_file: str) -> DirectConnection:
        connecting.set()
        assert closed.wait(30)
        return DirectConnection(executor, address_file)

    monkeypatch.setattr(connections_module, "DirectConnection", connect)
    world.announce()
    assert connecting.wait(30)
    world.channel.close()
    closed.set()
    greet(world.executor, executor="1")
    assert eventually(lambda: world.executor.accepted[-1].recv(1 << 16) == b"")


@pytest.mark.parametrize("end", ["close", "lost"])
def test_no_timer_is_left_for_an_executor_that_cannot_come_back(
    world: World, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The timer that connects again ends when the channel closes, and when Spark loses the executor."""
    monkeypatch.setattr(connections_module, "_RECONNECT_PAUSE", 60)
    world.connect()
    world.executor.accepted.pop().close()
    eventually(lambda: world.host.named("lost_route"))
    (timer,) = eventually(lambda: list(world.channel._directs._reconnects.values()))
    assert timer.f is not None
    if end == "close":
        world.channel.close()
    else:
        world.jvm.send("LOST", executor="1", reason="Spark removed it")
        eventually(lambda: world.host.named("lost"))
    assert timer.f is None
