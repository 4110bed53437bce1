"""The connection to executors, as the host of coordinators uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from stagecrew.coordination.gateway import Gateway
    from stagecrew.coordination.route import Route

__all__ = ["Transport"]


class Transport(Protocol):
    """Sends frames to executors. `DriverChannel` implements it; tests have implementations without a socket."""

    def send(self, route: Route, frame: bytes) -> None:
        """Enqueues a frame for an evaluation."""

    def dirty(self, gateway: Gateway) -> None:
        """Records that a gateway has events to send."""

    def flush(self) -> None:
        """Sends the enqueued frames, and the events of gateways."""
