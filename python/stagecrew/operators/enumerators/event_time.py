"""Several sources of splits, merged in the order of the splits' event times."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from stagecrew.errors import OperatorFailed, OperatorMisused
from stagecrew.operators.arguments import check_seconds
from stagecrew.operators.enumerators.enumerator import SinglePassEnumerator
from stagecrew.operators.watermarks import comparable_time

__all__ = ["EventTimeSplits"]


class EventTimeSplits:
    """An enumerator that merges several sources. `Topology.splits` assigns their splits in the order of event time.

    A split waits while any task is still reading a split that is earlier by more than `drift`. So the rows of a subtask
    are out of order by at most `drift` plus the time range of one split. With `parallelism=1`, the splits are read in
    order. A task that has ended, or has been reading one split for `idle_after` seconds, does not hold back other
    tasks. The splits that tasks read are pairs `(name, split)`.

    If a source goes back in time, the topology fails: its `with` statement raises `CoordinatorFailed`, whose
    `__cause__` is `OperatorFailed`.

    Args:
        sources: Enumerators, or iterables of splits, by name. Each yields its splits in the order of their event times.
        event_time: Returns the event time of a split. The rows of the split are at this time or later.
        drift: How far a split may be ahead of the earliest split that is being read. Event times plus
            `drift` must be comparable with event times: both are numbers, or the event times are `datetime` and the
            drift is a `timedelta`.
        idle_after: A task that has been reading one split for this many seconds no longer holds back other tasks. None
            means never.

    Raises:
        OperatorMisused: If `sources` is not a mapping or is empty, or `event_time` is not callable.

    Examples:
        >>> merged = EventTimeSplits({"a": [1, 5], "b": [2, 3]}, event_time=lambda split: split, drift=10)
        >>> list(merged.splits())
        [('a', 1), ('b', 2), ('b', 3), ('a', 5)]

    Not promised: that the wait for a hanging task ends, unless `idle_after` is set. Such a task holds back all other
    tasks forever, and `waits_for` in the topology's report shows this. Set `idle_after`, or use a timeout in `read`.

    Source: Flink's watermark alignment (FLIP-182).
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        event_time: Callable[[Any], Any],
        drift: Any,
        idle_after: float | None = None,
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise OperatorMisused("EventTimeSplits merges named sources: pass a dict of at least one source")
        if not callable(event_time):
            raise OperatorMisused(
                f"event_time is a function of a split, not {type(event_time).__name__}: pass one that returns the "
                "split's event time"
            )
        if idle_after is not None:
            check_seconds("idle_after", idle_after)
        self._sources = {
            name: SinglePassEnumerator(source, f"source {name!r} of EventTimeSplits")
            if isinstance(source, Iterator)
            else source
            for name, source in sources.items()
        }
        self._event_time = event_time
        self.drift, self.idle_after = drift, idle_after

    def event_time(self, split: tuple[str, Any]) -> Any:
        """Returns the event time of a split.

        Args:
            split: The name of a source, and one of its splits.

        Returns:
            The event time.
        """
        return self._event_time(split[1])

    def splits(self) -> Iterator[tuple[str, Any]]:
        """Yields the splits of all sources, the earliest first.

        Yields:
            The name of a source, and one of its splits.

        Raises:
            OperatorFailed: If a source yields a split that is earlier than its previous one.
        """
        merged = heapq.merge(
            *(self._timed(name, source) for name, source in self._sources.items()), key=lambda timed: timed[:2]
        )
        for _, name, split in merged:
            yield name, split

    def _timed(self, name: str, source: Any) -> Iterator[tuple[Any, str, Any]]:
        """Yields the splits of one source, each with its event time and the source's name."""
        last: Any = None
        splits: Iterable[Any] = source.splits() if hasattr(source, "splits") else source
        for split in splits:
            event_time = comparable_time(self._event_time(split))
            if last is not None and event_time < last:
                raise OperatorFailed(
                    f"source {name!r} goes back in time: a split of {event_time!r} follows one of {last!r}. A source "
                    "must yield its splits in the order of their event times"
                )
            last = event_time
            yield event_time, name, split
