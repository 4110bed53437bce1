"""Finds the value that a listener opened, for its `get()` in a worker or in a test.

Every Python worker imports this module, so it uses only the standard library and starts no thread.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Final, Protocol

from stagecrew.errors import ResourceNotOpen
from stagecrew.listeners import not_open
from stagecrew.listeners.identity import Identity

__all__ = ["LEFT", "PROPERTY", "Resolver", "resolve", "resolving"]

#: Local properties of Spark: the topology of a task, and the topologies that had ended in the thread of the action.
PROPERTY: Final = "spark.stagecrew.topology"
LEFT: Final = "spark.stagecrew.left"


class Resolver(Protocol):
    """Finds the value that a listener opened. Workers install a resolver for tasks, `stagecrew.testing` for a test."""

    def __call__(self, identity: Identity) -> Any:
        """The opened value. Raises `NotRegisteredError`, or a `LookupError` that says why the value is missing."""


_resolvers: Final[list[Resolver]] = []


@contextlib.contextmanager
def resolving(resolver: Resolver) -> Iterator[None]:
    """Inside the `with`, `get()` uses this resolver in all threads of this process, before those of outer `with`s."""
    _resolvers.append(resolver)
    try:
        yield
    finally:
        _resolvers.remove(resolver)


def resolve(identity: Identity, name: str) -> Any:
    """Returns the value that a listener opened. Raises `ResourceNotOpen` with the cause and the remedy."""
    refusals: list[LookupError] = []
    for resolver in reversed(_resolvers):
        try:
            return resolver(identity)
        except LookupError as error:
            refusals.append(error)
    innermost = refusals[0] if refusals else None
    if innermost is None or isinstance(innermost, not_open.NotRegisteredError):
        raise ResourceNotOpen(not_open.explain(name, identity.topologies, _task(), innermost))
    raise ResourceNotOpen(f"listener {name!r} is not open here: {innermost}.")


def _task() -> not_open.Task | None:
    """The task that this process is running, or None."""
    if "pyspark" not in sys.modules:
        return None
    from pyspark import TaskContext

    if (context := TaskContext.get()) is None:
        return None
    closed = context.getLocalProperty(LEFT) or ""
    return not_open.Task(context.getLocalProperty(PROPERTY), tuple(closed.split()))
