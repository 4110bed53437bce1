"""A connection of the driver's Python to an executor on the same host, past Spark's RPC and the driver's JVM.

The executor's channel is a socket on this host, and the driver's Python can read the executor's address file. So it
connects to the executor as the executor's own Python processes do, with the same proofs. A request then passes four
threads instead of ten. An executor on another host, or of another user, is reached through the driver's JVM.
"""

from __future__ import annotations

import collections
import select
from typing import Final

from stagecrew.errors import ChannelClosed, ChannelError
from stagecrew.wire.channel import Channel
from stagecrew.wire.frames import Frame

__all__ = ["DirectConnection"]

#: `write` waits only if more than this many bytes are unsent. An executor that then reads nothing is lost.
_MAX_UNSENT: Final = 16 << 20
_MAX_WAIT_MS: Final = 10_000


class DirectConnection:
    """One such connection. One thread at a time writes, and one reads."""

    def __init__(self, executor: str, address_file: str) -> None:
        """Connects. Raises `ChannelError` if this process cannot reach the executor directly."""
        self._channel = Channel.connect(address_file, role="driver")
        if self._channel.welcome.get("executor") != executor:
            self._channel.close()
            raise ChannelError(f"{address_file} is not the address file of executor {executor}")
        self.executor, self.address_file = executor, address_file
        self._unsent: collections.deque[bytes] = collections.deque()

    def fileno(self) -> int:
        """The socket's file descriptor."""
        return self._channel.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `write` still keeps frames for which the socket had no room."""
        return bool(self._unsent)

    def write(self, *frames: bytes) -> None:
        """Sends frames. See `DirectRoute.write`."""
        self._unsent.extend(frames)
        self.write_unsent()
        if self._unsent and sum(map(len, self._unsent)) > _MAX_UNSENT:
            self._wait_for_room()

    def write_unsent(self) -> None:
        """Sends the kept frames for which the socket has room now. Raises `ChannelClosed`."""
        while self._unsent:
            before = len(self._unsent)
            frames = [self._unsent.popleft() for _ in range(min(before, 512))]
            rest = self._channel.write_now(*frames)
            self._unsent.extendleft(reversed(rest))
            if rest:
                return

    def _wait_for_room(self) -> None:
        poller = select.poll()
        poller.register(self._channel, select.POLLOUT)
        while sum(map(len, self._unsent)) > _MAX_UNSENT:
            if not poller.poll(_MAX_WAIT_MS):
                raise ChannelClosed(f"executor {self.executor} has read nothing for {_MAX_WAIT_MS // 1000} s")
            self.write_unsent()

    def receive(self) -> list[Frame]:
        """The messages that have arrived. Raises `ChannelError`."""
        return self._channel.receive()

    def shutdown(self) -> None:
        """Ends the connection. The thread that reads it then gets `ChannelClosed`."""
        self._channel.shutdown()

    def close(self) -> None:
        """Closes the socket."""
        self._channel.close()
