"""The report of a topology: counts per listener and executor, as the driver knows them."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import Any

from stagecrew.partitions.report import PartitionReport

__all__ = ["LatencySummary", "ListenerReport", "OperatorReport", "TopologyReport"]


@dataclasses.dataclass(frozen=True)
class ListenerReport:
    """One listener of a topology on one executor.

    `opens` and `closes` count attempts. `lost` counts opens whose process ended without a close.
    """

    name: str
    scope: str
    executor: str
    opens: int
    closes: int
    failures: int
    lost: int
    open_seconds: float
    close_seconds: float
    last_error: str


@dataclasses.dataclass(frozen=True)
class LatencySummary:
    """Percentiles of `count` durations, in seconds, within 1/64 of the exact ones, and the longest duration."""

    count: int
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, node: dict[str, int]) -> LatencySummary:
        """From the driver's JSON."""
        return cls(node["count"], *(node[name] / 1e6 for name in ("p50", "p95", "p99", "max")))


@dataclasses.dataclass(frozen=True)
class OperatorReport:
    """One use of an operator, with the number of the use in its name: `"supersteps/1"`. Resets keep the counts.

    `live`, `finished`, `failed` and `abandoned` count evaluations. `events_in` and `requests` count messages from
    tasks, `events_out` events to tasks, and `queued` messages that wait for the coordinator. `replies` are the
    durations from the arrival of a request to its reply. `acknowledgements` are the durations from the sending of an
    event to the acknowledgement of its executor; if several events are acknowledged at once, the oldest counts.
    `waits_for` says what the coordinator waits for, and since when. `progress` is the coordinator's own progress.
    """

    name: str
    kind: str
    state: str
    live: int
    finished: int
    failed: int
    abandoned: int
    resets: int
    events_in: int
    events_out: int
    requests: int
    queued: int
    replies: LatencySummary
    acknowledgements: LatencySummary
    waits_for: str
    progress: dict[str, str]
    last_error: str

    @classmethod
    def of(cls, node: dict[str, Any]) -> OperatorReport:
        """From the driver's JSON."""
        same = (
            "name",
            "kind",
            "state",
            "live",
            "finished",
            "failed",
            "abandoned",
            "resets",
            "requests",
            "queued",
            "progress",
        )
        return cls(
            **{name: node[name] for name in same},
            events_in=node["eventsIn"],
            events_out=node["eventsOut"],
            replies=LatencySummary.of(node["replies"]),
            acknowledgements=LatencySummary.of(node["acknowledgements"]),
            waits_for=node["waitsFor"],
            last_error=node["lastError"],
        )


@dataclasses.dataclass(frozen=True)
class TopologyReport:
    """The counts of a topology, as the driver knows them now. Executors report about every second, and at its end.

    `processes` counts the Python processes that opened a listener, per executor. `lost_processes` counts those that
    ended before they closed it, and `deferred` those that close after their current task of another topology.
    `unclosed` lists what had not closed when the exit stopped waiting. `partitions` are the stored partitions, per
    executor. `operators` are updated about every second while anything happens, and when the topology ends.

    The report lists the last lost executors, up to `spark.stagecrew.ui.retainedDeadExecutors`. The
    `forgotten_executors` before them are counted together, as an executor called `forgotten`. It lists the last 500
    uses of operators. The `forgotten_operators` before them are counted together, as an operator called `forgotten`.
    """

    id: str
    name: str
    kind: str
    state: str
    started: dt.datetime
    ended: dt.datetime | None
    jobs: int
    listeners: tuple[ListenerReport, ...]
    processes: dict[str, int]
    lost_processes: dict[str, int]
    deferred: dict[str, int]
    lost_executors: tuple[str, ...]
    unclosed: tuple[str, ...]
    partitions: tuple[PartitionReport, ...] = ()
    operators: tuple[OperatorReport, ...] = ()
    forgotten_executors: int = 0
    forgotten_operators: int = 0

    @property
    def released(self) -> int:
        """How many partitions its end released."""
        return sum(one.released for one in self.partitions)

    @property
    def released_bytes(self) -> int:
        """How many bytes these were."""
        return sum(one.released_bytes for one in self.partitions)

    @property
    def release_failures(self) -> int:
        """How many partitions its end could not delete."""
        return sum(one.release_failures for one in self.partitions)

    @property
    def opens(self) -> int:
        """How often a listener's `open` was called."""
        return sum(listener.opens for listener in self.listeners)

    @property
    def closes(self) -> int:
        """How often a listener's `close` was called."""
        return sum(listener.closes for listener in self.listeners)

    @property
    def failures(self) -> int:
        """How often a hook raised or was interrupted."""
        return sum(listener.failures for listener in self.listeners)

    @property
    def lost(self) -> int:
        """How many opens have no close, because their process ended."""
        return sum(listener.lost for listener in self.listeners)

    @classmethod
    def of(cls, node: dict[str, Any]) -> TopologyReport:
        """From the driver's JSON."""
        executors: dict[str, Any] = node["executors"]
        listeners = [
            ListenerReport(
                name=entry["name"],
                scope=entry["scope"],
                executor=executor,
                opens=entry["opens"],
                closes=entry["closes"],
                failures=entry["failures"],
                lost=entry["lost"],
                open_seconds=entry["openMicros"] / 1e6,
                close_seconds=entry["closeMicros"] / 1e6,
                last_error=entry["lastError"],
            )
            for executor, counts in executors.items()
            for entry in counts["listeners"]
        ]

        def numbers(name: str) -> dict[str, int]:
            return {executor: counts[name] for executor, counts in executors.items() if counts[name]}

        return cls(
            id=node["id"],
            name=node["name"],
            kind=node["kind"],
            state=node["state"],
            started=_time(node["started"]),
            ended=_time(node["ended"]) if node["ended"] else None,
            jobs=node["jobs"],
            listeners=tuple(listeners),
            processes=numbers("processes"),
            lost_processes=numbers("lostProcesses"),
            deferred={
                executor: len(counts["deferred"]) for executor, counts in executors.items() if counts["deferred"]
            },
            lost_executors=tuple(node["lostExecutors"]),
            unclosed=tuple(node["unclosed"]),
            partitions=tuple(
                PartitionReport.of(node["id"], executor, counts["partitions"]) for executor, counts in executors.items()
            ),
            operators=tuple(map(OperatorReport.of, node["operators"])),
            forgotten_executors=node.get("forgottenExecutors", 0),
            forgotten_operators=node.get("forgottenOperators", 0),
        )


def _time(milliseconds: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(milliseconds / 1000, tz=dt.UTC)
