"""The context through which a coordinator acts on its topology. Thread-safe, and usable while the session runs."""

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


class ContextBackend(Protocol):
    """Carries out the calls that are made on a coordinator's context once the session is running."""

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

    The context is *uninitialised* until the session is running, then *initialised*, and *closed* once the coordinator
    is being closed. Attributes can always be read. Methods raise `OperatorMisused` in the first state and do nothing in
    the last. Functions that are passed to a method are enqueued, and never run inside that call.

    `operator` and `topology` are the names of the coordinator's operator and topology. `store` is a dictionary that the
    coordinators of the topology share. stagecrew does not lock it: coordinators that need a lock for it must use their
    own.

    stagecrew creates the context, and passes it to the factory of the coordinator.

    Args:
        operator: The operator's name.
        topology: The topology's name.
        store: The dictionary that the topology's coordinators share.
        make_async: Called with the operator's name. Returns the executor that `call_async` uses.
        topology_id: The topology's id.

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

    Not promised: how soon a call takes effect.

    Source: Flink's lazily initialised context (FLINK-17781).
    """

    __slots__ = (
        "_async", "_backend", "_lock", "_make_async", "_paused", "_state", "_topology_id", "operator", "progress",
        "store", "topology",
    )  # fmt: skip

    def __init__(
        self,
        operator: str,
        topology: str,
        store: dict[str, Any],
        make_async: Callable[[str], AsyncExecutor],
        topology_id: str = "",
    ) -> None:
        self.operator = operator
        self.topology = topology
        self._topology_id = topology_id
        self.store = store
        #: The values passed to `report` so far. Each call replaces the whole mapping, so any thread may read it.
        self.progress: Mapping[str, Any] = NO_PROGRESS
        self._lock = threading.Lock()
        self._state = "uninitialised"
        self._backend: ContextBackend | None = None
        #: Repeated `while_live` calls that are waiting for a live evaluation.
        self._paused: tuple[Callable[[], None], ...] = ()
        self._make_async = make_async
        self._async: AsyncExecutor | None = None

    def report(self, **values: Any) -> None:
        """Shows values as the coordinator's progress in the UI and the reports.

        Args:
            **values: Numbers or texts by name. They are merged with the values of earlier calls, which they replace if
                the names are equal.

        Raises:
            OperatorMisused: The session is not running yet.
        """
        if self._is_usable("report"):
            with self._lock:
                self.progress = {**self.progress, **values}
            assert self._backend is not None
            self._backend.mark_changed()

    @property
    def state(self) -> str:
        """`uninitialised`, `initialised` or `closed`."""
        return self._state

    def fail(self, cause: BaseException) -> None:
        """Fails the topology: its jobs are cancelled, and its `with` statement raises `CoordinatorFailed`.

        Only the first failure of a topology has an effect.

        Args:
            cause: The `__cause__` of the `CoordinatorFailed`.

        Raises:
            OperatorMisused: The session is not running yet.
        """
        if self._is_usable("fail"):
            assert self._backend is not None
            self._backend.fail(cause)

    def run_in_coordinator_thread(self, f: Callable[..., Any], *args: Any) -> None:
        """Calls a function on the coordinator's thread, after the calls that are already enqueued there.

        Args:
            f: The function. If it raises, the topology fails.
            *args: The arguments of the function.

        Raises:
            OperatorMisused: The session is not running yet.
        """
        if self._is_usable("run_in_coordinator_thread"):
            assert self._backend is not None
            self._backend.enqueue(self._call_unless_closed, f, *args)

    def call_async(
        self,
        f: Callable[[], Any],
        handler: Callable[[Any, BaseException | None], None],
        period: float | None = None,
        while_live: bool = False,
    ) -> None:
        """Calls a function on a thread of a pool, and then calls the handler on the coordinator's thread.

        A call that never returns does not keep the driver's process alive.

        Args:
            f: The function. It may block.
            handler: Called with `(result, None)`, or with `(None, error)` if `f` raised.
            period: If given, `f` is called again this many seconds after each call of `f` has ended, until the
                coordinator is closed.
            while_live: Repeats the call only while an evaluation is live, so that an idle coordinator costs nothing.

        Raises:
            OperatorMisused: The session is not running yet.
        """
        if not self._is_usable("call_async") or (executor := self._async_executor()) is None:
            return

        def run() -> None:
            result, error = None, None
            try:
                result = f()
            except BaseException as raised:  # such as CancelledError, which is no Exception
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
            f: The function. If it raises, the topology fails, and the function is not called again.
            while_live: Calls the function only while an evaluation is live, so that an idle coordinator costs nothing.

        Raises:
            OperatorMisused: The session is not running yet.
        """
        if not self._is_usable("every") or (executor := self._async_executor()) is None:
            return

        def call() -> None:
            f()
            wait()

        def wait() -> None:
            self._repeat(lambda: executor.later(seconds, lambda: self.run_in_coordinator_thread(call)), while_live)

        wait()

    def _repeat(self, again: Callable[[], None], while_live: bool) -> None:
        # If an evaluation begins at this moment, the lock ensures that either this method sees that it is live, or
        # `resume` finds this call among the paused ones.
        with self._lock:
            if while_live and self._backend is not None and not self._backend.is_live:
                self._paused = (*self._paused, again)
                return
        again()

    # -- Called by stagecrew, not by coordinators

    def initialise(self, backend: ContextBackend) -> None:
        """Initialises the context once the session is running.

        Args:
            backend: Carries out the coordinator's calls.
        """
        with self._lock:
            self._backend = backend
            if self._state == "uninitialised":
                self._state = "initialised"

    def resume(self) -> None:
        """Resumes the paused `while_live` calls. Called when an evaluation begins."""
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

    def _call_unless_closed(self, f: Callable[..., Any], *args: Any) -> None:
        if self._state != "closed":
            set_current_evaluation(None)
            f(*args)

    def _is_usable(self, method: str) -> bool:
        """Whether a call of this method has an effect. Raises `OperatorMisused` before the session is running."""
        if self._state == "uninitialised":
            raise OperatorMisused(
                f"the coordinator of operator {self.operator!r} called context.{method} before the session was "
                f"running; call it in start() or later"
            )
        return self._state == "initialised"
