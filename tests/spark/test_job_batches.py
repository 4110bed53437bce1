"""Batches of a job in real streaming queries."""

from __future__ import annotations

import pytest
from pyspark.errors import StreamingQueryException

from support.stored_job import StoredJob


def test_a_batch_belongs_to_its_query(spark, crew, tmp_path):
    """A query that starts again skips its stored batch. Another query with the same name in the job is refused."""
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "one.txt").write_text("row\n")
    stored, called = StoredJob(), []

    def ingest(run, checkpoint):
        def load(rows, batch_id):
            run.batch("load", batch_id, lambda: called.append((checkpoint, batch_id)))

        query = (
            spark.readStream.text(str(tmp_path / "input")).writeStream.trigger(availableNow=True)
            .option("checkpointLocation", str(tmp_path / checkpoint)).foreachBatch(load).start()
        )  # fmt: skip
        query.awaitTermination()

    run = stored.run()
    ingest(run, "orders")
    with pytest.raises(StreamingQueryException, match="belong to another streaming query"):
        ingest(run, "clicks")
    (tmp_path / "orders" / "commits" / "0").unlink()  # as if the driver had died before the commit
    (tmp_path / "orders" / "commits" / ".0.crc").unlink()
    ingest(stored.run(), "orders")
    assert called == [("orders", 0)]
    with pytest.raises(StreamingQueryException, match="belong to another streaming query"):
        ingest(stored.run(), "another place")
    assert called == [("orders", 0)]
