"""One local session from its start to its end: the part of `make smoke` that needs Spark."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle

import stagecrew
from stagecrew.operators.sinks import ParquetSink
from support.journal import Recorder
from support.sessions import LOCAL

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors do not have this module


class Doubler(stagecrew.Coordinator):
    """Replies to each request, a number, with twice that number."""

    def handle_request(self, evaluation, request):
        return 2 * request


def doubled(gateway, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Asks the coordinator for twice the sum of each batch."""
    for batch in batches:
        yield pa.record_batch({"sum": [gateway.request(sum(batch["id"].to_pylist()))]})


@pytest.mark.contract
def test_a_session_from_start_to_end(sessions, journal, tmp_path):
    """A listener opens and closes, tasks reach their coordinator, rows are committed, and the report is complete."""
    spark = sessions.get(LOCAL)
    listener = Recorder(journal, "smoke")
    with stagecrew.crew(spark).topology("smoke", listeners=[listener]) as topology:
        numbers = spark.range(0, 10, 1, 2)
        sums = topology.coordinate("double", Doubler).map(numbers, doubled, "sum long")
        assert sum(row["sum"] for row in sums.collect()) == 90
        topology.commit(numbers.repartition(2), ParquetSink(str(tmp_path / "out")))
    assert sorted(pq.read_table(tmp_path / "out")["id"].to_pylist()) == list(range(10))
    assert topology.report.opens == topology.report.closes == len(journal.read(event="open")) > 0
    assert topology.report.failures == 0
    assert sum(one.released for one in topology.report.partitions) > 0
