"""A coordinator's context, through which it affects the topology. Thread-safe. Usable when the session is running."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from stagecrew.errors import OperatorMisused
from stagecrew.observability.logs import set_current_evaluation

if TYPE_CHECKING:
    from stagecrew.coordination.async_calls import AsyncExecutor

__all__ = ["NO_PROGRESS", "CoordinatorContext"]


NO_PROGRESS: Final[Mapping[str, Any]] = types.MappingProxyType({})


class Effects(Protocol):
    """The effects of a coordinator's context when the session is running."""

    @property
    def is_live(self) -> bool:
        """Whether an evaluation is live."""

    def enqueue(self, f: Callable[..., Any], *args: Any) -> None:
        """Calls a function on the coordinator's thread."""

    def fail(self, cause: BaseException) -> None:
        """Fails the topology."""

    def mark_changed(self) -> None:
        """Records that the coordinator reported something."""


class CoordinatorContext:
    """A coordinator's context. Its methods may be called from any thread, and never wait.

    The context is *uninitialised* until the session runs, then *initialised*, and *closed* after the coordinator was
    closed. Attributes can always be read. Methods raise `OperatorMisused` before the session runs, and have no effect
    after the coordinator was closed. Every effect is enqueued onto the thread that owns the state.

    `operator` and `topology` are the names of the coordinator's operator and topology. `store` is a dictionary that the
    coordinators of the topology share; code that changes it must hold its own lock if it needs one.

    stagecrew creates the context, and passes it to the factory of the coordinator.

    Args:
        operator: The operator's name.
        topology: The topology's name.
        store: The dictionary that the topology's coordinators share.
        make_async: Creates the executor of `call_async` for an operator's name.

    Examples:
        >>> import stagecrew
        >>> from stagecrew.testing import CoordinatorHarness
        >>> class Polling(stagecrew.Coordinator):
        ...     seen = 0
        ...     def start(self):
        ...         self.context.call_async(lambda: 7, self.polled, period=60.0)
        ...     def polled(self, result, error):
        ...         self.seen += result
        >>> with CoordinatorHarness(Polling) as harness:
        ...     harness.advance(120)
        ...     harness.coordinator.seen
        21

    Not promised: how soon an effect happens.

    Source: Flink's lazily initialised context (FLINK-17781).
    """

    __slots__ = (
        "_async", "_effects", "_lock", "_make_async", "_paused", "_state", "operator", "progress", "store", "topology",
    )  # fmt: skip

    def __init__(
        self, operator: str, topology: str, store: dict[str, Any], make_async: Callable[[str], AsyncExecutor]
    ) -> None:
        self.operator = operator
        self.topology = topology
        self.store = store
        #: The values of `report`. The mapping is replaced as a whole, so that any thread may read it.
        self.progress: Mapping[str, Any] = NO_PROGRESS
        self._lock = threading.Lock()
        self._state = "uninitialised"
        self._effects: Effects | None = None
        #: Repeated calls that wait for a live evaluation.
        self._paused: tuple[Callable[[], None], ...] = ()
        self._make_async = make_async
        self._async: AsyncExecutor | None = None

    def report(self, **values: Any) -> None:
        """Shows values as the coordinator's progress in the UI and the reports.

        Args:
            **values: Numbers or texts by name. They are added to those of earlier calls.

        Raises:
            OperatorMisused: The session does not run yet.
        """
        if self._may("report"):
            with self._lock:
                self.progress = {**self.progress, **values}
            assert self._effects is not None
            self._effects.mark_changed()

    @property
    def state(self) -> str:
        """`uninitialised`, `initialised` or `closed`."""
        return self._state

    def fail(self, cause: BaseException) -> None:
        """Fails the topology, once: its jobs are cancelled, and its `with` statement raises `CoordinatorFailed`.

        Args:
            cause: The `__cause__` of the `CoordinatorFailed`.

        Raises:
            OperatorMisused: The session does not run yet.
        """
        if self._may("fail"):
            assert self._effects is not None
            self._effects.fail(cause)

    def run_in_coordinator_thread(self, f: Callable[..., Any], *args: Any) -> None:
        """Calls a function on the coordinator's thread, after the calls that are already enqueued there.

        Args:
            f: The function. An exception fails the topology.
            *args: Its arguments.

        Raises:
            OperatorMisused: The session does not run yet.
        """
        if self._may("run_in_coordinator_thread"):
            assert self._effects is not None
            self._effects.enqueue(self._if_open, f, *args)

    def call_async(
        self,
        f: Callable[[], Any],
        handler: Callable[[Any, BaseException | None], None],
        period: float | None = None,
        while_live: bool = False,
    ) -> None:
        """Calls a function on a thread of a pool, and then the handler on the coordinator's thread.

        A call that never returns does not keep the driver's process alive.

        Args:
            f: The function. It may block.
            handler: Called with `(result, None)`, or with `(None, error)` if `f` raised.
            period: If given, `f` is called again this many seconds after each call has ended, until the coordinator is
                closed.
            while_live: Repeats the call only while an evaluation is live, so that an idle coordinator costs nothing.

        Raises:
            OperatorMisused: The session does not run yet.
        """
        if not self._may("call_async") or (executor := self._async_executor()) is None:
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
                    again = functools.partial(executor.later, period, lambda: executor.submit(run))
                    self._repeat(again, while_live)

        executor.submit(run)

    def every(self, seconds: float, f: Callable[[], None], while_live: bool = False) -> None:
        """Calls a function on the coordinator's thread repeatedly, until the coordinator is closed.

        Args:
            seconds: The time before the first call, and between the end of a call and the next one.
            f: The function. An exception fails the topology, and ends the repetition.
            while_live: Calls only while an evaluation is live, so that an idle coordinator costs nothing.

        Raises:
            OperatorMisused: The session does not run yet.
        """
        if not self._may("every") or (executor := self._async_executor()) is None:
            return

        def call() -> None:
            f()
            wait()

        def wait() -> None:
            self._repeat(lambda: executor.later(seconds, lambda: self.run_in_coordinator_thread(call)), while_live)

        wait()

    def _repeat(self, again: Callable[[], None], while_live: bool) -> None:
        with self._lock:  # either `resume` sees this call, or this method sees the evaluation
            if while_live and self._effects is not None and not self._effects.is_live:
                self._paused = (*self._paused, again)
                return
        again()

    # -- For the host; not for coordinators

    def initialise(self, effects: Effects) -> None:
        """Initialises the context when the session is running.

        Args:
            effects: Executes the coordinator's calls.
        """
        with self._lock:
            self._effects = effects
            if self._state == "uninitialised":
                self._state = "initialised"

    def resume(self) -> None:
        """Continues the calls that are repeated only while an evaluation is live, because an evaluation has begun."""
        with self._lock:
            paused, self._paused = self._paused, ()
        for again in paused:
            again()

    def close(self) -> None:
        """Closes the context. Later calls have no effect."""
        with self._lock:
            self._state = "closed"
            self._paused = ()
            executor = self._async
        if executor is not None:
            executor.close()

    def _async_executor(self) -> AsyncExecutor | None:
        with self._lock:
            if self._state == "closed":
                return None
            if self._async is None:
                self._async = self._make_async(self.operator)
            return self._async

    def _if_open(self, f: Callable[..., Any], *args: Any) -> None:
        if self._state != "closed":
            set_current_evaluation(None)
            f(*args)

    def _may(self, method: str) -> bool:
        if self._state == "uninitialised":
            raise OperatorMisused(
                f"the coordinator of operator {self.operator!r} called context.{method} before the session runs; call "
                f"it in start() or later"
            )
        return self._state == "initialised"
