"""Enumerators of splits: files, Parquet row groups, ranges of a key, the partitions of a Python DataSource.

Each has `splits()`, and what can be read by itself has `read` and `schema` too:

    groups = ParquetRowGroups("flights/")
    flights = topology.splits(groups, groups.read, groups.schema)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from stagecrew.errors import OperatorMisused, SplitsFailed

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
        self,
        source: str | Sequence[str],
        file_format: str,
        columns: Sequence[str] | None,
        filesystem: Any,
        schema: pa.Schema | None,
    ) -> None:
        self.source, self.file_format = source, file_format
        self.columns = None if columns is None else tuple(columns)
        self.filesystem = filesystem
        if filesystem is None:
            self.source, self.filesystem = _resolved(source)
        self._given = schema

    @functools.cached_property
    def _dataset(self) -> Any:
        import pyarrow.dataset as ds

        source = self.source if isinstance(self.source, str) else list(self.source)
        return ds.dataset(source, self._given, self.file_format, self.filesystem)

    @functools.cached_property
    def _arrow(self) -> pa.Schema:
        """The schema as Spark has it in Arrow: it takes the columns of a batch by their place, and looks at no name or type."""
        from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

        found = self._dataset.schema
        if self.columns is not None:
            if unknown := [name for name in self.columns if name not in found.names]:
                raise OperatorMisused(f"{self._shown()} has no column {unknown[0]!r}: it has {', '.join(found.names)}")
            found = pa.schema([found.field(name) for name in self.columns])
        # What one file never leaves out another may: Spark would not look for nulls there.
        return to_arrow_schema(from_arrow_schema(found).toNullable(), timezone="UTC")

    @property
    def schema(self) -> StructType:
        """The schema of the rows, for Spark."""
        from pyspark.sql.pandas.types import from_arrow_schema

        return from_arrow_schema(self._arrow)

    def __getstate__(self) -> dict[str, Any]:
        with_schema = {**vars(self), "_arrow": self._arrow}  # found here: tasks have it with them
        return {key: value for key, value in with_schema.items() if key != "_dataset"}

    def _read(self, path: str, row_group: int | None = None) -> Iterator[pa.RecordBatch]:
        import pyarrow.dataset as ds

        (fragment,) = ds.dataset(path, self._arrow, self.file_format, self.filesystem).get_fragments()
        try:
            if row_group is not None:
                fragment = fragment.subset(row_group_ids=[row_group])
            names = fragment.physical_schema.names
            if names and not set(names) & set(self._arrow.names):
                raise SplitsFailed(
                    f"{path} has none of the columns of {self._shown()}, {', '.join(self._arrow.names)}: it has {', '.join(names)}. Is it "
                    f"without a header, or with another delimiter?"
                )
            yield from fragment.to_batches(schema=self._arrow)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            if self.file_format in ("csv", "json") and self.filesystem.get_file_info(path).size == 0:
                return  # no rows
            differing = self._differing(fragment)
            raise SplitsFailed(
                f"{path} cannot be read by the schema of {self._shown()}{differing}: {error}"
                f"{'. Give a schema= that holds what is in all files' if differing else ''}"
            ) from error

    def _shown(self) -> str:
        return ", ".join([*_several(self.source)][:3])

    def _differing(self, fragment: Any) -> str:
        try:
            has = fragment.physical_schema
        except (pa.ArrowException, OSError):  # then the file itself is broken, as the error says
            return ""
        found = [
            f"column {field.name!r} is {has.field(field.name).type} in the file, and {field.type} in the schema"
            for field in self._arrow
            if has.get_field_index(field.name) >= 0 and has.field(field.name).type != field.type
        ]
        return f" ({'; '.join(found)})" if found else ""


def _resolved(source: str | Sequence[str]) -> tuple[str | list[str], Any]:
    """The paths, and the file system they are on, which tasks have too: a path alone does not say where it is."""
    from stagecrew.files import file_system

    found = [file_system(_uri(os.fspath(one)), None) for one in _several(source)]
    if any(filesystem != found[0][0] for filesystem, _ in found):
        raise OperatorMisused("the files of one enumerator are on one file system: make an enumerator for each")
    paths = [path for _, path in found]
    return (paths[0] if isinstance(source, str | os.PathLike) else paths), found[0][0] if found else None


def _uri(text: str) -> str:
    if text.startswith("~"):
        return str(Path(text).expanduser())
    return re.sub(r"^([a-z][a-z0-9+.-]+):/(?!/)", r"\1:///", text)  # as Hadoop writes it


def _several(source: str | Sequence[str]) -> Sequence[str]:
    return [source] if isinstance(source, str | os.PathLike) else source


class ParquetRowGroups(_Arrow):
    """The row groups of Parquet files: a file, a folder, or several files, of any filesystem of `pyarrow.fs`.

    All rows are of one schema, that of the first file unless one is given: columns are found by their names, one that a file does
    not have is null there, and what Arrow cannot cast safely to its type is `SplitsFailed`, which names file and column, as is a file
    with none of the columns. `source` is a path or a URI, or a path on `filesystem`.

    Not promised: columns of what stands in the names of folders (`key=value`).

    `largest_first` reads all footers first, and gives row groups by their size: the last ones are small then, and tasks end
    together. Without it footers are read as they are needed.
    """

    def __init__(
        self,
        source: str | Sequence[str],
        columns: Sequence[str] | None = None,
        filesystem: Any = None,
        largest_first: bool = True,
        schema: pa.Schema | None = None,
    ) -> None:
        super().__init__(source, "parquet", columns, filesystem, schema)
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
        return self._read(split.path, split.index)


class Files(_Arrow):
    """Whole files of any format that `pyarrow.dataset` reads: `parquet`, `orc`, `csv`, `json`, `feather`.

    Their rows are of one schema, and they are of any filesystem, as of `ParquetRowGroups`.
    """

    def __init__(
        self,
        source: str | Sequence[str],
        file_format: str,
        columns: Sequence[str] | None = None,
        filesystem: Any = None,
        schema: pa.Schema | None = None,
    ) -> None:
        super().__init__(source, file_format, columns, filesystem, schema)

    def splits(self) -> Iterable[str]:
        """One per file: its path."""
        return (fragment.path for fragment in self._dataset.get_fragments())

    def read(self, split: str) -> Iterator[pa.RecordBatch]:
        """The rows of a file."""
        return self._read(split)


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
        from pyspark.sql.conversion import LocalDataToArrowConversion

        rows = iter(self._reader.read(split[1]))  # type: ignore[arg-type]
        while some := list(itertools.islice(rows, _ROWS)):
            for are_batches, part in itertools.groupby(some, lambda row: isinstance(row, pa.RecordBatch)):
                if are_batches:
                    yield from part
                else:  # as Spark itself takes them: a time without a zone is one of this host
                    yield from LocalDataToArrowConversion.convert(list(part), self.schema, False).to_batches()


_ROWS = 10_000
