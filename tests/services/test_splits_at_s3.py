"""Splits of files on an S3 server."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pyarrow.parquet as pq

from stagecrew.operators.enumerators import Files, ParquetRowGroups
from support.s3 import s3_server


def test_splits_are_read_from_an_s3_uri():
    """An enumerator lists row groups or files at an S3 URI, and a pickled copy of it reads them, as a task does.

    The secret key in the URI is not in the `repr` of the splits.
    """
    with s3_server() as (filesystem, uri):
        pq.write_table(pa.table({"n": range(10)}), "bucket/states/n.parquet", filesystem=filesystem, row_group_size=4)
        for enumerator in (ParquetRowGroups(uri), Files(uri, "parquet")):
            splits, copy = list(enumerator.splits()), pickle.loads(pickle.dumps(enumerator))
            assert sorted(n for split in splits for batch in copy.read(split) for n in batch["n"].to_pylist()) == [
                *range(10)
            ]
            assert "very-secret" not in repr(splits)
