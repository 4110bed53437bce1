"""Runs coordinators on the calling thread: loops, timers and a connection without threads, clocks or sockets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import Any

from stagecrew.coordination.gateway import Gateway
from stagecrew.coordination.route import Route
from stagecrew.coordination.threads import Owner, Threads
from stagecrew.wire.frames import Frame, decode_all

__all__ = ["InlineLoop", "InlineThreads", "InlineTransport"]

Later = Callable[[float, Callable[[], None]], None]


class InlineLoop:
    """Enqueues a coordinator's calls, and makes them when `run` is called."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._waiting: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._ended = False

    is_current = False

    def call(self, f: Callable[..., Any], *args: Any) -> None:
        """See `Loop`."""
        if not self._ended:
            self._waiting.append((f, args))

    def end(self, _seconds: float) -> bool:
        """See `Loop`. Makes the enqueued calls first."""
        self.run()
        self._ended = True
        return True

    def run(self) -> bool:
        """Makes the enqueued calls. Returns whether there were any."""
        ran = bool(self._waiting)
        while self._waiting:
            f, args = self._waiting.pop(0)
            try:
                f(*args)
            except Exception as error:
                self._failed(error)
        return ran


class _InlineCalls:
    """Calls functions at once, and uses the timers of a manual clock."""

    def __init__(self, later: Later) -> None:
        self._later, self._closed = later, False

    def submit(self, f: Callable[[], None]) -> None:
        if not self._closed:
            f()

    def later(self, seconds: float, f: Callable[[], None]) -> None:
        self._later(seconds, lambda: self.submit(f))

    def close(self) -> None:
        self._closed = True


class InlineThreads(Threads):
    """Creates loops and executors without threads.

    `run` makes the calls of all `loops`, and `later` sets a timer of the manual clock.
    """

    def __init__(self, run: Callable[[], None], later: Later) -> None:
        self._run, self._later = run, later
        self.loops: list[InlineLoop] = []
        #: Called once in the next `wait`, between the request for the states and the deadline.
        self.during_wait: Callable[[], Any] = lambda: None

    def loop(self, name: str, failed: Callable[[BaseException], None], owner: Owner) -> InlineLoop:
        """See `Threads`."""
        made = InlineLoop(failed)
        self.loops.append(made)
        return made

    def async_calls(self, name: str) -> _InlineCalls:
        """See `Threads`."""
        return _InlineCalls(self._later)

    def wait(self, futures: Iterable[Future[Any]], seconds: float) -> Collection[Future[Any]]:
        """See `Threads`. Makes the calls that the futures may be waiting for."""
        self._run()
        during_wait, self.during_wait = self.during_wait, lambda: None
        during_wait()
        self._run()
        return super().wait(futures, seconds)


class InlineTransport:
    """Keeps the frames for executors until `deliver_all` passes each of them to `deliver`."""

    def __init__(self, deliver: Callable[[Frame], None]) -> None:
        self._deliver = deliver
        self._waiting: list[bytes] = []
        self._dirty: dict[Gateway, None] = {}

    def send(self, route: Route, frame: bytes) -> None:
        """See `Transport`."""
        self._gather()
        self._waiting.append(frame)

    def dirty(self, gateway: Gateway) -> None:
        """See `Transport`."""
        self._dirty[gateway] = None

    def flush(self) -> None:
        """Does nothing: frames wait for `deliver_all`."""

    def deliver_all(self) -> bool:
        """Delivers the frames. Returns whether there were any."""
        self._gather()
        frames, self._waiting = self._waiting, []
        for frame in decode_all(b"".join(frames)):
            self._deliver(frame)
        return bool(frames)

    def _gather(self) -> None:
        for gateway in tuple(self._dirty):
            while (frame := gateway.take()) is not None:
                self._waiting.append(frame)
        self._dirty.clear()
