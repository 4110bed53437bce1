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
        """Whether the executor has not read everything that was written."""

    def fileno(self) -> int:
        """The socket's file descriptor."""

    def write(self, *frames: bytes) -> None:
        """Sends frames, and keeps those for which the socket has no room. Raises `ChannelClosed`."""

    def shutdown(self) -> None:
        """Ends the connection, so that the reading thread gets `ChannelClosed`."""


#: Where the frames of an evaluation go: the id of its executor, which the driver's JVM reaches, or a direct connection.
#: An evaluation keeps the route on which it began, so that its frames stay in order.
Route: TypeAlias = "str | DirectRoute"
