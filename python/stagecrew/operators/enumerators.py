"""Enumerators of splits: files, Parquet row groups, ranges of a key, the partitions of a Python DataSource.

Each has `splits()`, and what can be read by itself has `read` and `schema` too:

    groups = ParquetRowGroups("flights/")
    flights = topology.splits(groups, groups.read, groups.schema)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from stagecrew.errors import OperatorMisused

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSource, InputPartition
    from pyspark.sql.types import StructType

__all__ = ["DataSourcePartitions", "Files", "KeyRanges", "ParquetRowGroups"]


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """One row group of a Parquet file."""

    path: str
    index: int
    rows: int


class _Arrow:
    """What reads by `pyarrow.dataset`."""

    def __init__(
        self, source: str | Sequence[str], file_format: str, columns: Sequence[str] | None, filesystem: Any
    ) -> None:
        self.source, self.file_format = source, file_format
        self.columns = None if columns is None else tuple(columns)
        self.filesystem = filesystem

    @functools.cached_property
    def _dataset(self) -> Any:
        import pyarrow.dataset as ds

        source = list(self.source) if not isinstance(self.source, str) else self.source
        return ds.dataset(source, format=self.file_format, filesystem=self.filesystem)

    @property
    def schema(self) -> StructType:
        """The schema of the rows, for Spark."""
        from pyspark.sql.pandas.types import from_arrow_schema

        found = self._dataset.schema
        if self.columns is not None:
            found = pa.schema([found.field(name) for name in self.columns])
        return from_arrow_schema(found)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_dataset"}


class ParquetRowGroups(_Arrow):
    """The row groups of Parquet files: a file, a folder, or several files, of any filesystem of `pyarrow.fs`.

    `largest_first` reads all footers first, and gives row groups by their size: the last ones are small then, and tasks end
    together. Without it footers are read as they are needed.
    """

    def __init__(
        self,
        source: str | Sequence[str],
        columns: Sequence[str] | None = None,
        filesystem: Any = None,
        largest_first: bool = True,
    ) -> None:
        super().__init__(source, "parquet", columns, filesystem)
        self.largest_first = largest_first

    def splits(self) -> Iterable[RowGroup]:
        """One per row group."""
        if self.largest_first:
            return [group for _, group in sorted(self._groups(), key=lambda one: -one[0])]
        return (group for _, group in self._groups())

    def _groups(self) -> Iterator[tuple[int, RowGroup]]:
        for fragment in self._dataset.get_fragments():
            for group in fragment.row_groups:
                yield group.total_byte_size, RowGroup(fragment.path, group.id, group.num_rows)

    def read(self, split: RowGroup) -> Iterator[pa.RecordBatch]:
        """The rows of a row group."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(split.path, filesystem=self.filesystem) as file:
            yield from file.iter_batches(row_groups=[split.index], columns=self.columns and list(self.columns))


class Files(_Arrow):
    """Whole files of any format that `pyarrow.dataset` reads: `parquet`, `orc`, `csv`, `json`, `feather`."""

    def __init__(
        self,
        source: str | Sequence[str],
        file_format: str,
        columns: Sequence[str] | None = None,
        filesystem: Any = None,
    ) -> None:
        super().__init__(source, file_format, columns, filesystem)

    def splits(self) -> Iterable[str]:
        """One per file: its path."""
        return (fragment.path for fragment in self._dataset.get_fragments())

    def read(self, split: str) -> Iterator[pa.RecordBatch]:
        """The rows of a file."""
        import pyarrow.dataset as ds

        columns = self.columns and list(self.columns)
        yield from ds.dataset(split, format=self.file_format, filesystem=self.filesystem).to_batches(columns=columns)


class KeyRanges:
    """The range of integers `lower <= key < upper` in `count` parts of nearly one size: pairs (first, behind the last).

    For a table of a database: `select … where key >= ? and key < ?`.

    >>> list(KeyRanges(0, 10, 3).splits())
    [(0, 3), (3, 6), (6, 10)]
    """

    def __init__(self, lower: int, upper: int, count: int) -> None:
        if upper < lower or count < 1:
            raise OperatorMisused(f"no range of keys: {lower} <= key < {upper} in {count} parts")
        self.lower, self.upper, self.count = lower, upper, count

    def splits(self) -> Iterator[tuple[int, int]]:
        """The parts that are not empty."""
        size = self.upper - self.lower
        bounds = [self.lower + size * i // self.count for i in range(self.count + 1)]
        return ((first, last) for first, last in itertools.pairwise(bounds) if first < last)


class DataSourcePartitions:
    """The partitions of a Python DataSource's reader: what one task each would read, pulled by idle tasks.

    `source` is an instance of the user's `DataSource`; its `reader(schema)` is asked for partitions on the driver, and reads
    in the tasks. What the reader yields: tuples, rows, or Arrow record batches. Filters are not pushed down.
    """

    def __init__(self, source: DataSource, schema: StructType | str | None = None) -> None:
        from pyspark.sql.types import StructType as Struct

        found = source.schema() if schema is None else schema
        self.schema = cast("StructType", Struct.fromDDL(found) if isinstance(found, str) else found)
        self._reader = source.reader(self.schema)

    def splits(self) -> Iterable[tuple[int, InputPartition | None]]:
        """Each partition of the reader with its number; two that look the same are two."""
        return list(enumerate(self._reader.partitions()))

    def read(self, split: tuple[int, InputPartition | None]) -> Iterator[pa.RecordBatch]:
        """What the reader yields for a partition."""
        from pyspark.sql.pandas.types import to_arrow_schema

        schema = to_arrow_schema(self.schema)
        rows: list[Any] = []
        for row in self._reader.read(split[1]):  # type: ignore[arg-type]
            if isinstance(row, pa.RecordBatch):
                yield row
                continue
            rows.append(row)
            if len(rows) == _ROWS:
                yield _batch(rows, schema)
                rows = []
        if rows:
            yield _batch(rows, schema)


_ROWS = 10_000


def _batch(rows: list[Any], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )
