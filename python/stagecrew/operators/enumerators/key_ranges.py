"""Ranges of an integer key, with which tasks read a database table in parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from stagecrew.errors import OperatorMisused

__all__ = ["KeyRanges"]


class KeyRanges:
    """The integers `lower <= key < upper`, split into `count` ranges of nearly equal size.

    A range is a pair: the first key, and the key after the last. Use them to read a table of a database: `select …
    where key >= ? and key < ?`.

    Args:
        lower: The first key.
        upper: The key after the last.
        count: The number of ranges. Ranges without a key are left out.

    Raises:
        OperatorMisused: If `upper` is below `lower`, or `count` is below 1.

    Examples:
        >>> list(KeyRanges(0, 10, 3).splits())
        [(0, 3), (3, 6), (6, 10)]
    """

    def __init__(self, lower: int, upper: int, count: int) -> None:
        if upper < lower or count < 1:
            raise OperatorMisused(
                f"no range of keys: {lower} <= key < {upper} in {count} parts. Pass lower <= upper, and a count of at "
                "least 1"
            )
        self.lower, self.upper, self.count = lower, upper, count

    def splits(self) -> Iterator[tuple[int, int]]:
        """Returns the ranges that are not empty, in ascending order.

        Returns:
            Pairs of the first key and the key after the last.
        """
        size = self.upper - self.lower
        bounds = [self.lower + size * i // self.count for i in range(self.count + 1)]
        return ((first, last) for first, last in itertools.pairwise(bounds) if first < last)
