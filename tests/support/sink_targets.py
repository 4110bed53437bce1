"""For tests with Spark: sinks that write to this host's disk or to servers."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyspark import TaskContext, cloudpickle
from pyspark.sql import functions as f

from stagecrew.files import list_files
from stagecrew.operators.sinks import DatabaseSink, IcebergSink, ObjectSink, ParquetSink, read_committed
from support.journal import Journal
from support.local_sinks import iceberg_table

# Executors cannot import the tests, so the definitions of this module are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = [(number, f"text {number}") for number in range(40)]


class SinkTarget:
    """Makes a sink, and inspects its visible rows and the staged data that is left.

    For "postgresql", `server` is a `postgres.Server`. For "s3" and "hdfs", it is the file system that `s3_server` or
    `hdfs` yields.
    """

    def __init__(self, name: str, folder: Path, server: Any = None) -> None:
        self.name, self.folder, self.server = name, folder, server
        self.conf: dict[str, str] = {}
        self.own_name = f"own{uuid.uuid4().hex}"  # the name of its table or folder on the server
        if name == "postgresql":
            self._query(f'CREATE TABLE {self.own_name} (id BIGINT, "text" TEXT)')
        if name == "sqlite":
            with contextlib.closing(sqlite3.connect(folder / "data.db")) as database:
                database.execute('CREATE TABLE target (id INTEGER, "text" TEXT)')
        if name == "iceberg":
            from pyiceberg.catalog import load_catalog
            from pyiceberg.schema import Schema
            from pyiceberg.types import LongType, NestedField, StringType

            self.conf = {"type": "sql", "uri": f"sqlite:///{folder}/c.db", "warehouse": f"file://{folder}/w"}
            fields = NestedField(1, "id", LongType()), NestedField(2, "text", StringType())
            with contextlib.closing(load_catalog("default", **self.conf)) as catalog:
                catalog.create_namespace_if_not_exists("db")
                catalog.create_table("db.target", Schema(*fields))

    def sink(self) -> Any:
        if self.name == "postgresql":
            return DatabaseSink(self.server.url, self.own_name)
        if self.name == "s3":
            return ObjectSink(f"bucket/{self.own_name}", self.server)
        if self.name == "hdfs":
            return ParquetSink(f"/{self.own_name}/table", "append", self.server)
        if self.name == "append":
            return ParquetSink(self.folder / "table", "append")
        if self.name == "parquet":
            return ParquetSink(self.folder / "table")
        if self.name == "objects":
            return ObjectSink(self.folder / "objects")
        if self.name == "sqlite":
            return DatabaseSink(f"sqlite:///{self.folder}/data.db", "target")
        return IcebergSink("db.target", properties=self.conf)

    def _files(self, below: str) -> set[str]:
        return {str(path) for path in (self.folder / below).rglob("*") if path.is_file()}

    def _query(self, text: str) -> list[Any]:
        import psycopg

        with psycopg.connect(self.server.url) as database:
            found = database.execute(text)
            return found.fetchall() if found.description else []

    def _files_on_server(self) -> list[str]:
        folder = f"/{self.own_name}" if self.name == "hdfs" else f"bucket/{self.own_name}"
        return list_files(self.server, folder)

    def visible(self) -> list[tuple[int, str]]:
        if self.name == "postgresql":
            return sorted(self._query(f"SELECT id, text FROM {self.own_name}"))
        if self.name in ("append", "hdfs"):
            names = self._files("table") if self.name == "append" else self._files_on_server()
            filesystem = None if self.name == "append" else self.server
            found = [name for name in names if name.endswith(".parquet") and "/_" not in name]
            rows = [row for name in found for row in pq.ParquetFile(name, filesystem=filesystem).read().to_pylist()]
            return sorted((row["id"], row["text"]) for row in rows)
        if self.name == "sqlite":
            with contextlib.closing(sqlite3.connect(self.folder / "data.db")) as database:
                return sorted(database.execute("SELECT id, text FROM target").fetchall())
        if self.name == "parquet":
            table = ds.dataset(str(self.folder / "table")).to_table() if (self.folder / "table").exists() else None
        elif self.name in ("objects", "s3"):
            try:
                table = self._committed().to_table()
            except FileNotFoundError:
                table = None
        else:
            with iceberg_table(self.conf) as iceberg:
                table = iceberg.scan().to_arrow()
        return sorted((row["id"], row["text"]) for row in table.to_pylist()) if table is not None else []

    def _committed(self) -> Any:
        if self.name == "s3":
            return read_committed(f"bucket/{self.own_name}", self.server)
        return read_committed(self.folder / "objects")

    def leftovers(self) -> list[str]:
        """Returns the names of staged files or tables that no committed data uses."""
        if self.name == "sqlite":
            with contextlib.closing(sqlite3.connect(self.folder / "data.db")) as database:
                return [
                    name
                    for (name,) in database.execute("SELECT name FROM sqlite_master WHERE name LIKE 'stagecrew_stage%'")
                ]
        if self.name == "postgresql":
            return [
                name for (name,) in self._query("SELECT relname FROM pg_class WHERE relname LIKE 'stagecrew_stage%'")
            ]
        if self.name in ("append", "hdfs"):
            names = self._files("table") if self.name == "append" else self._files_on_server()
            return sorted(name for name in names if "/_" in name and not name.endswith("/_stagecrew.json"))
        if self.name == "parquet":
            return [path.name for path in self.folder.iterdir() if path.name.startswith("_stagecrew")]
        if self.name in ("objects", "s3"):
            names = self._files("objects/data") if self.name == "objects" else set(self._files_on_server())
            names = {name for name in names if "/_stagecrew/" not in name}
            with contextlib.suppress(FileNotFoundError):
                names -= set(self._committed().files)
            return sorted(names)
        with iceberg_table(self.conf) as table:
            known = {task.file.file_path.removeprefix("file://") for task in table.scan().plan_files()}
        return sorted(file for file in self._files("w") if "/stagecrew-" in file and file not in known)


def rows_of(spark: Any, parts: int = 4) -> Any:
    return spark.range(0, 40, 1, parts).select("id", f.format_string("text %d", "id").alias("text"))


class OfferedMessage(dict[str, Any]):
    """The message of an attempt. Calls `then` after the message was offered, but before the task's result is sent."""

    then: Callable[[], None]

    def items(self) -> Any:
        self.then()
        return super().items()


def recording_sink(
    sink: Any,
    journal: Journal,
    before: Callable[..., None] | None = None,
    offered: Callable[..., None] | None = None,
    staged: Callable[..., None] | None = None,
) -> Any:
    """Returns the sink, changed so that tasks record their attempts and append the attempt's number to each text.

    The functions are called with (partition, attempt, number of earlier attempts at this partition): `before` when an
    attempt has read all of its rows, `staged` when it has staged them, and `offered` when it has offered its message.
    """
    stage = type(sink).stage

    class RecordingSink(type(sink)):  # type: ignore[misc]
        def stage(self, staging: Any, partition: int, attempt: int, batches: Any) -> Any:
            context = TaskContext.get()
            assert context is not None
            arguments = (partition, attempt, len(journal.read(event="attempt", partition=partition)))
            journal.write(event="attempt", partition=partition, attempt=attempt, stage=context.stageId())
            marked = []
            for batch in batches:
                texts = [f"{text} by {attempt}" for text in batch.column("text").to_pylist()]
                marked.append(pa.record_batch({"id": batch.column("id"), "text": texts}))
            if before is not None:
                before(*arguments)
            message = stage(self, staging, partition, attempt, iter(marked))
            journal.write(event="staged", partition=partition, attempt=attempt)
            if staged is not None:
                staged(*arguments)
            if offered is None or message is None:
                return message
            message = OfferedMessage(message)
            message.then = lambda: offered(*arguments)
            return message

    sink.__class__ = RecordingSink
    return sink


def accepted_attempts(spark: Any, journal: Journal) -> set[int]:
    """Returns the ids of the recorded attempts whose results Spark accepted."""
    context = spark.sparkContext._jsc.sc()
    context.listenerBus().waitUntilEmpty()
    found = set()
    for stage in {line["stage"] for line in journal.read(event="attempt")}:
        for number in range(10):
            tasks = context.statusStore().taskList(stage, number, 1000)
            found |= {tasks.apply(i).taskId() for i in range(tasks.size()) if tasks.apply(i).status() == "SUCCESS"}
    return found


def attempts_by_partition(visible: list[tuple[int, str]]) -> dict[int, set[int]]:
    """Returns, for each partition of `rows_of`, the attempts that wrote its visible rows."""
    found: dict[int, set[int]] = {}
    for number, text in visible:
        found.setdefault(number // 10, set()).add(int(text.rsplit(" ", 1)[1]))
    return found
