"""Files and Parquet row groups, read with `pyarrow.dataset`."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stagecrew.errors import OperatorFailed, OperatorMisused
from stagecrew.files import file_system
from stagecrew.spark_version import arrow_schema, spark_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["Files", "ParquetRowGroups"]


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """One row group of a Parquet file: the file's path, the index of the group, and its number of rows."""

    path: str
    index: int
    rows: int


class _ArrowFiles:
    """Files of one format and one schema, on one file system."""

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
        self._given_schema = schema

    @functools.cached_property
    def _dataset(self) -> Any:
        import pyarrow.dataset as ds

        source = self.source if isinstance(self.source, str) else list(self.source)
        return ds.dataset(source, self._given_schema, self.file_format, self.filesystem)

    @functools.cached_property
    def _arrow_schema(self) -> pa.Schema:
        """The Arrow schema in which Spark expects the batches.

        Spark identifies the columns of a batch by position, and checks neither names nor types.
        """
        found = self._dataset.schema
        if self.columns is not None:
            if unknown := [name for name in self.columns if name not in found.names]:
                raise OperatorMisused(
                    f"{self._described()} has no column {unknown[0]!r}: it has {', '.join(found.names)}. Name columns "
                    "that it has"
                )
            found = pa.schema([found.field(name) for name in self.columns])
        # A column without nulls in one file may have nulls in another. Spark would not check for them.
        return arrow_schema(spark_schema(found).toNullable())

    @property
    def schema(self) -> StructType:
        """The schema of the rows, for `Topology.splits`."""
        return spark_schema(self._arrow_schema)

    def __getstate__(self) -> dict[str, Any]:
        # Include the schema that the driver found, so that tasks need not read it.
        with_schema = {**vars(self), "_arrow_schema": self._arrow_schema}
        return {key: value for key, value in with_schema.items() if key != "_dataset"}

    def _read(self, path: str, row_group: int | None = None) -> Iterator[pa.RecordBatch]:
        import pyarrow.dataset as ds

        (fragment,) = ds.dataset(path, self._arrow_schema, self.file_format, self.filesystem).get_fragments()
        try:
            if row_group is not None:
                fragment = fragment.subset(row_group_ids=[row_group])
            names = fragment.physical_schema.names
            if names and not set(names) & set(self._arrow_schema.names):
                raise OperatorFailed(
                    f"{path} has none of the columns of {self._described()}, {', '.join(self._arrow_schema.names)}: it "
                    f"has {', '.join(names)}. Leave it out, or name its columns. A CSV file needs a header and commas"
                )
            yield from fragment.to_batches(schema=self._arrow_schema)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            if self.file_format in ("csv", "json") and self.filesystem.get_file_info(path).size == 0:
                return  # an empty file has no rows
            difference = self._difference(fragment)
            raise OperatorFailed(
                f"{path} cannot be read with the schema of {self._described()}{difference}: {error}"
                f"{'. Give a schema= that holds the values of all files' if difference else ''}"
            ) from error

    def _described(self) -> str:
        return ", ".join([*_as_list(self.source)][:3])

    def _difference(self, fragment: Any) -> str:
        """Describes how the types of a file's columns differ from the schema. Empty if they do not."""
        try:
            physical = fragment.physical_schema
        except (pa.ArrowException, OSError):  # the file itself is damaged, and the original error says so
            return ""
        found = [
            f"column {field.name!r} is {physical.field(field.name).type} in the file, and {field.type} in the schema"
            for field in self._arrow_schema
            if physical.get_field_index(field.name) >= 0 and physical.field(field.name).type != field.type
        ]
        return f" ({'; '.join(found)})" if found else ""


def _resolved(source: str | Sequence[str]) -> tuple[str | list[str], Any]:
    """Returns the paths and their file system. Tasks get both, because a path does not identify its file system."""
    found = [file_system(os.fspath(path), None) for path in _as_list(source)]
    if any(filesystem != found[0][0] for filesystem, _ in found):
        raise OperatorMisused(
            "the files of one enumerator must be on one file system: create one enumerator for each file system"
        )
    paths = [path for _, path in found]
    return (paths[0] if isinstance(source, str | os.PathLike) else paths), found[0][0] if found else None


def _as_list(source: str | Sequence[str]) -> Sequence[str]:
    return [source] if isinstance(source, str | os.PathLike) else source


class ParquetRowGroups(_ArrowFiles):
    """The row groups of Parquet files as splits. All rows have one schema.

    Columns are matched by name. A column that a file does not have is null in the file's rows. If Arrow cannot cast
    a column safely, or a file has none of the columns, the task fails with `OperatorFailed`, which names the file and
    the column.

    Args:
        source: A path or URI of a file or folder, or several of them on one file system.
        columns: The columns to read, by default all columns.
        filesystem: The `pyarrow.fs.FileSystem` of a path that is not a URI, by default the local disk.
        largest_first: Reads all footers first, and orders the row groups by size in bytes. The last splits are then
            small, so tasks end at nearly the same time. If False, each footer is read when it is needed.
        schema: The Arrow schema of the rows, by default the schema of the first file.

    Attributes:
        schema: The schema of the rows, for `Topology.splits`.

    Raises:
        OperatorMisused: If the files are on several file systems. Reading `schema` raises it if the files do not have a
            column.

    Examples:
        >>> import tempfile, pyarrow.parquet as pq
        >>> folder = tempfile.TemporaryDirectory()
        >>> pq.write_table(pa.table({"n": range(10)}), f"{folder.name}/a.parquet", row_group_size=6)
        >>> groups = ParquetRowGroups(folder.name)
        >>> [group.rows for group in groups.splits()]
        [6, 4]
        >>> folder.cleanup()

    In a topology, with tasks that read the groups: `topology.splits(groups, groups.read, groups.schema)`.

    Not promised: partition columns, whose values are in the names of folders (`key=value`).
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
        """Returns one split for each row group.

        Returns:
            The row groups: the largest first, or in the order of the files.
        """
        if self.largest_first:
            return [group for _, group in sorted(self._groups(), key=lambda sized: -sized[0])]
        return (group for _, group in self._groups())

    def _groups(self) -> Iterator[tuple[int, RowGroup]]:
        for fragment in self._dataset.get_fragments():
            for group in fragment.row_groups:
                yield group.total_byte_size, RowGroup(fragment.path, group.id, group.num_rows)

    def read(self, split: RowGroup) -> Iterator[pa.RecordBatch]:
        """Reads one row group, in a task.

        Args:
            split: A row group that `splits` returned.

        Returns:
            The rows, in batches.

        Raises:
            OperatorFailed: If the file does not fit the schema.
        """
        return self._read(split.path, split.index)


class Files(_ArrowFiles):
    r"""Whole files as splits, of any format that `pyarrow.dataset` reads. All rows have one schema.

    Columns are matched and cast as by `ParquetRowGroups`.

    Args:
        source: A path or URI of a file or folder, or several of them on one file system.
        file_format: `parquet`, `orc`, `csv`, `json` or `feather`.
        columns: The columns to read, by default all columns.
        filesystem: The `pyarrow.fs.FileSystem` of a path that is not a URI, by default the local disk.
        schema: The Arrow schema of the rows, by default the schema of the first file.

    Attributes:
        schema: The schema of the rows, for `Topology.splits`.

    Raises:
        OperatorMisused: If the files are on several file systems. Reading `schema` raises it if the files do not have a
            column.

    Examples:
        >>> import pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = pathlib.Path(folder.name, "a.csv").write_text("n,name\n1,one\n")
        >>> files = Files(folder.name, "csv")
        >>> [pathlib.Path(path).name for path in files.splits()]
        ['a.csv']
        >>> folder.cleanup()

    In a topology, with tasks that read the files: `topology.splits(files, files.read, files.schema)`.

    Not promised: partition columns, whose values are in the names of folders (`key=value`).
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
        """Returns one split for each file.

        Returns:
            The paths of the files, as the file system writes them.
        """
        return (fragment.path for fragment in self._dataset.get_fragments())

    def read(self, split: str) -> Iterator[pa.RecordBatch]:
        """Reads one file, in a task.

        Args:
            split: The path of a file.

        Returns:
            The rows, in batches.

        Raises:
            OperatorFailed: If the file does not fit the schema.
        """
        return self._read(split)
