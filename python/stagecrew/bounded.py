"""A collection that keeps its last entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Bounded"]

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V], Generic[K, V]):
    """A dict that keeps the `limit` keys that were added last. Not thread-safe.

    An older entry is passed to `evicted`, which may add it to a sum. Setting a key again keeps its place. Only
    assignments of single keys are bounded.

    Examples:
        >>> last = Bounded(2)
        >>> for number in range(5):
        ...     last[number] = "x" * number
        >>> last
        {3: 'xxx', 4: 'xxxx'}
    """

    def __init__(self, limit: int, evicted: Callable[[K, V], object] = lambda key, value: None) -> None:
        super().__init__()
        self._limit, self._evicted = limit, evicted

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._limit:
            oldest = next(iter(self))
            self._evicted(oldest, self.pop(oldest))
