"""The interface of an enumerator, and an enumerator for an iterator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from stagecrew.errors import OperatorFailed

__all__ = ["Enumerator", "SinglePassEnumerator"]


class Enumerator(Protocol):
    """A source of splits for `Topology.splits`. The coordinator reads it lazily, on the driver.

    An enumerator may also have `locations(split)`, which returns the names of the hosts near the split, as Spark names
    hosts. Tasks on these hosts are preferred if this does not delay other tasks.

    After a reset, the new coordinator enumerates again. So each call of `splits` must yield the same splits, from the
    beginning.

    Examples:
        >>> class Days:
        ...     def splits(self):
        ...         return (f"2024-06-{day:02d}" for day in range(1, 31))
        >>> next(iter(Days().splits()))
        '2024-06-01'

    Source: Flink's SplitEnumerator (FLIP-27).
    """

    def splits(self) -> Iterable[Any]:
        """Returns the splits, from the beginning each time it is called.

        Returns:
            Picklable splits, each once, in the order in which tasks should begin them: if their sizes are known, the
            largest first.
        """


class SinglePassEnumerator:
    """An enumerator for an iterator of splits. Its coordinator cannot be reset, because an iterator is read once."""

    def __init__(self, iterator: Iterator[Any], name: str) -> None:
        self._iterator, self._name, self._is_read = iterator, name, False

    def splits(self) -> Iterator[Any]:
        """Returns the iterator on the first call. Later calls raise `OperatorFailed`."""
        if self._is_read:
            raise OperatorFailed(
                f"{self._name} came from an iterator, which cannot be read again after a reset: pass a list, or an "
                "object whose splits() returns a new iterator"
            )
        self._is_read = True
        return self._iterator
