"""The part about recovery: a driver that loads the flights piece by piece is killed halfway."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from stagecrew.demo.flights_job import PIECES
from stagecrew.errors import StagecrewError

__all__ = ["Survivor", "compare_survivor"]

#: The file with the function of the job.
_JOB: Final = Path(__file__).with_name("flights_job.py")

#: How long this part may take, in seconds.
_DEADLINE: Final = 180.0
_POLL_PERIOD: Final = 0.05
#: A leader, and a standby that takes over.
_DRIVERS: Final = 2


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The result of one load: whether it finished, how many rows exist, and how many of them are there twice."""

    finished: bool
    rows: int
    twice: int
    runs: int


@dataclasses.dataclass(frozen=True)
class Survivor:
    """The results of both loads."""

    flights: int
    without: Loaded
    with_stagecrew: Loaded

    @property
    def ok(self) -> bool:
        """Whether the job with stagecrew finished, with each row once."""
        ours = self.with_stagecrew
        return ours.finished and ours.rows == self.flights and ours.twice == 0

    def rows(self) -> list[tuple[str, str, str]]:
        """See `Part`."""
        plain, ours = self.without, self.with_stagecrew
        return [
            ("driver killed halfway", _outcome(plain), _outcome(ours)),
            ("  rows loaded", f"{plain.rows:,}", f"{ours.rows:,}"),
            ("  rows loaded twice", f"{plain.twice:,}", f"{ours.twice:,}"),
        ]

    def notes(self) -> list[str]:
        """See `Part`."""
        return [] if self.ok else ["The job did NOT finish with each row once. This is a bug: please report it."]

    def as_json(self) -> dict[str, Any]:
        """See `Part`."""
        return dataclasses.asdict(self)


def _outcome(loaded: Loaded) -> str:
    if not loaded.finished:
        return "lost"
    return f"finished in run {loaded.runs}"


def compare_survivor(flights: Path, rows: int, folder: Path, logs: Path, master: str) -> Survivor:
    """Loads the flights twice, and kills each driver halfway.

    Args:
        flights: The folder with the flights as Parquet files.
        rows: The number of flights.
        folder: A folder for the results and the store. It is removed later.
        logs: An existing folder for the logs of the drivers.
        master: The Spark master of the loads.
    """
    folder.mkdir()
    log = logs / "drivers.log"
    log.write_bytes(b"")
    plain = _without(flights, folder, log, master)
    return Survivor(rows, plain, _with_stagecrew(flights, folder, log, master))


def _without(flights: Path, folder: Path, log: Path, master: str) -> Loaded:
    target = folder / "plain"
    arguments = [str(flights), target.as_uri(), master]
    code = f"from stagecrew.demo.flights_job import load_plainly; load_plainly(*{arguments})"
    finished = False
    with log.open("ab") as file, _started([sys.executable, "-c", code], {}, file, piped=True) as process:
        assert process.stdout is not None
        pieces = 0
        for line in process.stdout:
            pieces += line.startswith(b"piece-")
            if pieces == _half(flights):
                process.kill()
                break
        else:
            finished = process.wait() == 0
    return _loaded(target, finished, 1)


def _with_stagecrew(flights: Path, folder: Path, log: Path, master: str) -> Loaded:
    from stagecrew.recovery import JobSpec, open_jobs

    target, state = folder / "crew", folder / "state"
    state.mkdir(mode=0o700)
    places = {"STAGECREW_STORE": f"sqlite://{folder}/jobs.db", "STAGECREW_STATE": str(state)}
    command = [sys.executable, "-c", "from stagecrew.cli import main; main()", "driver", "--work", str(folder / "work")]
    conf = {"spark.master": master, "spark.log.level": "ERROR"}
    arguments = {"flights": str(flights), "target": str(target)}
    spec = JobSpec.of_function("flights_job:load", arguments, conf, [_JOB])
    deadline = time.monotonic() + _DEADLINE
    with (
        open_jobs(places["STAGECREW_STORE"], places["STAGECREW_STATE"]) as jobs,
        log.open("ab") as file,
        contextlib.ExitStack() as stack,
    ):
        drivers = {
            process.pid: process
            for process in (stack.enter_context(_started(command, places, file)) for _ in range(_DRIVERS))
        }
        job = jobs.submit(spec, "load")
        steps = jobs.handles(job, "steps")
        half = _half(flights)
        _wait(lambda: len(steps.names()) >= half or jobs.read(job)[0].state.is_terminal, deadline, log)
        leader, run = jobs.leader(), jobs.process(job)
        if leader is not None and leader.pid in drivers:
            drivers[leader.pid].kill()
        if run is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(run["pid"], signal.SIGKILL)
        _wait(lambda: jobs.read(job)[0].state.is_terminal, deadline, log)
        record, _ = jobs.read(job)
    return _loaded(target, record.state == "succeeded", record.run)


def _half(flights: Path) -> int:
    """The number of pieces after which a driver is killed."""
    return max(1, min(PIECES, len(list(flights.glob("*.parquet")))) // 2)


def _loaded(target: Path, finished: bool, runs: int) -> Loaded:
    """Counts the rows in a folder of Parquet files, as a reader without Spark would."""
    import pyarrow.dataset as ds

    if not target.exists():
        return Loaded(finished, 0, 0, runs)
    table = ds.dataset(target, format="parquet", partitioning=None).to_table()
    unique = table.group_by(table.column_names).aggregate([]).num_rows
    return Loaded(finished, table.num_rows, table.num_rows - unique, runs)


@contextlib.contextmanager
def _started(
    command: Sequence[str], environment: dict[str, str], log: Any, piped: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a process, and terminates it at the end."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if piped else log, stderr=log,
        env=os.environ | environment,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _wait(done: Callable[[], bool], deadline: float, log: Path) -> None:
    while not done():
        if time.monotonic() > deadline:
            raise StagecrewError(f"the job of the demo did not end within {_DEADLINE:g} s; see {log}")
        time.sleep(_POLL_PERIOD)
