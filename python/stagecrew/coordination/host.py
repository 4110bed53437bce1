"""Connects coordinators to the frames of executors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from stagecrew.coordination.beginnings import Beginnings
from stagecrew.coordination.binding_checkpoints import BindingCheckpoints
from stagecrew.coordination.delivery import Delivery
from stagecrew.coordination.liveness import Liveness
from stagecrew.coordination.statistics_reporter import StatisticsReporter
from stagecrew.errors import ChannelClosed, ChannelError, CheckpointFailed, OperatorFailed
from stagecrew.wire import hops
from stagecrew.wire.frames import Frame, decode_all, encode

if TYPE_CHECKING:
    from stagecrew.coordination.binding import Binding
    from stagecrew.coordination.checkpoints import TakenState
    from stagecrew.coordination.route import Route
    from stagecrew.coordination.threads import Owner
    from stagecrew.coordination.transport import Transport

__all__ = ["Host"]


class Host:
    """Serves every binding of the session.

    Frames arrive on one thread at a time, and those of an executor arrive in the order in which it sent them. One lock
    guards the state of the host. While the lock is held, no user code is called and nothing is sent: calls of
    coordinators and frames for executors are only enqueued.
    """

    def __init__(
        self, transport: Transport, limit: int, ack_timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.transport = transport
        self.limit = limit
        self._ack_timeout, self._clock = ack_timeout, clock
        self._lock = threading.Lock()
        self._liveness = Liveness(transport, self._lock, limit, ack_timeout, clock)
        self._beginnings = Beginnings(clock)
        self._delivery = Delivery(transport, limit, clock, self._liveness.fail)
        self._checkpoints = BindingCheckpoints(transport, self._lock)
        self._reporter = StatisticsReporter(clock, ack_timeout)
        #: Bindings that ended before their topology, and whose final statistics are not reported yet.
        self._ended_early: list[Binding] = []
        #: Why executors can no longer be reached, or None.
        self._broken: str | None = None

    @property
    def is_busy(self) -> bool:
        """Whether any evaluation is live."""
        return self._liveness.is_busy

    def live_bindings(self, owner: Owner) -> list[Binding]:
        """The owner's bindings that have a live evaluation."""
        return self._liveness.live_bindings(owner)

    # -- Bindings

    def add(self, binding: Binding) -> None:
        """Starts to serve evaluations of the binding."""
        with self._lock:
            self._liveness.bindings[binding.id] = binding
            self._reporter.add(binding)
            broken = self._broken
        if broken is not None:
            binding.owner.fail(ChannelClosed(broken))

    def remove(self, binding: Binding, reason: str) -> None:
        """Stops serving the binding. Its live evaluations are aborted for this reason."""
        with self._lock:
            if self._liveness.stop_serving(binding, reason) and binding.statistics.is_failed:
                self._ended_early.append(binding)  # reported with the next frame, even if its topology continues
            detached = self._liveness.detach(binding)
            pending, binding.pending = binding.pending, None
        if pending is not None:
            pending.fail(CheckpointFailed(reason))
        self._liveness.abort_detached(binding, detached, reason)
        self.transport.flush()

    def reset(
        self, binding: Binding, checkpoint_id: int, state: bytes | None, seconds: float, subtasks: int = 0
    ) -> None:
        """Replaces the coordinator with one that is restored from a checkpoint.

        Live evaluations are aborted: they get no more replies, and cannot succeed.
        """
        coordinator = binding.instance.coordinator
        with self._lock:
            detached = self._liveness.detach(binding)
            binding.seen = subtasks
            pending, binding.pending = binding.pending, None
            binding.reset(checkpoint_id, state, seconds)
        if pending is not None:
            pending.fail(
                CheckpointFailed(
                    f"the coordinator of operator {binding.operator!r} was reset during the checkpoint; take another"
                )
            )
        self._liveness.abort_detached(binding, detached, "its coordinator was reset")
        self.transport.flush()
        if detached and coordinator is not None and coordinator._live_reset_problem:
            binding.owner.fail(OperatorFailed(coordinator._live_reset_problem))

    # -- Checkpoints

    def checkpoint(self, binding: Binding, checkpoint_id: int) -> Future[TakenState]:
        """See `BindingCheckpoints.begin`."""
        return self._checkpoints.begin(binding, checkpoint_id)

    def end_checkpoint(self, binding: Binding, checkpoint_id: int, complete: bool) -> None:
        """See `BindingCheckpoints.end`."""
        self._checkpoints.end(binding, checkpoint_id, complete)

    # -- Statistics

    def statistics(self) -> bytes | None:
        """A frame for the driver's JVM with the statistics that changed since the last frame, or None if none did."""
        with self._lock:
            due = (*self._reporter.take_due(), *self._ended_early)
            bindings = [(binding, list(binding.live.values())) for binding in due]
            self._ended_early.clear()
        return self._reporter.frame(bindings)

    def ended(self, binding: Binding) -> None:
        """Records that the binding has closed before the end of its topology."""
        with self._lock:
            binding.statistics.is_closed = True
            self._ended_early.append(binding)

    def last_statistics(self, owner: str, bindings: list[Binding]) -> bytes | None:
        """A frame with the final statistics of a topology's closed bindings, or None if nothing is left to report."""
        with self._lock:
            bindings = [*(binding for binding in self._ended_early if binding.owner.id == owner), *bindings]
            self._ended_early = [binding for binding in self._ended_early if binding.owner.id != owner]
        for binding in bindings:
            binding.statistics.is_closed = True
        return self._reporter.frame([(binding, ()) for binding in bindings], last=True)

    # -- From executors, on the thread that reads the channel

    def received(self, executor: str, frames: bytes, route: Route | None = None) -> None:
        """Handles frames of evaluations on this executor. `route` is the direct connection from which they came."""
        for frame in decode_all(frames):
            self._handle(executor, frame, executor if route is None else route)
        if self._beginnings:
            self._begin_waiting()
        self.transport.flush()

    def lost(self, executor: str, reason: str) -> None:
        """Handles the loss of an executor, with every evaluation on it."""
        self._liveness.end_executor(executor, reason)
        self._beginnings.drop(lambda waiting: waiting.executor == executor)
        self._begin_waiting()

    def is_lost(self, executor: str) -> bool:
        """Whether this executor was lost."""
        return self._liveness.is_lost(executor)

    def lost_route(self, route: Route, reason: str) -> None:
        """Handles the loss of a direct connection, with every evaluation that used it."""
        self._liveness.end_route(route, reason)
        self._beginnings.drop(lambda waiting: waiting.route is route)
        self._begin_waiting()

    def broken(self, reason: str) -> None:
        """Handles a broken connection to the executors: fails every topology that has bindings."""
        with self._lock:
            self._broken = reason
            owners = {id(binding.owner): binding.owner for binding in self._liveness.bindings.values()}
        for owner in owners.values():
            owner.fail(ChannelClosed(reason))

    def due(self) -> float | None:
        """The next deadline: of an acknowledgement, or of an evaluation that waits to begin. None if nothing waits."""
        deadlines = (self._liveness.next_deadline(), self._beginnings.due)
        return min((due for due in deadlines if due is not None), default=None)

    def expire(self) -> None:
        """Fails attempts whose executor did not acknowledge an event in time, and begins evaluations that waited.

        Call this after the frames that have arrived were handled, or after a grace period.
        """
        if self._beginnings:
            self._begin_waiting()
        if self._liveness.expire():
            self.transport.flush()

    def _begin_waiting(self) -> None:
        """Begins the evaluations that need not wait any more, and handles their frames."""
        for waiting in self._beginnings.take(self._liveness.is_live):
            ready, *frames = waiting.frames
            self._liveness.begin(waiting.executor, ready, waiting.route)
            for frame in frames:
                self._handle(waiting.executor, frame, waiting.route)

    def _handle(self, executor: str, frame: Frame, route: Route) -> None:
        id_ = frame["evaluation"]
        if self._beginnings and self._beginnings.keep(frame):
            return
        if frame.kind == "READY":
            if earlier := self._liveness.earlier_elsewhere(frame, route):
                self._beginnings.add(executor, frame, route, {other for other, _ in earlier})
                for other, its_route in earlier:
                    self.transport.send(its_route, encode("ASK_LIVE", evaluation=other))
            else:
                self._liveness.begin(executor, frame, route)
            return
        if frame.kind == "ENDED":
            self._liveness.end(id_, frame["outcome"], frame["reason"])
            return
        if (found := self._liveness.find(id_)) is None:
            if frame.kind in ("EVENTS", "REQUEST", "FINISH", "ASK_HANDLED"):
                self._liveness.abort(route, id_, "its topology has ended, or its coordinator was reset")
            return
        binding, instance, live = found
        if frame.kind == "EVENTS":
            self._delivery.events(instance, live, frame["first"], frame["payloads"], binding.statistics)
        elif frame.kind == "REQUEST":
            if hops.passed is not None:
                hops.passed("host-receives", id_, frame["sequence"])
            self._delivery.request(instance, live, frame["sequence"], frame["payload"], binding.statistics)
        elif frame.kind == "FINISH":
            if self._delivery.finish(live, frame["sequence"]):
                self._liveness.end(id_, frame["outcome"], frame["reason"])
        elif frame.kind == "ASK_HANDLED":
            instance.loop.call(self._delivery.report_handled, live)  # after the messages that the task sent before
        elif frame.kind == "ACCEPTED":
            if (due := live.gateway.acknowledge(frame["sequence"])) is not None:
                binding.statistics.acknowledgements.add(self._clock() - due + self._ack_timeout)
        elif frame.kind == "LIVE":
            self._beginnings.confirm(id_)
        elif frame.kind == "OVERFLOWED":
            self._liveness.fail(id_, frame["reason"])
        else:
            raise ChannelError(f"executor {executor} sent a {frame.kind} frame, which executors never send")
