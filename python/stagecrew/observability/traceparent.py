"""Trace contexts as text, in the form of the W3C header `traceparent`.

Every Python worker imports this module, so it uses only the standard library.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

__all__ = ["TraceIds", "derived", "ids_of", "task_traceparent", "traceparent_of"]


class TraceIds(NamedTuple):
    """The ids in a `traceparent`. The trace id has 128 bits, and the span id has 64 bits."""

    trace: int
    span: int
    is_sampled: bool


def ids_of(traceparent: str) -> TraceIds:
    """Returns the ids in a `traceparent` that stagecrew wrote.

    >>> ids_of("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").is_sampled
    True
    """
    _, trace, span, flags = traceparent.split("-")
    return TraceIds(int(trace, 16), int(span, 16), bool(int(flags, 16) & 1))


def traceparent_of(ids: TraceIds) -> str:
    """Returns the text of these ids."""
    return f"00-{ids.trace:032x}-{ids.span:016x}-{int(ids.is_sampled):02x}"


def derived(traceparent: str, what: str) -> str:
    """Returns the context of a span of the same trace, whose id is computed from the trace and from `what`.

    So several processes know the id of a span before one of them records the span.
    """
    ids = ids_of(traceparent)
    digest = hashlib.sha256(f"{ids.trace:032x} {what}".encode()).digest()
    return traceparent_of(ids._replace(span=int.from_bytes(digest[:8], "big") or 1))


def task_traceparent(traceparent: str, attempt: int) -> str:
    """Returns the context of a task's span. `traceparent` is the context of its topology."""
    return derived(traceparent, f"task {attempt}")
