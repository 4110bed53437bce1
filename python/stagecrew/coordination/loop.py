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

    @property
    def is_current(self) -> bool:
        """Whether the caller is on its thread."""

    def end(self, seconds: float) -> bool:
        """Takes no more; waits so long for those that were taken."""


class Loop:
    """One thread that calls what it is given, in order. What a call raises goes to `failed`, and the loop goes on.

    `begin` is called first, there. `idle` is called whenever there is nothing more to do at once: what was put off until then is done. `wait` is then asked
    to wait for the next call; it answers whether it did, and may do for others what it can meanwhile.
    """

    def __init__(
        self,
        name: str,
        failed: Callable[[BaseException], None],
        idle: Callable[[], None],
        wait: Callable[[Loop], bool] = lambda _: False,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._failed, self._idle, self._wait, self._begin = failed, idle, wait, begin
        #: Ends the waiting of `wait`, while it waits.
        self.waits_in: Callable[[], None] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"stagecrew-{name}", daemon=True)
        self._thread.start()

    def call(self, f: Callable[..., Any], *args: Any) -> None:
        """Enqueues a call; from any thread. After the loop's end it does nothing."""
        if not self._closed.is_set():
            self._put((f, args))

    @property
    def is_current(self) -> bool:
        """Whether the caller is on this loop's thread."""
        return threading.current_thread() is self._thread

    @property
    def is_empty(self) -> bool:
        """Whether nothing is enqueued."""
        return self._calls.empty()

    def end(self, seconds: float) -> bool:
        """No more calls are taken; waits so long for those that were. Answers whether all are done."""
        if not self._closed.is_set():
            self._closed.set()
            self._put(None)
        if not self.is_current:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _put(self, call: tuple[Callable[..., Any], tuple[Any, ...]] | None) -> None:
        self._calls.put(call)
        # It says first that it waits, and looks then whether there is something.
        if (wake := self.waits_in) is not None and not self.is_current:
            wake()

    def _next(self) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
        while True:
            try:
                return self._calls.get_nowait()
            except queue.Empty:
                self._contained(self._idle)
            try:
                waited = self._wait(self)
            except BaseException:
                _log.exception("stagecrew's own part of thread %s failed", self._thread.name)
                waited = False
            if not waited:
                return self._calls.get()

    def _run(self) -> None:
        self._begin()
        while (call := self._next()) is not None:
            f, args = call
            try:
                f(*args)
            except BaseException as error:
                self._contained(self._failed, error)
        self._contained(self._idle)

    def _contained(self, f: Callable[..., Any], *args: Any) -> None:
        try:
            f(*args)
        except BaseException:
            _log.exception("stagecrew's own part of thread %s failed", self._thread.name)
