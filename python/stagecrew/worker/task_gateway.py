"""The task's gateway to its coordinator: events and requests of the task, and events of the coordinator.

A coordinator's events wait in the executor's mailbox until the task has credit for them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from stagecrew.errors import CoordinationTimeout, EvaluationEnded, RequestFailed
from stagecrew.observability.error_summary import without_surrogates
from stagecrew.wire import hops
from stagecrew.wire.frames import encode, encoded
from stagecrew.wire.serialization import END, WINDOW, WINDOW_BYTES, pack, raised, unpack
from stagecrew.worker.connection import Connection

__all__ = ["Bound", "TaskGateway"]

#: Sent events are batched. A batch is flushed after this many seconds, events or bytes.
_FLUSH_DELAY: Final = 0.001
_BATCH: Final = 128
_BATCH_BYTES: Final = 1 << 16
#: The credit that a task gives to its mailbox: the events and bytes that the mailbox may send to it.
_CREDIT: Final = 512
_CREDIT_BYTES: Final = 1 << 17
#: A failed evaluation waits at most this many seconds until the driver has its last events.
_FAILURE_WAIT: Final = 1.0


@dataclasses.dataclass(frozen=True)
class Bound:
    """The data that a bound function carries to its tasks. Times are in seconds, sizes in bytes."""

    binding: str
    operator: str
    topology: str
    #: The column with the subtask, or `PARTITION`; None for a binding without subtasks.
    subtask: str | None
    max_event: int
    request_timeout: float


class TaskGateway:
    """The connection of a task to its coordinator. All threads of the task may use it.

    `subtask` is the partition of the bound dataset that the evaluation works on. It is None for `bind`, and for an
    empty partition.

    Examples:
        def numbered(gateway, batches):
            for batch in batches:
                first = gateway.request(batch.num_rows)
                yield pa.record_batch({"id": list(range(first, first + batch.num_rows))})
    """

    def __init__(self, connection: Connection, bound: Bound, subtask: int | None, context: Any) -> None:
        self._connection, self._bound = connection, bound
        self.subtask = subtask
        self.id = int.from_bytes(os.urandom(8), "big", signed=True)
        self._lock = threading.Lock()
        self._sequence = 0  # the number of the last message
        self._first_unsent = 1  # the number of the first event in `_unsent`
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._flushed_at = 0.0
        self._handled = 0  # the number of the last message that the coordinator handled
        #: The sizes of the messages that the coordinator may not have handled yet.
        self._sizes: collections.deque[int] = collections.deque()
        self._unhandled_bytes = 0
        self._room_requested_at = 0  # the number of the last message when more room was requested
        self._flusher: threading.Thread | None = None
        self._has_unsent = threading.Event()
        self._replies: dict[int, tuple[str, bytes]] = {}
        self._awaited: set[int] = set()  # the requests with a waiting thread
        self._events: collections.deque[bytes] = collections.deque()
        #: The credit that the mailbox has not used yet. The mailbox counts it, too.
        self._credit = self._credit_bytes = 0
        self._abort_reason: str | None = None
        self._is_finished = False
        connection.add(self)
        connection.send(
            encode(
                "READY",
                evaluation=self.id,
                binding=bound.binding,
                subtask=-1 if subtask is None else subtask,
                attempt=context.taskAttemptId(),
                number=context.attemptNumber(),
                stage=context.stageId(),
                partition=context.partitionId(),
                stage_attempt=0,
                partitions=0,
            )
        )

    @property
    def host(self) -> str:
        """The executor's host, as Spark names it."""
        return str(self._connection.welcome["host"])

    def __repr__(self) -> str:
        return f"<gateway to the coordinator of {self._bound.operator!r}, subtask {self.subtask}>"

    def send(self, event: Any) -> None:
        """Sends an event to the coordinator.

        It returns at once, unless the coordinator has too many unhandled messages of this task. The coordinator handles
        the events of one thread in order, each one once, before the evaluation ends. Events that are sent in quick
        succession are batched, which delays them by at most a millisecond.

        Args:
            event: Any object that can be pickled. `bytes` are sent unchanged.

        Raises:
            EventRejected: The event cannot be pickled.
            EventRejected: The event exceeds `spark.stagecrew.event.maxSize`.
            EvaluationEnded: The evaluation has ended, or Spark has killed its attempt.
            CoordinationTimeout: The coordinator handled none of the earlier messages within
                `spark.stagecrew.request.timeout`.

        The last events are not guaranteed to arrive if the evaluation does not finish: if Spark stops reading its rows
        early (as with `limit`), or if it fails. A request does not return before the coordinator has handled all
        earlier events of the thread.
        """
        payload = pack(event, self._bound.max_event)
        while True:
            with self._lock:
                if (handled := self._check_room(len(payload))) is None:
                    self._add(payload)
                    self._unsent.append(payload)
                    self._unsent_bytes += len(payload)
                    if (
                        len(self._unsent) >= _BATCH
                        or self._unsent_bytes >= _BATCH_BYTES
                        or time.monotonic() - self._flushed_at > _FLUSH_DELAY
                    ):
                        self._flush()
                        return
                    break
            self._await_room(handled, self._bound.request_timeout)
        if self._flusher is None:
            self._start_flusher()
        if not self._has_unsent.is_set():
            self._has_unsent.set()

    def request(self, request: Any, timeout: float | None = None) -> Any:
        """Sends a request to the coordinator, and waits for its reply. The coordinator handles earlier events first.

        Args:
            request: Any object that can be pickled. `bytes` are sent unchanged.
            timeout: The seconds to wait until the request can be sent and the reply arrives. The default is
                `spark.stagecrew.request.timeout`.

        Returns:
            The reply.

        Raises:
            RequestFailed: The coordinator raised an exception. It is the cause, if this process can import its class.
            CoordinationTimeout: No reply came in time. The message says whether the request was sent; if it was, the
                coordinator may have handled it.
            EvaluationEnded: The evaluation has ended, or Spark has killed its attempt.
            EventRejected: The request cannot be pickled.
            EventRejected: The request exceeds `spark.stagecrew.event.maxSize`.
        """
        payload = pack(request, self._bound.max_event)
        seconds = self._bound.request_timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        while True:
            with self._lock:
                if (handled := self._check_room(len(payload))) is None:
                    sequence = self._add(payload)
                    self._awaited.add(sequence)
                    if hops.passed is not None:
                        hops.passed("task-sends", self.id, sequence)
                    self._flush(*encoded("REQUEST", evaluation=self.id, sequence=sequence, payload=payload))
                    break
            self._await_room(handled, seconds, deadline)
        outcome, reply = self._await_reply(sequence, deadline, f"did not reply within {seconds:g} s", self._check)
        if hops.passed is not None:
            hops.passed("task-receives", self.id, sequence)
        if outcome == "ok":
            return unpack(reply)
        error, text = raised(reply)
        raise RequestFailed(f"the coordinator of operator {self._bound.operator!r} raised:\n{text}") from error

    def events(self, timeout: float | None = None) -> Iterator[Any]:
        """The coordinator's events, in order.

        Args:
            timeout: The seconds to wait for each event. By default there is no limit.

        Yields:
            Each event, until the coordinator closes its gateway to this evaluation.

        Raises:
            CoordinationTimeout: No event came in time.
            EvaluationEnded: The evaluation has ended, or Spark has killed its attempt.
        """
        while True:
            payload = self._next(timeout)
            if payload == END:
                return
            yield unpack(payload)

    # -- Used in this module only

    def _handle(self, frame: Any) -> None:
        """Handles a frame. Called with the connection's condition held."""
        if frame.kind == "REPLY":
            fields = frame.fields
            if (sequence := fields["sequence"]) in self._awaited:
                self._replies[sequence] = (fields["outcome"], fields["payload"])
        elif frame.kind == "EVENTS":
            self._events.extend(frame["payloads"])
        elif frame.kind == "HANDLED":
            self._handled = max(self._handled, frame["sequence"])
        elif frame.kind == "ABORT":
            self._abort_reason = self._abort_reason or frame["reason"]  # the first reason is the cause

    def _finish(self, outcome: str, reason: str) -> None:
        """Reports the end of the evaluation, and waits until the driver has queued all its messages.

        If it failed, waits for a short time only. Without the wait, Spark could report the failure before the executor
        has read the last events, which would then be dropped.
        """
        with self._lock:
            if self._is_finished:
                return
            self._is_finished = True
        try:
            sequence = self._send_finish(outcome, reason)
            hops.flush()
            if outcome == "finished":
                seconds = self._bound.request_timeout
                problem = f"did not acknowledge the end of this evaluation within {seconds:g} s"
                self._await_reply(sequence, time.monotonic() + seconds, problem, self._check_aborted)
            elif outcome == "failed":
                with contextlib.suppress(CoordinationTimeout, EvaluationEnded):  # the failure itself is raised
                    self._await_reply(sequence, time.monotonic() + _FAILURE_WAIT, "", self._check_aborted)
        finally:
            self._has_unsent.set()  # so that the flusher thread ends
            self._connection.remove(self)

    def _send_finish(self, outcome: str, reason: str) -> int:
        """Sends the unsent events and the end of the evaluation. Returns the number of the message."""
        with self._lock:
            sequence = self._sequence + 1
            self._awaited.add(sequence)
            reason = without_surrogates(reason)  # the message of a user's exception may have any text
            frame = encode("FINISH", evaluation=self.id, sequence=sequence, outcome=outcome, reason=reason)
            try:
                self._flush(frame)
            except EvaluationEnded:
                if outcome == "finished":
                    raise
        return sequence

    def _check(self) -> None:
        if self._is_finished:
            raise EvaluationEnded(
                f"the evaluation of operator {self._bound.operator!r} has ended; use its gateway only while it runs"
            )
        self._check_aborted()

    def _check_aborted(self) -> None:
        if self._abort_reason is not None:
            raise EvaluationEnded(
                f"the evaluation of operator {self._bound.operator!r} has ended: {self._abort_reason}"
            )

    def _add(self, payload: bytes) -> int:
        self._sequence += 1
        self._sizes.append(len(payload))
        self._unhandled_bytes += len(payload)
        return self._sequence

    def _check_room(self, size: int) -> int | None:
        """Returns None if a message of this size may be sent. Otherwise requests room for it.

        Then it returns the number of the last handled message, for `_await_room`. Called with the lock held.
        """
        self._check()
        handled = self._handled  # read before the check, because the reading thread changes it without the lock
        if self._has_room(size):
            return None
        if self._room_requested_at < self._sequence:  # the driver also reports handled messages without a request
            self._room_requested_at = self._sequence
            self._flush(encode("ASK_HANDLED", evaluation=self.id))
        return handled

    def _await_room(self, handled: int, seconds: float, deadline: float | None = None) -> None:
        """Waits until the coordinator has handled more messages than `handled`, or the evaluation ends.

        Called without the lock, so that other threads can receive meanwhile.
        """

        def has_changed() -> bool | None:
            return self._handled > handled or self._abort_reason is not None or self._is_finished or None

        remaining = seconds if deadline is None else max(deadline - time.monotonic(), 0.0)
        if self._connection.wait(has_changed, remaining) is None:
            raise CoordinationTimeout(
                f"nothing was sent: the coordinator of operator {self._bound.operator!r} has {len(self._sizes)} "
                f"unhandled messages of this task ({self._unhandled_bytes} bytes), and handled none of them within "
                f"{seconds:g} s. It is slow or blocked"
            )

    def _has_room(self, size: int) -> bool:
        """Whether a message of this size may be sent. Handled messages do not count. Called with the lock held."""
        if len(self._sizes) < WINDOW and self._unhandled_bytes + size <= WINDOW_BYTES:
            return True
        while len(self._sizes) > self._sequence - self._handled:
            self._unhandled_bytes -= self._sizes.popleft()
        return len(self._sizes) < WINDOW and (not self._sizes or self._unhandled_bytes + size <= WINDOW_BYTES)

    def _flush(self, *more: bytes) -> None:
        """Sends the unsent events, and then these frames. Called with the lock held."""
        self._flushed_at = time.monotonic()
        if self._unsent:
            unsent, self._unsent, self._unsent_bytes = self._unsent, [], 0
            more = (encode("EVENTS", evaluation=self.id, first=self._first_unsent, payloads=unsent), *more)
        self._first_unsent = self._sequence + 1
        if more:
            self._connection.send(*more)

    def _start_flusher(self) -> None:
        with self._lock:
            if self._flusher is None:
                self._flusher = threading.Thread(target=self._flush_later, name="stagecrew-flush", daemon=True)
                self._flusher.start()

    def _flush_later(self) -> None:
        while True:
            self._has_unsent.wait()
            self._has_unsent.clear()
            time.sleep(_FLUSH_DELAY)  # to collect more events
            with self._lock:
                if self._is_finished:
                    return
                try:
                    self._flush()
                except EvaluationEnded as error:
                    self._abort_reason = self._abort_reason or str(error)
                    return

    def _await_reply(
        self, sequence: int, deadline: float, problem: str, check: Callable[[], None]
    ) -> tuple[str, bytes]:
        def pop_reply() -> tuple[str, bytes] | None:
            if (reply := self._replies.pop(sequence, None)) is None:
                check()
            return reply

        try:
            reply = self._connection.wait(pop_reply, max(deadline - time.monotonic(), 0.0))
        finally:
            self._awaited.discard(sequence)
        if reply is None:
            raise CoordinationTimeout(f"the coordinator of operator {self._bound.operator!r} {problem}")
        return reply

    def _next(self, timeout: float | None) -> bytes:
        def pop_event() -> tuple[bytes, bytes | None] | None:
            if self._events:
                return self._pop_event()
            self._check()
            return None

        # Fast path: an event has arrived, and nothing must be sent first.
        if self._events and not self._unsent and self._abort_reason is None and not self._is_finished:
            with self._connection.changed:
                found = pop_event()
        else:
            with self._lock:
                self._check()
                self._flush()
            with self._connection.changed:
                credit = self._new_credit()
            if credit is not None:
                self._connection.send(credit)
            found = None
        if found is None and (found := self._connection.wait(pop_event, timeout)) is None:
            raise CoordinationTimeout(
                f"no event of the coordinator of operator {self._bound.operator!r} arrived within {timeout} s"
            )
        payload, credit = found
        if credit is not None:
            self._connection.send(credit)
        return payload

    def _pop_event(self) -> tuple[bytes, bytes | None]:
        """Removes and returns the oldest event, and a CREDIT frame if `_new_credit` returns one.

        Called with the connection's condition held.
        """
        if self._events[0] == END:  # it is not removed: every receiving thread must see it
            return END, None
        payload = self._events.popleft()
        self._credit -= 1
        self._credit_bytes -= max(len(payload), 1)
        return payload, self._new_credit()

    def _new_credit(self) -> bytes | None:
        """Returns a CREDIT frame that fills up the credit, if no event is waiting and little credit is left.

        Called with the connection's condition held.
        """
        if self._events or (self._credit > _CREDIT // 2 and self._credit_bytes > _CREDIT_BYTES // 2):
            return None
        events, size = _CREDIT - self._credit, _CREDIT_BYTES - self._credit_bytes
        self._credit, self._credit_bytes = _CREDIT, _CREDIT_BYTES
        return encode("CREDIT", evaluation=self.id, events=events, bytes=size)
