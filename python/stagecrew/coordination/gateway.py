"""The gateway through which a coordinator sends events to one evaluation."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from stagecrew.coordination.evaluation import Evaluation
from stagecrew.coordination.outbox import Outbox
from stagecrew.coordination.route import Route
from stagecrew.errors import EvaluationEnded
from stagecrew.wire.frames import encode
from stagecrew.wire.serialization import END, pack

__all__ = ["Gateway"]

_log = logging.getLogger("stagecrew")


class Gateway:
    """Sends events to one evaluation, and to no other. Each evaluation has a gateway of its own.

    A coordinator receives the gateway in `Coordinator.ready`. Every method may be called from any thread, and none
    waits.

    No event is lost silently. An event is acknowledged when it is in the evaluation's mailbox. If the acknowledgement
    does not arrive within `spark.stagecrew.ack.timeout`, or the mailbox is full, the attempt fails and Spark retries
    it. This holds for `send`, `send_acknowledged` and `close` alike. While a checkpoint is being taken, events that
    were sent after the coordinator's cut are held back until the checkpoint ends.

    Args:
        evaluation: The evaluation. It is also an attribute of the gateway.
        limit: The maximum size of a serialized event, in bytes.
        deadline: Returns the time by which an event that is sent now must be acknowledged.
        dirty: Called with the gateway when it has frames to send.
        route: Where its frames go. The default is its executor, through the driver's JVM.

    Examples:
        >>> import stagecrew
        >>> from stagecrew.testing import CoordinatorHarness
        >>> class Greeter(stagecrew.Coordinator):
        ...     def ready(self, evaluation, gateway):
        ...         gateway.send("hello")
        ...         gateway.close()
        >>> with CoordinatorHarness(Greeter) as harness:
        ...     task = harness.evaluation(subtask=0)
        ...     task.events(), task.ended
        (['hello'], True)

    Not promised: that the task has *handled* an acknowledged event. If the coordinator must know, let the task reply
    with an event.

    Source: Flink's SubtaskGatewayImpl (FLINK-18071, FLINK-21996).
    """

    def __init__(
        self,
        evaluation: Evaluation,
        limit: int,
        deadline: Callable[[], float],
        dirty: Callable[[Gateway], None],
        route: Route | None = None,
    ) -> None:
        self.evaluation = evaluation
        self._route: Route = evaluation.executor if route is None else route
        self._limit, self._deadline, self._dirty = limit, deadline, dirty
        self._lock = threading.Lock()
        self._outbox = Outbox()
        #: Why the evaluation has ended, or None.
        self._end_reason: str | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<gateway to {self.evaluation}>"

    def send(self, event: Any) -> None:
        """Sends an event. Events that one thread sends arrive in order.

        If the evaluation has ended, the event is dropped. `send_acknowledged` reports this, but `send` does not.

        Args:
            event: Any object that cloudpickle can pickle; `bytes` are sent unchanged.

        Raises:
            EventRejected: The event cannot be pickled.
            EventRejected: The pickled event is larger than `spark.stagecrew.event.maxSize`.
        """
        self._add(pack(event, self._limit))

    def send_acknowledged(self, event: Any) -> Future[None]:
        """Sends an event and returns a future that completes when the event is in the evaluation's mailbox.

        Use it only if you need the future: `send` is several times cheaper.

        Args:
            event: Any object that cloudpickle can pickle; `bytes` are sent unchanged.

        Returns:
            The future. Its result is None. Its exception is `EvaluationEnded` if the evaluation ended first. An event
            that was sent cannot be recalled, so `cancel()` does nothing. Callbacks usually run on the thread
            that reads acknowledgements, and must be short.

        Raises:
            EventRejected: The event cannot be pickled.
            EventRejected: The pickled event is larger than `spark.stagecrew.event.maxSize`.
        """
        payload = pack(event, self._limit)
        future = _running_future()
        self._add(payload, future)
        return future

    def close(self) -> Future[None]:
        """Ends the task's `gateway.events()` after the events that were sent. A second call has no effect.

        Returns:
            A future like that of `send_acknowledged`. A second call returns a completed future.
        """
        future = _running_future()
        with self._lock:
            was_closed, self._closed = self._closed, True
        if was_closed:
            future.set_result(None)
        else:
            self._add(END, future)
        return future

    def _add(self, payload: bytes, future: Future[None] | None = None) -> None:
        with self._lock:
            reason = self._end_reason
            if reason is None:
                self._outbox.add(payload, self._deadline(), future)
        if reason is None:
            self._dirty(self)
        elif future is not None:
            _complete(future, self._ended(reason))

    def _ended(self, reason: str) -> EvaluationEnded:
        return EvaluationEnded(f"{self.evaluation} has ended: {reason}")

    # -- Called by stagecrew, not by coordinators

    @property
    def route(self) -> Route:
        """Where the frames of the evaluation go."""
        return self._route

    def hold(self) -> Future[None] | None:
        """Makes the cut of a checkpoint: events that are sent from now on are held back.

        Returns:
            A future that completes when every event that was sent before the cut is acknowledged. None if all of these
            events already are.
        """
        with self._lock:
            return self._outbox.hold()

    def release(self) -> None:
        """Sends the events that were held back, when the checkpoint has ended."""
        with self._lock:
            self._outbox.release(self._deadline())
        self._dirty(self)

    def take(self) -> bytes | None:
        """Takes the next frame to send.

        Returns:
            The encoded frame, or None if there is nothing to send.
        """
        with self._lock:
            found = self._outbox.take()
        if found is None:
            return None
        first, events = found
        return encode("EVENTS", evaluation=self.evaluation.id, first=first, payloads=events)

    def acknowledge(self, sequence: int) -> float | None:
        """Records that events are in the mailbox.

        Args:
            sequence: The sequence number of the last event that is in the mailbox.

        Returns:
            The deadline of the oldest event that this call acknowledged. None if it acknowledged none.
        """
        with self._lock:
            deadline, before = self._outbox.deadline, self._outbox.unacknowledged
            futures = self._outbox.acknowledge(sequence)
            is_new = self._outbox.unacknowledged < before
        for future in futures:
            _complete(future)
        return deadline if is_new else None

    @property
    def sent(self) -> int:
        """The number of events that the coordinator sent, including those that are held back."""
        with self._lock:
            return self._outbox.added - self._closed

    @property
    def due(self) -> float | None:
        """The acknowledgement deadline of the oldest unacknowledged event, or None."""
        with self._lock:
            return self._outbox.deadline

    def end(self, reason: str) -> None:
        """Ends the gateway with its evaluation: pending futures fail, and later events are dropped.

        Args:
            reason: Why the evaluation ended.
        """
        with self._lock:
            if self._end_reason is not None:
                return
            self._end_reason = reason
            futures = self._outbox.clear()
        for future in futures:
            _complete(future, self._ended(reason))


def _running_future() -> Future[None]:
    """A future that cannot be cancelled."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def _complete(future: Future[None], error: BaseException | None = None) -> None:
    """Completes a future. Logs an error raised by a callback, so that the caller can complete further futures."""
    try:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
    except KeyboardInterrupt:
        raise
    # A callback may raise SystemExit or asyncio's CancelledError, and the user may have completed the future.
    except BaseException:
        _log.exception("could not complete the future of an event, or one of its callbacks failed")
