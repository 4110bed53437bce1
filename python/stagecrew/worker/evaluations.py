"""The task's side of an operator: calls of bound functions, and their gateway to the coordinator.

An evaluation is one call of a bound function. A coordinator's events wait in the executor's mailbox until they are
asked for.
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

from stagecrew.errors import (
    EvaluationEnded,
    EventTimeout,
    OperatorMisused,
    RequestFailed,
    RequestTimeout,
)
from stagecrew.wire.frames import encode
from stagecrew.wire.serialization import END, WINDOW, WINDOW_BYTES, pack, raised, unpack
from stagecrew.worker.connection import Connection, connected
from stagecrew.worker.process import PLACE

__all__ = ["PARTITION", "Bound", "TaskGateway", "evaluate"]

#: In the place of a column: the partition of the task is the subtask, which an empty one has too.
PARTITION: Final = ""

#: What is sent is kept back for at most so long, or until so much waits.
_PAUSE: Final = 0.001
_BATCH: Final = 128
_BATCH_BYTES: Final = 1 << 16
#: How many events, of how many bytes, are asked for at once.
_WANT: Final = 512
_WANT_BYTES: Final = 1 << 17


@dataclasses.dataclass(frozen=True)
class Bound:
    """What a bound function carries to its tasks. Times in seconds, sizes in bytes."""

    binding: str
    operator: str
    topology: str
    #: The column with the subtask, or `PARTITION`; None for a binding without.
    subtask: str | None
    max_event: int
    request_timeout: float


class TaskGateway:
    """A task's way to its coordinator. Usable from several threads of the task.

    `subtask` is the partition of the bound dataset that the evaluation works on; None for `bind`, and of an empty
    partition.
    """

    def __init__(self, connection: Connection, bound: Bound, subtask: int | None, context: Any) -> None:
        self._connection, self._bound = connection, bound
        self.subtask = subtask
        self.id = int.from_bytes(os.urandom(8), "big", signed=True)
        self._lock = threading.Lock()
        self._sequence = 0  # of the last message
        self._first = 1  # of the first that is kept back
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._sent_at = 0.0
        self._handled = 0
        #: The sizes of what is not known to be handled.
        self._sizes: collections.deque[int] = collections.deque()
        self._unhandled_bytes = 0
        self._asked_at = 0  # the last message when room was asked for
        self._flusher: threading.Thread | None = None
        self._something_kept = threading.Event()
        self._replies: dict[int, tuple[str, bytes]] = {}
        self._awaited: set[int] = set()  # the replies that somebody waits for
        self._events: collections.deque[bytes] = collections.deque()
        #: How much of what was asked for has not been taken; the executor's mailbox counts the same.
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
        """Sends an event to the coordinator. It returns at once, unless as much is unhandled as may be.

        Those of one thread are handled in order, once each, before the evaluation is over. What is sent in a hurry
        travels together, at most a millisecond later.

        Raises `EventNotPicklable`, `EventTooLarge`, `EvaluationEnded`, and `RequestTimeout` when the coordinator has
        not handled anything of what was sent before within `spark.stagecrew.request.timeout`.
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
        """Asks the coordinator, behind what was sent before, and answers its reply.

        Raises `RequestFailed` from the coordinator's exception, `RequestTimeout` after `timeout` seconds (default
        `spark.stagecrew.request.timeout`), which count for the wait for room too: its text says whether it was sent,
        and if it was, the coordinator may still have handled it; `EvaluationEnded`, `EventNotPicklable` and
        `EventTooLarge`.
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
        """The coordinator's events, in order, until it closes its gateway to this evaluation.

        Raises `EventTimeout` when none came for `timeout` seconds, and `EvaluationEnded`.
        """
        while True:
            payload = self._next(timeout)
            if payload == END:
                return
            yield unpack(payload)

    # -- of this module

    def took(self, frame: Any) -> None:
        """Something came; called by whoever reads, holding the connection's condition."""
        if frame.kind == "REPLY":
            if frame["sequence"] in self._awaited:
                self._replies[frame["sequence"]] = (frame["outcome"], frame["payload"])
        elif frame.kind == "EVENTS":
            self._events.extend(frame["payloads"])
        elif frame.kind == "HANDLED":
            self._handled = max(self._handled, frame["sequence"])
        elif frame.kind == "ABORT":
            self._over = self._over or frame["reason"]  # what is said to whoever goes on after it says less

    def finish(self, outcome: str, reason: str) -> None:
        """The function has ended. After its own end it waits until all that was sent is in the coordinator's queue."""
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
        self._something_kept.set()  # its thread ends
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
        """None when there is room for one more, else what was handled then, to wait for more of it. With the lock."""
        self._check()
        handled = self._handled  # before the look for room: who reads changes it without the lock
        if self._has_room(size):
            return None
        if self._asked_at < self._sequence:  # what is handled is told now and then, and behind this
            self._asked_at = self._sequence
            self._flush(encode("CREDIT", evaluation=self.id))
        return handled

    def _await_room(self, handled: int, seconds: float, due: float | None = None) -> None:
        """Waits until more is handled, so long, or until `due`. Without the lock: others receive."""

        def more() -> bool | None:
            return self._handled > handled or self._over is not None or self._done or None

        if self._connection.wait(more, seconds if due is None else max(due - time.monotonic(), 0.0)) is None:
            raise RequestTimeout(
                f"nothing was sent: the coordinator of operator {self._bound.operator!r} has {len(self._sizes)} messages of this "
                f"task, of {self._unhandled_bytes} bytes, to handle, and made no room for more within {seconds:g} s; it is slow, "
                f"or blocks"
            )

    def _has_room(self, size: int) -> bool:
        """Whether there is, when what is handled is forgotten. With the lock."""
        if len(self._sizes) < WINDOW and self._unhandled_bytes + size <= WINDOW_BYTES:
            return True
        while len(self._sizes) > self._sequence - self._handled:
            self._unhandled_bytes -= self._sizes.popleft()
        return len(self._sizes) < WINDOW and (not self._sizes or self._unhandled_bytes + size <= WINDOW_BYTES)

    def _flush(self, *more: bytes) -> None:
        """Sends what is kept back, and this behind it. With the lock."""
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
            time.sleep(_PAUSE)  # for more
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
            raise RequestTimeout(f"the coordinator of operator {self._bound.operator!r} {what}")
        return reply

    def _next(self, timeout: float | None) -> bytes:
        def one() -> tuple[bytes, bytes | None] | None:
            if self._events:
                return self._taken()
            self._check()
            return None

        if (
            self._events and not self._kept and self._over is None and not self._done
        ):  # no wait, and nothing to flush before
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
            raise EventTimeout(
                f"no event of the coordinator of operator {self._bound.operator!r} came within {timeout} s"
            )
        payload, wanted = found
        if wanted is not None:
            self._connection.send(wanted)
        return payload

    def _taken(self) -> tuple[bytes, bytes | None]:
        """The oldest event that is here, and the frame that asks for more behind the last.

        Holding the connection's condition.
        """
        if self._events[0] == END:  # it stays, for all who receive
            return END, None
        payload = self._events.popleft()
        self._wanted -= 1
        self._wanted_bytes -= max(len(payload), 1)
        return payload, self._wanting()

    def _wanting(self) -> bytes | None:
        """The frame that asks for more, when none is here and little is on its way.

        Holding the connection's condition.
        """
        if self._events or (self._wanted > _WANT // 2 and self._wanted_bytes > _WANT_BYTES // 2):
            return None
        more, size = _WANT - self._wanted, _WANT_BYTES - self._wanted_bytes
        self._wanted, self._wanted_bytes = _WANT, _WANT_BYTES
        return encode("CREDIT_REQUEST", evaluation=self.id, events=more, bytes=size)


def evaluate(bound: Bound, work: Callable[..., Any], *args: Any) -> Any:
    """Calls `work(gateway, *args)` as one evaluation; an iterator that it answers belongs to it."""
    from pyspark import TaskContext

    context = TaskContext.get()
    place = context.getLocalProperty(PLACE) if context is not None else None
    if not place:
        raise OperatorMisused(
            f"a function bound to operator {bound.operator!r} ran outside of topology {bound.topology!r}: run the action "
            f"inside its `with`; a lazy dataset that is run later has no coordinator. If its stored partitions went with the "
            f"topology, `topology.keep(dataset)` inside it keeps them"
        )
    connection = connected(place)
    subtask: int | None = None
    if bound.subtask == PARTITION:
        assert context is not None  # there is a place
        subtask = context.partitionId()
    elif bound.subtask is not None:
        subtask, batches = _identified(bound.subtask, args[0])
        args = (batches,)
    gateway = TaskGateway(connection, bound, subtask, context)
    try:
        result = work(gateway, *args)
    except BaseException as error:
        gateway.finish("failed", f"{type(error).__name__}: {error}")
        raise
    if hasattr(result, "__next__"):
        return _through(gateway, result)
    gateway.finish("finished", "")
    return result


def _through(gateway: TaskGateway, rows: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from rows
    except GeneratorExit:
        gateway.finish("abandoned", "Spark needed no more of its rows")
        raise
    except BaseException as error:
        gateway.finish("failed", f"{type(error).__name__}: {error}")
        raise
    gateway.finish("finished", "")


def _identified(column: str, batches: Iterator[Any]) -> tuple[int | None, Iterator[Any]]:
    """The subtask of a partition's batches, and these without the column that carries it."""
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
