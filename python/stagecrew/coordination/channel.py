"""The socket between the driver's JVM and its Python, by which coordinators reach executors. One thread reads it."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from stagecrew.coordination.gateway import Gateway
from stagecrew.coordination.host import Host
from stagecrew.errors import ChannelClosed
from stagecrew.worker.channel import Channel

__all__ = ["DriverChannel"]

_log = logging.getLogger("stagecrew")

#: What is enqueued is sent at once when it is this long since the last sending, or this much; else when its thread is idle.
_PAUSE: Final = 0.001
_BATCH: Final = 512


class DriverChannel:
    """Frames for executors, and from them to the host. Enqueueing is safe from any thread; one at a time sends.

    Who enqueues much at once (a coordinator that handles a batch) sends it in few pieces: an enqueue sends itself only when
    nothing was sent within the last millisecond, or much waits; the rest goes when the loop is idle, and at the latest with
    the reader's next turn.
    """

    def __init__(self, place: str, make_host: Callable[[DriverChannel], Host]) -> None:
        self._channel = Channel.connect(place, role="driver")
        self._lock = threading.Lock()
        self._waiting: dict[str, list[bytes]] = {}
        self._dirty: dict[Gateway, None] = {}
        self._count = 0
        self._sending = threading.Lock()
        self._sent = 0.0
        self._ended = False
        self.host = make_host(self)
        self._thread = threading.Thread(target=self._run, name="stagecrew-coordination", daemon=True)
        self._thread.start()

    # -- What coordinators and the host enqueue

    def send(self, executor: str, frame: bytes) -> None:
        """Enqueues a frame for an executor, behind the events of gateways that were enqueued before."""
        with self._lock:
            self._gather()
            self._waiting.setdefault(executor, []).append(frame)
            self._count += 1

    def dirty(self, gateway: Gateway) -> None:
        """A gateway has an event to send."""
        with self._lock:
            self._dirty[gateway] = None
            self._count += 1
            now = self._count >= _BATCH or time.monotonic() - self._sent > _PAUSE
        if now:
            self.flush()

    def flush(self) -> None:
        """Sends what is enqueued."""
        while self._count and self._sending.acquire(blocking=False):
            try:
                with self._lock:
                    self._gather()
                    waiting, self._waiting, self._count = self._waiting, {}, 0
                    self._sent = time.monotonic()
                for executor, frames in waiting.items():
                    self._channel.send("TO", executor=executor, frames=b"".join(frames))
            except ChannelClosed:
                return  # the reader sees it too
            finally:
                self._sending.release()

    def _gather(self) -> None:
        for gateway in self._dirty:
            if (frame := gateway.take()) is not None:
                self._waiting.setdefault(gateway.evaluation.executor, []).append(frame)
        self._dirty.clear()

    # -- The reader

    def _run(self) -> None:
        poller = select.poll()
        try:
            poller.register(self._channel, select.POLLIN)
            while not self._ended:
                due = self.host.due()
                pause = 0.1 if due is None else min(0.1, max(0.0, due - time.monotonic()))
                if poller.poll(pause * 1000 + 1):
                    for frame in self._channel.arrived():
                        self._take(frame)
                else:
                    # Only now: while this thread had no turn, what is late may have come.
                    self.host.expire()
                self.flush()
        except ChannelClosed:
            if not self._ended:
                _log.debug("the driver's JVM closed the channel of coordinators")
        except Exception:
            _log.exception("the channel of coordinators failed")

    def _take(self, frame: Any) -> None:
        try:
            if frame.kind == "FROM":
                self.host.received(frame["executor"], frame["frames"])
            elif frame.kind == "LOST":
                self.host.lost(frame["executor"], frame["reason"])
        except Exception:
            _log.exception("frames of an executor could not be handled")

    def close(self) -> None:
        """Ends the reader and the connection; a second call does nothing."""
        if self._ended:
            return
        self._ended = True
        self.flush()
        try:
            self._channel._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        finally:
            if threading.current_thread() is not self._thread:
                self._thread.join(5)
            self._channel.close()
