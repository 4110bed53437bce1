"""Calls that run outside a coordinator's thread: immediately on a pool, or later on the timers' thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, Protocol

from stagecrew.coordination.pool import ASYNC_CALLS, TIMERS, Pool, Timer, Timers

__all__ = ["AsyncCalls", "AsyncExecutor"]

_log = logging.getLogger("stagecrew")

#: The number of calls of one coordinator that may run at the same time.
_MAX_RUNNING: Final = 4


class AsyncExecutor(Protocol):
    """The interface of `AsyncCalls`. The test harness implements it without threads and with a manual clock."""

    def submit(self, f: Callable[[], None]) -> None:
        """Calls a function soon, on another thread."""

    def later(self, seconds: float, f: Callable[[], None]) -> None:
        """Calls a short function after this time, on another thread."""

    def close(self) -> None:
        """Stops beginning calls."""


class AsyncCalls:
    """One coordinator's calls on the pool, at most four at a time, and its timers.

    After `close`, no call begins. `close` does not wait for running calls. A call that never returns occupies its
    thread forever, but the thread is a daemon, so the process can still end.
    """

    def __init__(self, pool: Pool = ASYNC_CALLS, timers: Timers = TIMERS) -> None:
        self._pool, self._clock = pool, timers
        self._lock = threading.Lock()
        self._closed = False
        self._waiting: list[Callable[[], None]] = []
        self._running = 0
        self._timers: set[Timer] = set()

    def submit(self, f: Callable[[], None]) -> None:
        """Calls a function on the pool."""
        with self._lock:
            if self._closed:
                return
            if self._running == _MAX_RUNNING:
                self._waiting.append(f)
                return
            self._running += 1
        try:
            self._pool.submit(lambda: self._run(f))
        except RuntimeError:  # the process can start no thread
            with self._lock:
                self._running -= 1
            raise

    def _run(self, f: Callable[[], None]) -> None:
        try:
            if not self._closed:
                f()
        finally:
            with self._lock:
                following = self._waiting.pop(0) if self._waiting else None
                if following is None:
                    self._running -= 1
            if following is not None:
                self._pool.submit(lambda: self._run(following))

    def later(self, seconds: float, f: Callable[[], None]) -> None:
        """Calls a function on the timers' thread."""

        def run() -> None:
            with self._lock:
                self._timers.discard(timer)
            f()

        with self._lock:
            if self._closed:
                return
            timer = self._clock.later(seconds, run)
            self._timers.add(timer)

    def close(self) -> None:
        """Cancels the timers, and drops the calls that are waiting for the pool."""
        with self._lock:
            self._closed = True
            timers = list(self._timers)
            self._timers.clear()
            self._waiting.clear()
        for timer in timers:
            timer.cancel()
