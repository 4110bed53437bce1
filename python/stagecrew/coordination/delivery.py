"""Delivers the messages of evaluations to their coordinators, each once and in order, and returns the replies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from stagecrew.coordination.instance import Instance
from stagecrew.coordination.live import LiveEvaluation
from stagecrew.coordination.statistics import Statistics
from stagecrew.coordination.transport import Transport
from stagecrew.observability.logs import set_current_evaluation
from stagecrew.wire import hops
from stagecrew.wire.frames import encode
from stagecrew.wire.serialization import WINDOW, WINDOW_BYTES, failure, pack, unpack

__all__ = ["Delivery"]

#: A reply of at least this many bytes is large. Only the last large reply to an evaluation is kept.
_LARGE_REPLY: Final = 1 << 16
#: When a message is handled, a HANDLED frame is sent if the last one is at least this many seconds old.
_REPORT_PERIOD: Final = 1.0


class Delivery:
    """Detects duplicate and missing messages by their numbers. Drops duplicates; a gap fails the evaluation's attempt.

    `fail(evaluation_id, reason)` fails the attempt of a live evaluation.
    """

    def __init__(
        self, transport: Transport, limit: int, clock: Callable[[], float], fail: Callable[[int, str], None]
    ) -> None:
        self._transport, self._limit, self._clock, self._fail = transport, limit, clock, fail

    # -- On the thread that reads frames

    def events(
        self, instance: Instance, live: LiveEvaluation, first: int, payloads: list[bytes], statistics: Statistics
    ) -> None:
        """Enqueues the events that are new. `first` is the sequence number of the first event."""
        if (new := self._accept_new(live, first, payloads)) is not None:
            statistics.events_in += len(new)
            instance.enqueue(self._handle_events, instance, live, new)

    def request(
        self, instance: Instance, live: LiveEvaluation, sequence: int, payload: bytes, statistics: Statistics
    ) -> None:
        """Enqueues a request. A repeated request gets the first reply again, if this reply is still kept."""
        if sequence < live.expected:
            if isinstance(reply := live.replies.get(sequence), tuple):
                self._reply(live, sequence, *reply)
            return  # otherwise, there is no reply yet, or it is no longer kept
        if self._accept_new(live, sequence, [payload]) is not None:
            now = self._clock()
            with live.replies_lock:
                live.replies[sequence] = now
            statistics.requests += 1
            if live.request_spans is not None:
                live.request_spans.begin(sequence)
            instance.enqueue(self._handle_request, instance, live, sequence, payload, statistics, now)

    def finish(self, live: LiveEvaluation, sequence: int) -> bool:
        """Acknowledges the evaluation's last message, and returns True.

        If earlier messages are missing, fails the attempt and returns False.
        """
        if sequence > live.expected:
            self._accept_new(live, sequence, [])
            return False
        self._reply(live, sequence, "ok", b"")
        return True

    def _accept_new(self, live: LiveEvaluation, first: int, payloads: list[bytes]) -> list[bytes] | None:
        """Accepts the payloads that are new: advances `live.expected`, and returns them.

        If messages are missing, fails the attempt and returns None.
        """
        if first > live.expected:
            self._fail(
                live.evaluation.id, f"messages {live.expected} to {first - 1} were lost on the way to the coordinator"
            )
            return None
        new = payloads[live.expected - first :]
        live.expected += len(new)
        return new

    # -- On the coordinator's thread, except where stated

    def _handle_events(self, instance: Instance, live: LiveEvaluation, payloads: list[bytes]) -> None:
        context, coordinator = instance.context, instance.coordinator
        if context.state == "closed" or coordinator is None:
            return  # the coordinator was reset or closed, which drops earlier messages
        handle, evaluation = coordinator.handle_event, live.evaluation
        set_current_evaluation(evaluation)
        for payload in payloads:
            if context.state == "closed":
                return
            handle(evaluation, unpack(payload))
            self._count_handled(live, len(payload))

    def _handle_request(
        self,
        instance: Instance,
        live: LiveEvaluation,
        sequence: int,
        payload: bytes,
        statistics: Statistics,
        received_at: float,
    ) -> None:
        if instance.context.state == "closed" or instance.coordinator is None:
            return
        set_current_evaluation(live.evaluation)
        if hops.passed is not None:
            hops.passed("coordinator-called", live.evaluation.id, sequence)
        try:
            reply = instance.coordinator.handle_request(live.evaluation, unpack(payload))
            if isinstance(reply, Future):
                reply.add_done_callback(
                    lambda done: self._reply_later(instance, live, sequence, done, statistics, received_at)
                )
            else:
                self._reply(live, sequence, "ok", pack(reply, self._limit))
                statistics.replies.add(self._clock() - received_at)
            if hops.passed is not None:
                hops.passed("coordinator-replied", live.evaluation.id, sequence)
        except Exception as error:
            self._reply_failure(live, sequence, error, statistics, received_at)
        self._count_handled(live, len(payload))

    def _reply_later(
        self,
        instance: Instance,
        live: LiveEvaluation,
        sequence: int,
        done: Future[Any],
        statistics: Statistics,
        received_at: float,
    ) -> None:
        """Replies with the outcome of the future that `handle_request` returned. Runs on any thread."""
        try:
            self._reply(live, sequence, "ok", pack(done.result(), self._limit))
            statistics.replies.add(self._clock() - received_at)
        except BaseException as error:  # includes CancelledError
            self._reply_failure(live, sequence, error, statistics, received_at)
        if not instance.loop.is_current:  # the loop flushes when it is idle, so that replies are sent together
            self._transport.flush()

    def _reply_failure(
        self, live: LiveEvaluation, sequence: int, error: BaseException, statistics: Statistics, received_at: float
    ) -> None:
        """Replies with an error, and counts it. Runs on any thread."""
        self._reply(live, sequence, "failed", failure(error, self._limit))
        statistics.raised(error, fails=False)
        statistics.replies.add(self._clock() - received_at)

    def _reply(self, live: LiveEvaluation, sequence: int, outcome: str, payload: bytes) -> None:
        """Keeps a reply, in case its request arrives again, and sends it. Runs on any thread."""
        with live.replies_lock:
            if sequence in live.replies:
                live.replies[sequence] = (outcome, payload)
                if len(payload) >= _LARGE_REPLY and live.large_reply != sequence:
                    live.replies.pop(live.large_reply, None)
                    live.large_reply = sequence
        if live.request_spans is not None:
            live.request_spans.end(sequence, outcome)
        evaluation = live.evaluation
        self._transport.send(
            live.gateway.route,
            encode("REPLY", evaluation=evaluation.id, sequence=sequence, outcome=outcome, payload=payload),
        )

    def _count_handled(self, live: LiveEvaluation, size: int) -> None:
        """Counts a handled message of this many bytes, and reports to the task from time to time.

        Reports after each quarter of the send window, so that handled messages do not fill it. Also reports about every
        second, so that the task of a slow coordinator sees progress.
        """
        live.handled += 1
        live.unreported_bytes += size
        is_due = live.handled - live.reported >= WINDOW // 4 or live.unreported_bytes >= WINDOW_BYTES // 4
        if is_due or self._clock() - live.reported_at >= _REPORT_PERIOD:
            self.report_handled(live)

    def report_handled(self, live: LiveEvaluation) -> None:
        """Reports to the task how many of its messages were handled, so that it can send more."""
        live.reported, live.unreported_bytes, live.reported_at = live.handled, 0, self._clock()
        handled = encode("HANDLED", evaluation=live.evaluation.id, sequence=live.handled)
        self._transport.send(live.gateway.route, handled)
