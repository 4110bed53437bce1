"""Ready-made sinks for `Topology.commit`: Parquet files, Parquet objects, database tables and Iceberg tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used, because each sink needs other packages."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
