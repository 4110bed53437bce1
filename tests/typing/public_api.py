"""What type checkers know about the public API. `make lint` checks this file with mypy, `make test-long` with pyright."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from typing import assert_type

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import stagecrew
from stagecrew.operators import CommitReport, SuperstepContext
from stagecrew.operators.sinks import ParquetSink


class Pool(stagecrew.Listener):
    """A listener with a constructor of its own."""

    def __init__(self, url: str) -> None:
        self.url = url

    def open(self, context: stagecrew.ListenerContext) -> None:
        self.connection = sqlite3.connect(self.url)


@stagecrew.resource
def database(context: stagecrew.ListenerContext, path: str, *, timeout: float = 1.0) -> Iterator[sqlite3.Connection]:
    yield sqlite3.connect(path, timeout=timeout)


@stagecrew.resource(scope="executor")
def server(context: stagecrew.ListenerContext) -> Iterator[int]:
    yield 8080


def listeners() -> None:
    """`get` returns the listener, or the value that the resource yields."""
    pool = Pool("orders.db")
    assert_type(pool, Pool)
    assert_type(pool.get(), Pool)
    assert_type(pool.get().connection, sqlite3.Connection)
    connection = database("orders.db", timeout=2.0)
    assert_type(connection, stagecrew.Resource[sqlite3.Connection])
    assert_type(connection.get(), sqlite3.Connection)
    assert_type(server().get(), int)
    database(1)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    with stagecrew.testing.opened(connection) as opened:
        assert_type(opened, sqlite3.Connection)
    with stagecrew.testing.opened(pool) as opened_pool:
        assert_type(opened_pool, Pool)
    with stagecrew.testing.opened(pool, value="fake") as fake:
        assert_type(fake, str)


def limited(gateway: stagecrew.TaskGateway, frame: pd.DataFrame, factor: float) -> pd.DataFrame:
    gateway.send(len(frame))
    return frame * factor


def enrich(gateway: stagecrew.TaskGateway, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def iterate(steps: SuperstepContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def operators(topology: stagecrew.Topology, dataset: DataFrame) -> None:
    """`bind` and `wrap` keep the signature of a function; `bind` removes its gateway."""
    operator = topology.coordinate("limit", stagecrew.Coordinator)
    assert_type(operator, stagecrew.Operator)
    bound = operator.bind(limited)
    assert_type(bound(pd.DataFrame(), 2.0), pd.DataFrame)
    bound(pd.DataFrame())  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
    assert_type(operator.map(dataset, enrich, "id long"), DataFrame)
    assert_type(topology.supersteps(dataset, iterate, "id long"), DataFrame)
    assert_type(topology.commit(dataset, ParquetSink("out")), CommitReport)
    wrapped = topology.wrap(divmod_)
    assert_type(wrapped(7, 2), tuple[int, int])
    wrapped("7", 2)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


def divmod_(number: int, divisor: int) -> tuple[int, int]:
    return divmod(number, divisor)


def session() -> None:
    """The methods of a crew, and their results."""
    spark = stagecrew.configure(SparkSession.builder.master("local[2]")).getOrCreate()
    crew = stagecrew.crew(spark)
    assert_type(crew, stagecrew.Crew)
    with crew.topology("typed", listeners=[Pool("orders.db"), database("orders.db")]) as topology:
        assert_type(topology, stagecrew.Topology)
    assert_type(topology.report, stagecrew.TopologyReport)
    assert_type(topology.report.opens, int)
    assert_type(crew.reports, list[stagecrew.TopologyReport])


def unknown_names() -> Callable[..., object]:
    """A name that does not exist is an error."""
    return stagecrew.topolgy  # type: ignore[attr-defined,no-any-return] # pyright: ignore[reportAttributeAccessIssue]
