"""The rules of the election as a pure state machine: which events make a process the leader, and which end its term."""

from __future__ import annotations

import dataclasses
import math

__all__ = [
    "Acquired",
    "Election",
    "ElectionEvent",
    "Granted",
    "LeaseRequestFailed",
    "Lost",
    "Refused",
    "Renewed",
    "Resigned",
    "Revoked",
    "Suspended",
    "Ticked",
]


@dataclasses.dataclass(frozen=True)
class Acquired:
    """The store has made this process the leader of a new term. `requested_at` is when the request was sent."""

    term: int
    requested_at: float
    #: The session timeout (see `Store.timeout`); None if the session has none.
    timeout: float | None = None


@dataclasses.dataclass(frozen=True)
class Refused:
    """This process did not get the term, usually because another process leads."""


@dataclasses.dataclass(frozen=True)
class Renewed:
    """The session is alive, and its term is the current one."""

    term: int
    requested_at: float


@dataclasses.dataclass(frozen=True)
class LeaseRequestFailed:
    """The request failed. If `error` is a `PossiblyInconsistentError`, its outcome is unknown."""

    error: Exception | None = None


@dataclasses.dataclass(frozen=True)
class Suspended:
    """The connection to the store is down."""


@dataclasses.dataclass(frozen=True)
class Lost:
    """Leadership must end, because the session has ended or for another reason.

    This event ends leadership only in `term`. If `term` is None, it ends leadership in any term.
    """

    reason: str
    term: int | None = None


@dataclasses.dataclass(frozen=True)
class Ticked:
    """Time has passed."""


@dataclasses.dataclass(frozen=True)
class Resigned:
    """This process no longer campaigns."""


#: The inputs of an election.
ElectionEvent = Acquired | Refused | Renewed | LeaseRequestFailed | Suspended | Lost | Ticked | Resigned


@dataclasses.dataclass(frozen=True)
class Granted:
    """This process starts to lead."""

    term: int


@dataclasses.dataclass(frozen=True)
class Revoked:
    """This process stops leading."""

    term: int
    reason: str


class Election:
    """The role of one process: follower, leader, follower again. A process that has resigned stays a follower.

    It has no clock, socket or thread. The caller passes all events to it, with times from a monotonic clock.

    * Each term is granted at most once, and a granted term is revoked at most once. Terms only grow. After a
      revocation, or after a `Suspended` or `Lost` event while this process follows, only an acquisition that was
      requested later counts.
    * `Suspended`, `Lost` and `Resigned` end leadership immediately. If the store does not respond, leadership ends at
      the deadline: two thirds of the session timeout after the last acknowledged request was *sent*. A response after
      the deadline does not restore leadership.

    Not promised: that at most one process believes that it leads. Another process may already have the next term. If a
    leader notices the end of its term late, the fence rejects its writes; this class does not.
    """

    def __init__(self) -> None:
        #: The term in which this process leads; None while it follows.
        self.term: int | None = None
        #: When leadership ends unless it is renewed; None while it follows, or if its session has no timeout.
        self.deadline: float | None = None
        self.resigned = False
        self._timeout: float | None = None
        self._highest_term = 0
        self._last_end = -math.inf

    def is_valid(self, now: float) -> bool:
        """Returns whether this process leads at this time."""
        return self.term is not None and (self.deadline is None or now < self.deadline)

    def handle(self, event: ElectionEvent, now: float) -> Granted | Revoked | None:
        """Handles an event. Returns the resulting change of leadership, or None."""
        if isinstance(event, Resigned):
            self.resigned = True
            return self._end("it has resigned", now)
        if isinstance(event, Suspended):
            return self._end("the connection to the store is down", now)
        if isinstance(event, Lost):
            return self._end(event.reason, now) if event.term in (None, self.term) else None
        if self.term is not None and not self.is_valid(now):
            assert self._timeout is not None
            return self._end(
                f"the store has not responded for two thirds of the session timeout of {self._timeout:g} s", now
            )
        if isinstance(event, Acquired):
            return self._acquired(event, now)
        if isinstance(event, Renewed) and event.term == self.term and self.deadline is not None:
            self.deadline = max(self.deadline, self._deadline_after(event.requested_at))
        return None

    def _acquired(self, event: Acquired, now: float) -> Granted | None:
        too_late = event.timeout is not None and now >= event.requested_at + event.timeout * 2 / 3
        is_new = event.term > self._highest_term and event.requested_at > self._last_end
        if self.resigned or self.term is not None or too_late or not is_new:
            return None
        self.term = self._highest_term = event.term
        self._timeout = event.timeout
        self.deadline = None if event.timeout is None else self._deadline_after(event.requested_at)
        return Granted(event.term)

    def _deadline_after(self, requested_at: float) -> float:
        assert self._timeout is not None
        return requested_at + self._timeout * 2 / 3

    def _end(self, reason: str, now: float) -> Revoked | None:
        self._last_end = max(self._last_end, now)
        if self.term is None:
            return None
        term, self.term, self.deadline = self.term, None, None
        return Revoked(term, reason)
