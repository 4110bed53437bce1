"""The partitions of a Python DataSource, read by idle tasks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow as pa

from stagecrew.errors import OperatorFailed
from stagecrew.spark_version import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSource, InputPartition
    from pyspark.sql.types import StructType

__all__ = ["DataSourcePartitions"]

#: The number of tuples or rows that are combined into one Arrow batch.
_ROWS: Final = 10_000


class DataSourcePartitions:
    """The partitions of a Python DataSource's reader. Idle tasks pull them; Spark itself would run a task for each.

    The driver calls `source.reader(schema)`, and asks the reader for its partitions. Tasks call the reader's `read`,
    which may yield tuples, rows or Arrow record batches.

    Args:
        source: An instance of a user's `pyspark.sql.datasource.DataSource`.
        schema: The schema of the rows, by default the schema of the source.

    Attributes:
        schema: The schema of the rows, for `Topology.splits`.

    Examples:
        >>> from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
        >>> from pyspark.sql.types import LongType, StructType
        >>> class Reader(DataSourceReader):
        ...     def partitions(self):
        ...         return [InputPartition(0), InputPartition(100)]
        ...     def read(self, partition):
        ...         yield (partition.value,)
        >>> class Numbers(DataSource):
        ...     def schema(self):
        ...         return StructType().add("n", LongType())
        ...     def reader(self, schema):
        ...         return Reader()
        >>> [number for number, _ in DataSourcePartitions(Numbers({})).splits()]
        [0, 1]

    Not promised: that filters are pushed down to the reader.
    """

    def __init__(self, source: DataSource, schema: StructType | str | None = None) -> None:
        from pyspark.sql.types import StructType as Struct

        found = source.schema() if schema is None else schema
        self.schema = cast("StructType", Struct.fromDDL(found) if isinstance(found, str) else found)
        self._reader = source.reader(self.schema)

    def splits(self) -> Iterable[tuple[int, InputPartition | None]]:
        """Returns the partitions of the reader.

        Returns:
            Each partition with its number, which distinguishes equal partitions.
        """
        from pyspark.sql.datasource import InputPartition as Partition

        try:
            found = list(self._reader.partitions())
        except NotImplementedError:
            found = []
        return list(enumerate(found or [Partition(None)]))  # as plan_data_source_read.py does

    def read(self, split: tuple[int, InputPartition | None]) -> Iterator[pa.RecordBatch]:
        """Reads one partition, in a task.

        Args:
            split: A partition with its number.

        Yields:
            The rows of the partition.

        Raises:
            OperatorFailed: If a named row or a batch has other columns than the schema.
        """
        from pyspark.sql.conversion import LocalDataToArrowConversion

        in_order = _Order(self.schema.fieldNames())
        expected = arrow_schema(self.schema)
        rows = iter(self._reader.read(split[1]))  # type: ignore[arg-type]
        while some := list(itertools.islice(rows, _ROWS)):
            for are_batches, part in itertools.groupby(some, lambda row: isinstance(row, pa.RecordBatch)):
                if are_batches:
                    for batch in part:  # Spark would identify the columns by their positions
                        if not expected.equals(batch.schema):
                            raise OperatorFailed(
                                f"the reader yielded a batch with the columns {_columns(batch.schema)}, but the "
                                f"schema is {_columns(expected)}: yield batches of this schema"
                            )
                        yield batch
                else:  # as Spark converts them: a time without a zone is in this host's zone
                    yield from LocalDataToArrowConversion.convert(
                        list(map(in_order, part)), self.schema, False
                    ).to_batches()


class _Order:
    """Orders the values of named rows like the names of a schema. Rows without names have this order already."""

    def __init__(self, names: list[str]) -> None:
        from pyspark.sql import Row

        self._names, self._row = names, Row
        self._positions: dict[tuple[str, ...], list[int]] = {}

    def __call__(self, row: Any) -> Any:
        if not isinstance(row, self._row) or not hasattr(row, "__fields__"):
            return row
        fields = tuple(row.__fields__)
        if (positions := self._positions.get(fields)) is None:
            if set(fields) != set(self._names):
                raise OperatorFailed(
                    f"the reader yielded a row with the fields {', '.join(fields)}, but the schema has "
                    f"{', '.join(self._names)}: yield rows of this schema"
                )
            positions = self._positions[fields] = [fields.index(name) for name in self._names]
        return tuple([row[position] for position in positions])


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}{'' if field.nullable else ' not null'}" for field in schema)
