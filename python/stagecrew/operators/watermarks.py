"""Who is ahead of whom in event time: a pure state machine, without Spark, threads or a clock of its own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

__all__ = ["WatermarkGroup"]

S = TypeVar("S", bound=Hashable)


@dataclasses.dataclass
class _Source:
    watermark: Any
    reported: float


class WatermarkGroup(Generic[S]):
    """Sources that advance in event time together: none may be ahead of the slowest by more than the drift.

    A source takes part from its first report until it finishes, is taken out, or is idle: has not reported for `idle_after`
    seconds. Whoever is idle takes part again with its next report. Watermarks only grow: a report that comes twice, late, or out
    of order changes nothing, and one that is lost is made good by the next.

    Event times are of any type that can be compared, and to which `drift` can be added: numbers, or `datetime` and `timedelta`.

    Source: Flink's watermark alignment (FLIP-182), with its mends: FLINK-31632 (overflow), FLINK-32420, FLINK-35933, FLINK-37670
    (who has finished holds nobody).
    """

    def __init__(
        self, drift: Any, idle_after: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.drift = drift
        self._idle_after, self._clock = idle_after, clock
        self._sources: dict[S, _Source] = {}
        self._finished: set[S] = set()

    def report(self, source: S, watermark: Any) -> None:
        """The source has come so far: nothing of before this event time will follow.

        Raises `TypeError` for what cannot be compared with the others' watermarks, or has no sum with the drift; it changes nothing.
        """
        if source in self._finished:
            return
        limit = self._sum(watermark)
        if watermark != watermark or (limit is not None and not limit >= watermark):  # noqa: PLR0124 (what is no number)
            raise TypeError(f"{watermark!r} with a drift of {self.drift!r} is no event time that others can be held to")
        for other in self._sources.values():
            watermark < other.watermark  # noqa: B015 (whether it can be compared)
            break
        known = self._sources.get(source)
        if known is None:
            self._sources[source] = _Source(watermark, self._clock())
        else:
            known.watermark = max(known.watermark, watermark)
            known.reported = self._clock()

    def remove(self, source: S) -> None:
        """It takes no part until it reports again: its task failed, and another will begin anew."""
        self._sources.pop(source, None)

    def forget(self, source: S) -> None:
        """It is gone, and its name will not come again."""
        self._sources.pop(source, None)
        self._finished.discard(source)

    def finish(self, source: S) -> None:
        """Nothing follows: it takes no part any more, whatever still comes of it."""
        self._sources.pop(source, None)
        self._finished.add(source)

    @property
    def slowest(self) -> Any:
        """The event time up to which all have come that are not idle; None when there is none."""
        return min((source.watermark for _, source in self._awake()), default=None)

    @property
    def slowest_of(self) -> tuple[S, Any] | None:
        """Who that is, and its event time; None when there is none."""
        found = min(self._awake(), key=lambda one: one[1].watermark, default=None)
        return None if found is None else (found[0], found[1].watermark)

    def _awake(self) -> Iterator[tuple[S, _Source]]:
        now = self._clock()
        return (
            (name, source)
            for name, source in self._sources.items()
            if self._idle_after is None or now - source.reported <= self._idle_after
        )

    @property
    def limit(self) -> Any:
        """The latest event time that may be read now; None when there is no limit."""
        slowest = self.slowest
        return None if slowest is None else self._sum(slowest)

    def _sum(self, watermark: Any) -> Any:
        try:
            return watermark + self.drift
        except OverflowError:  # near the end of time
            return None

    def allows(self, event_time: Any, beside: Any = None) -> bool:
        """Whether that event time may be read now, and while another is still to be read, if that is given."""
        limits = [self.limit, None if beside is None else self._sum(beside)]
        return all(limit is None or bool(event_time <= limit) for limit in limits)
