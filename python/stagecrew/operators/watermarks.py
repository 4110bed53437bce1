"""The rule that limits how far sources advance in event time: a pure state machine, whose clock is an argument."""

from __future__ import annotations

import dataclasses
import datetime as dt
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

__all__ = ["WatermarkGroup", "comparable_time"]

S = TypeVar("S", bound=Hashable)


def comparable_time(event_time: Any) -> Any:
    """Returns an event time as others are compared with it: a `datetime` with a time zone in UTC.

    Python compares and adds to two datetimes with one `ZoneInfo` by their local times, which go back one hour a year.
    """
    if isinstance(event_time, dt.datetime) and event_time.tzinfo is not None:
        try:
            return event_time.astimezone(dt.UTC)
        except OverflowError:  # near the smallest or the largest datetime
            pass
    return event_time


@dataclasses.dataclass
class _Source:
    watermark: Any
    reported_at: float


class WatermarkGroup(Generic[S]):
    """Sources that advance in event time together. None may be ahead of the slowest source by more than the drift.

    A source takes part from its first report until it finishes, is removed, or becomes idle. An idle source takes part
    again from its next report. Watermarks only increase. So a report that arrives twice, late or out of order lowers no
    watermark, and the next report makes up for a lost one.

    Event times may have any type whose values can be compared, and to which `drift` can be added: numbers, or
    `datetime` with a `timedelta`. A `datetime` with a time zone is an instant, whatever its zone is.

    Args:
        drift: How far ahead of the slowest source a source may be.
        idle_after: A source is idle after this many seconds without a report. None means never.
        clock: Returns the current time in seconds.

    Examples:
        >>> group = WatermarkGroup(drift=10)
        >>> group.report("a", 100)
        >>> group.report("b", 105)
        >>> group.limit, group.allows(111)
        (110, False)

    Source: Flink's watermark alignment (FLIP-182), with its fixes: FLINK-31632 (overflow), FLINK-32420, FLINK-35933,
    FLINK-37670 (a finished source holds back no other).
    """

    def __init__(
        self, drift: Any, idle_after: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.drift = drift
        self._idle_after, self._clock = idle_after, clock
        self._sources: dict[S, _Source] = {}
        self._finished: set[S] = set()

    def report(self, source: S, watermark: Any) -> None:
        """Records that a source has reached a watermark. The source will not read earlier event times.

        Args:
            source: The source. A report of a finished source is ignored.
            watermark: The event time.

        Raises:
            TypeError: If the watermark cannot be compared with those of other sources, or the drift cannot be added to
                it. The group is then unchanged.
        """
        if source in self._finished:
            return
        watermark = comparable_time(watermark)
        limit = self._plus_drift(watermark)
        if watermark != watermark or (limit is not None and not limit >= watermark):  # noqa: PLR0124 (not a number)
            raise TypeError(
                f"{watermark!r} with a drift of {self.drift!r} is not an event time that others can be compared with"
            )
        for other in self._sources.values():
            watermark < other.watermark  # noqa: B015 (raises if they cannot be compared)
            break
        state = self._sources.get(source)
        if state is None:
            self._sources[source] = _Source(watermark, self._clock())
        else:
            state.watermark = max(state.watermark, watermark)
            state.reported_at = self._clock()

    def remove(self, source: S) -> None:
        """Removes a source until it reports again, for example because the source is idle.

        Args:
            source: The source. An unknown source is ignored.
        """
        self._sources.pop(source, None)

    def forget(self, source: S) -> None:
        """Removes a source that will never report again, and everything that is stored for it.

        Args:
            source: The source. An unknown source is ignored.
        """
        self._sources.pop(source, None)
        self._finished.discard(source)

    def finish(self, source: S) -> None:
        """Ends a source. It no longer takes part, and its later reports are ignored.

        Args:
            source: The source.
        """
        self._sources.pop(source, None)
        self._finished.add(source)

    @property
    def slowest_watermark(self) -> Any:
        """The lowest watermark of the sources that take part. None if no source takes part."""
        return min((source.watermark for _, source in self._awake()), default=None)

    @property
    def slowest_source(self) -> tuple[S, Any] | None:
        """The slowest source and its watermark. None if no source takes part."""
        found = min(self._awake(), key=lambda named: named[1].watermark, default=None)
        return None if found is None else (found[0], found[1].watermark)

    def _awake(self) -> Iterator[tuple[S, _Source]]:
        now = self._clock()
        return (
            (name, source)
            for name, source in self._sources.items()
            if self._idle_after is None or now - source.reported_at <= self._idle_after
        )

    @property
    def limit(self) -> Any:
        """The latest event time that may be read now. None if there is no limit."""
        slowest = self.slowest_watermark
        return None if slowest is None else self._plus_drift(slowest)

    def _plus_drift(self, watermark: Any) -> Any:
        try:
            return watermark + self.drift
        except OverflowError:  # near the largest datetime
            return None

    def allows(self, event_time: Any, beside: Any = None) -> bool:
        """Returns whether an event time may be read now.

        Args:
            event_time: The event time.
            beside: Another event time that is still to be read. It limits `event_time` like the watermark of a source.

        Returns:
            True if the event time is within the drift of the slowest source, and of `beside`.
        """
        event_time = comparable_time(event_time)
        limits = [self.limit, None if beside is None else self._plus_drift(comparable_time(beside))]
        return all(limit is None or bool(event_time <= limit) for limit in limits)
