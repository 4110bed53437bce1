"""The coordinator's way to one evaluation."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from stagecrew.coordination.acknowledgement import Acknowledgement
from stagecrew.coordination.evaluation import Evaluation
from stagecrew.errors import EvaluationEnded
from stagecrew.wire.frames import encode
from stagecrew.wire.serialization import END, TOGETHER, pack

__all__ = ["Gateway", "Outbox"]


class Outbox:
    """What was sent to one evaluation and is not acknowledged: a pure state machine, guarded by its gateway.

    Events have the sequence numbers 1, 2, 3…; an acknowledgement is for all up to a number, may come twice, late or never.
    While it is held, events are kept back, and count as sent at their release.
    """

    def __init__(self) -> None:
        #: How many were added, in all.
        self.added = 0
        self._sent = 0
        self._unsent: collections.deque[bytes] = collections.deque()
        #: Sequence number, the time by which it has to be acknowledged, and who waits for it.
        self._waiting: collections.deque[tuple[int, float, Acknowledgement]] = collections.deque()
        self._held: list[tuple[bytes, Acknowledgement]] | None = None

    def add(self, payload: bytes, due: float) -> Acknowledgement:
        """Takes one more event; answers who learns of its acknowledgement."""
        future = Acknowledgement()
        self.added += 1
        if self._held is None:
            self._queue(payload, due, future)
        else:
            self._held.append((payload, future))
        return future

    def hold(self) -> list[Acknowledgement]:
        """Keeps back what is added from now on. Answers who waits for what was added before."""
        if self._held is None:
            self._held = []
        return [future for _, _, future in self._waiting]

    def release(self, due: float) -> None:
        """Nothing is kept back any more."""
        held, self._held = self._held or [], None
        for payload, future in held:
            self._queue(payload, due, future)

    def _queue(self, payload: bytes, due: float, future: Acknowledgement) -> None:
        self._unsent.append(payload)
        self._waiting.append((self._sent + len(self._unsent), due, future))

    def take(self) -> tuple[int, list[bytes]] | None:
        """What is to be sent next, with its first sequence number: as much as travels together; None when there is no more."""
        if not self._unsent:
            return None
        events: list[bytes] = []
        size = 0
        while self._unsent and size < TOGETHER:
            events.append(self._unsent.popleft())
            size += len(events[-1])
        first = self._sent + 1
        self._sent += len(events)
        return first, events

    def acknowledged(self, sequence: int) -> list[Acknowledgement]:
        """All up to this one are in the evaluation's mailbox. Answers who has waited for that."""
        done = []
        while self._waiting and self._waiting[0][0] <= min(sequence, self._sent):
            done.append(self._waiting.popleft()[2])
        return done

    @property
    def due(self) -> float | None:
        """By when the oldest has to be acknowledged."""
        return self._waiting[0][1] if self._waiting else None

    def fail(self) -> list[Acknowledgement]:
        """Nothing will be acknowledged any more. Answers all who wait."""
        waiting = [future for _, _, future in self._waiting] + [future for _, future in self._held or ()]
        self._waiting.clear()
        self._unsent.clear()
        self._held = None
        return waiting


class Gateway:
    """Sends events to one evaluation, for ever to that one: another attempt at its work has a gateway of its own.

    Usable from any thread.
    """

    def __init__(
        self, evaluation: Evaluation, limit: int, deadline: Callable[[], float], dirty: Callable[[Gateway], None]
    ) -> None:
        self.evaluation = evaluation
        self._limit, self._deadline, self._dirty = limit, deadline, dirty
        self._lock = threading.Lock()
        self._outbox = Outbox()
        self._over: str | None = None
        self._ended = False

    def __repr__(self) -> str:
        return f"<gateway to {self.evaluation}>"

    def send(self, event: Any) -> Future[None]:
        """Sends an event; those of one thread arrive in order. Answers a future that is done when it is in the mailbox.

        It does not wait, and what was sent cannot be taken back: `cancel()` of the future does nothing. That the task *handled* it, nobody is told: let it answer. When the evaluation is over, or cannot
        take the event, the future raises `EvaluationEnded`, and its attempt has failed: no loss is silent.

        Raises `EventNotPicklable` and `EventTooLarge`.
        """
        return self._add(pack(event, self._limit))

    def close(self) -> Future[None]:
        """Ends the task's `gateway.events()` behind what was sent; a second call does nothing more."""
        with self._lock:
            ended, self._ended = self._ended, True
        if ended:
            done = Acknowledgement()
            done.settle()
            return done
        return self._add(END)

    def _add(self, payload: bytes) -> Acknowledgement:
        with self._lock:
            if self._over is None:
                future = self._outbox.add(payload, self._deadline())
                over = None
            else:
                over = self._over
        if over is not None:
            future = Acknowledgement()
            future.settle(EvaluationEnded(f"{self.evaluation} is over: {over}"))
            return future
        self._dirty(self)
        return future

    # -- for the host

    def hold(self) -> list[Acknowledgement]:
        """A checkpoint's cut: what is sent from now on is kept back. Answers who waits for what was sent before."""
        with self._lock:
            return self._outbox.hold()

    def release(self) -> None:
        """The checkpoint is over: what was kept back is sent."""
        with self._lock:
            self._outbox.release(self._deadline())
        self._dirty(self)

    def take(self) -> bytes | None:
        """The frame that is to be sent next; None when there is none."""
        with self._lock:
            found = self._outbox.take()
        if found is None:
            return None
        first, events = found
        return encode("EVENTS", evaluation=self.evaluation.id, first=first, payloads=events)

    def acknowledged(self, sequence: int) -> float | None:
        """All up to this one are in the mailbox. Answers by when the oldest of them had to be, if one was not known to be."""
        with self._lock:
            due = self._outbox.due
            done = self._outbox.acknowledged(sequence)
        for future in done:
            future.settle()
        return due if done else None

    @property
    def sent(self) -> int:
        """How many events were sent."""
        with self._lock:
            return self._outbox.added - self._ended

    @property
    def due(self) -> float | None:
        """By when the oldest event has to be acknowledged."""
        with self._lock:
            return self._outbox.due

    def over(self, reason: str) -> None:
        """The evaluation is over: nothing is sent to it any more."""
        with self._lock:
            if self._over is not None:
                return
            self._over = reason
            failed = self._outbox.fail()
        for future in failed:
            future.settle(EvaluationEnded(f"{self.evaluation} is over: {reason}"))
