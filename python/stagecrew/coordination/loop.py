"""A coordinator's calls: one at a time and in order, on whichever thread of the pool is free."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from stagecrew.coordination.pool import COORDINATORS, Pool
from stagecrew.observability.logs import coordinates

__all__ = ["CallsInOrder", "Loop"]

_log = logging.getLogger("stagecrew")

_Call = tuple[Callable[..., Any], tuple[Any, ...]]


class CallsInOrder(Protocol):
    """What a `Loop` does; tests have one without a thread."""

    def call(self, f: Callable[..., Any], *args: Any) -> None:
        """Enqueues a call."""

    @property
    def is_current(self) -> bool:
        """Whether the caller is in one of its calls."""

    def end(self, seconds: float) -> bool:
        """Takes no more; waits this long for those that were taken."""


class Loop:
    """Makes calls in order, never two at once. An exception of a call is passed to `failed`, and the loop continues.

    It has a thread of the pool only while it has calls. Log records of its calls name the topology and the operator. `idle` is
    called whenever there is nothing more to do at once.
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
        "_waits",
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
        #: The thread that runs its calls now, and what `end` waits for.
        self._thread: int | None = None
        self._waits: tuple[threading.Lock, ...] = ()

    def call(self, f: Callable[..., Any], *args: Any) -> None:
        """Enqueues a call; from any thread. After the loop's end it does nothing."""
        with self._lock:
            if self._closed:
                return
            self._calls.append((f, args))
            if self._is_scheduled:
                return
            self._is_scheduled = True
        self._pool.submit(self._run)

    @property
    def is_current(self) -> bool:
        """Whether the caller is in one of its calls."""
        return threading.get_ident() == self._thread

    def end(self, seconds: float) -> bool:
        """No more calls are taken; waits this long for those that were. Returns whether all are done."""
        with self._lock:
            self._closed = True
            if not self._is_scheduled:
                return True
            if self.is_current:
                return False
            wait = threading.Lock()
            wait.acquire()
            self._waits = (*self._waits, wait)
        deadline = time.monotonic() + seconds
        return wait.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        """Makes the calls that are there, on a thread of the pool; those that come meanwhile have their next turn."""
        with self._lock:
            calls, self._calls = self._calls, []
        self._thread = threading.get_ident()
        coordinates(self._topology, self._name)
        for f, args in calls:
            try:
                f(*args)
            except BaseException as error:
                self._contained(self._failed, error)
        if not self._calls:
            self._contained(self._idle)
        self._thread = None
        with self._lock:
            if not self._calls:
                self._is_scheduled = False
                if self._closed:
                    waits, self._waits = self._waits, ()
                    for wait in waits:
                        wait.release()
                return
        self._pool.submit(self._run)

    def _contained(self, f: Callable[..., Any], *args: Any) -> None:
        try:
            f(*args)
        except BaseException:
            _log.exception("stagecrew's own part of the coordinator of operator %r failed", self._name)
