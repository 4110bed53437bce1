"""Enumerators for `Topology.splits`: files, Parquet row groups, key ranges, and partitions of a Python DataSource.

An enumerator has a method `splits()`. An enumerator whose splits can be read without further code also has `read` and
`schema`:

    groups = ParquetRowGroups("flights/")
    flights = topology.splits(groups, groups.read, groups.schema)

The splits of an enumerator can be listed without Spark:

>>> from stagecrew.operators.enumerators import KeyRanges
>>> list(KeyRanges(0, 10, 3).splits())
[(0, 3), (3, 6), (6, 10)]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagecrew.lazy import lazy_names

if TYPE_CHECKING:
    from stagecrew.operators.enumerators.arrow import Files, ParquetRowGroups
    from stagecrew.operators.enumerators.data_source import DataSourcePartitions
    from stagecrew.operators.enumerators.enumerator import Enumerator
    from stagecrew.operators.enumerators.event_time import EventTimeSplits
    from stagecrew.operators.enumerators.key_ranges import KeyRanges

__all__ = ["DataSourcePartitions", "Enumerator", "EventTimeSplits", "Files", "KeyRanges", "ParquetRowGroups"]

_LAZY = {
    "DataSourcePartitions": "data_source",
    "Enumerator": "enumerator",
    "EventTimeSplits": "event_time",
    "Files": "arrow",
    "KeyRanges": "key_ranges",
    "ParquetRowGroups": "arrow",
}

if not TYPE_CHECKING:  # a type checker knows these names, and reports others
    __getattr__ = lazy_names(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted(__all__)
