"""Calls off a coordinator's thread: at once on a pool, or later."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, Protocol

from stagecrew.coordination.pool import ASYNC_CALLS, TIMERS, Pool, Timer, Timers

__all__ = ["Background", "InBackground"]

_log = logging.getLogger("stagecrew")

#: How many calls of one coordinator run at once.
_AT_ONCE: Final = 4


class InBackground(Protocol):
    """What a `Background` does; tests have one without threads and with a clock of their own."""

    def submit(self, f: Callable[[], None]) -> None:
        """Calls it soon, elsewhere."""

    def later(self, seconds: float, f: Callable[[], None]) -> None:
        """Calls it after this time, elsewhere. It must be short."""

    def close(self) -> None:
        """Nothing more is begun."""


class Background:
    """Calls on the pool, four at a time, and timers. After `close` nothing begins; what runs is not waited for.

    A call that never returns keeps its thread, which is a daemon: the process ends all the same.
    """

    def __init__(self, pool: Pool = ASYNC_CALLS, timers: Timers = TIMERS) -> None:
        self._pool, self._clock = pool, timers
        self._lock = threading.Lock()
        self._closed = False
        self._waiting: list[Callable[[], None]] = []
        self._running = 0
        self._timers: set[Timer] = set()

    def submit(self, f: Callable[[], None]) -> None:
        """Calls it on the pool."""
        with self._lock:
            if self._closed:
                return
            if self._running == _AT_ONCE:
                self._waiting.append(f)
                return
            self._running += 1
        self._pool.submit(lambda: self._run(f))

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
        """Calls it on the thread of timers."""

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
        """Timers are cancelled, and what waits for the pool is dropped."""
        with self._lock:
            self._closed = True
            timers = list(self._timers)
            self._timers.clear()
            self._waiting.clear()
        for timer in timers:
            timer.cancel()
