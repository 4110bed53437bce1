"""Reports with values, for tests of how they are shown."""

from __future__ import annotations

import datetime as dt

from stagecrew.operators.committer import CommitReport
from stagecrew.partitions.report import PartitionReport
from stagecrew.session.reports import LatencySummary, ListenerReport, OperatorReport, TopologyReport

__all__ = ["COMMIT", "LISTENER", "NONE", "OPERATOR", "PARTITIONS", "REPLIES", "TOPOLOGY"]

LISTENER = ListenerReport("orders", "worker", "1", 2, 1, 1, 1, 0.5, 0.25, "ValueError: <b>no</b>")
REPLIES = LatencySummary(10, 0.001, 0.002, 0.004, 0.0315)
NONE = LatencySummary(0, 0.0, 0.0, 0.0, 0.0)
OPERATOR = OperatorReport(
    "splits/1", "splits", "active", 2, 5, 0, 0, 0, 7, 0, 9, 0, REPLIES, NONE, "1 more task", {"done": "3"}, ""
)
PARTITIONS = PartitionReport("enrich-1", "1", 0, 4, 2000, 0, 0, 4, 2000)
STARTED = dt.datetime(2026, 11, 22, 9, 30, tzinfo=dt.UTC)
TOPOLOGY = TopologyReport(
    "enrich-1", "enrich", "topology", "closed", STARTED, STARTED + dt.timedelta(seconds=1.5), 3,
    (LISTENER,), {"1": 2}, {}, {}, (), (), (PARTITIONS,), (OPERATOR,),
)  # fmt: skip
COMMIT = CommitReport("day-1", parts=2, rows=1000, bytes=2048, repeated=False)
