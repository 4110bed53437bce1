"""Ready-made sinks for `Topology.commit`: Parquet files, Parquet objects, database tables and Iceberg tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagecrew.lazy import lazy_names

if TYPE_CHECKING:
    from stagecrew.operators.sinks.database import DatabaseSink
    from stagecrew.operators.sinks.iceberg import IcebergSink
    from stagecrew.operators.sinks.objects import ObjectSink, read_committed
    from stagecrew.operators.sinks.parquet import ParquetSink

__all__ = ["DatabaseSink", "IcebergSink", "ObjectSink", "ParquetSink", "read_committed"]

_LAZY = {
    "DatabaseSink": "database",
    "IcebergSink": "iceberg",
    "ObjectSink": "objects",
    "ParquetSink": "parquet",
    "read_committed": "objects",
}

if not TYPE_CHECKING:  # a type checker knows these names, and reports others
    __getattr__ = lazy_names(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted(__all__)
