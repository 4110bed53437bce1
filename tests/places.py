"""Sinks on the disk of this host for the tests with Spark: what is visible there, what is left, and which attempts wrote it."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from pyspark import TaskContext, cloudpickle
from pyspark.sql import functions as f

from crewtools import Journal
from stagecrew.operators.sinks import DatabaseSink, IcebergSink, ObjectSink, ParquetSink, read_committed

# Executors do not have the tests: what is defined here travels by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = [(number, f"text {number}") for number in range(40)]


class Place:
    """A sink, what is visible there, and what is left beside that."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.conf: dict[str, str] = {}
        if name == "sqlite":
            with contextlib.closing(sqlite3.connect(folder / "data.db")) as database:
                database.execute('CREATE TABLE target (id INTEGER, "text" TEXT)')
        if name == "iceberg":
            from pyiceberg.catalog import load_catalog
            from pyiceberg.schema import Schema
            from pyiceberg.types import LongType, NestedField, StringType

            self.conf = {"type": "sql", "uri": f"sqlite:///{folder}/c.db", "warehouse": f"file://{folder}/w"}
            catalog = load_catalog("default", **self.conf)
            catalog.create_namespace_if_not_exists("db")
            fields = NestedField(1, "id", LongType()), NestedField(2, "text", StringType())
            catalog.create_table("db.target", Schema(*fields))

    def sink(self) -> Any:
        if self.name == "parquet":
            return ParquetSink(self.folder / "table")
        if self.name == "objects":
            return ObjectSink(self.folder / "objects")
        if self.name == "sqlite":
            return DatabaseSink(f"sqlite:///{self.folder}/data.db", "target")
        return IcebergSink("db.target", properties=self.conf)

    def _files(self, below: str) -> set[str]:
        return {str(path) for path in (self.folder / below).rglob("*") if path.is_file()}

    def visible(self) -> list[tuple[int, str]]:
        if self.name == "sqlite":
            with contextlib.closing(sqlite3.connect(self.folder / "data.db")) as database:
                return sorted(database.execute("SELECT id, text FROM target").fetchall())
        if self.name == "parquet":
            table = ds.dataset(str(self.folder / "table")).to_table() if (self.folder / "table").exists() else None
        elif self.name == "objects":
            try:
                table = read_committed(self.folder / "objects").to_table()
            except FileNotFoundError:
                table = None
        else:
            table = self._table().scan().to_arrow()
        return sorted((row["id"], row["text"]) for row in table.to_pylist()) if table is not None else []

    def _table(self) -> Any:
        from pyiceberg.catalog import load_catalog

        return load_catalog("default", **self.conf).load_table("db.target")

    def left(self) -> list[str]:
        """What was staged and is not visible."""
        if self.name == "sqlite":
            with contextlib.closing(sqlite3.connect(self.folder / "data.db")) as database:
                return [
                    name
                    for (name,) in database.execute("SELECT name FROM sqlite_master WHERE name LIKE 'stagecrew_stage%'")
                ]
        if self.name == "parquet":
            return [path.name for path in self.folder.iterdir() if path.name.startswith("_stagecrew")]
        if self.name == "objects":
            with contextlib.suppress(FileNotFoundError):
                return sorted(self._files("objects/data") - set(read_committed(self.folder / "objects").files))
            return sorted(self._files("objects/data"))
        known = {task.file.file_path.removeprefix("file://") for task in self._table().scan().plan_files()}
        return sorted(file for file in self._files("w") if "/stagecrew-" in file and file not in known)


def rows_of(spark: Any, parts: int = 4) -> Any:
    return spark.range(0, 40, 1, parts).select("id", f.format_string("text %d", "id").alias("text"))


class Offered(dict[str, Any]):
    """The message of an attempt, with something done when it has been offered, and its result has not been sent."""

    then: Callable[[], None]

    def items(self) -> Any:
        self.then()
        return super().items()


def telling(
    sink: Any,
    journal: Journal,
    before: Callable[..., None] | None = None,
    offered: Callable[..., None] | None = None,
    staged: Callable[..., None] | None = None,
) -> Any:
    """The sink, whose tasks write down their attempts, and put their number into each row.

    These are called with (partition, attempt, how many attempts this partition had before): when an attempt has read all of its
    rows, when it has staged them, and when it has offered them.
    """
    stage = type(sink).stage

    class Telling(type(sink)):  # type: ignore[misc]
        def stage(self, staging: Any, partition: int, attempt: int, batches: Any) -> Any:
            context = TaskContext.get()
            assert context is not None
            own = (partition, attempt, len(journal.read(event="attempt", partition=partition)))
            journal.write(event="attempt", partition=partition, attempt=attempt, stage=context.stageId())
            marked = []
            for batch in batches:
                texts = [f"{text} by {attempt}" for text in batch.column("text").to_pylist()]
                marked.append(pa.record_batch({"id": batch.column("id"), "text": texts}))
            if before is not None:
                before(*own)
            message = stage(self, staging, partition, attempt, iter(marked))
            journal.write(event="staged", partition=partition, attempt=attempt)
            if staged is not None:
                staged(*own)
            if offered is None or message is None:
                return message
            message = Offered(message)
            message.then = lambda: offered(*own)
            return message

    sink.__class__ = Telling
    return sink


def accepted(spark: Any, journal: Journal) -> set[int]:
    """The attempts among those that told of themselves whose results Spark took."""
    context = spark.sparkContext._jsc.sc()
    context.listenerBus().waitUntilEmpty()
    found = set()
    for stage in {line["stage"] for line in journal.read(event="attempt")}:
        for number in range(10):
            tasks = context.statusStore().taskList(stage, number, 1000)
            found |= {tasks.apply(i).taskId() for i in range(tasks.size()) if tasks.apply(i).status() == "SUCCESS"}
    return found


def attempts(visible: list[tuple[int, str]]) -> dict[int, set[int]]:
    """Which attempts wrote the rows of each partition of `rows_of`, or of what was told."""
    found: dict[int, set[int]] = {}
    for number, text in visible:
        found.setdefault(number // 10, set()).add(int(text.rsplit(" ", 1)[1]))
    return found
