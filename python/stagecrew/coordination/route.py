"""The routes between coordinators and the tasks on an executor."""

from __future__ import annotations

from typing import Protocol, TypeAlias

__all__ = ["DirectRoute", "Route"]


class DirectRoute(Protocol):
    """A connection to an executor on this host."""

    @property
    def executor(self) -> str:
        """The executor's id."""

    @property
    def has_unsent(self) -> bool:
        """Whether `write` still keeps frames for which the socket had no room."""

    def fileno(self) -> int:
        """The socket's file descriptor."""

    def write(self, *frames: bytes) -> None:
        """Sends frames. Frames for which the socket has no room are kept, and sent later.

        Waits only if very many bytes are kept. Raises `ChannelClosed` if the connection has ended.
        """

    def shutdown(self) -> None:
        """Ends the connection. The thread that reads it then gets `ChannelClosed`."""


#: The way of frames to an evaluation (a call of a bound function in a task). The id of an executor means: to this
#: executor, through the driver's JVM. A `DirectRoute` means: to the executor itself. An evaluation keeps the route on
#: which it began, so that its frames stay in order.
Route: TypeAlias = "str | DirectRoute"
