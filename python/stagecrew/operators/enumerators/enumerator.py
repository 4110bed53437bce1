"""The contract of an enumerator, and an iterator in the place of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from stagecrew.errors import OperatorFailed

__all__ = ["Enumerator", "SinglePassEnumerator"]


class Enumerator(Protocol):
    """A source of splits for `Topology.splits`. The driver reads it lazily, on its coordinator's thread.

    An enumerator may also have `locations(split)`, which returns the host names on which a task reads the split best,
    as Spark names hosts. Tasks on these hosts are preferred when that delays no other task.

    A coordinator that is reset enumerates again, so each call of `splits()` must yield the same splits from the
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
            Picklable splits, each once, in the order in which tasks should begin them: the largest first, if their
            sizes are known.
        """


class SinglePassEnumerator:
    """An iterator of splits. It can be read once, so a coordinator that is reset cannot begin it again."""

    def __init__(self, iterator: Iterator[Any], name: str) -> None:
        self._iterator, self._name, self._is_read = iterator, name, False

    def splits(self) -> Iterator[Any]:
        """The iterator, the first time. Raises `OperatorFailed` after that."""
        if self._is_read:
            raise OperatorFailed(
                f"{self._name} came from an iterator, which cannot be read again, as after a reset: give a list, or an "
                "object whose splits() returns a new iterator"
            )
        self._is_read = True
        return self._iterator
