"""Reports the statistics of coordinators to the driver's JVM, about once a second, for those who look at the UI."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Final

from stagecrew.coordination.latency import Times
from stagecrew.wire.frames import encode

if TYPE_CHECKING:
    from stagecrew.coordination.binding import Binding
    from stagecrew.coordination.live import Live

__all__ = ["StatisticsReporter"]

#: Of so many uses of its operators the last word of a topology tells, the last ones; of others where their numbers are new.
_MOST: Final = 500
#: How long something has to be awaited before it is told of, in seconds.
_LATE: Final = 1.0
_COUNTS: Final = (
    *("live", "finished", "failed", "abandoned", "resets"),
    *("eventsIn", "eventsOut", "requests", "queued"),
)


class StatisticsReporter:
    """Tells of the bindings of a session what has changed since it last did."""

    def __init__(self, clock: Callable[[], float], ack_timeout: float, wall: Callable[[], float] = time.time) -> None:
        self._clock, self._ack_timeout, self._wall = clock, ack_timeout, wall
        self._lock = threading.Lock()
        self._sequence = 0
        #: Bindings that were called since the last frame, or were not quiet then; and their last entries.
        self._news: dict[Binding, None] = {}
        self._known: dict[Binding, _Known] = {}
        self._sums = [0] * len(_COUNTS)
        self._replies, self._acknowledgements = Times(), Times()

    def add(self, binding: Binding) -> None:
        """It is told of from now on."""
        binding.news = self._news
        self._news[binding] = None
        binding.statistics.replies.sum = self._replies
        binding.statistics.acknowledgements.sum = self._acknowledgements

    def due(self) -> list[Binding]:
        """The bindings that may have news. The caller must pass them to `frame`, which keeps those that are not quiet."""
        due = list(self._news)
        for binding in due:  # before their counts are read: a binding that is called meanwhile is due again
            self._news.pop(binding, None)
        return due

    def frame(self, bindings: Iterable[tuple[Binding, Collection[Live]]], last: bool = False) -> bytes | None:
        """A frame of what changed of these, with those that live of each; None when nothing did. The last word is of all of it."""
        with self._lock:
            topologies: dict[str, dict[str, Any]] = {}
            news = set()
            for binding, live in bindings:
                if binding.statistics.is_told:
                    continue
                known = self._known.setdefault(binding, _Known())
                is_last = last or binding.statistics.is_closed
                if not is_last:
                    if known.is_quiet(binding, live):
                        del self._known[binding]
                        continue
                    self._news[binding] = None
                    binding.instance.ask(self._clock())
                told = self._of(binding, live, known)
                counted = tuple(told[count] for count in _COUNTS)
                if counted != binding.statistics.counted:
                    news.add((binding.owner.id, binding.key))
                    before = binding.statistics.counted or [0] * len(_COUNTS)
                    self._sums = [sum_ + new - old for sum_, new, old in zip(self._sums, counted, before, strict=True)]
                    binding.statistics.counted = counted
                if is_last or told != known.told:
                    known.told = told
                    topologies.setdefault(binding.owner.id, {})[binding.key] = told
                if is_last:
                    binding.statistics.is_told = True
                    self._known.pop(binding, None)
                    self._news.pop(binding, None)
            if not topologies:
                return None
            if last:
                topologies = {
                    id_: {
                        key: told
                        for left, (key, told) in zip(range(len(of), 0, -1), of.items(), strict=True)
                        if left <= _MOST or (id_, key) in news
                    }
                    for id_, of in topologies.items()
                }
            self._sequence += 1
            body = {"topologies": topologies, "totals": self._totals()}
            return encode("STATISTICS", sequence=self._sequence, body=json.dumps(body))

    def _totals(self) -> dict[str, Any]:
        return dict(zip(_COUNTS, self._sums, strict=True)) | {
            "replies": self._replies.percentiles(),
            "acknowledgements": self._acknowledgements.percentiles(),
        }

    def _of(self, binding: Binding, live: Collection[Live], known: _Known) -> dict[str, Any]:
        counts, (kind, waits, progress) = binding.statistics, binding.instance.shown
        waits = "" if counts.is_closed else "; ".join(filter(None, [*self._waits(binding, live), waits]))
        if waits != known.waits:
            known.waits, known.since = waits, time.strftime("%H:%M:%S UTC", time.gmtime(self._wall()))
        return {
            "name": binding.key,
            "kind": kind,
            "state": counts.state,
            "live": len(live),
            **counts.over,
            "resets": counts.resets,
            "eventsIn": counts.events_in,
            "eventsOut": counts.events_out,
            "requests": counts.requests,
            # What is over has nothing queued: one that did not close in time would else have it for good, in the sums.
            "queued": 0 if counts.is_closed else binding.instance.queued,
            "replies": counts.replies.percentiles(),
            "acknowledgements": counts.acknowledgements.percentiles(),
            "waitsFor": f"{waits}, since {known.since}" if waits else "",
            "progress": progress,
            "lastError": counts.error,
        }

    def _waits(self, binding: Binding, live: Collection[Live]) -> Iterable[str]:
        """Whom the coordinator, or what is asked of it, waits for, as far as others than itself know."""
        now = self._clock()
        if (asked := binding.instance.asked) is not None and now - asked > _LATE:
            yield "its own thread, which is in a call"
        if (pending := binding.pending) is not None:
            what = "the acknowledgement of what it had sent" if binding.held else "the coordinator's state"
            yield f"{what}, for checkpoint {pending.id}"
        silent = {
            one.evaluation.executor
            for one in live
            if (due := one.gateway.due) is not None and now - (due - self._ack_timeout) > _LATE
        }
        if silent:
            yield f"executor {', '.join(sorted(silent))} to say that it has an event"


class _Known:
    """What was told of a binding, and what tells whether there is anything new."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}
        self.waits = self.since = ""
        self._mark: tuple[Any, ...] = ()
        self._same = 0

    def is_quiet(self, binding: Binding, live: Collection[Live]) -> bool:
        """Nobody lives, and for two looks nothing has happened: the second sees what was asked for at the first."""
        counts, instance = binding.statistics, binding.instance
        mark = (
            *(counts.events_in, counts.requests, counts.resets, *counts.over.values(), counts.state, counts.error),
            *(counts.events_out, counts.replies.count, id(instance), id(instance.context.progress)),
        )
        is_idle = not live and binding.pending is None and instance.asked is None and instance.queued == 0
        self._same = self._same + 1 if mark == self._mark and is_idle else 0
        self._mark = mark
        return self._same > 2
