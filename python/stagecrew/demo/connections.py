"""The part about connections: each flight is looked up in a database, by 64 tasks in two Python workers."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stagecrew
from stagecrew.demo.databases import Database

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from stagecrew.demo.enrich import Enrich

__all__ = ["Connections", "compare_connections", "warm_up"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The figures of one enrichment. `checksum` does not depend on the order of the rows."""

    connections: int
    seconds: float
    rows: int
    checksum: int


@dataclasses.dataclass(frozen=True)
class Connections:
    """The figures of both enrichments. `pools` contains the opens and closes of the pool for each executor."""

    tasks: int
    without: Outcome
    with_stagecrew: Outcome
    pools: dict[str, tuple[int, int]]
    counted_by: str

    @property
    def ok(self) -> bool:
        """Whether both enrichments returned the same rows."""
        return (self.without.rows, self.without.checksum) == (self.with_stagecrew.rows, self.with_stagecrew.checksum)

    def rows(self) -> list[tuple[str, str, str]]:
        """See `Part`."""
        without, with_ = self.without, self.with_stagecrew
        pools = [(f"  pools of executor {name}", "-", f"{a} opened, {b} closed") for name, (a, b) in self.pools.items()]
        return [
            (f"connections of {self.tasks} tasks", f"{without.connections:,}", f"{with_.connections:,}"),
            ("  rows", f"{without.rows:,}", f"{with_.rows:,}"),
            ("  seconds", f"{without.seconds:.2f}", f"{with_.seconds:.2f}"),
            *pools,
        ]

    def notes(self) -> list[str]:
        """See `Part`."""
        checksum = self.with_stagecrew.checksum & 0xFFFF_FFFF_FFFF_FFFF
        counted = f"Connections are counted by {self.counted_by}."
        if not self.ok:
            return [counted, "The two enrichments returned DIFFERENT rows. This is a bug: please report it."]
        same = f"Both enrichments returned the same {self.with_stagecrew.rows:,} rows (checksum {checksum:016x})."
        return [counted, same]

    def as_json(self) -> dict[str, Any]:
        """See `Part`."""
        pools = {executor: {"opens": opens, "closes": closes} for executor, (opens, closes) in self.pools.items()}
        return {**dataclasses.asdict(self), "pools": pools, "same": self.ok}


def warm_up(flights: DataFrame, path: Path) -> None:
    """Starts the Python workers and compiles Spark's readers and writers.

    Otherwise only the first enrichment would pay for that.
    """
    from stagecrew.demo.enrich import unchanged

    _write(flights, unchanged, flights.schema.simpleString()[7:-1], path)


def compare_connections(
    spark: SparkSession, database: Database, flights: DataFrame, tasks: int, without: Path, with_: Path
) -> Connections:
    """Enriches the flights twice, and writes them into these folders."""
    from stagecrew.demo.enrich import connection_per_task, database_pool, pool_per_worker

    plain = _timed(spark, database, flights, connection_per_task(database), without)
    pool = database_pool(database)
    topology = stagecrew.crew(spark).topology("enrich", listeners=[pool])
    ours = _timed(spark, database, flights, pool_per_worker(database, pool), with_, topology)
    pools = {one.executor: (one.opens, one.closes) for one in topology.report.listeners}
    return Connections(tasks, plain, ours, pools, database.counted_by)


def _timed(
    spark: SparkSession,
    database: Database,
    flights: DataFrame,
    enrich: Enrich,
    path: Path,
    topology: contextlib.AbstractContextManager[Any] | None = None,
) -> Outcome:
    """Measures one enrichment, from its first job until everything that it opened is closed."""
    from stagecrew.demo.enrich import SCHEMA

    opened = database.connections()
    start = time.monotonic()
    with topology or contextlib.nullcontext():
        _write(flights, enrich, SCHEMA, path)
    seconds = time.monotonic() - start
    opened = database.connections() - opened
    result = spark.read.parquet(path.as_uri())
    # Decimals, because a sum of hashes overflows a long, and Spark raises an error then.
    row = result.selectExpr("count(*)", "sum(cast(xxhash64(*) as decimal(38, 0)))").first()
    assert row is not None
    return Outcome(opened, seconds, row[0], int(row[1] or 0))


def _write(flights: DataFrame, enrich: Any, schema: str, path: Path) -> None:
    flights.mapInArrow(enrich, schema).write.mode("overwrite").parquet(path.as_uri())
