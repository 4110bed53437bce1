"""The part about disks: the shuffle files that remain when a run has ended."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import stagecrew
from stagecrew.observability.notebook import data_size

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Disk", "compare_disk"]


@dataclasses.dataclass(frozen=True)
class Left:
    """The shuffle outputs that remain after a run."""

    outputs: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Disk:
    """What remains after both runs."""

    without: Left
    with_stagecrew: Left

    @property
    def ok(self) -> bool:
        """Whether the run with stagecrew left nothing."""
        return self.with_stagecrew.outputs == 0

    def rows(self) -> list[tuple[str, str, str]]:
        """See `Part`."""
        cells = [f"{left.outputs:,} ({data_size(left.bytes)})" for left in (self.without, self.with_stagecrew)]
        return [("shuffle files left after a run", cells[0], cells[1])]

    def notes(self) -> list[str]:
        """See `Part`."""
        return [] if self.ok else ["Shuffle files of the topology REMAIN. This is a bug: please report it."]

    def as_json(self) -> dict[str, Any]:
        """See `Part`."""
        return dataclasses.asdict(self)


def compare_disk(spark: SparkSession, flights: DataFrame) -> Disk:
    """Runs a query with a shuffle twice: outside of a topology, and in one."""
    delays = flights.groupBy("carrier", "dest").avg("dep_delay")
    before = _stored(spark)
    delays.count()
    plain = _stored(spark)
    with stagecrew.crew(spark).topology("delays"):
        delays.count()
    after = _stored(spark)
    return Disk(_between(before, plain), _between(plain, after))


def _stored(spark: SparkSession) -> Left:
    """The shuffle outputs that executors store now, of all topologies and of the application."""
    reports = stagecrew.crew(spark).partitions()
    return Left(sum(one.outputs for one in reports), sum(one.output_bytes for one in reports))


def _between(before: Left, after: Left) -> Left:
    return Left(after.outputs - before.outputs, after.bytes - before.bytes)
