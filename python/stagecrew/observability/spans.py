"""Passes spans to the exporter of traces, if tracing is on. Without an exporter, nothing is recorded."""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol

__all__ = ["EndedSpan", "SlowestSpans", "SpanExporter", "exporter", "set_exporter", "span", "topology_traceparent"]

#: How many spans of one kind are exported for one evaluation or operator: the first, and the slowest of the others.
FIRST: Final = 100
SLOWEST: Final = 100


class EndedSpan(NamedTuple):
    """A span that has ended. Times are in nanoseconds since 1970."""

    name: str
    #: The `traceparent` of the parent.
    parent: str
    started: int
    ended: int
    #: "ok", "failed", "killed" or "lost".
    outcome: str
    error: str = ""
    attributes: Mapping[str, Any] = {}
    #: The span's own `traceparent`. If it is empty, the exporter chooses the id of the span.
    own: str = ""


class SpanExporter(Protocol):
    """Exports spans. Thread-safe, and never raises."""

    def topology(self, id_: str) -> str | None:
        """The `traceparent` of an active topology, or None if it is not traced."""

    def add(self, ended: EndedSpan) -> None:
        """Exports a span that has ended. Returns at once."""

    def span(self, name: str, topology: str, attributes: Mapping[str, Any]) -> AbstractContextManager[None]:
        """A context manager around a span of the calling thread, whose parent is the thread's current span.

        If the thread has no current span, the parent is the span of the topology with this id.
        """


#: The exporter of this process, or None if tracing is off.
exporter: SpanExporter | None = None


def set_exporter(new: SpanExporter | None) -> None:
    """Sets or removes the exporter of this process."""
    global exporter
    exporter = new


def span(name: str, attributes: Mapping[str, Any], topology: str = "") -> AbstractContextManager[None]:
    """Returns a context manager that records a span, if tracing is on. See `SpanExporter.span`."""
    return contextlib.nullcontext() if exporter is None else exporter.span(name, topology, attributes)


def topology_traceparent(id_: str) -> str | None:
    """Returns the `traceparent` of an active topology, or None if it is not traced."""
    return None if exporter is None else exporter.topology(id_)


class SlowestSpans:
    """Chooses spans to export: the first 100, and then the 100 slowest of the others. Thread-safe.

    The first ones are exported at once, and the slowest ones by `close`. So a task with a million requests costs
    little, and its trace remains readable.

    Args:
        make: Makes an ended span from its key, its two times and its outcome.
        clock: Returns the time in nanoseconds since 1970.
    """

    def __init__(
        self, make: Callable[[int, int, int, str], EndedSpan], clock: Callable[[], int] = time.time_ns
    ) -> None:
        self._make, self._clock = make, clock
        self._lock = threading.Lock()
        #: When each running span began, by its key.
        self._running: dict[int, int] = {}
        self._count = 0
        #: The slowest spans: duration, key, beginning, end and outcome. The fastest of them is first.
        self._slowest: list[tuple[int, int, int, int, str]] = []

    def begin(self, key: int) -> None:
        """A span begins."""
        self._running[key] = self._clock()

    def end(self, key: int, outcome: str) -> None:
        """A span ends. Does nothing if no span with this key is running."""
        if (started := self._running.pop(key, None)) is None:
            return
        ended = self._clock()
        with self._lock:
            self._count += 1
            if is_first := self._count <= FIRST:
                pass
            elif len(self._slowest) < SLOWEST:
                heapq.heappush(self._slowest, (ended - started, key, started, ended, outcome))
            elif self._slowest[0][0] < ended - started:
                heapq.heapreplace(self._slowest, (ended - started, key, started, ended, outcome))
        if is_first and exporter is not None:
            exporter.add(self._make(key, started, ended, outcome))

    def close(self) -> None:
        """Ends the running spans with the outcome "lost". Then exports the slowest spans."""
        for key in list(self._running):
            self.end(key, "lost")
        with self._lock:
            slowest, self._slowest = self._slowest, []
        if exporter is not None:
            for _, key, started, ended, outcome in sorted(slowest, key=lambda one: one[2]):
                exporter.add(self._make(key, started, ended, outcome))
