"""The socket between the driver's JVM and its Python, by which coordinators reach executors.

An idle thread of the coordinators' pool reads it until there is work, so that a request is handled by the thread that read it. (A
hop to another thread costs Python more than all the rest.) While the pool has no idle thread, the channel's
own thread reads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from stagecrew.coordination.gateway import Gateway
from stagecrew.coordination.host import Host
from stagecrew.coordination.pool import COORDINATORS, Pool
from stagecrew.errors import ChannelClosed, ChannelError
from stagecrew.wire.channel import Channel
from stagecrew.wire.frames import encode, encoded
from stagecrew.wire.serialization import TOGETHER

__all__ = ["DriverChannel"]

_log = logging.getLogger("stagecrew")

#: What is enqueued is sent at once when it is this long since the last sending, or this much; else when its thread is idle.
_PAUSE: Final = 0.001
_BATCH: Final = 512
#: How long nobody may have read before the channel's own thread does, in seconds: while tasks talk, and while none does.
_ABSENCE: Final = 0.005
_QUIET: Final = 0.1
#: The driver's JVM is told after so many messages that they were read.
_TELL: Final = 16
#: How often it is looked what of coordinators has changed for those who look on, in seconds.
_STATISTICS: Final = 1.0


class DriverChannel:
    """Frames for executors, and from them to the host. Enqueueing is safe from any thread; one at a time sends, one reads.

    Who enqueues much at once (a coordinator that handles a batch) sends it in few pieces: an enqueue sends itself only when
    nothing was sent within the last millisecond, or much waits; the rest goes when the loop is idle, and at the latest with
    the reader's next turn.
    """

    def __init__(
        self,
        place: str,
        make_host: Callable[[DriverChannel], Host],
        pool: Pool = COORDINATORS,
        report: Callable[[bytes], object] = lambda frame: None,
    ) -> None:
        self._pool = pool
        #: Passes a STATISTICS frame to the driver's JVM.
        self._report = report
        self._channel = Channel.connect(place, role="driver")
        self._lock = threading.Lock()
        self._waiting: dict[str, list[bytes]] = {}
        self._dirty: dict[Gateway, None] = {}
        self._count = 0
        self._sending = threading.Lock()
        self._sent = 0.0
        self._read = self._told = 0
        self._turns = 0
        self._reading = threading.Lock()
        #: Who leaves its wait for frames when this is written to.
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._channel, select.POLLIN)
        self._poller.register(self._wake_out, select.POLLIN)
        self._waking = threading.Lock()
        #: Whether the channel's own thread reads, and whether a thread of the pool waits to read instead.
        self._own = self._is_wanted = False
        #: Set when the channel's own thread must check whether another thread reads.
        self._attention = threading.Event()
        self._ended = threading.Event()
        self._closed = False
        self.host = make_host(self)
        self._thread = threading.Thread(target=self._run, name="stagecrew-coordination", daemon=True)
        self._thread.start()
        self._teller = threading.Thread(target=self._tell, name="stagecrew-statistics", daemon=True)
        self._teller.start()
        pool.set_reader(self)

    # -- What coordinators and the host enqueue

    def send(self, executor: str, frame: bytes) -> None:
        """Enqueues a frame for an executor, behind the events of gateways that were enqueued before."""
        if self._ended.is_set():
            return  # nobody hears it
        with self._lock:
            self._gather()
            self._waiting.setdefault(executor, []).append(frame)
            self._count += 1

    def dirty(self, gateway: Gateway) -> None:
        """A gateway has an event to send."""
        if self._ended.is_set():
            return
        with self._lock:
            self._dirty[gateway] = None
            self._count += 1
            now = self._count >= _BATCH or time.monotonic() - self._sent > _PAUSE
        if now:
            self.flush()

    def flush(self) -> None:
        """Sends what is enqueued."""
        while self._has_to_send and self._sending.acquire(blocking=False):
            try:
                with self._lock:
                    self._gather()
                    waiting, self._waiting, self._count = self._waiting, {}, 0
                    self._sent = time.monotonic()
                frames = [
                    piece
                    for to, some in waiting.items()
                    for part in _parts(some)
                    for piece in encoded("TO", executor=to, frames=part)
                ]
                if (read := self._read) != self._told:
                    self._told = read
                    frames.append(encode("READ", messages=read))
                if frames:
                    self._channel.write(*frames)
            except ChannelClosed:
                # Perhaps in the midst of a frame: nothing may follow. The reader sees it too.
                self._channel.shutdown()
                return
            finally:
                self._sending.release()

    @property
    def _has_to_send(self) -> bool:
        """What was enqueued, or how much was read."""
        return self._count > 0 or self._read - self._told >= _TELL

    def _gather(self) -> None:
        for gateway in self._dirty:
            while (frame := gateway.take()) is not None:
                self._waiting.setdefault(gateway.evaluation.executor, []).append(frame)
        self._dirty.clear()

    def _tell(self) -> None:
        """Tells the driver's JVM what people see of coordinators, on a thread of its own."""
        while not self._ended.wait(_STATISTICS):
            try:
                if (frame := self.host.statistics()) is not None:
                    self._report(frame)
            except Exception:
                _log.exception("the statistics of coordinators could not be reported")

    # -- Whoever reads

    def read(self, until: Callable[[], bool]) -> bool:
        """Reads for all on the calling thread until the condition holds. False when another thread reads."""
        if self._ended.is_set():
            return False
        if not self._reading.acquire(blocking=False):
            if self._own:  # it gives way
                self._is_wanted = True
                self.wake()
            return False
        try:
            self._is_wanted = False
            while not until() and not self._ended.is_set():
                self._turn(_QUIET)
        finally:
            self._reading.release()
        return True

    def wake(self) -> None:
        """Whoever waits for frames looks around."""
        with self._waking, contextlib.suppress(BlockingIOError):  # one that is full wakes anyway
            if not self._closed:
                os.write(self._wake_in, b"\0")

    def _turn(self, seconds: float) -> None:
        """Waits for frames, and takes them. By whoever holds the right to read."""
        self._turns += 1
        self.flush()
        due = self.host.due()
        pause = seconds if due is None else min(seconds, max(0.0, due - time.monotonic()))
        ready = {fd for fd, _ in self._poller.poll(pause * 1000 + 1)}
        if self._wake_out in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_out, 1024)
        if self._channel.fileno() in ready:
            try:
                for frame in self._channel.arrived():
                    self._take(frame)
            except ChannelError as error:
                if not self._ended.is_set():
                    self._ended.set()
                    self._channel.shutdown()
                    self.host.broken(f"the way from coordinators to executors broke: {error}")
                return
        elif not ready:
            # Only now: while nobody read, what is late may have come.
            self.host.expire()
        self.flush()

    def _run(self) -> None:
        try:
            turns = -1
            while not self._ended.is_set():
                # Only where nobody has read since the last look: a coordinator that handles what it read comes back at once.
                before, turns = turns, self._turns
                if before == turns and self._reading.acquire(blocking=False):
                    try:
                        self._own = True
                        while not self._is_wanted and not self._ended.is_set():
                            self._turn(_QUIET)
                    finally:
                        self._own = False
                        self._reading.release()
                    if self._is_wanted:
                        self._is_wanted = False
                        self._pool.submit(_nothing)  # a thread of the pool takes over
                self._attention.clear()
                self._attention.wait(_ABSENCE if self.host.is_busy else _QUIET)
        except Exception:
            _log.exception("the channel of coordinators failed")

    def _take(self, frame: Any) -> None:
        was_busy = self.host.is_busy
        try:
            if frame.kind == "FROM":
                self.host.received(frame["executor"], frame["frames"])
            elif frame.kind == "LOST":
                self.host.lost(frame["executor"], frame["reason"])
        except Exception:
            _log.exception("frames of an executor could not be handled")
        self._read += 1
        if not was_busy and self.host.is_busy:
            self._attention.set()

    @property
    def is_broken(self) -> bool:
        """Whether nothing goes through it any more."""
        return self._ended.is_set()

    def close(self) -> None:
        """Ends the reader and the connection; a second call does nothing."""
        self.flush()
        self._ended.set()
        self._pool.remove_reader(self)
        self._attention.set()
        self.wake()
        self._channel.shutdown()
        for thread in (self._thread, self._teller):
            if threading.current_thread() is not thread:
                thread.join(5)
        with self._reading, self._waking:  # nobody polls, or writes to, what is closed now
            if self._closed:
                return
            self._closed = True
            self._channel.close()
            os.close(self._wake_in)
            os.close(self._wake_out)


def _parts(frames: list[bytes]) -> Iterator[bytes]:
    """These, in pieces of about as much as travels together."""
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
    """A task that makes a thread of the pool look what there is to do."""
