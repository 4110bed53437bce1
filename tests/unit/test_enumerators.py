"""Enumerators of files: what is read is of the schema that is stated, from wherever it was listed."""

from __future__ import annotations

import datetime as dt
import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import Row
from pyspark.sql.types import ArrayType, IntegerType, StringType, StructType, TimestampType

from stagecrew.errors import OperatorMisused, SplitsFailed
from stagecrew.operators.enumerators import DataSourcePartitions, Files, ParquetRowGroups

SCHEMA = pa.schema([("a", pa.int64()), ("b", pa.int64())])


def written(folder: Path, *tables: dict[str, Any]) -> str:
    for number, columns in enumerate(tables):
        pq.write_table(pa.table(columns), folder / f"{number}.parquet")
    return str(folder)


def read(enumerator: Any) -> list[pa.RecordBatch]:
    """As tasks do, which have a copy."""
    copy = pickle.loads(pickle.dumps(enumerator))
    return [batch for split in enumerator.splits() for batch in copy.read(split)]


@pytest.fixture(params=[ParquetRowGroups, lambda *args, **more: Files(args[0], "parquet", *args[1:], **more)])
def reader(request):
    """Both that read files."""
    return request.param


def test_columns_are_those_of_the_schema(reader, tmp_path):
    """Files whose columns are in another order, of narrower types, or missing are read as the schema says, by names."""
    folder = written(
        tmp_path, {"a": [1], "b": [2]}, {"b": [20], "a": pa.array([10], pa.int32()), "c": ["more"]}, {"b": [200]}
    )
    batches = read(reader(folder, **({"largest_first": False} if reader is ParquetRowGroups else {})))
    assert [batch.schema for batch in batches] == [SCHEMA] * 3
    assert [batch.to_pylist() for batch in batches] == [
        [{"a": 1, "b": 2}],
        [{"a": 10, "b": 20}],
        [{"a": None, "b": 200}],
    ]
    chosen = read(reader(folder, ["b", "a"]))
    assert {tuple(batch.schema.names) for batch in chosen} == {("b", "a")}
    assert sum(sum(batch.column("b").to_pylist()) for batch in chosen) == 222


def test_what_does_not_fit_names_file_and_column(reader, tmp_path):
    """A value that the schema's type cannot hold is an error that names file and column; a schema that holds all reads all."""
    folder = written(tmp_path, {"a": [1], "b": [2]}, {"b": [0.5], "a": [10]})
    with pytest.raises(SplitsFailed, match=r"1\.parquet cannot be read .*column 'b' is double in the file, and int64"):
        read(reader(folder))
    wide = reader(folder, schema=pa.schema([("a", pa.int64()), ("b", pa.float64())]))
    assert sorted(row["b"] for batch in read(wide) for row in batch.to_pylist()) == [0.5, 2.0]
    with pytest.raises(OperatorMisused, match="has no column 'd': it has a, b"):
        reader(folder, ["a", "d"]).schema  # noqa: B018


def test_the_schema_in_spark_s_types(reader, tmp_path):
    """What Arrow has more types for than Spark comes in the one that Spark reads, as the stated schema says."""
    folder = written(
        tmp_path, {"at": pa.array([10**9], pa.timestamp("ns")), "text": pa.array(["x"]).dictionary_encode()}
    )
    reads = reader(folder)
    assert reads.schema.simpleString() == "struct<at:timestamp_ntz,text:string>"
    assert [batch.schema.types for batch in read(reads)] == [[pa.timestamp("us"), pa.string()]]


def test_csv_of_several_types(tmp_path):
    """Integers in one CSV file and fractions in another are an error by name, and are read by a schema that holds both."""
    (tmp_path / "0.csv").write_text("a,b\n1,2\n")
    (tmp_path / "1.csv").write_text("b,a\n0.5,10\n")
    with pytest.raises(SplitsFailed, match=r"1\.csv cannot be read .*column 'b' is double in the file"):
        read(Files(str(tmp_path), "csv"))
    rows = read(Files(str(tmp_path), "csv", schema=pa.schema([("a", pa.int64()), ("b", pa.float64())])))
    assert [row for batch in rows for row in batch.to_pylist()] == [{"a": 1, "b": 2.0}, {"a": 10, "b": 0.5}]


def test_a_file_that_is_broken(tmp_path):
    """A file that is no Parquet is an error that names it."""
    written(tmp_path, {"a": [1]})
    (tmp_path / "1.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(SplitsFailed, match=r"1\.parquet cannot be read"):
        read(Files(str(tmp_path), "parquet"))


@pytest.mark.parametrize("several", [False, True])
def test_a_uri_is_read_where_it_was_listed(reader, tmp_path, several):
    """Splits of a URI are read from its file system, in tasks too, of one URI and of several."""
    written(tmp_path, {"a": [1], "b": [2]})
    uri = (tmp_path / "0.parquet").as_uri()
    assert [batch.to_pylist() for batch in read(reader([uri] if several else uri))] == [[{"a": 1, "b": 2}]]
    with pytest.raises(OperatorMisused, match="on one file system"):
        reader([uri, "mock:///there"])


def test_a_relative_path_is_that_of_the_driver(reader, tmp_path, monkeypatch):
    """A path is that of the process that made the enumerator, also where another reads it."""
    written(tmp_path, {"a": [1], "b": [2]})
    monkeypatch.chdir(tmp_path)
    enumerator = reader("0.parquet")
    data = pickle.dumps(enumerator)
    (split,) = enumerator.splits()
    os.chdir("/")
    assert [batch.num_rows for batch in pickle.loads(data).read(split)] == [1]


def test_times_with_a_zone(reader, tmp_path):
    """Instants stay those that they are, within others too; times without a zone are taken as Spark takes them."""
    at = dt.datetime(2024, 1, 1, 10, tzinfo=dt.UTC)
    zoned = pa.timestamp("us", tz="Europe/Berlin")
    folder = written(
        tmp_path, {"a": pa.array([at], zoned), "b": pa.array([{"c": [at]}], pa.struct([("c", pa.list_(zoned))]))}
    )
    (batch,) = read(reader(folder))
    assert batch.to_pylist() == [{"a": at, "b": {"c": [at]}}]
    (batch,) = read(reader(folder, schema=pa.schema([("a", zoned)])))
    assert batch.to_pylist() == [{"a": at}]
    assert reader(folder).schema.simpleString() == "struct<a:timestamp,b:struct<c:array<timestamp>>>"


def test_csv_with_times(tmp_path):
    """As Arrow reads them."""
    (tmp_path / "a.csv").write_text("a\n2024-01-01 10:00:00Z\n")
    (batch,) = read(Files(str(tmp_path), "csv"))
    assert batch.to_pylist() == [{"a": dt.datetime(2024, 1, 1, 10, tzinfo=dt.UTC)}]


def test_what_one_file_never_leaves_out(reader, tmp_path):
    """Another may: everything may be null, however deep, so that Spark looks for it."""
    pq.write_table(
        pa.table(
            {"a": [1], "b": [{"c": [2]}]},
            pa.schema([pa.field("a", pa.int64(), False),
                       pa.field("b", pa.struct([pa.field("c", pa.list_(pa.field("item", pa.int64(), False)), False)]), False)]),
        ),
        tmp_path / "0.parquet",
    )  # fmt: skip
    pq.write_table(pa.table({"b": [{"d": 5}]}), tmp_path / "1.parquet")
    made = reader(str(tmp_path))
    assert "'nullable': False" not in str(made.schema.jsonValue())
    assert "'containsNull': False" not in str(made.schema.jsonValue())
    rows = [row for batch in read(made) for row in batch.to_pylist()]
    assert sorted(rows, key=str) == [{"a": 1, "b": {"c": [2]}}, {"a": None, "b": {"c": None}}]


def test_a_file_of_other_columns(tmp_path):
    """One that shares none with the others, as one without a header does, is an error; one without rows is not."""
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text("")
    made = Files(str(tmp_path), "csv")
    assert [row for batch in read(made) for row in batch.to_pylist()] == [{"x": 1, "y": 2}]
    (tmp_path / "c.csv").write_text("3,4\n5,6\n")
    with pytest.raises(SplitsFailed, match=r"c\.csv has none of the columns .* x, y: it has 3, 4.*header"):
        read(Files(str(tmp_path), "csv"))


def test_forms_of_a_path(reader, tmp_path):
    """A path of pathlib's, several of them, and a URI as Hadoop writes it."""
    folder = written(tmp_path, {"a": [1]})
    for source in (tmp_path, [tmp_path / "0.parquet"], f"file:{folder}", f"file://{folder}"):
        assert [batch.to_pylist() for batch in read(reader(source))] == [[{"a": 1}]]


def test_rows_of_a_data_source():
    """What its reader yields, rows and batches in any order, is of its schema; an instant is the same whatever zone it is told in."""
    at = dt.datetime(2024, 1, 1, 10, tzinfo=dt.UTC)
    schema = StructType().add("a", IntegerType()).add("t", TimestampType()).add("n", ArrayType(StringType()))

    class Reader:
        def partitions(self):
            return [None]

        def read(self, partition):
            yield (1, at, ["x"])
            yield Row(a=2, t=None, n=None)
            yield batch
            yield (4, at.astimezone(dt.timezone(dt.timedelta(hours=5))), [])

    class Source:
        def reader(self, schema):
            return Reader()

    arrow = pa.schema([("a", pa.int32()), ("t", pa.timestamp("us", tz="UTC")), ("n", pa.list_(pa.string()))])
    batch = pa.RecordBatch.from_pylist([{"a": 3, "t": at, "n": ["y"]}], arrow)
    made = DataSourcePartitions(Source(), schema)
    rows = [row for split in made.splits() for read in made.read(split) for row in read.to_pylist()]
    assert [(row["a"], row["t"], row["n"]) for row in rows] == [
        (1, at, ["x"]),
        (2, None, None),
        (3, at, ["y"]),
        (4, at, []),
    ]
