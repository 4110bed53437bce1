"""The part about skew: the flights of each airline are a file, and reading a flight takes the same time everywhere."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

import stagecrew

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Skew", "compare_skew"]

#: How long the simulated service takes for 1,000 flights, in seconds. A task waits for it, and uses no CPU.
_SERVICE: Final = 0.02
_SCHEMA: Final = "task long, flights long"


@dataclasses.dataclass(frozen=True)
class Read:
    """The figures of one read: its duration, and the number of flights that each task read."""

    seconds: float
    flights: tuple[int, ...]

    @property
    def busiest(self) -> float:
        """The share of the flights that the busiest task read."""
        return max(self.flights) / sum(self.flights)


@dataclasses.dataclass(frozen=True)
class Skew:
    """The figures of both reads."""

    files: int
    without: Read
    with_stagecrew: Read

    @property
    def ok(self) -> bool:
        """Whether both read each flight once."""
        return sum(self.without.flights) == sum(self.with_stagecrew.flights)

    def rows(self) -> list[tuple[str, str, str]]:
        """See `Part`."""
        both = (self.without, self.with_stagecrew)
        (seconds, ours), (busiest, our_busiest) = (
            [f"{read.seconds:.2f}" for read in both],
            [f"{read.busiest:.0%}" for read in both],
        )
        return [
            (f"seconds for {self.files} uneven files", seconds, ours),
            ("  read by the busiest task", busiest, our_busiest),
        ]

    def notes(self) -> list[str]:
        """See `Part`."""
        if self.ok:
            return []
        return ["The two reads returned DIFFERENT numbers of flights. This is a bug: please report it."]

    def as_json(self) -> dict[str, Any]:
        """See `Part`."""
        return dataclasses.asdict(self)


def _serve(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Sends each flight to the simulated service. Yields the task and its number of flights."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    for batch in batches:
        time.sleep(_SERVICE * batch.num_rows / 1000)
        yield pa.record_batch({"task": [context.partitionId()], "flights": [batch.num_rows]})


def compare_skew(spark: SparkSession, flights: pa.Table, folder: Path, tasks: int) -> Skew:
    """Writes a file for each airline, and reads the files with Spark's partitions, and with splits."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from stagecrew.operators.enumerators import ParquetRowGroups

    folder.mkdir()
    airlines = flights["carrier"].unique().to_pylist()
    for airline in airlines:
        rows = flights.filter(pc.equal(flights["carrier"], airline))
        pq.write_table(rows, folder / f"{airline}.parquet", row_group_size=2000)
    spark.conf.unset("spark.sql.files.minPartitionNum")  # as without the settings of the other parts
    static = _timed(spark.read.parquet(folder.as_uri()).mapInArrow(_serve, _SCHEMA))
    groups = ParquetRowGroups(str(folder))
    with stagecrew.crew(spark).topology("read") as topology:
        dataset = topology.splits(groups, lambda split: _serve(groups.read(split)), _SCHEMA, parallelism=tasks)
        return Skew(len(airlines), static, _timed(dataset))


def _timed(dataset: DataFrame) -> Read:
    started = time.monotonic()
    found = dataset.groupBy("task").sum("flights").collect()
    return Read(time.monotonic() - started, tuple(sorted((row[1] for row in found), reverse=True)))
