"""Reports of the partitions that topologies have stored on executors, and the policy that releases them."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from stagecrew.errors import ConfigurationError, TopologyError
from stagecrew.observability.notebook import amount, data_size, field_table, html_table, one_line

__all__ = ["PartitionReport", "Release", "java_dataset", "policy"]


class Release(enum.Enum):
    """Which stored partitions are deleted when a topology ends. Partitions that another topology uses always stay.

    Examples:
        >>> import stagecrew
        >>> [release.value for release in stagecrew.Release]
        ['shuffles', 'all', 'none']
    """

    #: The shuffle outputs that its tasks wrote. This is the default.
    SHUFFLES = "shuffles"
    #: The shuffle outputs, and the blocks of datasets that its tasks cached: the datasets are unpersisted.
    ALL = "all"
    #: None. Spark's ContextCleaner deletes them after a garbage collection in the driver.
    NONE = "none"


@dataclasses.dataclass(frozen=True, repr=False)
class PartitionReport:
    """The partitions that a topology has stored on one executor.

    Executors report about once a second, and when the topology closes. `outputs` counts complete outputs of map tasks,
    `in_progress` counts outputs that are being written, and `blocks` counts the cached blocks of datasets
    (`block_bytes` is their size in memory and on disk). `released` counts partitions that were deleted after the
    topology ended, and `release_failures` counts partitions that could not be deleted. The executor's log contains the
    reason.

    Examples:
        with crew.topology("joined") as topology:
            dataset.groupBy("id").count().collect()
        print(sum(stored.released_bytes for stored in topology.report.partitions))
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

    def __repr__(self) -> str:
        return one_line(
            "partitions",
            self.topology,
            (
                f"executor {self.executor}",
                f"{amount(self.outputs, 'output')} ({data_size(self.output_bytes)})" if self.outputs else "",
                f"{amount(self.blocks, 'block')} ({data_size(self.block_bytes)})" if self.blocks else "",
                f"{self.released:,} released ({data_size(self.released_bytes)})",
                f"{self.release_failures:,} not released" if self.release_failures else "",
            ),
        )

    def _repr_html_(self) -> str:
        return html_table("Partitions", *field_table((self,)))

    @classmethod
    def _from_json(cls, topology: str, executor: str, node: dict[str, int]) -> PartitionReport:
        """Reads the driver's JSON."""
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
    """Returns the policy with this name. Raises `ConfigurationError` if there is none."""
    try:
        return Release(release)
    except ValueError:
        known = ", ".join(repr(one.value) for one in Release)
        raise ConfigurationError(f"release={release!r} is not a release policy; use one of {known}") from None


def java_dataset(dataset: Any) -> Any:
    """The JVM object of a DataFrame or an RDD. Raises `TopologyError` for anything else."""
    for attribute in ("_jdf", "_jrdd"):
        if (found := getattr(dataset, attribute, None)) is not None:
            return found
    raise TopologyError(f"topology.keep takes DataFrames and RDDs, not {type(dataset).__name__}")
