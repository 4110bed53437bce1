"""What a coordinator may ask for: safe from any thread, and usable as far as the session exists."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from stagecrew.errors import NotInitialised
from stagecrew.observability.logs import set_current_evaluation

if TYPE_CHECKING:
    from stagecrew.coordination.async_calls import InBackground

__all__ = ["NO_PROGRESS", "CoordinatorContext"]


NO_PROGRESS: Final[Mapping[str, Any]] = types.MappingProxyType({})


class Effects(Protocol):
    """The effects of a coordinator's context, once the session runs."""

    @property
    def is_live(self) -> bool:
        """Whether an evaluation is live."""

    def enqueue(self, f: Callable[..., Any], *args: Any) -> None:
        """Calls a function on the coordinator's thread."""

    def fail(self, cause: BaseException) -> None:
        """Fails the topology."""

    def touch(self) -> None:
        """Notes that something was reported."""


class CoordinatorContext:
    """A coordinator's context. Reads always work; the rest raises `NotInitialised` before the session runs, and does nothing
    after the coordinator was closed.

    Every effect is an enqueue onto the thread that owns the truth: safe from any thread, and nothing waits.

    Source: Flink's lazily initialised context (FLINK-17781).
    """

    __slots__ = (
        "_background", "_effects", "_lock", "_make_background", "_paused", "_state", "operator", "progress", "store", "topology",
    )  # fmt: skip

    def __init__(
        self, operator: str, topology: str, store: dict[str, Any], background: Callable[[str], InBackground]
    ) -> None:
        self.operator = operator
        self.topology = topology
        #: Shared by the coordinators of the topology; not fenced: whoever changes it holds what it needs.
        self.store = store
        #: What was reported; replaced as a whole, so that any thread may read it.
        self.progress: Mapping[str, Any] = NO_PROGRESS
        self._lock = threading.Lock()
        self._state = "uninitialised"
        self._effects: Effects | None = None
        #: Repeated calls that wait for a live evaluation.
        self._paused: tuple[Callable[[], None], ...] = ()
        self._make_background = background
        self._background: InBackground | None = None

    def report(self, **values: Any) -> None:
        """What people see of the coordinator's progress: names and numbers or texts, beside those of before."""
        if self._may("report"):
            with self._lock:
                self.progress = {**self.progress, **values}
            assert self._effects is not None
            self._effects.touch()

    @property
    def state(self) -> str:
        """`uninitialised`, `initialised` or `closed`."""
        return self._state

    def fail(self, cause: BaseException) -> None:
        """Fails the topology, once: its jobs are cancelled, and the caller's `with` raises `CoordinatorFailed` from this."""
        if self._may("fail"):
            assert self._effects is not None
            self._effects.fail(cause)

    def run_in_coordinator_thread(self, f: Callable[..., Any], *args: Any) -> None:
        """Calls this on the coordinator's own thread, after what is enqueued there."""
        if self._may("run_in_coordinator_thread"):
            assert self._effects is not None
            self._effects.enqueue(self._guarded, f, *args)

    def call_async(
        self,
        f: Callable[[], Any],
        handler: Callable[[Any, BaseException | None], None],
        period: float | None = None,
        while_live: bool = False,
    ) -> None:
        """Calls `f` on a thread of a pool, and then `handler(result, None)` or `handler(None, error)` on the coordinator's.

        With a `period` in seconds it is called again that long after each end, until the coordinator is closed; with `while_live`
        only while an evaluation is live, so that an idle coordinator costs nothing. A call that never returns does not keep the
        driver's process alive.
        """
        if not self._may("call_async") or (background := self._in_background()) is None:
            return

        def run() -> None:
            result, error = None, None
            try:
                result = f()
            except Exception as raised:
                error = raised
            if self._state == "initialised":
                self.run_in_coordinator_thread(handler, result, error)
                if period is not None:
                    again = functools.partial(background.later, period, lambda: background.submit(run))
                    self._repeat(again, while_live)

        background.submit(run)

    def every(self, seconds: float, f: Callable[[], None], while_live: bool = False) -> None:
        """Calls `f` on the coordinator's own thread, so long after now and after the end of each call, until it is closed.

        With `while_live` only while an evaluation is live, so that an idle coordinator costs nothing. An exception of `f` fails the
        topology, as in every callback, and ends it.
        """
        if not self._may("every") or (background := self._in_background()) is None:
            return

        def call() -> None:
            f()
            wait()

        def wait() -> None:
            self._repeat(lambda: background.later(seconds, lambda: self.run_in_coordinator_thread(call)), while_live)

        wait()

    def _repeat(self, again: Callable[[], None], while_live: bool) -> None:
        with self._lock:  # so that `resume` sees this call, or this sees the evaluation
            if while_live and self._effects is not None and not self._effects.is_live:
                self._paused = (*self._paused, again)
                return
        again()

    # -- for the host

    def initialise(self, effects: Effects) -> None:
        """The session runs: what the coordinator does has an effect from now on."""
        with self._lock:
            self._effects = effects
            if self._state == "uninitialised":
                self._state = "initialised"

    def resume(self) -> None:
        """An evaluation is live: continues the calls that are repeated only while one is."""
        with self._lock:
            paused, self._paused = self._paused, ()
        for again in paused:
            again()

    def close(self) -> None:
        """Nothing that the coordinator does has an effect any more."""
        with self._lock:
            self._state = "closed"
            self._paused = ()
            background = self._background
        if background is not None:
            background.close()

    def _in_background(self) -> InBackground | None:
        with self._lock:
            if self._state == "closed":
                return None
            if self._background is None:
                self._background = self._make_background(self.operator)
            return self._background

    def _guarded(self, f: Callable[..., Any], *args: Any) -> None:
        if self._state != "closed":
            set_current_evaluation(None)
            f(*args)

    def _may(self, what: str) -> bool:
        if self._state == "uninitialised":
            raise NotInitialised(
                f"the coordinator of operator {self.operator!r} called context.{what} before the session runs; do it in "
                f"start() or later"
            )
        return self._state == "initialised"
