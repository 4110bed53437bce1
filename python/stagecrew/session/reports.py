"""Reports of topologies: counts for each listener, executor and operator, as the driver knows them."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from stagecrew.observability.notebook import amount, data_size, duration, field_table, html_table, one_line
from stagecrew.partitions.report import PartitionReport

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["LatencySummary", "ListenerReport", "OperatorReport", "TopologyReport", "reports_table", "topology_frame"]


@dataclasses.dataclass(frozen=True, repr=False)
class ListenerReport:
    """One listener of a topology on one executor.

    `opens` and `closes` count attempts to open and close. `lost` counts opens whose process ended before it could close
    the listener.

    Examples:
        with crew.topology("enrich", listeners=[orders]) as topology:
            flights.mapInArrow(enrich, schema).collect()
        for listener in topology.report.listeners:
            print(listener.name, listener.executor, listener.opens, listener.open_seconds)
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

    def __repr__(self) -> str:
        return one_line(
            "listener",
            self.name,
            (
                f"executor {self.executor}",
                amount(self.opens, "open"),
                amount(self.closes, "close"),
                amount(self.failures, "failure") if self.failures else "",
                f"{self.lost:,} lost" if self.lost else "",
            ),
        )

    def _repr_html_(self) -> str:
        return html_table("Listener", *field_table((self,)))


@dataclasses.dataclass(frozen=True, repr=False)
class LatencySummary:
    """A summary of durations, in seconds: the count, percentiles with an error of at most 1/64, and the maximum.

    Examples:
        >>> import stagecrew
        >>> replies = stagecrew.LatencySummary(count=1000, p50=0.001, p95=0.002, p99=0.004, max=0.031)
        >>> f"{replies.p99 * 1000:.0f} ms"
        '4 ms'
    """

    count: int
    p50: float
    p95: float
    p99: float
    max: float

    def __repr__(self) -> str:
        if not self.count:
            return "<durations: none>"
        median, slow, longest = map(duration, (self.p50, self.p99, self.max))
        return f"<durations: {self.count:,}, p50 {median}, p99 {slow}, maximum {longest}>"

    def _repr_html_(self) -> str:
        names = ("p50", "p95", "p99", "max")
        cells = [self.count, *(duration(getattr(self, name)) for name in names)]
        return html_table("Durations", ("count", *names), [cells])

    @classmethod
    def _from_json(cls, node: dict[str, int]) -> LatencySummary:
        """Reads the driver's JSON."""
        return cls(node["count"], *(node[name] / 1e6 for name in ("p50", "p95", "p99", "max")))


@dataclasses.dataclass(frozen=True, repr=False)
class OperatorReport:
    """One use of an operator. `name` includes the number of the use: `"supersteps/1"`. A reset keeps the counts.

    `live`, `finished`, `failed` and `abandoned` count evaluations. `events_in` and `requests` count received
    messages, `events_out` counts sent events, and `queued` counts messages that are waiting for the coordinator.
    `replies` measures the time from the arrival of a request to its reply. `acknowledgements` measures the time from
    sending an event to the executor's acknowledgement. If several events are acknowledged together, only the time of
    the oldest is included. `waits_for` says what the coordinator is waiting for, and since when. `progress` contains
    the values that the coordinator reports about itself.

    Examples:
        with crew.topology("counted") as topology:
            topology.coordinate("counter", stagecrew.Coordinator).map(dataset, pass_on, "id long").collect()
        for operator in topology.report.operators:
            print(operator.name, operator.finished, operator.replies.p99)
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

    def __repr__(self) -> str:
        return one_line(
            "operator",
            self.name,
            (
                self.state,
                f"{self.live:,} live" if self.live else "",
                f"{self.finished:,} finished",
                f"{self.failed:,} failed" if self.failed else "",
                f"waits for {self.waits_for}" if self.waits_for else "",
            ),
        )

    def _repr_html_(self) -> str:
        return html_table("Operator", *_operator_table((self,)))

    @classmethod
    def _from_json(cls, node: dict[str, Any]) -> OperatorReport:
        """Reads the driver's JSON."""
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
            replies=LatencySummary._from_json(node["replies"]),
            acknowledgements=LatencySummary._from_json(node["acknowledgements"]),
            waits_for=node["waitsFor"],
            last_error=node["lastError"],
        )


@dataclasses.dataclass(frozen=True, repr=False)
class TopologyReport:
    """The driver's knowledge of a topology. Executors report about once a second, and when the topology ends.

    For each executor, `processes` counts the Python processes that opened a listener, `lost_processes` those that ended
    before they closed it, and `deferred` those that will close it only after their current task, because that task
    does not belong to this topology. `unclosed` lists everything that was not closed when the exit stopped waiting.
    `partitions` describes the partitions that the topology has stored. `operators` are updated about once a second,
    and when the topology ends.

    The report lists at most `spark.stagecrew.ui.retainedDeadExecutors` lost executors, those that were lost last. The
    others are counted by `forgotten_executors`, and their counts are added up under an executor called `forgotten`.
    The report lists the last 500 uses of operators. Earlier uses are counted by `forgotten_operators`, and their counts
    are added up under an operator called `forgotten`.

    Examples:
        with crew.topology("enrich", listeners=[orders]) as topology:
            flights.mapInArrow(enrich, schema).collect()
        report = topology.report
        print(report.state, report.jobs, report.released_bytes)
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

    def __repr__(self) -> str:
        released = amount(self.released, "partition")
        return one_line(
            "topology",
            self.name,
            (
                self.state,
                amount(self.jobs, "job"),
                amount(self.opens, "open"),
                amount(self.closes, "close"),
                amount(self.failures, "failure") if self.failures else "",
                f"{self.lost:,} lost" if self.lost else "",
                f"{released} released ({data_size(self.released_bytes)})" if self.released else "",
                duration(self.seconds) if self.ended else "",
            ),
        )

    def _repr_html_(self) -> str:
        tables = [html_table(f"Topology {self.name}", *_topology_table((self,)))]
        if self.listeners:
            tables.append(html_table("Listeners", *field_table(self.listeners)))
        if self.operators:
            tables.append(html_table("Coordinators", *_operator_table(self.operators)))
        if stored := [one for one in self.partitions if one.outputs or one.blocks or one.released]:
            tables.append(html_table("Partitions", *field_table(stored)))
        return "".join(tables)

    @property
    def seconds(self) -> float:
        """The time from the start of the topology to its end, or to now."""
        return ((self.ended or dt.datetime.now(dt.UTC)) - self.started).total_seconds()

    @property
    def released(self) -> int:
        """The number of partitions that were deleted when the topology ended."""
        return sum(one.released for one in self.partitions)

    @property
    def released_bytes(self) -> int:
        """The size of the deleted partitions, in bytes."""
        return sum(one.released_bytes for one in self.partitions)

    @property
    def release_failures(self) -> int:
        """The number of partitions that could not be deleted when the topology ended."""
        return sum(one.release_failures for one in self.partitions)

    @property
    def opens(self) -> int:
        """The number of calls of `open`."""
        return sum(listener.opens for listener in self.listeners)

    @property
    def closes(self) -> int:
        """The number of calls of `close`."""
        return sum(listener.closes for listener in self.listeners)

    @property
    def failures(self) -> int:
        """The number of hooks that raised an error or were interrupted."""
        return sum(listener.failures for listener in self.listeners)

    @property
    def lost(self) -> int:
        """The number of opens without a close, because the process ended."""
        return sum(listener.lost for listener in self.listeners)

    @classmethod
    def _from_json(cls, node: dict[str, Any]) -> TopologyReport:
        """Reads the driver's JSON."""
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
                PartitionReport._from_json(node["id"], executor, counts["partitions"])
                for executor, counts in executors.items()
            ),
            operators=tuple(map(OperatorReport._from_json, node["operators"])),
            forgotten_executors=node.get("forgottenExecutors", 0),
            forgotten_operators=node.get("forgottenOperators", 0),
        )


def _time(milliseconds: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(milliseconds / 1000, tz=dt.UTC)


def topology_frame(reports: Iterable[TopologyReport]) -> pd.DataFrame:
    """The reports as a DataFrame of pandas, with one row for each topology."""
    import pandas as pd

    columns, rows = _topology_table(reports)
    return pd.DataFrame([list(row) for row in rows], columns=[column.replace(" ", "_") for column in columns])


def reports_table(title: str, reports: Iterable[TopologyReport]) -> str:
    """The reports as an HTML table."""
    return html_table(title, *_topology_table(reports))


def _topology_table(reports: Iterable[TopologyReport]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    columns = (
        "id", "name", "kind", "state", "started", "ended", "seconds", "jobs",
        "opens", "closes", "failures", "lost", "open seconds", "close seconds", "operators",
        "released", "released bytes", "release failures", "lost executors", "unclosed",
    )  # fmt: skip
    rows = [
        (
            one.id, one.name, one.kind, one.state, one.started, one.ended, one.seconds, one.jobs,
            one.opens, one.closes, one.failures, one.lost,
            sum(listener.open_seconds for listener in one.listeners),
            sum(listener.close_seconds for listener in one.listeners),
            len(one.operators) + one.forgotten_operators,
            one.released, one.released_bytes, one.release_failures,
            len(one.lost_executors) + one.forgotten_executors, len(one.unclosed),
        )
        for one in reports
    ]  # fmt: skip
    return columns, rows


def _operator_table(operators: Iterable[OperatorReport]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    columns = (
        "name", "kind", "state", "live", "finished", "failed", "abandoned", "resets", "requests", "replies p99",
        "events in", "events out", "queued", "progress", "waits for", "last error",
    )  # fmt: skip
    rows = [
        (
            one.name, one.kind, one.state, one.live, one.finished, one.failed, one.abandoned, one.resets, one.requests,
            duration(one.replies.p99) if one.replies.count else "",
            one.events_in, one.events_out, one.queued, one.progress, one.waits_for, one.last_error,
        )
        for one in operators
    ]  # fmt: skip
    return columns, rows
