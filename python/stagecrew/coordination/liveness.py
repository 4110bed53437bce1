"""Tracks which evaluations are live, and calls the lifecycle methods of coordinators in the promised order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from stagecrew.bounded import Bounded
from stagecrew.coordination.binding import Binding
from stagecrew.coordination.contract import NO_CHECKPOINT
from stagecrew.coordination.evaluation import Evaluation
from stagecrew.coordination.gateway import Gateway
from stagecrew.coordination.instance import Instance
from stagecrew.coordination.live import LiveEvaluation
from stagecrew.coordination.request_spans import request_spans
from stagecrew.coordination.route import Route
from stagecrew.coordination.threads import Owner
from stagecrew.coordination.transport import Transport
from stagecrew.observability.error_summary import without_surrogates
from stagecrew.wire.frames import Frame, encode

__all__ = ["Liveness"]

#: How many removed bindings and how many ended evaluations are remembered.
_MAX_REMOVED: Final = 256
_MAX_ENDED: Final = 4096
#: How many lost executors are remembered.
_MAX_LOST: Final = 4096


class Liveness:
    """Tracks the bindings that are served, and their live evaluations.

    `lock` is the host's lock. It guards this object and the bindings. While the lock is held, no user code is called
    and nothing is sent: calls of coordinators and frames for executors are only enqueued.
    """

    def __init__(
        self, transport: Transport, lock: threading.Lock, limit: int, ack_timeout: float, clock: Callable[[], float]
    ) -> None:
        self.bindings: dict[str, Binding] = {}
        self._transport, self._lock, self._limit = transport, lock, limit
        self._ack_timeout, self._clock = ack_timeout, clock
        self._live: dict[int, tuple[Binding, LiveEvaluation]] = {}
        #: For the bindings that were removed last, why they are no longer served.
        self._removed: Bounded[str, str] = Bounded(_MAX_REMOVED)
        self._ended: Bounded[int, None] = Bounded(_MAX_ENDED)
        #: By executor: why it was lost. Spark never uses the id of an executor twice.
        self._lost: Bounded[str, str] = Bounded(_MAX_LOST)

    @property
    def is_busy(self) -> bool:
        """Whether any evaluation is live."""
        return bool(self._live)

    def live_bindings(self, owner: Owner) -> list[Binding]:
        """The owner's bindings that have a live evaluation."""
        with self._lock:
            return list(dict.fromkeys(binding for binding, _ in self._live.values() if binding.owner is owner))

    def find(self, id_: int) -> tuple[Binding, Instance, LiveEvaluation] | None:
        """A live evaluation, its binding, and the instance that serves it now. None if no such evaluation is live."""
        with self._lock:
            if (known := self._live.get(id_)) is None:
                return None
            binding, live = known
            return binding, binding.instance, live

    def is_live(self, id_: int) -> bool:
        """Whether this evaluation is live."""
        with self._lock:
            return id_ in self._live

    # -- Begin and end of evaluations

    def earlier_elsewhere(self, ready: Frame, route: Route) -> list[tuple[int, Route]]:
        """The live evaluations of this subtask whose frames arrive on another route, with their routes."""
        with self._lock:
            binding = self.bindings.get(ready["binding"])
            if binding is None or ready["subtask"] < 0 or not binding.seen >> ready["subtask"] & 1:
                return []
            return [
                (live.evaluation.id, live.gateway.route)
                for live in binding.live.values()
                if live.evaluation.subtask == ready["subtask"] and live.gateway.route != route
            ]

    def begin(self, executor: str, frame: Frame, route: Route) -> None:
        """Handles the beginning of an evaluation. Calls `subtask_reset` if its subtask begins again, then `ready`."""
        with self._lock:
            if frame["evaluation"] in self._live or frame["evaluation"] in self._ended:
                return  # a duplicate, or a frame that arrived after the evaluation's end
            # The news of the loss takes another way, so it may arrive before the frames of the executor.
            reason = self._lost.get(executor)
            binding = self.bindings.get(frame["binding"])
            if binding is None:
                reason = self._removed.get(frame["binding"], "its topology has ended")
            elif reason is None:
                self._begin(binding, _evaluation(binding.operator, executor, frame), route)
        if reason is not None:
            self.abort(route, frame["evaluation"], reason)

    def _begin(self, binding: Binding, evaluation: Evaluation, route: Route) -> None:
        gateway = Gateway(evaluation, self._limit, self._ack_deadline, self._transport.dirty, route)
        if binding.holds_events:
            gateway.hold()
        live = LiveEvaluation(evaluation, gateway, self._clock(), request_spans(binding.owner.id, evaluation))
        binding.statistics.began(gateway)
        begins_again = False
        if (subtask := evaluation.subtask) is not None:
            begins_again = bool(binding.seen >> subtask & 1) and not any(
                other.evaluation.subtask == subtask for other in binding.live.values()
            )
            binding.seen |= 1 << subtask
        binding.live[evaluation.id] = live
        self._live[evaluation.id] = (binding, live)
        # Enqueue the calls under the lock, so that a reset in between cannot pass this evaluation to a new instance.
        if begins_again:
            binding.instance.call("subtask_reset", subtask, NO_CHECKPOINT)
        binding.instance.ready(live)

    def _ack_deadline(self) -> float:
        return self._clock() + self._ack_timeout

    def end(self, id_: int, outcome: str, reason: str) -> None:
        """Handles the end of an evaluation. `outcome` is `finished`, `failed` or `abandoned`. Idempotent."""
        with self._lock:
            known = self._live.pop(id_, None)
            self._ended[id_] = None
            if known is None:
                return
            binding, live = known
            binding.live.pop(id_, None)
            # If the dict is empty, replace it: a dict never shrinks, and bindings live for a long time.
            binding.live = binding.live or {}
            binding.statistics.count(outcome)
            binding.instance.end(live, outcome, *([reason] if outcome == "failed" else []))
        live.close(reason or outcome)
        binding.statistics.ended(live.gateway)

    def fail(self, id_: int, reason: str) -> None:
        """Fails the attempt of a live evaluation, so that executor and driver agree on its delivered messages."""
        with self._lock:
            known = self._live.get(id_)
        if known is not None:
            self.abort(known[1].gateway.route, id_, reason)
            self.end(id_, "failed", reason)

    def end_executor(self, executor: str, reason: str) -> None:
        """Handles the loss of an executor: all evaluations on it have failed."""
        with self._lock:
            self._lost[executor] = reason
            lost = [live.evaluation.id for _, live in self._live.values() if live.evaluation.executor == executor]
        for id_ in lost:
            self.end(id_, "failed", reason)

    def is_lost(self, executor: str) -> bool:
        """Whether this executor was lost."""
        with self._lock:
            return executor in self._lost

    def end_route(self, route: Route, reason: str) -> None:
        """Handles the loss of a direct connection: the evaluations that used it have failed."""
        with self._lock:
            lost = [live.evaluation.id for _, live in self._live.values() if live.gateway.route is route]
        for id_ in lost:
            self.end(id_, "failed", reason)

    def abort(self, route: Route, id_: int, reason: str) -> None:
        """Tells the executor to fail the attempt of an evaluation."""
        self._transport.send(route, encode("ABORT", evaluation=id_, reason=without_surrogates(reason)))

    # -- Bindings

    def stop_serving(self, binding: Binding, reason: str) -> bool:
        """Stops serving new evaluations of the binding. Returns whether it was served. The caller holds the lock."""
        if self.bindings.pop(binding.id, None) is None:
            return False
        self._removed[binding.id] = reason
        return True

    def detach(self, binding: Binding) -> list[LiveEvaluation]:
        """Removes the binding's live evaluations, for `abort_detached`. The caller holds the lock."""
        detached = list(binding.live.values())
        binding.live.clear()
        binding.statistics.count("failed", len(detached))
        for live in detached:
            self._live.pop(live.evaluation.id, None)
            self._ended[live.evaluation.id] = None
        return detached

    def abort_detached(self, binding: Binding, detached: list[LiveEvaluation], reason: str) -> None:
        """Aborts these evaluations. Their coordinator is not called."""
        for live in detached:
            self.abort(live.gateway.route, live.evaluation.id, reason)
            live.close(reason)
            binding.statistics.ended(live.gateway)

    # -- Acknowledgement deadlines

    def next_deadline(self) -> float | None:
        """The next acknowledgement deadline, or None."""
        with self._lock:
            deadlines = [due for _, live in self._live.values() if (due := live.gateway.due) is not None]
        return min(deadlines, default=None)

    def expire(self) -> bool:
        """Fails the attempts whose executor did not acknowledge an event in time. Returns whether there were any."""
        now = self._clock()
        with self._lock:
            late = [
                live.evaluation
                for _, live in self._live.values()
                if (due := live.gateway.due) is not None and due <= now
            ]
        for evaluation in late:
            self.fail(
                evaluation.id,
                f"executor {evaluation.executor} did not acknowledge an event within {self._ack_timeout} s "
                f"(spark.stagecrew.ack.timeout)",
            )
        return bool(late)


def _evaluation(operator: str, executor: str, frame: Frame) -> Evaluation:
    return Evaluation(
        id=frame["evaluation"],
        operator=operator,
        subtask=None if frame["subtask"] < 0 else int(frame["subtask"]),
        attempt=frame["attempt"],
        attempt_number=frame["number"],
        stage=frame["stage"],
        partition=frame["partition"],
        stage_attempt=frame["stage_attempt"],
        partitions=frame["partitions"],
        executor=executor,
    )
