"""`stagecrew logs`."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import click

from stagecrew.errors import JobError
from stagecrew.recovery.commands.following import JobView, run_logs
from stagecrew.recovery.commands.options import open_places, place_options, work_option

if TYPE_CHECKING:
    from stagecrew.recovery.jobs.store import Jobs

__all__ = ["logs"]

#: How often a log is read again, in seconds.
_POLL_PERIOD: Final = 0.2


@click.command()
@place_options
@work_option
@click.option("--run", "number", type=click.IntRange(min=1), metavar="N", help="The run (default: the latest one).")
@click.option("--follow", is_flag=True, help="Print new output, also of later runs on this host, until the job ends.")
@click.argument("id_", metavar="ID")
def logs(store: str, state: str, work: Path, number: int | None, follow: bool, id_: str) -> None:
    """Print the output of a job: of its code, of its Spark driver, and of stagecrew.

    The output is in the --work folder of the `stagecrew driver` that ran the job, so run this command on that host.
    """
    if follow and number is not None:
        raise click.UsageError("--follow cannot be combined with --run")
    with open_places(store, state) as jobs:
        view = JobView.read(jobs, id_)
        if follow:
            _follow(jobs, work, id_)
            return
    found = {key: path for key, path in run_logs(work, id_).items() if number is None or key[0] == number}
    if not found:
        raise JobError(_missing(work, id_, number, view))
    latest = max(run for run, _ in found)
    for (run, _), path in found.items():
        if run == latest:
            with path.open("rb") as file:
                _copy(file)


def _missing(work: Path, job: str, number: int | None, view: JobView) -> str:
    what = f"output of run {number}" if number is not None else "output"
    if view.run == 0:
        return f"there is no {what} of job {job!r}, because no run of it has started"
    if view.host and view.host != socket.gethostname():
        where = f"run {view.run} of the job is on {view.host}: run this command there"
    else:
        where = "name the --work folder of the driver, and run this command on the host of the driver"
    return f"{work} has no {what} of job {job!r}; {where}"


def _follow(jobs: Jobs, work: Path, job: str) -> None:
    """Prints the output from the latest run on, until the job has ended and everything is printed."""
    read: dict[Path, IO[bytes]] = {}
    first: int | None = None
    try:
        while True:
            is_terminal = jobs.read(job)[0].state.is_terminal  # before the last read of the output
            found = run_logs(work, job)
            if first is None and found:
                first = max(run for run, _ in found)
            for (run, _), path in found.items():
                if first is not None and run >= first:
                    if path not in read:
                        read[path] = path.open("rb")
                    _copy(read[path])
            if is_terminal:
                return
            time.sleep(_POLL_PERIOD)
    except KeyboardInterrupt:
        return
    finally:
        for file in read.values():
            file.close()


def _copy(file: IO[bytes]) -> None:
    """Prints the rest of a file. The bytes are those of the job, and stay unchanged."""
    while data := file.read(1 << 16):
        sys.stdout.buffer.write(data)
    sys.stdout.flush()
