"""Creates the frames that report the statistics of coordinators to the driver's JVM, for the UI and the metrics."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Final

from stagecrew.coordination.evaluation import where_it_runs
from stagecrew.coordination.latency import LatencyHistogram
from stagecrew.wire.frames import encode

if TYPE_CHECKING:
    from stagecrew.coordination.binding import Binding
    from stagecrew.coordination.live import LiveEvaluation

__all__ = ["StatisticsReporter"]

#: The final statistics of a topology include at most this many of its last uses, and other uses whose counts changed.
_MAX_FINAL: Final = 500
#: A wait that the reporter itself notices is reported after this many seconds.
_LATE: Final = 1.0
_COUNTS: Final = (
    *("live", "finished", "failed", "abandoned", "resets"),
    *("eventsIn", "eventsOut", "requests", "queued"),
)


class StatisticsReporter:
    """Creates frames with the statistics that changed since the last frame, for all bindings of a session."""

    def __init__(self, clock: Callable[[], float], ack_timeout: float, wall: Callable[[], float] = time.time) -> None:
        self._clock, self._ack_timeout, self._wall = clock, ack_timeout, wall
        self._lock = threading.Lock()
        self._sequence = 0
        #: Bindings that were called since the last frame, or were not quiet then.
        self._unreported: dict[Binding, None] = {}
        #: The last report of each binding that is not quiet.
        self._last: dict[Binding, _LastReport] = {}
        self._sums = [0] * len(_COUNTS)
        self._replies, self._acknowledgements = LatencyHistogram(), LatencyHistogram()

    def add(self, binding: Binding) -> None:
        """Includes the binding in reports from now on."""
        binding.unreported = self._unreported
        self._unreported[binding] = None
        binding.statistics.replies.sum = self._replies
        binding.statistics.acknowledgements.sum = self._acknowledgements

    def take_due(self) -> list[Binding]:
        """Takes the bindings that may have changed. The caller must pass them to `frame`, which re-adds active ones."""
        due = list(self._unreported)
        # Remove each binding before its counts are read, so that it is due again if it is called in between.
        for binding in due:
            self._unreported.pop(binding, None)
        return due

    def frame(self, bindings: Iterable[tuple[Binding, Collection[LiveEvaluation]]], last: bool = False) -> bytes | None:
        """A frame with the changed entries of these bindings and their live evaluations. None if there are no changes.

        If this is the `last` frame of a topology, it also has the unchanged entries of the last `_MAX_FINAL` uses.
        """
        with self._lock:
            topologies: dict[str, dict[str, Any]] = {}
            changed = set()
            for binding, live in bindings:
                if binding.statistics.is_reported:
                    continue
                report = self._last.setdefault(binding, _LastReport())
                is_last = last or binding.statistics.is_closed
                if not is_last:
                    if report.becomes_quiet(binding, live):
                        del self._last[binding]
                        continue
                    self._unreported[binding] = None
                    binding.instance.request_summary(self._clock())
                entry = self._entry(binding, live, report)
                counted = tuple(entry[count] for count in _COUNTS)
                if counted != binding.statistics.counted:
                    changed.add((binding.owner.id, binding.key))
                    before = binding.statistics.counted or [0] * len(_COUNTS)
                    self._sums = [sum_ + new - old for sum_, new, old in zip(self._sums, counted, before, strict=True)]
                    binding.statistics.counted = counted
                if is_last or entry != report.entry:
                    report.entry = entry
                    topologies.setdefault(binding.owner.id, {})[binding.key] = entry
                if is_last:
                    binding.statistics.is_reported = True
                    self._last.pop(binding, None)
                    self._unreported.pop(binding, None)
            if not topologies:
                return None
            if last:
                topologies = {
                    id_: {
                        key: entry
                        for remaining, (key, entry) in zip(range(len(entries), 0, -1), entries.items(), strict=True)
                        if remaining <= _MAX_FINAL or (id_, key) in changed
                    }
                    for id_, entries in topologies.items()
                }
            self._sequence += 1
            body = {"topologies": topologies, "totals": self._totals()}
            return encode("STATISTICS", sequence=self._sequence, body=json.dumps(body))

    def _totals(self) -> dict[str, Any]:
        return dict(zip(_COUNTS, self._sums, strict=True)) | {
            "replies": self._replies.percentiles(),
            "acknowledgements": self._acknowledgements.percentiles(),
        }

    def _entry(self, binding: Binding, live: Collection[LiveEvaluation], report: _LastReport) -> dict[str, Any]:
        counts, (kind, waits, progress) = binding.statistics, binding.instance.summary
        waits = "" if counts.is_closed else "; ".join(filter(None, [*self._waits(binding, live), waits]))
        if waits != report.waits:
            report.waits, report.waits_since = waits, time.strftime("%H:%M:%S UTC", time.gmtime(self._wall()))
        return {
            "name": binding.key,
            "kind": kind,
            "state": counts.state,
            "live": len(live),
            **counts.outcomes,
            "resets": counts.resets,
            "eventsIn": counts.events_in,
            "eventsOut": counts.events_out,
            "requests": counts.requests,
            # A closed coordinator has nothing queued, and one that did not close in time must not stay in the sums.
            "queued": 0 if counts.is_closed else binding.instance.queued,
            "replies": counts.replies.percentiles(),
            "acknowledgements": counts.acknowledgements.percentiles(),
            "waitsFor": f"{waits}, since {report.waits_since}" if waits else "",
            "progress": progress | self._slowest_request(live),
            "lastError": counts.error,
        }

    def _slowest_request(self, live: Collection[LiveEvaluation]) -> dict[str, str]:
        """The request that has waited longest for its reply, if it has waited for a second."""
        waiting = [(since, one) for one in live if (since := one.oldest_request) is not None]
        since, slowest = min(waiting, key=lambda one: one[0], default=(0.0, None))
        seconds = self._clock() - since
        if slowest is None or seconds < _LATE:
            return {}
        return {"slowest request": f"{where_it_runs(slowest.evaluation)}, for {seconds:.0f} s"}

    def _waits(self, binding: Binding, live: Collection[LiveEvaluation]) -> Iterable[str]:
        """The waits that a coordinator cannot report itself."""
        now = self._clock()
        if (requested := binding.instance.summary_requested_at) is not None and now - requested > _LATE:
            yield "its own thread, which is in a call"
        if (pending := binding.pending) is not None:
            awaited = (
                "the acknowledgement of events that it sent" if binding.holds_events else "the coordinator's state"
            )
            yield f"{awaited}, for checkpoint {pending.id}"
        silent = {
            live_evaluation.evaluation.executor
            for live_evaluation in live
            if (due := live_evaluation.gateway.due) is not None and now - (due - self._ack_timeout) > _LATE
        }
        if silent:
            yield f"executor {', '.join(sorted(silent))} to acknowledge an event"


class _LastReport:
    """The last entry of a binding, and the activity up to then, to notice that nothing has happened since."""

    def __init__(self) -> None:
        self.entry: dict[str, Any] = {}
        self.waits = self.waits_since = ""
        self._activity: tuple[Any, ...] = ()
        #: The number of reports in a row in which nothing had happened.
        self._idle_reports = 0

    def becomes_quiet(self, binding: Binding, live: Collection[LiveEvaluation]) -> bool:
        """Records the activity so far. Returns whether no evaluation is live and nothing has happened in three reports.

        By then, a report has had the summary that was requested after the last activity.
        """
        counts, instance = binding.statistics, binding.instance
        activity = (
            *(counts.events_in, counts.requests, counts.resets, *counts.outcomes.values(), counts.state, counts.error),
            *(counts.events_out, counts.replies.count, id(instance), id(instance.context.progress)),
        )
        is_idle = (
            not live and binding.pending is None and instance.summary_requested_at is None and instance.queued == 0
        )
        self._idle_reports = self._idle_reports + 1 if activity == self._activity and is_idle else 0
        self._activity = activity
        return self._idle_reports > 2
