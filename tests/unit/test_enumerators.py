"""Enumerators: rows have the stated schema, and files are read from the file system that listed them."""

from __future__ import annotations

import datetime as dt
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import Row
from pyspark.sql.types import ArrayType, IntegerType, LongType, StringType, StructType, TimestampType

from stagecrew.errors import OperatorFailed, OperatorMisused
from stagecrew.operators.enumerators import DataSourcePartitions, Files, ParquetRowGroups

SCHEMA = pa.schema([("a", pa.int64()), ("b", pa.int64())])


def write_tables(folder: Path, *tables: dict[str, Any]) -> str:
    for number, columns in enumerate(tables):
        pq.write_table(pa.table(columns), folder / f"{number}.parquet")
    return str(folder)


def read(enumerator: Any) -> list[pa.RecordBatch]:
    """Reads all splits with a pickled copy of the enumerator, as tasks do."""
    copy = pickle.loads(pickle.dumps(enumerator))
    return [batch for split in enumerator.splits() for batch in copy.read(split)]


@pytest.fixture(params=[ParquetRowGroups, lambda *args, **more: Files(args[0], "parquet", *args[1:], **more)])
def reader(request):
    """Each of the two file enumerators, for Parquet files."""
    return request.param


def test_rows_have_the_columns_of_the_schema(reader, tmp_path):
    """Columns are matched by name. In a file, they can have another order or a narrower type, or be missing."""
    folder = write_tables(
        tmp_path, {"a": [1], "b": [2]}, {"b": [20], "a": pa.array([10], pa.int32()), "c": ["more"]}, {"b": [200]}
    )
    batches = read(reader(folder, **({"largest_first": False} if reader is ParquetRowGroups else {})))
    assert [batch.schema for batch in batches] == [SCHEMA] * 3
    assert [batch.to_pylist() for batch in batches] == [
        [{"a": 1, "b": 2}],
        [{"a": 10, "b": 20}],
        [{"a": None, "b": 200}],
    ]
    selected = read(reader(folder, ["b", "a"]))
    assert {tuple(batch.schema.names) for batch in selected} == {("b", "a")}
    assert sum(sum(batch.column("b").to_pylist()) for batch in selected) == 222


def test_a_type_that_does_not_fit_names_file_and_column(reader, tmp_path):
    """The error about a type that does not fit names the file and the column. A wider stated schema reads all files."""
    folder = write_tables(tmp_path, {"a": [1], "b": [2]}, {"b": [0.5], "a": [10]})
    with pytest.raises(
        OperatorFailed, match=r"1\.parquet cannot be read .*column 'b' is double in the file, and int64"
    ):
        read(reader(folder))
    wide = reader(folder, schema=pa.schema([("a", pa.int64()), ("b", pa.float64())]))
    assert sorted(row["b"] for batch in read(wide) for row in batch.to_pylist()) == [0.5, 2.0]
    with pytest.raises(OperatorMisused, match="has no column 'd': it has a, b"):
        reader(folder, ["a", "d"]).schema  # noqa: B018


def test_the_schema_is_given_in_sparks_types(reader, tmp_path):
    """Arrow types without an equivalent in Spark are converted to the Spark types of the enumerator's schema."""
    folder = write_tables(
        tmp_path, {"at": pa.array([10**9], pa.timestamp("ns")), "text": pa.array(["x"]).dictionary_encode()}
    )
    enumerator = reader(folder)
    assert enumerator.schema.simpleString() == "struct<at:timestamp_ntz,text:string>"
    assert [batch.schema.types for batch in read(enumerator)] == [[pa.timestamp("us"), pa.string()]]


def test_csv_files_with_different_types_need_a_schema(tmp_path):
    """If a column has integers in one CSV file and fractions in another, the error names the file.

    A stated schema with a type for both reads all files.
    """
    (tmp_path / "0.csv").write_text("a,b\n1,2\n")
    (tmp_path / "1.csv").write_text("b,a\n0.5,10\n")
    with pytest.raises(OperatorFailed, match=r"1\.csv cannot be read .*column 'b' is double in the file"):
        read(Files(str(tmp_path), "csv"))
    rows = read(Files(str(tmp_path), "csv", schema=pa.schema([("a", pa.int64()), ("b", pa.float64())])))
    assert [row for batch in rows for row in batch.to_pylist()] == [{"a": 1, "b": 2.0}, {"a": 10, "b": 0.5}]


def test_a_broken_file_is_named_in_the_error(tmp_path):
    """The error about a file that is not a Parquet file, despite its name, contains the file's name."""
    write_tables(tmp_path, {"a": [1]})
    (tmp_path / "1.parquet").write_bytes(b"not parquet")
    with pytest.raises(OperatorFailed, match=r"1\.parquet cannot be read"):
        read(Files(str(tmp_path), "parquet"))


@pytest.mark.parametrize("several", [False, True])
def test_a_uri_is_read_from_the_file_system_of_its_listing(reader, tmp_path, several):
    """Tasks read a URI, or a list of URIs, from the file system that listed it. A list must be on one file system."""
    write_tables(tmp_path, {"a": [1], "b": [2]})
    uri = (tmp_path / "0.parquet").as_uri()
    assert [batch.to_pylist() for batch in read(reader([uri] if several else uri))] == [[{"a": 1, "b": 2}]]
    with pytest.raises(OperatorMisused, match="on one file system"):
        reader([uri, "mock:///there"])


def test_a_relative_path_is_resolved_by_the_driver(reader, tmp_path, monkeypatch):
    """A task with a different working directory reads the file that the driver's relative path refers to."""
    write_tables(tmp_path, {"a": [1], "b": [2]})
    monkeypatch.chdir(tmp_path)
    enumerator = reader("0.parquet")
    data = pickle.dumps(enumerator)
    (split,) = enumerator.splits()
    os.chdir("/")
    assert [batch.num_rows for batch in pickle.loads(data).read(split)] == [1]


def test_times_with_a_zone_keep_their_instant(reader, tmp_path):
    """Times with a time zone keep their instant, even inside nested types."""
    at = dt.datetime(2024, 1, 1, 10, tzinfo=dt.UTC)
    zoned = pa.timestamp("us", tz="Europe/Berlin")
    folder = write_tables(
        tmp_path, {"a": pa.array([at], zoned), "b": pa.array([{"c": [at]}], pa.struct([("c", pa.list_(zoned))]))}
    )
    (batch,) = read(reader(folder))
    assert batch.to_pylist() == [{"a": at, "b": {"c": [at]}}]
    (batch,) = read(reader(folder, schema=pa.schema([("a", zoned)])))
    assert batch.to_pylist() == [{"a": at}]
    assert reader(folder).schema.simpleString() == "struct<a:timestamp,b:struct<c:array<timestamp>>>"


def test_csv_times_are_parsed_by_arrow(tmp_path):
    """A time with a zone in a CSV file becomes an instant."""
    (tmp_path / "a.csv").write_text("a\n2024-01-01 10:00:00Z\n")
    (batch,) = read(Files(str(tmp_path), "csv"))
    assert batch.to_pylist() == [{"a": dt.datetime(2024, 1, 1, 10, tzinfo=dt.UTC)}]


def test_all_columns_are_nullable(reader, tmp_path):
    """All columns are nullable at any depth, because a file can lack a column that is required in another file."""
    pq.write_table(
        pa.table(
            {"a": [1], "b": [{"c": [2]}]},
            pa.schema([
                pa.field("a", pa.int64(), False),
                pa.field("b", pa.struct([pa.field("c", pa.list_(pa.field("item", pa.int64(), False)), False)]), False),
            ]),
        ),
        tmp_path / "0.parquet",
    )  # fmt: skip
    pq.write_table(pa.table({"b": [{"d": 5}]}), tmp_path / "1.parquet")
    enumerator = reader(str(tmp_path))
    assert "'nullable': False" not in str(enumerator.schema.jsonValue())
    assert "'containsNull': False" not in str(enumerator.schema.jsonValue())
    rows = [row for batch in read(enumerator) for row in batch.to_pylist()]
    assert sorted(rows, key=str) == [{"a": 1, "b": {"c": [2]}}, {"a": None, "b": {"c": None}}]


def test_a_file_without_any_column_of_the_others_is_an_error(tmp_path):
    """A file that has none of the columns of the others, such as a CSV file without a header, is an error.

    An empty file is accepted.
    """
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text("")
    enumerator = Files(str(tmp_path), "csv")
    assert [row for batch in read(enumerator) for row in batch.to_pylist()] == [{"x": 1, "y": 2}]
    (tmp_path / "c.csv").write_text("3,4\n5,6\n")
    with pytest.raises(OperatorFailed, match=r"c\.csv has none of the columns .* x, y: it has 3, 4.*header"):
        read(Files(str(tmp_path), "csv"))


def test_paths_can_be_given_in_several_forms(reader, tmp_path):
    """Paths can be given as a pathlib path, as a list of these, or as URIs in Hadoop's form."""
    folder = write_tables(tmp_path, {"a": [1]})
    for source in (tmp_path, [tmp_path / "0.parquet"], f"file:{folder}", f"file://{folder}"):
        assert [batch.to_pylist() for batch in read(reader(source))] == [[{"a": 1}]]


def test_a_data_source_without_partitions_is_read_once():
    """Like Spark, a reader that has no partitions, or does not define them, is read once."""

    def refuse():
        raise NotImplementedError

    for partitions in (list, refuse):
        reader = SimpleNamespace(partitions=partitions)
        source = SimpleNamespace(
            schema=lambda: StructType().add("a", IntegerType()), reader=lambda schema, reader=reader: reader
        )
        ((number, partition),) = DataSourcePartitions(source).splits()
        assert (number, partition.value) == (0, None)


def test_rows_of_a_data_source_have_its_schema():
    """A data source's reader can yield tuples, rows and batches in any order. Instants do not depend on time zones."""
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
    enumerator = DataSourcePartitions(Source(), schema)
    rows = [row for split in enumerator.splits() for read in enumerator.read(split) for row in read.to_pylist()]
    assert [(row["a"], row["t"], row["n"]) for row in rows] == [
        (1, at, ["x"]),
        (2, None, None),
        (3, at, ["y"]),
        (4, at, []),
    ]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([Row(b=1, a=2)], [{"a": 2, "b": 1}]),
        ([Row(b=1, c=2)], "a row with the fields b, c, but the schema has a, b"),
        (
            [pa.RecordBatch.from_pydict({"b": [1], "a": [2]})],
            "a batch with the columns b int64, a int64, but the schema",
        ),
    ],
)
def test_columns_of_a_data_source_are_identified_by_their_names(rows, expected):
    """Fields of a named row are identified by name. Rows and batches with other columns are refused, as in Spark."""
    schema = StructType().add("a", LongType()).add("b", LongType())
    reader = SimpleNamespace(partitions=lambda: [None], read=lambda partition: iter(rows))
    enumerator = DataSourcePartitions(SimpleNamespace(reader=lambda schema: reader), schema)
    (split,) = enumerator.splits()
    if isinstance(expected, str):
        with pytest.raises(OperatorFailed, match=expected):
            list(enumerator.read(split))
    else:
        assert [row for batch in enumerator.read(split) for row in batch.to_pylist()] == expected
