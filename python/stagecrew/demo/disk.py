"""The part about disks: the shuffle files that remain when a run has ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stagecrew
from stagecrew.observability.notebook import data_size

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Disk", "compare_disk"]


@dataclasses.dataclass(frozen=True)
class Left:
    """The shuffle files that remain after a run."""

    files: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Disk:
    """What remains after both runs."""

    without: Left
    with_stagecrew: Left

    @property
    def ok(self) -> bool:
        """Whether the run with stagecrew left nothing."""
        return self.with_stagecrew.files == 0

    def rows(self) -> list[tuple[str, str, str]]:
        """See `Part`."""
        cells = [f"{left.files:,} ({data_size(left.bytes)})" for left in (self.without, self.with_stagecrew)]
        return [("shuffle files left", cells[0], cells[1])]

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
    # Spark may delete files of earlier runs meanwhile, when the driver collects garbage.
    return Disk(_new(plain, before), _new(after, plain))


def _stored(spark: SparkSession) -> dict[str, int]:
    """The sizes of the shuffle files on the disks of all executors. Each executor runs a task that lists them."""
    context = spark.sparkContext
    tasks = 4 * context.defaultParallelism
    found = context.parallelize(range(tasks), tasks).mapPartitions(_shuffle_files).collect()
    return {path: size for one in found for path, size in one.items()}


def _shuffle_files(_: Iterable[int]) -> Iterator[dict[str, int]]:
    # Spark passes its local directories to Python workers.
    folders = os.environ["SPARK_LOCAL_DIRS"].split(",")
    for path in (path for folder in folders for path in Path(folder).rglob("shuffle_*.data")):
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            yield {f"{socket.gethostname()}:{path}": path.stat().st_size}


def _new(files: dict[str, int], before: dict[str, int]) -> Left:
    sizes = [size for path, size in files.items() if path not in before]
    return Left(len(sizes), sum(sizes))
