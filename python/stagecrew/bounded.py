"""A dict that keeps only the entries that were added last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Bounded"]

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V], Generic[K, V]):
    """A dict that keeps the `limit` keys that were added last. Not thread-safe.

    Each removed entry is passed to `evicted`, which can, for example, add it to a sum. A key that is assigned again
    does not count as added last. Only assignments of single keys keep the limit: do not use `update` or `setdefault`.

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
