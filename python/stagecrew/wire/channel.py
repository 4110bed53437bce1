"""The Python side of the socket between a Python process and its executor, or the driver's JVM.

The JVM listens on a Unix domain socket, or on a loopback port. The address file says where (`channel_address.py`), and
contains the token that both sides must know (`handshake.py`). A worker gets the file's path from a local property, and
the agent from an argument. The channel has no thread of its own: its owner reads it.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import select
import socket
import time
from typing import Any, Final

from stagecrew.errors import ChannelClosed, ChannelError
from stagecrew.wire.channel_address import ChannelAddress
from stagecrew.wire.frames import Decoder, Field, Frame, encode
from stagecrew.wire.handshake import Handshake

__all__ = ["LONGEST_WAIT", "Channel"]

#: The number of buffers that every operating system accepts in one `writev`.
_MAX_BUFFERS: Final = 512
#: The pauses between two attempts to connect, in seconds: the first one, and the longest. Each is twice the one before.
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.5
#: The longest single wait in seconds: neither `poll` nor `threading` accepts any number. Longer waits are repeated.
LONGEST_WAIT: Final = 86_400.0


class Channel:
    """One authenticated connection. Not thread-safe."""

    def __init__(self, connection: socket.socket, limit: int, timeout: float, peer: str = "the executor") -> None:
        connection.settimeout(timeout)
        self._socket = connection
        #: The maximum size of a frame in bytes.
        self.limit = limit
        self._decoder = Decoder(limit)
        self._timeout = timeout
        #: The name of the other end, for messages.
        self._peer = peer
        self._arrived: collections.deque[Frame] = collections.deque()
        self.welcome: dict[str, Any] = {}

    @classmethod
    def connect(cls, address_file: str, role: str) -> Channel:
        """Connects to the JVM with this address file, and identifies this process.

        The JVM may drop the connection if unidentified clients open very many. Then this tries again, within the
        channel's timeout.

        Raises `ChannelError` if the JVM cannot be reached, is not the one that wrote the address file, or refuses the
        process.
        """
        peer = "the driver's JVM" if role == "driver" else "the executor"
        deadline, pause = None, _FIRST_PAUSE
        while True:
            try:
                where = ChannelAddress.read(address_file, role)
                deadline = deadline or time.monotonic() + where.timeout
                return cls._connected(where, role, peer)
            except (BlockingIOError, ConnectionResetError, TimeoutError, ChannelClosed) as error:
                if deadline is None or time.monotonic() + pause > deadline:
                    raise ChannelError(
                        f"cannot connect to the channel of {peer} through {address_file}: {error}"
                    ) from error
            except OSError as error:  # it is gone
                raise ChannelError(
                    f"cannot connect to the channel of {peer} through {address_file}: {error}"
                ) from error
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, _LONGEST_PAUSE)

    @classmethod
    def _connected(cls, where: ChannelAddress, role: str, peer: str) -> Channel:
        connection = where.new_socket()
        try:
            connection.settimeout(where.timeout)
            connection.connect(where.address)
            where.check_peer(connection)
            channel = cls(connection, where.max_frame, where.timeout, peer)
            handshake = Handshake(where.token, role, peer)
            channel.write(handshake.connect())
            channel.write(handshake.hello(channel._first("CHALLENGE")))
            channel.welcome = json.loads(channel.wait_for("WELCOME")["body"])
        except BaseException:
            connection.close()
            raise
        return channel

    def _first(self, kind: str) -> Frame:
        """Waits for the server's first frame, of whatever kind it is."""
        if not self._arrived and not self._read(self._timeout):
            raise ChannelError(f"{self._peer} sent no {kind} within {self._timeout} s")
        return self._arrived.popleft()

    def fileno(self) -> int:
        """The socket's file descriptor, for `poll`."""
        return self._socket.fileno()

    @property
    def has_arrived(self) -> bool:
        """Whether frames were read that no call has returned yet. The socket is not ready for them again."""
        return bool(self._arrived)

    def send(self, kind: str, **fields: Field) -> None:
        """Sends one frame. Raises `ChannelClosed`."""
        self.write(encode(kind, **fields))

    def write(self, *frames: bytes) -> None:
        """Sends encoded frames in this order. Raises `ChannelClosed`."""
        try:
            try:  # write without waiting first: sendall on a socket with a timeout would call poll before each write
                sent = os.writev(self._socket.fileno(), frames[:_MAX_BUFFERS])
            except BlockingIOError:
                sent = 0
            for frame in frames:
                if sent < len(frame):
                    self._socket.sendall(memoryview(frame)[sent:])
                sent = max(0, sent - len(frame))
        except OSError as error:
            raise ChannelClosed(f"{self._peer} no longer reads: {error}") from error

    def write_now(self, *frames: bytes) -> list[bytes]:
        """Sends the encoded frames for which the socket has room now. Returns the rest. Raises `ChannelClosed`."""
        try:
            sent = os.writev(self._socket.fileno(), frames[:_MAX_BUFFERS])
        except BlockingIOError:
            return list(frames)
        except OSError as error:
            raise ChannelClosed(f"{self._peer} no longer reads: {error}") from error
        for number, frame in enumerate(frames):
            if sent < len(frame):
                return [bytes(memoryview(frame)[sent:]), *frames[number + 1 :]]
            sent -= len(frame)
        return []

    def await_frames(self, seconds: float | None) -> bool:
        """Waits this long until `receive` need not wait. Returns whether this is the case. Waits at most a day."""
        return bool(self._arrived) or self._await(seconds)

    def _await(self, seconds: float | None) -> bool:
        poller = select.poll()  # a new one each time, because a signal handler may read while the main code waits
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(None if seconds is None else max(0, int(min(seconds, LONGEST_WAIT) * 1000))))

    def receive(self, seconds: float | None = 0.0) -> list[Frame]:
        """Waits this long for a frame, and returns the frames that have arrived. Raises `ChannelClosed`.

        Waits at most a day.
        """
        self._read(0.0 if self._arrived else seconds)
        frames, self._arrived = list(self._arrived), collections.deque()
        return frames

    def wait_for(self, kind: str, **matching: Field) -> Frame:
        """Waits for a frame of this kind whose fields match, and returns it. Keeps other frames for later calls.

        Raises `ChannelError` if none arrives within the channel's timeout, and `ChannelClosed` if the connection ends.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            for frame in self._arrived:
                if frame.kind == kind and all(frame[name] == value for name, value in matching.items()):
                    self._arrived.remove(frame)
                    return frame
                if frame.kind == "REFUSED":
                    raise ChannelError(f"{self._peer} refused this process: {frame['reason']}")
            if not self._read(deadline - time.monotonic()):
                raise ChannelError(f"{self._peer} sent no {kind} within {self._timeout} s")

    def next(self) -> Frame:
        """Returns the next frame. Waits for it without a timeout. Raises `ChannelClosed`."""
        while not self._arrived:
            self._read(None)
        return self._arrived.popleft()

    def take(self) -> list[Frame]:
        """Returns all frames that have arrived, without waiting. Raises `ChannelClosed`."""
        while self._read(0.0):
            pass
        frames, self._arrived = list(self._arrived), collections.deque()
        return frames

    def shutdown(self) -> None:
        """Ends the connection, so that a thread that reads it gets `ChannelClosed`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        self._socket.close()

    def _read(self, seconds: float | None) -> bool:
        if seconds != 0 and not self._await(seconds):
            return False
        try:
            size = os.readv(self._socket.fileno(), [self._decoder.room()])
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosed(f"the connection to {self._peer} broke: {error}") from error
        if not size:
            raise ChannelClosed(f"{self._peer} closed the channel")
        self._arrived.extend(self._decoder.filled(size))
        return True
