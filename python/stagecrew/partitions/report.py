"""What topologies have stored on executors: Python's view of the bookkeeping, and what becomes of it when one ends."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from stagecrew.errors import ConfigurationError, TopologyError

__all__ = ["PartitionReport", "Release", "java_dataset", "policy"]


class Release(enum.Enum):
    """What of its partitions goes when a topology ends; what another topology or the application uses never does."""

    #: The shuffle outputs that its tasks wrote (the default).
    SHUFFLES = "shuffles"
    #: Those, and the blocks of datasets that its tasks cached: these are unpersisted.
    ALL = "all"
    #: Nothing: Spark's own cleaner takes what the driver's garbage collector finds.
    NONE = "none"


@dataclasses.dataclass(frozen=True)
class PartitionReport:
    """What a topology has stored on one executor, as that said last: about every second, and when it closed.

    `outputs` are those of map tasks that are written, `in_progress` those that are being written, `blocks` those of cached
    datasets (their bytes in memory and on disk). `released` counts partitions that are gone since the topology ended,
    `release_failures` partitions that could not be deleted: the executor's log says why.
    """

    topology: str
    executor: str
    in_progress: int
    outputs: int
    output_bytes: int
    blocks: int
    block_bytes: int
    released: int
    released_bytes: int
    release_failures: int = 0

    @classmethod
    def of(cls, topology: str, executor: str, node: dict[str, int]) -> PartitionReport:
        """From the driver's JSON."""
        return cls(
            topology=topology,
            executor=executor,
            in_progress=node["inProgress"],
            outputs=node["outputs"],
            output_bytes=node["outputBytes"],
            blocks=node["blocks"],
            block_bytes=node["blockBytes"],
            released=node["released"],
            released_bytes=node["releasedBytes"],
            release_failures=node.get("releaseFailures", 0),
        )


def policy(release: Release | str) -> Release:
    """The policy of this name. Raises `ConfigurationError`."""
    try:
        return Release(release)
    except ValueError:
        known = ", ".join(repr(one.value) for one in Release)
        raise ConfigurationError(
            f"release={release!r} is no policy for what a topology stores; it is one of {known}"
        ) from None


def java_dataset(dataset: Any) -> Any:
    """What the JVM knows a DataFrame or an RDD by. Raises `TopologyError` for anything else."""
    for attribute in ("_jdf", "_jrdd"):
        if (found := getattr(dataset, attribute, None)) is not None:
            return found
    raise TopologyError(f"topology.keep takes DataFrames and RDDs, and not {type(dataset).__name__}")
