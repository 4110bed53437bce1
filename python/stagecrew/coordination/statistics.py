"""The counts of one use of an operator. They are cheap to update while messages are handled."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from stagecrew.coordination.latency import LatencyHistogram
from stagecrew.observability.error_summary import error_text

if TYPE_CHECKING:
    from stagecrew.coordination.gateway import Gateway

__all__ = ["Statistics", "cut_to"]

#: An error is reported with at most this many characters.
_TEXT: Final = 1000


class Statistics:
    """The counts of one binding. Any thread may read them."""

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
        "is_reported",
        "replies",
        "requests",
        "resets",
    )  # fmt: skip
    #: Shared by all instances, because there may be many. Each instance holds the lock only for a moment.
    _lock = threading.Lock()

    def __init__(self) -> None:
        #: Written by the thread that reads the frames from executors.
        self.events_in = self.requests = 0
        #: Written under the host's lock.
        self.resets = 0
        self.finished = self.failed = self.abandoned = 0
        #: The times from a request's arrival to its reply, and from sending an event to its first acknowledgement.
        self.replies, self.acknowledgements = LatencyHistogram(), LatencyHistogram()
        #: The last error that the coordinator raised, and whether one failed the topology. Any thread may write them.
        self.error, self.is_failed = "", False
        self.is_closed = False
        #: Whether the final statistics were reported.
        self.is_reported = False
        #: The counts in the last frame that was sent.
        self.counted: tuple[int, ...] | None = None
        self._gateways: tuple[Gateway, ...] = ()
        self._sent = 0

    def began(self, gateway: Gateway) -> None:
        """Includes the events of this gateway from now on. Called when its evaluation begins."""
        with self._lock:
            self._gateways = (*self._gateways, gateway)

    def ended(self, gateway: Gateway) -> None:
        """Adds the final number of events of this gateway. Called when its evaluation has ended."""
        with self._lock:
            if gateway in self._gateways:
                self._gateways = tuple(other for other in self._gateways if other is not gateway)
                self._sent += gateway.sent

    def count(self, outcome: str, number: int = 1) -> None:
        """Counts ended evaluations. `outcome` is `finished`, `failed` or `abandoned`."""
        setattr(self, outcome, getattr(self, outcome) + number)

    @property
    def outcomes(self) -> dict[str, int]:
        """The number of ended evaluations, by outcome."""
        return {"finished": self.finished, "failed": self.failed, "abandoned": self.abandoned}

    @property
    def events_out(self) -> int:
        """The number of events that the coordinator sent to tasks."""
        with self._lock:
            return self._sent + sum(gateway.sent for gateway in self._gateways)

    def raised(self, error: BaseException, fails: bool) -> None:
        """Records an error that the coordinator raised, and whether it fails the topology."""
        self.error = cut_to(_TEXT, error_text(error))
        self.is_failed = self.is_failed or fails

    @property
    def state(self) -> str:
        """`active`, `failed` or `closed`."""
        return "failed" if self.is_failed else "closed" if self.is_closed else "active"


def cut_to(length: int, text: str) -> str:
    """Shortens a text to at most this many characters."""
    return text if len(text) <= length else f"{text[: length - 1]}…"
