"""The counts of one use of an operator. The threads that handle messages only add to them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from stagecrew.coordination.latency import Times

if TYPE_CHECKING:
    from stagecrew.coordination.gateway import Gateway

__all__ = ["Statistics", "cut_to"]

#: How many characters of an error, and of what is waited for, travel.
_TEXT: Final = 1000


class Statistics:
    """The counts of one binding. Each is written by one thread, or under the host's lock, and read by any."""

    __slots__ = (
        "_gateways",
        "_sent",
        "abandoned",
        "acknowledgements",
        "counted",
        "error",
        "events_in",
        "failed",
        "finished",
        "is_closed",
        "is_failed",
        "is_told",
        "replies",
        "requests",
        "resets",
    )  # fmt: skip
    #: Of all of them: each holds it for a moment, and there may be many.
    _lock = threading.Lock()

    def __init__(self) -> None:
        #: Of whoever reads what comes from executors.
        self.events_in = self.requests = 0
        #: Under the host's lock.
        self.resets = 0
        self.finished = self.failed = self.abandoned = 0
        #: From a request's arrival to its reply; from an event's sending to the acknowledgement that is also the first of it.
        self.replies, self.acknowledgements = Times(), Times()
        #: What the coordinator raised last, and whether that ended it.
        self.error, self.is_failed = "", False
        self.is_closed = False
        #: Whether the last word was told.
        self.is_told = False
        #: The counts in the last frame.
        self.counted: tuple[int, ...] | None = None
        self._gateways: tuple[Gateway, ...] = ()
        self._sent = 0

    def began(self, gateway: Gateway) -> None:
        """An evaluation has begun; what is sent to it is counted by its gateway."""
        with self._lock:
            self._gateways = (*self._gateways, gateway)

    def ended(self, gateway: Gateway) -> None:
        """Nothing more is sent to it."""
        with self._lock:
            if gateway in self._gateways:
                self._gateways = tuple(one for one in self._gateways if one is not gateway)
                self._sent += gateway.sent

    def count(self, outcome: str, number: int = 1) -> None:
        """This many evaluations ended so: `finished`, `failed` or `abandoned`."""
        setattr(self, outcome, getattr(self, outcome) + number)

    @property
    def over(self) -> dict[str, int]:
        """How many evaluations ended, by how."""
        return {"finished": self.finished, "failed": self.failed, "abandoned": self.abandoned}

    @property
    def events_out(self) -> int:
        """How many events were sent."""
        with self._lock:
            return self._sent + sum(gateway.sent for gateway in self._gateways)

    def raised(self, error: BaseException, fails: bool) -> None:
        """The coordinator raised this; where that fails the topology, it has failed."""
        self.error = cut_to(_TEXT, f"{type(error).__name__}: {error}")
        self.is_failed = self.is_failed or fails

    @property
    def state(self) -> str:
        """`active`, `failed` or `closed`."""
        return "failed" if self.is_failed else "closed" if self.is_closed else "active"


def cut_to(length: int, text: str) -> str:
    """So many characters of it at most."""
    return text if len(text) <= length else f"{text[: length - 1]}…"
