"""Calls off a coordinator's thread: at once on a pool, or later."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import Final, Protocol

__all__ = ["Background", "InBackground"]

#: How many calls run at once.
_POOL: Final = 4


class InBackground(Protocol):
    """What a `Background` does; tests have one without threads and with a clock of their own."""

    def submit(self, f: Callable[[], None]) -> None:
        """Calls it soon, elsewhere."""

    def later(self, seconds: float, f: Callable[[], None]) -> None:
        """Calls it so much later, elsewhere."""

    def close(self) -> None:
        """Nothing more is begun."""


class Background:
    """A pool, and timers. After `close` nothing begins; what runs is not waited for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._closed = False
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._timers: set[threading.Timer] = set()

    def submit(self, f: Callable[[], None]) -> None:
        """Calls it on the pool."""
        with self._lock:
            if self._closed:
                return
            if self._pool is None:
                self._pool = concurrent.futures.ThreadPoolExecutor(_POOL, f"stagecrew-{self._name}-async")
            pool = self._pool
        with contextlib.suppress(RuntimeError):  # it was closed meanwhile
            pool.submit(f)

    def later(self, seconds: float, f: Callable[[], None]) -> None:
        """Calls it on a timer's thread."""

        def run() -> None:
            with self._lock:
                self._timers.discard(timer)
            f()

        timer = threading.Timer(seconds, run)
        timer.daemon = True
        with self._lock:
            if self._closed:
                return
            self._timers.add(timer)
            timer.start()

    def close(self) -> None:
        """Timers are cancelled, and what waits for the pool is dropped."""
        with self._lock:
            self._closed = True
            pool, timers = self._pool, list(self._timers)
            self._timers.clear()
        for timer in timers:
            timer.cancel()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
