"""Opens, reads, writes and replaces the direct connections from the driver's Python to executors on the same host."""

from __future__ import annotations

import collections
import contextlib
import logging
import select
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from stagecrew.coordination.direct import DirectConnection
from stagecrew.coordination.pool import ASYNC_CALLS, TIMERS, Timer
from stagecrew.coordination.route import DirectRoute
from stagecrew.errors import ChannelClosed, ChannelError
from stagecrew.wire.frames import Frame

__all__ = ["DirectConnections"]

_log = logging.getLogger("stagecrew")

#: The pauses before the driver connects again to an executor on its host, in seconds: the first one, and the longest.
#: Each is twice the one before.
_RECONNECT_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0


class Reader(Protocol):
    """The channel whose reading thread also reads the direct connections."""

    def wake(self) -> None:
        """Ends the reading thread's wait for frames."""

    def handle(self, frame: Frame, direct: DirectConnection) -> None:
        """Handles a frame that arrived on a direct connection."""

    def decline(self, executor: str) -> None:
        """Tells an executor that it gets no direct connection now."""

    def lost_route(self, direct: DirectConnection, reason: str) -> None:
        """Fails the evaluations that used this direct connection, because it has ended."""

    def is_lost(self, executor: str) -> bool:
        """Whether Spark has lost this executor."""


class DirectConnections:
    """Keeps at most one direct connection to each executor on this host.

    Any thread may call `connect` and `shutdown`, and any thread that holds the sending lock may call `write`. The other
    methods run on the reading thread, or after its end.
    """

    def __init__(self, reader: Reader, poller: select.poll, sending: threading.Lock) -> None:
        self._reader, self._poller = reader, poller
        #: Held by the thread that is sending.
        self._sending = sending
        #: By descriptor.
        self._open: dict[int, DirectConnection] = {}
        #: New connections that the reading thread has not added yet.
        self._pending: collections.deque[DirectConnection] = collections.deque()
        #: By executor: the timer that connects again.
        self._reconnects: dict[str, Timer] = {}
        self._ended = threading.Event()

    def __len__(self) -> int:
        return len(self._open)

    def connect(self, executor: str, address_file: str, next_pause: float | None = None) -> None:
        """Connects to an executor in the background, if it is on this host.

        If this fails, tries again after `next_pause` seconds; by default after the first pause.
        """
        self._cancel_reconnect(executor)  # otherwise two connections could be made, and one would replace the other
        pause = _RECONNECT_PAUSE if next_pause is None else next_pause
        ASYNC_CALLS.submit(partial(self._connect, executor, address_file, pause))

    def _connect(self, executor: str, address_file: str, pause: float) -> None:
        if self._is_unwanted(executor):
            return
        try:
            self._pending.append(DirectConnection(executor, address_file))
        except ChannelError as error:
            _log.debug("executor %s is reached through the driver's JVM: %s", executor, error)
            self._reader.decline(executor)
            if Path(address_file).exists():  # otherwise the executor is on another host
                self._connect_later(executor, address_file, pause)
            return
        if self._ended.is_set():
            self._close_pending()
        else:
            self._reader.wake()

    def _is_unwanted(self, executor: str) -> bool:
        return self._ended.is_set() or self._reader.is_lost(executor)

    def _connect_later(self, executor: str, address_file: str, pause: float) -> None:
        connect = partial(self.connect, executor, address_file, min(2 * pause, _LONGEST_PAUSE))
        self._reconnects[executor] = TIMERS.later(pause, connect)
        if self._is_unwanted(executor):  # `lose` or `close` may have missed the timer
            self._cancel_reconnect(executor)

    def _cancel_reconnect(self, executor: str) -> None:
        if (timer := self._reconnects.pop(executor, None)) is not None:
            timer.cancel()

    def _close_pending(self) -> None:
        with contextlib.suppress(IndexError):  # two threads may do this at the same time
            while self._pending:
                self._pending.popleft().close()

    def write(self, direct: DirectRoute, frames: Iterable[bytes] = ()) -> None:
        """Writes to a direct connection. The caller holds the sending lock."""
        had_unsent = direct.has_unsent
        try:
            direct.write(*frames)
        except ChannelClosed:
            direct.shutdown()  # the reading thread sees the end
            return
        if direct.has_unsent != had_unsent and direct.fileno() in self._open:
            self._poller.modify(direct.fileno(), select.POLLIN | (select.POLLOUT if direct.has_unsent else 0))
            self._reader.wake()

    def serve(self, ready: set[int]) -> None:
        """Adds the new connections. Then serves the connections whose descriptors are ready."""
        while self._pending:
            self._add(self._pending.popleft())
        for descriptor in ready & self._open.keys():
            self._serve(self._open[descriptor])

    def _add(self, direct: DirectConnection) -> None:
        if self._is_unwanted(direct.executor):
            direct.close()
            return
        for other in self._connections_to(direct.executor):
            self._drop(other, f"executor {direct.executor} has a newer connection")
        self._open[direct.fileno()] = direct
        self._poller.register(direct.fileno(), select.POLLIN)
        self._serve(direct)  # frames may have arrived together with the welcome

    def _serve(self, direct: DirectConnection) -> None:
        """Handles the frames that have arrived on a connection, and writes its unsent frames."""
        try:
            for frame in direct.receive():
                self._reader.handle(frame, direct)
            if direct.has_unsent:
                with self._sending:
                    self.write(direct)
        except ChannelError as error:
            self._drop(direct, f"the connection from coordinators to executor {direct.executor} broke: {error}")
            self._connect_later(direct.executor, direct.address_file, _RECONNECT_PAUSE)

    def _drop(self, direct: DirectConnection, reason: str) -> None:
        with self._sending:  # a write may change the events for which the descriptor is polled
            self._poller.unregister(direct.fileno())
            del self._open[direct.fileno()]
            direct.close()
        self._reader.lost_route(direct, reason)

    def _connections_to(self, executor: str) -> list[DirectConnection]:
        return [one for one in self._open.values() if one.executor == executor]

    def lose(self, executor: str, reason: str) -> None:
        """Ends the connection to a lost executor, even if its process still runs but is cut off from the driver."""
        self._cancel_reconnect(executor)
        for direct in self._connections_to(executor):
            self._drop(direct, reason)

    def shutdown(self) -> None:
        """Ends all connections, and opens no more. `close` must follow."""
        self._ended.set()
        for direct in tuple(self._open.values()):
            direct.shutdown()

    def close(self) -> None:
        """Closes all connections. Call it when no thread reads or writes any more."""
        self._ended.set()
        self._close_pending()
        for direct in self._open.values():
            direct.close()
        for executor in list(self._reconnects):
            self._cancel_reconnect(executor)
