"""The events that were sent to one evaluation and are not acknowledged yet."""

from __future__ import annotations

import collections
from concurrent.futures import Future

from stagecrew.wire.serialization import TOGETHER

__all__ = ["Outbox"]


class Outbox:
    """A pure state machine that numbers events, matches acknowledgements, and holds events back for a checkpoint.

    Events have the sequence numbers 1, 2, 3, and so on. An acknowledgement covers all events up to its number, and may
    arrive twice, late or never. Events that are added between `hold` and `release` get their numbers in `release`. The
    gateway's lock guards the outbox.
    """

    def __init__(self) -> None:
        #: The number of events that were added, including those that are held back.
        self.added = 0
        self._taken = 0
        self._acknowledged = 0
        self._unsent: collections.deque[bytes] = collections.deque()
        #: The acknowledgement deadline of each unacknowledged event, oldest first.
        self._deadlines: collections.deque[float] = collections.deque()
        #: Sequence numbers, and the futures that wait for their acknowledgement. Most events have no future.
        self._futures: collections.deque[tuple[int, Future[None]]] = collections.deque()
        self._held: list[tuple[bytes, Future[None] | None]] | None = None

    def add(self, payload: bytes, deadline: float, future: Future[None] | None = None) -> None:
        """Adds an event. When the event is acknowledged, `acknowledge` returns its future."""
        self.added += 1
        if self._held is None:
            self._queue(payload, deadline, future)
        else:
            self._held.append((payload, future))

    def hold(self) -> Future[None] | None:
        """Holds back events that are added from now on.

        Returns a future for the acknowledgement of all earlier events, or None if all of them are acknowledged.
        """
        if self._held is None:
            self._held = []
        if not self._deadlines:
            return None
        future: Future[None] = Future()
        self._futures.append((self._acknowledged + len(self._deadlines), future))
        return future

    def release(self, deadline: float) -> None:
        """Queues the events that were held back."""
        held, self._held = self._held or [], None
        for payload, future in held:
            self._queue(payload, deadline, future)

    def _queue(self, payload: bytes, deadline: float, future: Future[None] | None) -> None:
        self._unsent.append(payload)
        self._deadlines.append(deadline)
        if future is not None:
            self._futures.append((self._taken + len(self._unsent), future))

    def take(self) -> tuple[int, list[bytes]] | None:
        """Takes about `TOGETHER` bytes of events to send. Returns the first sequence number and the events, or None."""
        if not self._unsent:
            return None
        events: list[bytes] = []
        size = 0
        while self._unsent and size < TOGETHER:
            events.append(self._unsent.popleft())
            size += len(events[-1])
        first = self._taken + 1
        self._taken += len(events)
        return first, events

    def acknowledge(self, sequence: int) -> list[Future[None]]:
        """Records that all events up to this number are in the mailbox. Returns the futures that waited for them."""
        sequence = min(sequence, self._taken)
        while self._acknowledged < sequence:
            self._acknowledged += 1
            self._deadlines.popleft()
        done = []
        while self._futures and self._futures[0][0] <= self._acknowledged:
            done.append(self._futures.popleft()[1])
        return done

    @property
    def unacknowledged(self) -> int:
        """The number of events that are neither held back nor acknowledged."""
        return len(self._deadlines)

    @property
    def deadline(self) -> float | None:
        """The acknowledgement deadline of the oldest unacknowledged event; None if there is no such event."""
        return self._deadlines[0] if self._deadlines else None

    def clear(self) -> list[Future[None]]:
        """Drops every event, because none will be acknowledged. Returns the futures that are still waiting."""
        futures = [future for _, future in self._futures]
        futures += [future for _, future in self._held or () if future is not None]
        self._futures.clear()
        self._deadlines.clear()
        self._unsent.clear()
        self._held = None
        return futures
