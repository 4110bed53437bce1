"""The task's side of an operator: calls of bound functions, and their gateway to the coordinator.

An evaluation is one call of a bound function. A coordinator's events wait in the executor's mailbox until the task has
credit for them.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from stagecrew.errors import CoordinationTimeout, EvaluationEnded, OperatorMisused, RequestFailed
from stagecrew.wire.frames import encode
from stagecrew.wire.serialization import END, WINDOW, WINDOW_BYTES, pack, raised, unpack
from stagecrew.worker.connection import Connection, connected
from stagecrew.worker.process import PLACE

__all__ = ["PARTITION", "Bound", "TaskGateway", "evaluate"]

#: Instead of a column: the subtask is the partition of the task, also if it is empty.
PARTITION: Final = ""

#: Events are sent together. They wait at most this long, or until this many events or bytes wait.
_PAUSE: Final = 0.001
_BATCH: Final = 128
_BATCH_BYTES: Final = 1 << 16
#: The credit of events, and of bytes.
_WANT: Final = 512
_WANT_BYTES: Final = 1 << 17


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
        self._first = 1  # the number of the first event that waits
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._sent_at = 0.0
        self._handled = 0
        #: The sizes of the messages that may not be handled yet.
        self._sizes: collections.deque[int] = collections.deque()
        self._unhandled_bytes = 0
        self._asked_at = 0  # the last message when room was requested
        self._flusher: threading.Thread | None = None
        self._something_kept = threading.Event()
        self._replies: dict[int, tuple[str, bytes]] = {}
        self._awaited: set[int] = set()  # the requests with a waiting thread
        self._events: collections.deque[bytes] = collections.deque()
        #: The credit that is left. The executor's mailbox counts the same.
        self._wanted = self._wanted_bytes = 0
        self._over: str | None = None
        self._done = False
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

        It returns at once, unless too many messages are unhandled. The events of one thread are handled in order, once
        each, before the evaluation ends. Events in quick succession travel together, at most a millisecond later.

        Args:
            event: Any object that can be pickled; `bytes` travel unchanged.

        Raises:
            EventRejected: The event cannot be pickled.
            EventRejected: The event exceeds `spark.stagecrew.event.maxSize`.
            EvaluationEnded: The evaluation has ended, or its attempt is killed.
            CoordinationTimeout: The coordinator handled none of the earlier messages within
                `spark.stagecrew.request.timeout`.
        """
        payload = pack(event, self._bound.max_event)
        while True:
            with self._lock:
                if (handled := self._lacks_room(len(payload))) is None:
                    self._add(payload)
                    self._kept.append(payload)
                    self._kept_bytes += len(payload)
                    if (
                        len(self._kept) >= _BATCH
                        or self._kept_bytes >= _BATCH_BYTES
                        or time.monotonic() - self._sent_at > _PAUSE
                    ):
                        self._flush()
                        return
                    break
            self._await_room(handled, self._bound.request_timeout)
        if self._flusher is None:
            self._start_flusher()
        if not self._something_kept.is_set():
            self._something_kept.set()

    def request(self, request: Any, timeout: float | None = None) -> Any:
        """Sends a request to the coordinator, and waits for its reply. The coordinator handles earlier events first.

        Args:
            request: Any object that can be pickled; `bytes` travel unchanged.
            timeout: The seconds to wait, for room to send and for the reply together. The default is
                `spark.stagecrew.request.timeout`.

        Returns:
            The reply.

        Raises:
            RequestFailed: The coordinator raised an exception, which is the cause.
            CoordinationTimeout: No reply came in time. The message says whether the request was sent; if it was, the
                coordinator may have handled it.
            EvaluationEnded: The evaluation has ended, or its attempt is killed.
            EventRejected: The request cannot be pickled.
            EventRejected: The request exceeds `spark.stagecrew.event.maxSize`.
        """
        payload = pack(request, self._bound.max_event)
        seconds = self._bound.request_timeout if timeout is None else timeout
        due = time.monotonic() + seconds
        while True:
            with self._lock:
                if (handled := self._lacks_room(len(payload))) is None:
                    sequence = self._add(payload)
                    self._awaited.add(sequence)
                    self._flush(encode("REQUEST", evaluation=self.id, sequence=sequence, payload=payload))
                    break
            self._await_room(handled, seconds, due)
        outcome, reply = self._wait_for(sequence, due, f"has not answered within {seconds:g} s", self._check)
        if outcome == "ok":
            return unpack(reply)
        error, text = raised(reply)
        raise RequestFailed(f"the coordinator of operator {self._bound.operator!r} raised:\n{text}") from error

    def events(self, timeout: float | None = None) -> Iterator[Any]:
        """The events of the coordinator, in order.

        Args:
            timeout: The seconds to wait for each event. The default is no limit.

        Yields:
            Each event, until the coordinator closes its gateway to this evaluation.

        Raises:
            CoordinationTimeout: No event came in time.
            EvaluationEnded: The evaluation has ended, or its attempt is killed.
        """
        while True:
            payload = self._next(timeout)
            if payload == END:
                return
            yield unpack(payload)

    # -- of this module

    def _handle(self, frame: Any) -> None:
        """Handles a frame. Called with the connection's condition held."""
        if frame.kind == "REPLY":
            if frame["sequence"] in self._awaited:
                self._replies[frame["sequence"]] = (frame["outcome"], frame["payload"])
        elif frame.kind == "EVENTS":
            self._events.extend(frame["payloads"])
        elif frame.kind == "HANDLED":
            self._handled = max(self._handled, frame["sequence"])
        elif frame.kind == "ABORT":
            self._over = self._over or frame["reason"]  # a later reason says less

    def _finish(self, outcome: str, reason: str) -> None:
        """The function has ended. If it finished, waits until all of its messages are in the coordinator's queue."""
        with self._lock:
            if self._done:
                return
            self._done = True
            sequence = self._sequence + 1
            self._awaited.add(sequence)
            frame = encode("FINISH", evaluation=self.id, sequence=sequence, outcome=outcome, reason=reason)
            try:
                self._flush(frame)
            except EvaluationEnded:
                if outcome == "finished":
                    raise
        self._something_kept.set()  # ends the thread
        try:
            if outcome == "finished":
                seconds = self._bound.request_timeout
                what = f"has not taken the end of this evaluation within {seconds:g} s"
                self._wait_for(sequence, time.monotonic() + seconds, what, self._check_over)
        finally:
            self._connection.remove(self)

    def _check(self) -> None:
        if self._done:
            raise EvaluationEnded(
                f"the evaluation of operator {self._bound.operator!r} has ended; use its gateway in it"
            )
        self._check_over()

    def _check_over(self) -> None:
        if self._over is not None:
            raise EvaluationEnded(f"the evaluation of operator {self._bound.operator!r} is over: {self._over}")

    def _add(self, payload: bytes) -> int:
        self._sequence += 1
        self._sizes.append(len(payload))
        self._unhandled_bytes += len(payload)
        return self._sequence

    def _lacks_room(self, size: int) -> int | None:
        """None if there is room for a message, else the number of handled ones, to wait for more. With the lock."""
        self._check()
        handled = self._handled  # before the check for room: a reader changes it without the lock
        if self._has_room(size):
            return None
        if self._asked_at < self._sequence:  # the driver reports handled messages from time to time, and after this
            self._asked_at = self._sequence
            self._flush(encode("CREDIT", evaluation=self.id))
        return handled

    def _await_room(self, handled: int, seconds: float, due: float | None = None) -> None:
        """Waits until more is handled, for this time or until `due`. Without the lock, so that others receive."""

        def more() -> bool | None:
            return self._handled > handled or self._over is not None or self._done or None

        if self._connection.wait(more, seconds if due is None else max(due - time.monotonic(), 0.0)) is None:
            raise CoordinationTimeout(
                f"nothing was sent: the coordinator of operator {self._bound.operator!r} has {len(self._sizes)} "
                f"messages of this task, of {self._unhandled_bytes} bytes, to handle, and made no room for more within "
                f"{seconds:g} s; it is slow, or blocks"
            )

    def _has_room(self, size: int) -> bool:
        """Whether there is room, without the handled messages. With the lock."""
        if len(self._sizes) < WINDOW and self._unhandled_bytes + size <= WINDOW_BYTES:
            return True
        while len(self._sizes) > self._sequence - self._handled:
            self._unhandled_bytes -= self._sizes.popleft()
        return len(self._sizes) < WINDOW and (not self._sizes or self._unhandled_bytes + size <= WINDOW_BYTES)

    def _flush(self, *more: bytes) -> None:
        """Sends the waiting events, and then these frames. With the lock."""
        kept, self._kept, self._kept_bytes = self._kept, [], 0
        self._sent_at = time.monotonic()
        frames = list(more)
        if kept:
            frames.insert(0, encode("EVENTS", evaluation=self.id, first=self._first, payloads=kept))
        self._first = self._sequence + 1
        if frames:
            self._connection.send(b"".join(frames))

    def _start_flusher(self) -> None:
        with self._lock:
            if self._flusher is None:
                self._flusher = threading.Thread(target=self._flush_later, name="stagecrew-flush", daemon=True)
                self._flusher.start()

    def _flush_later(self) -> None:
        while True:
            self._something_kept.wait()
            self._something_kept.clear()
            time.sleep(_PAUSE)  # more events may come
            with self._lock:
                if self._done:
                    return
                try:
                    self._flush()
                except EvaluationEnded as error:
                    self._over = self._over or str(error)
                    return

    def _wait_for(self, sequence: int, due: float, what: str, check: Callable[[], None]) -> tuple[str, bytes]:
        def answered() -> tuple[str, bytes] | None:
            if (reply := self._replies.pop(sequence, None)) is not None:
                return reply
            check()
            return None

        try:
            reply = self._connection.wait(answered, max(due - time.monotonic(), 0.0))
        finally:
            self._awaited.discard(sequence)
        if reply is None:
            raise CoordinationTimeout(f"the coordinator of operator {self._bound.operator!r} {what}")
        return reply

    def _next(self, timeout: float | None) -> bytes:
        def one() -> tuple[bytes, bytes | None] | None:
            if self._events:
                return self._taken()
            self._check()
            return None

        if (
            self._events and not self._kept and self._over is None and not self._done
        ):  # nothing to wait for, and nothing to send first
            with self._connection.changed:
                found = one()
        else:
            with self._lock:
                self._check()
                self._flush()
            with self._connection.changed:
                wanted = self._wanting()
            if wanted is not None:
                self._connection.send(wanted)
            found = None
        if found is None and (found := self._connection.wait(one, timeout)) is None:
            raise CoordinationTimeout(
                f"no event of the coordinator of operator {self._bound.operator!r} came within {timeout} s"
            )
        payload, wanted = found
        if wanted is not None:
            self._connection.send(wanted)
        return payload

    def _taken(self) -> tuple[bytes, bytes | None]:
        """Removes the oldest event. Returns it, and after the last one the frame that adds credit.

        Called with the connection's condition held.
        """
        if self._events[0] == END:  # it stays, for all threads that receive
            return END, None
        payload = self._events.popleft()
        self._wanted -= 1
        self._wanted_bytes -= max(len(payload), 1)
        return payload, self._wanting()

    def _wanting(self) -> bytes | None:
        """The frame that adds credit, if no event is here and little credit is left.

        Called with the connection's condition held.
        """
        if self._events or (self._wanted > _WANT // 2 and self._wanted_bytes > _WANT_BYTES // 2):
            return None
        more, size = _WANT - self._wanted, _WANT_BYTES - self._wanted_bytes
        self._wanted, self._wanted_bytes = _WANT, _WANT_BYTES
        return encode("CREDIT_REQUEST", evaluation=self.id, events=more, bytes=size)


def evaluate(bound: Bound, work: Callable[..., Any], *args: Any) -> Any:
    """Calls `work(gateway, *args)` as one evaluation, which includes the iterator that it returns."""
    from pyspark import TaskContext

    context = TaskContext.get()
    place = context.getLocalProperty(PLACE) if context is not None else None
    if not place:
        raise OperatorMisused(
            f"a function bound to operator {bound.operator!r} ran outside of topology {bound.topology!r}: run the "
            f"action inside its `with`; a lazy dataset that is run later has no coordinator. If its stored partitions "
            f"were released with the topology, `topology.keep(dataset)` inside it keeps them"
        )
    connection = connected(place)
    subtask: int | None = None
    if bound.subtask == PARTITION:
        assert context is not None  # a place implies a context
        subtask = context.partitionId()
    elif bound.subtask is not None:
        subtask, batches = _identified(bound.subtask, args[0])
        args = (batches,)
    gateway = TaskGateway(connection, bound, subtask, context)
    try:
        result = work(gateway, *args)
    except BaseException as error:
        gateway._finish("failed", f"{type(error).__name__}: {error}")
        raise
    if hasattr(result, "__next__"):
        return _through(gateway, result)
    gateway._finish("finished", "")
    return result


def _through(gateway: TaskGateway, rows: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from rows
    except GeneratorExit:
        gateway._finish("abandoned", "Spark needed no more of its rows")
        raise
    except BaseException as error:
        gateway._finish("failed", f"{type(error).__name__}: {error}")
        raise
    gateway._finish("finished", "")


def _identified(column: str, batches: Iterator[Any]) -> tuple[int | None, Iterator[Any]]:
    """The subtask of a partition's batches, and the batches without its column."""
    first = next(batches, None)
    if first is None:
        return None, iter(())
    while first.num_rows == 0:
        following = next(batches, None)
        if following is None:
            return None, iter([first.drop_columns([column])])
        first = following
    subtask = int(first.column(column)[0].as_py())
    return subtask, (batch.drop_columns([column]) for batch in itertools.chain([first], batches))
