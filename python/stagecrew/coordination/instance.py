"""One instance of a coordinator, with its context and its loop. A reset replaces it with another instance."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, Protocol

from stagecrew.coordination.checkpoints import PendingCheckpoint, check_state
from stagecrew.coordination.context import NO_PROGRESS, CoordinatorContext
from stagecrew.coordination.contract import NO_CHECKPOINT, Coordinator
from stagecrew.coordination.evaluation import Evaluation
from stagecrew.coordination.live import LiveEvaluation
from stagecrew.coordination.statistics import Statistics, cut_to
from stagecrew.coordination.threads import Owner, Threads
from stagecrew.errors import OperatorMisused
from stagecrew.observability.logs import set_current_evaluation

__all__ = ["Instance", "Summary"]

_log = logging.getLogger("stagecrew")

#: Limits of a summary: characters of a text, of a kind and of a name, and the number of progress entries.
_MAX_TEXT: Final = 300
_MAX_KIND: Final = 40
_MAX_NAME: Final = 80
_MAX_ENTRIES: Final = 20


class Use(Protocol):
    """The binding of an instance, as the instance sees it."""

    operator: str
    factory: Callable[[CoordinatorContext], Coordinator]
    threads: Threads
    statistics: Statistics

    @property
    def owner(self) -> Owner:
        """The operators of its topology."""

    def mark_changed(self) -> None:
        """Records that the coordinator was called or reported something."""


class Summary(NamedTuple):
    """The last description that a coordinator gave of itself, for the UI and the reports."""

    kind: str
    waits_for: str
    progress: dict[str, str]


_NO_SUMMARY: Final = Summary(Coordinator.kind, "", {})
#: Guards `_unfinished` in all instances. Each instance holds the lock only for a moment.
_unfinished_lock: Final = threading.Lock()


class Instance:
    """One coordinator with its context and its loop."""

    __slots__ = (
        "_is_failure_logged",
        "_own_progress",
        "_unfinished",
        "_use",
        "context",
        "coordinator",
        "loop",
        "summary",
        "summary_requested_at",
    )

    def __init__(self, use: Use) -> None:
        self._use = use
        owner, threads = use.owner, use.threads
        self.context = CoordinatorContext(use.operator, owner.name, owner.store, threads.async_calls, owner.id)
        self.coordinator: Coordinator | None = None
        self.summary = _NO_SUMMARY
        #: The time when a new summary was requested, or None if none is requested.
        self.summary_requested_at: float | None = None
        #: The last value that `Coordinator.progress` returned.
        self._own_progress: Mapping[str, Any] = NO_PROGRESS
        #: Live evaluations, and ended ones whose messages or end are still enqueued. None instead of an empty dict.
        self._unfinished: dict[int, LiveEvaluation] | None = None
        self._is_failure_logged = False
        self.loop = threads.loop(use.operator, self._failed, owner)

    # -- Begin

    def make(self, checkpoint_id: int = NO_CHECKPOINT, state: bytes | None = None) -> None:
        """Calls the factory, on the calling thread, and restores the coordinator if there is a checkpoint."""
        made: object = self._use.factory(self.context)
        if not isinstance(made, Coordinator):
            raise OperatorMisused(
                f"the factory of operator {self._use.operator!r} returned a {type(made).__name__}, not a "
                f"stagecrew.Coordinator; does it return the coordinator that it makes?"
            )
        self.coordinator = made
        with contextlib.suppress(Exception):
            if made.kind != Coordinator.kind:
                self.summary = Summary(cut_to(_MAX_KIND, str(made.kind)), "", {})
        if checkpoint_id != NO_CHECKPOINT:
            self.coordinator.reset_to_checkpoint(checkpoint_id, state)

    def begin(self) -> None:
        """Starts the coordinator. Called once the session is running."""
        self.context.initialise(self)
        self.call("start")

    def take_over(self, old: Instance, checkpoint_id: int, state: bytes | None, seconds: float) -> None:
        """Creates and starts the coordinator, after the old instance has closed. Must be the first call on the loop."""
        if not old.loop.end(seconds):
            _log.warning(
                "the coordinator of operator %r did not close within %g s; the new coordinator starts now",
                self._use.operator, seconds,
            )  # fmt: skip
        if self.context.state == "closed":
            return  # it was reset again before it began
        self.make(checkpoint_id, state)
        assert self.coordinator is not None
        self.context.initialise(self)
        self.coordinator.start()

    # -- Calls

    def call(self, method: str, *args: Any) -> None:
        """Enqueues a call to one of the coordinator's methods."""
        self.enqueue(self._call, method, args)

    def enqueue(self, f: Callable[..., Any], *args: Any) -> None:
        """Enqueues a call that may change the coordinator's state."""
        self.loop.call(f, *args)
        # The order matters: a checkpoint between the two lines may call checkpoint() once too often, but never misses a
        # change.
        self._use.mark_changed()

    def _call(self, method: str, args: tuple[Any, ...]) -> None:
        if self.context.state != "closed" and self.coordinator is not None:
            set_current_evaluation(args[0] if args and isinstance(args[0], Evaluation) else None)
            getattr(self.coordinator, method)(*args)

    def mark_changed(self) -> None:
        """Records that the coordinator reported something."""
        self._use.mark_changed()

    # -- Evaluations

    @property
    def is_live(self) -> bool:
        """Whether an evaluation is live, or its end is still enqueued."""
        return self._unfinished is not None

    def ready(self, live: LiveEvaluation) -> None:
        """Notifies the coordinator that an evaluation has begun."""
        with _unfinished_lock:
            self._unfinished = self._unfinished or {}
            self._unfinished[live.evaluation.id] = live
        self.context.resume()
        self.call("ready", live.evaluation, live.gateway)

    def end(self, live: LiveEvaluation, outcome: str, *reason: str) -> None:
        """Notifies the coordinator that an evaluation ended. `outcome` is `finished`, `failed` or `abandoned`."""
        self.call(outcome, live.evaluation, *reason)
        self.loop.call(self._forget, live.evaluation.id)

    def _forget(self, evaluation: int) -> None:
        with _unfinished_lock:
            if self._unfinished is not None:
                self._unfinished.pop(evaluation, None)
                self._unfinished = self._unfinished or None

    @property
    def queued(self) -> int:
        """The number of messages that are not handled yet, including those of evaluations that have ended."""
        if self.context.state == "closed":
            return 0
        return sum(max(0, live.expected - 1 - live.handled) for live in list((self._unfinished or {}).values()))

    # -- Checkpoints

    def checkpoint(self, pending: PendingCheckpoint, cut: Callable[[PendingCheckpoint, bytes | None], None]) -> None:
        """Requests the coordinator's state, on its loop. Makes the cut when the coordinator provides the state."""
        if self.context.state == "closed" or self.coordinator is None:
            return  # the checkpoint failed when the binding was closed or reset
        set_current_evaluation(None)

        def complete(done: Future[bytes | None]) -> None:
            try:
                cut(pending, check_state(done.result(), self._use.operator))
            except BaseException as error:
                pending.fail(error)

        try:
            state = self.coordinator.checkpoint(pending.id)
            if isinstance(state, Future):
                state.add_done_callback(complete)
            else:
                cut(pending, check_state(state, self._use.operator))
        except BaseException as error:
            pending.fail(error)
            raise  # this fails the topology, as an exception in any other method does

    def notify(self, method: str, checkpoint_id: int) -> None:
        """Calls `checkpoint_complete` or `checkpoint_aborted` if the coordinator defines it.

        Otherwise enqueues nothing, because each call marks the state as changed.
        """
        if getattr(type(self.coordinator), method, None) is not getattr(Coordinator, method):
            self.call(method, checkpoint_id)

    # -- Summary

    @property
    def progress(self) -> dict[str, Any]:
        """The values that the coordinator reported, and the last value of its `progress()`."""
        return {**self.context.progress, **self._own_progress}

    def request_summary(self, now: float) -> None:
        """Enqueues an update of `summary`, unless an update is already enqueued."""
        if self.summary_requested_at is None:
            self.summary_requested_at = now
            self.loop.call(self._update_summary)

    def _update_summary(self) -> None:
        """Updates the summary from the coordinator's methods. If one raises, its last value stays."""
        self.summary_requested_at = None
        set_current_evaluation(None)
        coordinator = self.coordinator
        if coordinator is None:
            return
        kind, waits, progress = self.summary
        try:
            kind = cut_to(_MAX_KIND, str(coordinator.kind))
            waits = cut_to(_MAX_TEXT, str(coordinator.waits_for() or ""))
            self._own_progress = dict(coordinator.progress()) or NO_PROGRESS
            values = self.progress
            progress = {
                cut_to(_MAX_NAME, str(name)): cut_to(_MAX_TEXT, str(values[name]))
                for name in list(values)[:_MAX_ENTRIES]
            }
        except BaseException:
            if not self._is_failure_logged:
                _log.warning(
                    "operator %r: kind, waits_for() or progress() of its coordinator failed; the UI shows older values",
                    self._use.operator, exc_info=True,
                )  # fmt: skip
            self._is_failure_logged = True
        if (kind, waits, progress) != self.summary:
            self.summary = Summary(kind, waits, progress)

    # -- End and failures

    def retire(self) -> None:
        """Closes the coordinator for a reset. Enqueued calls are dropped."""
        self.context.close()
        self.loop.call(self._close)

    def finish(self) -> None:
        """Closes the coordinator. Must be the last call on the loop, so that all earlier messages have been handled."""
        self._update_summary()
        self.context.close()
        self._close()

    def _close(self) -> None:
        set_current_evaluation(None)
        if self.coordinator is not None:
            self.coordinator.close()

    def fail(self, cause: BaseException) -> None:
        """Fails the topology."""
        self._use.statistics.raised(cause, fails=True)
        self._use.owner.fail(cause)

    def _failed(self, error: BaseException) -> None:
        if self.context.state == "closed":  # an error during the close does not fail the topology
            _log.warning("the coordinator of operator %r failed while closing", self._use.operator, exc_info=error)
        else:
            self.fail(error)
