"""What a topology tells of itself: counts per listener and executor, as the driver knows them."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import Any

from stagecrew.partitions.report import PartitionReport

__all__ = ["LatencySummary", "ListenerReport", "OperatorReport", "TopologyReport"]


@dataclasses.dataclass(frozen=True)
class ListenerReport:
    """One listener of a topology on one executor. `opens` and `closes` count attempts, `lost` opens without a close."""

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
    """How long so many took, in seconds: percentiles within 1/64 of the exact ones, and the longest."""

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
    """One use of an operator, by its name and how-manieth: `"supersteps/1"`. A reset goes on with its counts.

    `live`, `finished`, `failed` and `abandoned` are evaluations; `events_in` and `requests` came, `events_out` were sent, and `queued`
    wait for the coordinator. `replies` took so long from the request's arrival; `acknowledgements` are the times after which an
    executor said that it has an event: of several that it says so of at once, the oldest's. `waits_for` says whom the
    coordinator waits for, and since when that has been seen; `progress` is what it says of itself.
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
    """What happened in a topology, as the driver knows it now: executors report about every second, and at its end.

    `processes` are the Python processes that opened something, per executor; `lost_processes` those that were gone before
    they closed it; `deferred` those that close when the task of another topology is over; `unclosed` says what had not
    closed when the exit gave up waiting; `partitions` are what it has stored, per executor; `operators` are told about every
    second while anything happens, and when it ends. Of executors that are lost the last ones are listed, as many as
    `spark.stagecrew.ui.retainedDeadExecutors` says; what happened on the `forgotten_executors` before them is counted still, on an
    executor called `forgotten`. Of operators the last 500 uses are listed: the numbers of the `forgotten_operators` before them are
    those of one called `forgotten`.
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
        """How many partitions went when it ended."""
        return sum(one.released for one in self.partitions)

    @property
    def released_bytes(self) -> int:
        """How many bytes these were."""
        return sum(one.released_bytes for one in self.partitions)

    @property
    def release_failures(self) -> int:
        """How many partitions could not be deleted when it ended."""
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
        """How many opens have no close, because their process is gone."""
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
