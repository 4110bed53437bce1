"""The sockets through which coordinators reach executors: one to the driver's JVM, and direct ones on this host.

An idle thread of the coordinators' pool reads the sockets until there is work, so that the thread that reads a request
also handles it: a switch to another thread costs more in Python than all other steps. While the pool has no idle
thread, the channel's own thread reads.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from stagecrew.coordination.direct import DirectConnection
from stagecrew.coordination.direct_connections import DirectConnections
from stagecrew.coordination.gateway import Gateway
from stagecrew.coordination.host import Host
from stagecrew.coordination.pool import COORDINATORS, Pool
from stagecrew.coordination.route import Route
from stagecrew.errors import ChannelClosed, ChannelError
from stagecrew.wire import hops
from stagecrew.wire.channel import Channel
from stagecrew.wire.frames import encode, encoded
from stagecrew.wire.serialization import TOGETHER

__all__ = ["DriverChannel"]

_log = logging.getLogger("stagecrew")

#: An event is sent immediately if nothing was sent for `_PAUSE` seconds, or if `_BATCH` frames are waiting. Otherwise
#: frames are sent by the next flush.
_PAUSE: Final = 0.001
_BATCH: Final = 512
#: The channel's own thread reads if no other thread has read for this many seconds. The first limit applies while an
#: evaluation is live, and the second while none is live. The second is also the longest wait for frames.
_BUSY_WAIT: Final = 0.005
_IDLE_WAIT: Final = 0.1
#: The time between two reports of statistics, in seconds.
_STATISTICS_PERIOD: Final = 1.0
#: How long a missed acknowledgement is awaited while there are always frames to read, in seconds.
_EXPIRY_GRACE: Final = 1.0


class DriverChannel:
    """Sends frames to executors, and passes frames from executors to the host.

    Enqueueing is safe from any thread. One thread at a time sends, and one reads. Frames that are enqueued in quick
    succession are sent together: an event is sent immediately only if nothing was sent within the last millisecond, or
    if many frames are waiting. Other frames are sent when the coordinator's loop is idle, and at the latest in the
    reader's next turn.
    """

    def __init__(
        self,
        address_file: str,
        make_host: Callable[[DriverChannel], Host],
        pool: Pool = COORDINATORS,
        report: Callable[[bytes], object] = lambda frame: None,
    ) -> None:
        self._pool = pool
        #: Passes a STATISTICS frame to the driver's JVM.
        self._report = report
        self._channel = Channel.connect(address_file, role="driver")
        self._lock = threading.Lock()
        self._waiting: dict[Route, list[bytes]] = {}
        self._dirty: dict[Gateway, None] = {}
        self._count = 0
        self._sending = threading.Lock()
        self._sent = 0.0
        self._turns = 0
        self._reading = threading.Lock()
        #: Writing a byte to this pipe ends the reader's wait for frames.
        self._wake_out, self._wake_in = os.pipe()
        for descriptor in (self._wake_out, self._wake_in):
            os.set_blocking(descriptor, False)
        self._poller = select.poll()
        self._poller.register(self._channel, select.POLLIN)
        self._poller.register(self._wake_out, select.POLLIN)
        self._directs = DirectConnections(self, self._poller, self._sending)
        self._waking = threading.Lock()
        #: Whether the channel's own thread is reading, and whether a thread of the pool wants to read instead.
        self._own_reads = self._is_wanted = False
        #: Set when the channel's own thread must check whether another thread is reading.
        self._attention = threading.Event()
        self._ended = threading.Event()
        self._closed = False
        self.host = make_host(self)
        self._thread = threading.Thread(target=self._run, name="stagecrew-coordination", daemon=True)
        self._thread.start()
        self._reporter = threading.Thread(target=self._report_statistics, name="stagecrew-statistics", daemon=True)
        self._reporter.start()
        pool.set_reader(self)

    # -- Sending, for coordinators and the host

    def send(self, route: Route, frame: bytes) -> None:
        """Enqueues a frame for an evaluation, after all events that gateways had to send before."""
        if self._ended.is_set():
            return  # the connection has ended
        with self._lock:
            self._gather()
            self._waiting.setdefault(route, []).append(frame)
            self._count += 1

    def dirty(self, gateway: Gateway) -> None:
        """Records that a gateway has an event to send."""
        if self._ended.is_set():
            return
        with self._lock:
            self._dirty[gateway] = None
            self._count += 1
            send_now = self._count >= _BATCH or time.monotonic() - self._sent > _PAUSE
        if send_now:
            self.flush()

    def flush(self) -> None:
        """Sends the enqueued frames."""
        while self._count and self._sending.acquire(blocking=False):
            try:
                with self._lock:
                    self._gather()
                    waiting, self._waiting, self._count = self._waiting, {}, 0
                    self._sent = time.monotonic()
                if hops.passed is not None:
                    hops.all_passed("host-sends", list(itertools.chain(*waiting.values())))
                frames = []
                for route, some in waiting.items():
                    if isinstance(route, str):
                        for part in _parts(some):
                            frames += encoded("TO", executor=route, frames=part)
                    else:
                        self._directs.write(route, some)
                if frames:
                    self._channel.write(*frames)
            except ChannelClosed:
                # The connection may have broken within a frame, so send nothing more. The reader also sees the error.
                self._channel.shutdown()
                return
            finally:
                self._sending.release()

    def _gather(self) -> None:
        for gateway in self._dirty:
            while (frame := gateway.take()) is not None:
                self._waiting.setdefault(gateway.route, []).append(frame)
        self._dirty.clear()

    def _report_statistics(self) -> None:
        """Sends the statistics of coordinators to the driver's JVM, on a separate thread."""
        while not self._ended.wait(_STATISTICS_PERIOD):
            try:
                if (frame := self.host.statistics()) is not None:
                    self._report(frame)
            except Exception:
                _log.exception("could not report the statistics of coordinators; the UI shows older ones")

    # -- Reading

    def read(self, until: Callable[[], bool]) -> bool:
        """Reads on the calling thread until the condition holds. Returns False at once if another thread is reading."""
        if self._ended.is_set():
            return False
        if not self._reading.acquire(blocking=False):
            if self._own_reads:  # the channel's own thread makes way
                self._is_wanted = True
                self.wake()
            return False
        try:
            self._is_wanted = False
            while not until() and not self._ended.is_set():
                self._turn(_IDLE_WAIT)
        finally:
            self._reading.release()
        return True

    def wake(self) -> None:
        """Ends the reading thread's wait, so that it checks its condition."""
        with self._waking, contextlib.suppress(BlockingIOError):  # a full pipe wakes the reader anyway
            if not self._closed:
                os.write(self._wake_in, b"\0")

    def _turn(self, seconds: float) -> None:
        """Waits for frames, and handles them. The caller holds `_reading`."""
        self._turns += 1
        self.flush()
        due = self.host.due()
        pause = seconds if due is None else min(seconds, max(0.0, due - time.monotonic()))
        ready = {fd for fd, _ in self._poller.poll(pause * 1000 + 1)}
        if self._wake_out in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_out, 1024)
        self._directs.serve(ready)
        has_arrived = self._channel.fileno() in ready or self._channel.has_arrived
        if has_arrived:
            try:
                for frame in self._channel.receive():
                    self.handle(frame)
            except ChannelError as error:
                if not self._ended.is_set():
                    self._ended.set()
                    self._channel.shutdown()
                    self._directs.shutdown()
                    self.host.broken(f"the connection from coordinators to executors broke: {error}")
                return
        # Check deadlines after reading, because an acknowledgement may have arrived while no thread was reading. Under
        # constant traffic there is always something to read.
        if not (ready or has_arrived) or (due is not None and time.monotonic() > due + _EXPIRY_GRACE):
            self.host.expire()
        self.flush()

    def _run(self) -> None:
        try:
            turns = -1
            while not self._ended.is_set():
                # Read only if no other thread has read since the last check. A thread that is handling a request will
                # soon read again.
                before, turns = turns, self._turns
                if before == turns and self._reading.acquire(blocking=False):
                    try:
                        self._own_reads = True
                        while not self._is_wanted and not self._ended.is_set():
                            self._turn(_IDLE_WAIT)
                    finally:
                        self._own_reads = False
                        self._reading.release()
                    if self._is_wanted:
                        self._is_wanted = False
                        self._pool.submit(_nothing)  # a thread of the pool takes over
                self._attention.clear()
                self._attention.wait(_BUSY_WAIT if self.host.is_busy else _IDLE_WAIT)
        except Exception:
            _log.exception("the thread that reads the frames of executors failed; please report it")

    def handle(self, frame: Any, direct: DirectConnection | None = None) -> None:
        """Handles a frame from executors, on the reading thread. It arrived on this direct connection, if any."""
        was_busy = self.host.is_busy
        try:
            if frame.kind == "FROM":
                self.host.received(frame["executor"], frame["frames"], direct)
            elif frame.kind == "ANNOUNCE" and frame["address_file"]:
                self._directs.connect(frame["executor"], frame["address_file"])
            elif frame.kind == "LOST":
                self._directs.lose(frame["executor"], frame["reason"])
                self.host.lost(frame["executor"], frame["reason"])
        except Exception:
            _log.exception(
                "could not handle a %s frame of executor %s; please report it", frame.kind, frame["executor"]
            )
        if not was_busy and self.host.is_busy:
            self._attention.set()

    def decline(self, executor: str) -> None:
        """Tells an executor that it gets no direct connection now, so that its first evaluations do not wait for it."""
        self.send(executor, encode("NO_DIRECT"))
        self.flush()

    def lost_route(self, direct: DirectConnection, reason: str) -> None:
        """Handles the end of a direct connection: the evaluations that used it have failed."""
        self.host.lost_route(direct, reason)

    def is_lost(self, executor: str) -> bool:
        """Whether Spark has lost this executor. Its process may still run, but is cut off from the driver."""
        return self.host.is_lost(executor)

    @property
    def is_broken(self) -> bool:
        """Whether the connection has ended."""
        return self._ended.is_set()

    def close(self) -> None:
        """Ends the reader and the connection. Idempotent."""
        self.flush()
        hops.flush()
        self._ended.set()
        self._pool.remove_reader(self)
        self._attention.set()
        self.wake()
        self._channel.shutdown()
        for thread in (self._thread, self._reporter):
            if threading.current_thread() is not thread:
                thread.join(5)
        with self._reading, self._sending, self._waking:  # no thread is polling these descriptors or writing to them
            if self._closed:
                return
            self._closed = True
            self._channel.close()
            self._directs.close()
            os.close(self._wake_in)
            os.close(self._wake_out)


def _parts(frames: list[bytes]) -> Iterator[bytes]:
    """Joins frames into pieces of about `TOGETHER` bytes."""
    part, size = [], 0
    for frame in frames:
        part.append(frame)
        size += len(frame)
        if size >= TOGETHER:
            yield b"".join(part)
            part, size = [], 0
    if part:
        yield b"".join(part)


def _nothing() -> None:
    """Does nothing. Submitted to wake a thread of the pool."""
