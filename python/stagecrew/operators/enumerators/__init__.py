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

from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used, because most of them need pyarrow."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
