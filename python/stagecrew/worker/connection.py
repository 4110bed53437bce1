"""A worker's connection to its executor for evaluations: one per process, shared by its evaluations.

It has no thread of its own. One of the threads that wait for a reply, an event or room to send reads the frames for
all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from stagecrew.errors import ChannelClosed, ChannelError, EvaluationEnded
from stagecrew.wire.channel import LONGEST_WAIT, Channel
from stagecrew.wire.frames import Frame
from stagecrew.worker import fork_safety

__all__ = ["Connection", "connected"]

T = TypeVar("T")


class Receiver(Protocol):
    """An evaluation, as the connection sees it."""

    id: int

    def _handle(self, frame: Frame) -> None:
        """Handles a frame. Called with the connection's condition held."""


class Connection:
    """The connection of this process to its executor. Thread-safe."""

    def __init__(self, address_file: str) -> None:
        self._channel = Channel.connect(address_file, role="evaluations")
        self.address_file = address_file
        self.welcome = self._channel.welcome
        #: The lock of `changed`. Entering it is faster than entering the condition.
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        #: Whether a thread reads for all, and how many threads wait for it.
        self._is_reading = False
        self._waiting = 0
        #: True while frames that were read are not yet passed on. If the reader has ended, they are lost.
        self._is_torn = False
        self._sending = threading.Lock()
        self._gateways: dict[int, Receiver] = {}
        self.broken: str | None = None
        fork_safety.forget_in_children(self)

    def forked(self) -> None:
        """Called in a child that user code forked. The connection belongs to the parent."""
        global _current
        _current = None
        self.broken = "this process was forked from the task's process; use the gateway in the task itself"
        self._channel.close()

    def add(self, gateway: Receiver) -> None:
        """Starts passing frames to this evaluation."""
        self._gateways[gateway.id] = gateway

    def remove(self, gateway: Receiver) -> None:
        """Stops passing frames to the evaluation, and wakes its waiting threads."""
        with self.changed:
            self._gateways.pop(gateway.id, None)
            self.changed.notify_all()

    def send(self, *frames: bytes) -> None:
        """Sends encoded frames, or pieces of frames. Raises `EvaluationEnded` if the executor is gone."""
        with self._sending:
            if self.broken is not None:
                raise EvaluationEnded(self.broken)
            try:
                self._channel.write(*frames)
            except ChannelClosed as error:
                # It may have broken within a frame, so nothing more is sent.
                raise EvaluationEnded(self._break(f"the connection to the executor broke: {error}")) from error

    def _break(self, reason: str) -> str:
        """Ends the connection, so that the executor and the reading thread see its end. Returns the first reason."""
        self.broken = self.broken or reason
        self._channel.shutdown()
        return self.broken

    def wait(self, check: Callable[[], T | None], seconds: float | None) -> T | None:
        """Waits until `check` returns a value, and returns this value. Returns None after the timeout."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            is_reader, frames = False, None
            try:  # an exception of a signal handler may be raised at any point
                with self._lock:
                    if (result := check()) is not None:
                        return result
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        return None
                    if self._is_torn and not self._is_reading:
                        self._break("an exception interrupted a thread while it received messages")
                    if self.broken is not None:
                        raise EvaluationEnded(self.broken)
                    if self._is_reading:
                        self._waiting += 1
                        try:
                            self.changed.wait(None if left is None else min(left, LONGEST_WAIT))
                        finally:
                            self._waiting -= 1
                        continue
                    is_reader = self._is_reading = True
                if self._channel.await_frames(left):
                    self._is_torn = True
                    frames = self._channel.receive()
            except ChannelError as error:
                self._break(f"the connection to the executor broke: {error}")
            finally:
                if is_reader:
                    self._pass_on(frames)

    def _pass_on(self, frames: list[Frame] | None) -> None:
        """Ends reading, and passes the frames to their evaluations. None if no frames were read."""
        with self._lock:
            try:
                if frames is not None:
                    for frame in frames:
                        gateway = self._gateways.get(frame.fields["evaluation"])
                        if gateway is not None:
                            gateway._handle(frame)
                    self._is_torn = False
            finally:
                self._is_reading = False
                if self._waiting:
                    self.changed.notify_all()


_current: Connection | None = None
_connecting: Final = threading.Lock()


def connected(address_file: str) -> Connection:
    """Returns this process's connection to the executor with this address file."""
    global _current
    with _connecting:
        if _current is None or _current.address_file != address_file or _current.broken is not None:
            _current = Connection(address_file)
        return _current
