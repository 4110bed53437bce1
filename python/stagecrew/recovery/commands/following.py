"""Follows a job until it ends: reads its state again and again, and reports each change."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from stagecrew.observability.console import harmless
from stagecrew.recovery.commands.options import say

if TYPE_CHECKING:
    from stagecrew.recovery.jobs.result import Result
    from stagecrew.recovery.jobs.store import Jobs

__all__ = ["EXIT_NOT_ENDED", "JobView", "changes", "exit_code", "follow", "run_logs", "show_result"]

#: The exit codes of commands that wait for a job.
_EXIT_CODES: Final = {"succeeded": 0, "failed": 3, "cancelled": 4}
EXIT_NOT_ENDED: Final = 5
#: How often a job is read, in seconds.
_POLL_PERIOD: Final = 0.2


@dataclasses.dataclass(frozen=True)
class JobView:
    """The facts about a job that commands show: its state, its run, the process of that run, and its finished steps."""

    state: str
    run: int = 0
    is_terminal: bool = False
    host: str = ""
    pid: int = 0
    ui: str = ""
    steps: tuple[str, ...] = ()

    @classmethod
    def read(cls, jobs: Jobs, job: str) -> JobView:
        """Reads the current state of a job from the store."""
        record, _ = jobs.read(job)
        if record.state.is_terminal:
            return cls(str(record.state), record.run, is_terminal=True)
        process = jobs.process(job) or {}
        return cls(
            str(record.state), record.run,
            host=str(process.get("host", "")), pid=int(process.get("pid", 0)), ui=str(process.get("ui", "")),
            steps=tuple(jobs.handles(job, "steps").names()),
        )  # fmt: skip


def changes(before: JobView | None, now: JobView) -> list[str]:
    """Describes the differences between two views of a job, one line for each."""
    lines = []
    if before is None or before.state != now.state:
        lines.append(f"{now.state}")
    if now.pid and (before is None or (before.run, before.pid) != (now.run, now.pid)):
        lines.append(f"run {now.run} is process {now.pid} on {now.host}")
    if now.ui and (before is None or before.ui != now.ui):
        lines.append(f"Spark UI: {now.ui}")
    known = set() if before is None else set(before.steps)
    lines += [f"step {name} has finished" for name in now.steps if name not in known]
    return lines


def follow(
    jobs: Jobs, job: str, show: Callable[[str], object], deadline: float | None = None
) -> tuple[JobView, Result | None]:
    """Reports the changes of a job until it ends, or until the deadline.

    Args:
        jobs: The jobs of a store.
        job: The id of the job.
        show: Is called with one line for each change.
        deadline: A time of `time.monotonic`, or None.

    Returns:
        The last view of the job, and its result if it has ended.

    Raises:
        StoreError: The store is unavailable.
    """
    before: JobView | None = None
    while True:
        now = JobView.read(jobs, job)
        for line in changes(before, now):
            show(line)
        before = now
        if now.is_terminal:
            return now, jobs.result(job)
        if deadline is not None and time.monotonic() >= deadline:
            return now, None
        time.sleep(_POLL_PERIOD)


def exit_code(result: Result | None) -> int:
    """The exit code for a job with this result: 0 succeeded, 3 failed, 4 cancelled, 5 not ended."""
    return EXIT_NOT_ENDED if result is None else _EXIT_CODES[result.state]


def show_result(job: str, view: JobView, result: Result | None, as_json: bool) -> None:
    """Prints how a job ended: its value or its error."""
    if as_json:
        body: dict[str, Any] = {"id": job, "state": view.state, "run": view.run}
        if result is not None:
            body |= {"value": result.shown, "reason": result.reason, "traceback": result.traceback}
        click.echo(json.dumps(body, indent=2))
    elif result is None:
        say(f"job {job} is {view.state}, in run {view.run}")
    elif result.state == "succeeded":
        click.echo(harmless(result.shown) if isinstance(result.shown, str) else json.dumps(result.shown))
    else:
        say(f"job {job} has {'been cancelled' if result.state == 'cancelled' else result.state}: {result.reason}")
        if result.traceback:
            click.echo(harmless(result.traceback.rstrip()))


def run_logs(work: Path, job: str) -> dict[tuple[int, bool], Path]:
    """The files with the output of a job's runs on this host, in the order of the runs.

    Args:
        work: The `--work` folder of the driver.
        job: The id of the job.

    Returns:
        The files by the number of the run and whether the run only finished commits.
    """
    from stagecrew.files import quoted  # it imports pyarrow

    found = {}
    for path in (work / quoted(job)).glob("run-*.log"):
        number, _, kind = path.stem.removeprefix("run-").partition("-")
        if number.isdecimal() and kind in ("", "finish"):
            found[int(number), kind == "finish"] = path
    return dict(sorted(found.items()))
