"""Calls the methods of one coordinator one at a time, in order, on any free thread of the coordinators' pool."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from stagecrew.coordination.pool import COORDINATORS, Pool
from stagecrew.observability.logs import set_current_coordinator

__all__ = ["CallsInOrder", "Loop"]

_log = logging.getLogger("stagecrew")

_Call = tuple[Callable[..., Any], tuple[Any, ...]]


class CallsInOrder(Protocol):
    """The interface of `Loop`. The test harness implements it without a thread."""

    def call(self, f: Callable[..., Any], *args: Any) -> None:
        """Enqueues a call."""

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is executing one of this loop's calls."""

    def end(self, seconds: float) -> bool:
        """Stops accepting calls, and waits at most this long for the enqueued ones. Returns whether all are done."""


class Loop:
    """Executes calls in order, one at a time. Uses a thread of the pool only while there are calls.

    An exception raised by a call is passed to `failed`, and the loop continues. `idle` is called whenever the queue
    becomes empty. Log records that the calls write contain the topology and the operator.
    """

    __slots__ = (
        "_calls",
        "_closed",
        "_failed",
        "_idle",
        "_is_scheduled",
        "_lock",
        "_name",
        "_pool",
        "_thread",
        "_topology",
        "_waiters",
    )

    def __init__(
        self,
        name: str,
        failed: Callable[[BaseException], None],
        idle: Callable[[], None],
        topology: str = "",
        pool: Pool = COORDINATORS,
    ) -> None:
        self._name, self._failed, self._idle, self._topology, self._pool = name, failed, idle, topology, pool
        self._lock = threading.Lock()
        self._calls: list[_Call] = []
        self._is_scheduled = self._closed = False
        #: The thread that is executing calls, or None.
        self._thread: int | None = None
        #: One lock for each thread that waits in `end`. They are released when all calls are done.
        self._waiters: tuple[threading.Lock, ...] = ()

    def call(self, f: Callable[..., Any], *args: Any) -> None:
        """Enqueues a call. Thread-safe. Has no effect after `end`."""
        with self._lock:
            if self._closed:
                return
            self._calls.append((f, args))
            if self._is_scheduled:
                return
            self._is_scheduled = True
        self._schedule()

    def _schedule(self) -> bool:
        """Returns whether the enqueued calls will run. If no thread can start, the next call tries again."""
        try:
            self._pool.submit(self._run)
        except RuntimeError:
            with self._lock:
                self._is_scheduled = False
            return False
        return True

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is executing one of this loop's calls."""
        return threading.get_ident() == self._thread

    def end(self, seconds: float) -> bool:
        """See `CallsInOrder`. Returns False immediately if called from one of this loop's own calls."""
        with self._lock:
            self._closed = True
            if not self._is_scheduled and not self._calls:
                return True
            if self.is_current:
                return False
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters = (*self._waiters, waiter)
            must_schedule = not self._is_scheduled  # no thread could start for the last call
            self._is_scheduled = True
        if must_schedule and not self._schedule():
            return False
        return waiter.acquire(timeout=max(0.0, seconds))

    def _run(self) -> None:
        """Executes the enqueued calls, on a thread of the pool. Later calls wait for the next run."""
        with self._lock:
            calls, self._calls = self._calls, []
        self._thread = threading.get_ident()
        set_current_coordinator(self._topology, self._name)
        for f, args in calls:
            try:
                f(*args)
            except BaseException as error:
                self._log_errors(self._failed, error)
        if not self._calls:
            self._log_errors(self._idle)
        self._thread = None
        with self._lock:
            if not self._calls:
                self._is_scheduled = False
                if self._closed:
                    waiters, self._waiters = self._waiters, ()
                    for waiter in waiters:
                        waiter.release()
                return
        self._pool.submit(self._run)

    def _log_errors(self, f: Callable[..., Any], *args: Any) -> None:
        try:
            f(*args)
        except BaseException:
            _log.exception(
                "an internal error of stagecrew in the coordinator of operator %r; please report it", self._name
            )
