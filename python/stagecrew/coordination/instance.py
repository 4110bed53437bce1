"""One instance of a coordinator, with its context and its loop. A reset puts another instance in its place."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Final, Protocol

from stagecrew.coordination.async_calls import Background, InBackground
from stagecrew.coordination.checkpoints import Pending, checked
from stagecrew.coordination.context import NO_PROGRESS, CoordinatorContext
from stagecrew.coordination.contract import NO_CHECKPOINT, Coordinator
from stagecrew.coordination.evaluation import Evaluation
from stagecrew.coordination.live import Live
from stagecrew.coordination.loop import CallsInOrder, Loop
from stagecrew.coordination.statistics import Statistics, cut_to
from stagecrew.errors import OperatorMisused
from stagecrew.observability.logs import set_current_evaluation

__all__ = ["Instance", "Owner", "Threads"]

_log = logging.getLogger("stagecrew")

#: How many characters of what a coordinator says of itself travel, and of how many things.
_SHOWN: Final = 300
_KIND: Final = 40
_ENTRIES: Final = 20


class Owner(Protocol):
    """What a coordinator belongs to: the operators of a topology."""

    #: The topology's name, and its id.
    name: str
    id: str
    #: Shared by its coordinators.
    store: dict[str, Any]

    def fail(self, cause: BaseException) -> None:
        """A coordinator failed."""

    def idle(self) -> None:
        """A coordinator has nothing to do at once."""


class Threads:
    """What a coordinator runs on; the harness of `stagecrew.testing` has another."""

    def loop(self, name: str, failed: Callable[[BaseException], None], owner: Owner) -> CallsInOrder:
        """Its turns on the threads that all coordinators share."""
        return Loop(name, failed, owner.idle, owner.name)

    def background(self, name: str) -> InBackground:
        """Where `call_async` runs."""
        return Background()

    def wait(self, futures: Iterable[Future[Any]], seconds: float) -> Collection[Future[Any]]:
        """Waits until all are done, or one failed, or it is late; answers those that are not done."""
        return concurrent.futures.wait(futures, seconds, concurrent.futures.FIRST_EXCEPTION).not_done


class Use(Protocol):
    """What an instance serves: one use of an operator."""

    operator: str
    factory: Callable[[CoordinatorContext], Coordinator]
    threads: Threads
    statistics: Statistics

    @property
    def owner(self) -> Owner:
        """The operators of its topology."""

    def touch(self) -> None:
        """The coordinator was called, or reported something."""


_NOTHING_SHOWN: Final[tuple[str, str, dict[str, str]]] = (Coordinator.kind, "", {})
#: Held for a moment by each that adds an evaluation to those of its instance, or removes one.
_hearing: Final = threading.Lock()


class Instance:
    """One coordinator with its context and its loop."""

    __slots__ = (
        "_heard",
        "_is_silent",
        "_own_progress",
        "_use",
        "asked",
        "context",
        "coordinator",
        "loop",
        "shown",
    )

    def __init__(self, use: Use) -> None:
        self._use = use
        owner, threads = use.owner, use.threads
        self.context = CoordinatorContext(use.operator, owner.name, owner.store, threads.background)
        self.coordinator: Coordinator | None = None
        #: Its kind, whom it waits for and how far it is, as it said last; and since when it is asked, while it is.
        self.shown: tuple[str, str, dict[str, str]] = _NOTHING_SHOWN
        self.asked: float | None = None
        #: The last value of `Coordinator.progress`.
        self._own_progress: Mapping[str, Any] = NO_PROGRESS
        #: Evaluations that it has not yet heard the end of: they may be over, and wait for its thread with all that they sent.
        self._heard: dict[int, Live] | None = None
        self._is_silent = False
        self.loop = threads.loop(use.operator, self._failed, owner)

    def make(self, checkpoint_id: int = NO_CHECKPOINT, state: bytes | None = None) -> None:
        """Calls the factory, on whatever thread this is, and restores the coordinator."""
        made: object = self._use.factory(self.context)
        if not isinstance(made, Coordinator):
            raise OperatorMisused(
                f"the factory of operator {self._use.operator!r} made a {type(made).__name__}, no stagecrew.Coordinator; "
                f"does it return what it makes?"
            )
        self.coordinator = made
        with contextlib.suppress(Exception):
            if made.kind != Coordinator.kind:
                self.shown = (cut_to(_KIND, str(made.kind)), "", {})
        if checkpoint_id != NO_CHECKPOINT:
            self.coordinator.reset_to_checkpoint(checkpoint_id, state)

    def begin(self) -> None:
        """The session runs: the coordinator starts."""
        self.context.initialise(self)
        self.call("start")

    def call(self, method: str, *args: Any) -> None:
        """Enqueues a call of one of the coordinator's methods."""
        self.enqueue(self._call, method, args)

    def enqueue(self, f: Callable[..., Any], *args: Any) -> None:
        """Enqueues a call that may change the coordinator's state."""
        self.loop.call(f, *args)
        self._use.touch()  # after it: a checkpoint that is taken between the two asks once more than it needs to

    def touch(self) -> None:
        """The coordinator reported something."""
        self._use.touch()

    @property
    def is_live(self) -> bool:
        """Whether an evaluation is live, or was and the coordinator has not heard its end."""
        return self._heard is not None

    def ready(self, live: Live) -> None:
        """An evaluation has begun."""
        with _hearing:
            self._heard = self._heard or {}
            self._heard[live.evaluation.id] = live
        self.context.resume()
        self.call("ready", live.evaluation, live.gateway)

    def over(self, live: Live, outcome: str, *reason: str) -> None:
        """It is over."""
        self.call(outcome, live.evaluation, *reason)
        self.loop.call(self._forget, live.evaluation.id)

    def _forget(self, evaluation: int) -> None:
        with _hearing:
            if self._heard is not None:
                self._heard.pop(evaluation, None)
                self._heard = self._heard or None

    @property
    def queued(self) -> int:
        """How many messages it has not handled, of evaluations that are over too."""
        if self.context.state == "closed":
            return 0
        return sum(max(0, one.expected - 1 - one.handled) for one in list((self._heard or {}).values()))

    def checkpoint(self, pending: Pending, cut: Callable[[Pending, bytes | None], None]) -> None:
        """On its thread: asks the coordinator for its state. The cut is made where that is there."""
        if self.context.state == "closed" or self.coordinator is None:
            return  # whoever closed it gives the checkpoint up
        set_current_evaluation(None)

        def taken(done: Future[bytes | None]) -> None:
            try:
                cut(pending, checked(done.result(), self._use.operator))
            except BaseException as error:
                pending.fail(error)

        try:
            state = self.coordinator.checkpoint(pending.id)
            if isinstance(state, Future):
                state.add_done_callback(taken)
            else:
                cut(pending, checked(state, self._use.operator))
        except BaseException as error:
            pending.fail(error)
            raise  # as in every callback

    def tell_outcome(self, method: str, checkpoint_id: int) -> None:
        """Calls `checkpoint_complete` or `checkpoint_aborted`, if the coordinator has one: the call may change its state."""
        if getattr(type(self.coordinator), method, None) is not getattr(Coordinator, method):
            self.call(method, checkpoint_id)

    @property
    def progress(self) -> dict[str, Any]:
        """The values that the coordinator reported, and those that it returned when it was last asked."""
        return {**self.context.progress, **self._own_progress}

    def ask(self, now: float) -> None:
        """Has the coordinator say how far it is, when its thread comes to that; `shown` has it then."""
        if self.asked is None:
            self.asked = now
            self.loop.call(self._look)

    def _look(self) -> None:
        """What the coordinator says of itself. It may be wrong, or raise: it only shows."""
        self.asked = None
        set_current_evaluation(None)  # what it logs now is about none
        coordinator = self.coordinator
        if coordinator is None:
            return
        kind, waits, progress = self.shown
        try:
            kind = cut_to(_KIND, str(coordinator.kind))
            waits = cut_to(_SHOWN, str(coordinator.waits_for() or ""))
            self._own_progress = dict(coordinator.progress()) or NO_PROGRESS
            said = self.progress
            progress = {cut_to(80, str(name)): cut_to(_SHOWN, str(said[name])) for name in list(said)[:_ENTRIES]}
        except BaseException:
            if not self._is_silent:
                _log.warning("operator %r: its coordinator cannot say how far it is", self._use.operator, exc_info=True)
            self._is_silent = True
        if (kind, waits, progress) != self.shown:
            self.shown = kind, waits, progress

    def retire(self) -> None:
        """Nothing that it does has an effect any more; what is enqueued is dropped, and it is closed."""
        self.context.close()
        self.loop.call(self._close)

    def finish(self) -> None:
        """The last call on its thread: what was enqueued before has been handled."""
        self._look()
        self.context.close()
        self._close()

    def take_over(self, from_: Instance, checkpoint_id: int, state: bytes | None, seconds: float) -> None:
        """Begins when the one before has closed, as of a checkpoint. The first call of this one's thread."""
        if not from_.loop.end(seconds):
            _log.warning("the coordinator of operator %r has not closed within %g s", self._use.operator, seconds)
        if self.context.state == "closed":
            return  # it was reset again before it began
        self.make(checkpoint_id, state)
        assert self.coordinator is not None
        self.context.initialise(self)
        self.coordinator.start()

    def _call(self, method: str, args: tuple[Any, ...]) -> None:
        if self.context.state != "closed" and self.coordinator is not None:
            set_current_evaluation(args[0] if args and isinstance(args[0], Evaluation) else None)
            getattr(self.coordinator, method)(*args)

    def _close(self) -> None:
        set_current_evaluation(None)
        if self.coordinator is not None:
            self.coordinator.close()

    def fail(self, cause: BaseException) -> None:
        """The coordinator fails its topology."""
        self._use.statistics.raised(cause, fails=True)
        self._use.owner.fail(cause)

    def _failed(self, error: BaseException) -> None:
        if self.context.state == "closed":  # errors while it closes fail nothing
            _log.warning("the coordinator of operator %r failed while it closed", self._use.operator, exc_info=error)
        else:
            self.fail(error)
