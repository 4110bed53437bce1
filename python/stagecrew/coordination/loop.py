"""A coordinator's own thread: everything that it does happens there, one after the other."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["CallsInOrder", "Loop"]

_log = logging.getLogger("stagecrew")


class CallsInOrder(Protocol):
    """What a `Loop` does; tests have one without a thread."""

    def call(self, f: Callable[..., Any], *args: Any) -> None:
        """Enqueues a call."""

    def end(self, seconds: float) -> bool:
        """Takes no more; waits so long for those that were taken."""


class Loop:
    """One thread that calls what it is given, in order. What a call raises goes to `failed`, and the loop goes on.

    `idle` is called whenever there is nothing more to do at once: what was put off until then is done.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], None], idle: Callable[[], None]) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._failed, self._idle = failed, idle
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"stagecrew-{name}", daemon=True)
        self._thread.start()

    def call(self, f: Callable[..., Any], *args: Any) -> None:
        """Enqueues a call; from any thread. After the loop's end it does nothing."""
        if not self._closed.is_set():
            self._calls.put((f, args))

    @property
    def is_current(self) -> bool:
        """Whether the caller is on this loop's thread."""
        return threading.current_thread() is self._thread

    def end(self, seconds: float) -> bool:
        """No more calls are taken; waits so long for those that were. Answers whether all are done."""
        if not self._closed.is_set():
            self._closed.set()
            self._calls.put(None)
        if not self.is_current:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        calls, get = self._calls, self._calls.get
        while (call := get()) is not None:
            f, args = call
            try:
                f(*args)
            except BaseException as error:
                self._contained(self._failed, error)
            if calls.empty():
                self._contained(self._idle)
        self._contained(self._idle)

    def _contained(self, f: Callable[..., Any], *args: Any) -> None:
        try:
            f(*args)
        except BaseException:
            _log.exception("stagecrew's own part of thread %s failed", self._thread.name)
