"""`stagecrew jobs`, `stagecrew result` and `stagecrew cancel`."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import time
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.live import Live

from stagecrew.errors import StoreUnavailable
from stagecrew.observability.console import table, wide_console
from stagecrew.recovery.commands.following import exit_code, follow, show_result
from stagecrew.recovery.commands.options import console, json_option, open_places, parse_age, place_options, say

if TYPE_CHECKING:
    from stagecrew.recovery.jobs.record import JobRecord
    from stagecrew.recovery.jobs.store import Jobs

__all__ = ["cancel", "list_jobs", "result"]

#: How often `jobs --watch` reads the jobs, in seconds.
_WATCH_PERIOD: Final = 1.0
#: The maximum length of a reason in a terminal.
_REASON: Final = 80
_COLUMNS: Final = ("id", "state", "run", "submitted", "process", "reason")


@click.command("jobs")
@place_options
@click.option(
    "--prune", callback=parse_age, metavar="AGE",
    help="Instead of listing jobs, remove those that ended longer ago than AGE, such as 30d, with their results.",
)  # fmt: skip
@click.option("--watch", is_flag=True, help="Show the jobs until Ctrl-C, updated every second.")
@json_option
@click.pass_context
def list_jobs(context: click.Context, store: str, state: str, prune: float | None, watch: bool, as_json: bool) -> None:
    """List all jobs, including unreadable ones, or remove old jobs.

    `--prune` only removes jobs that have ended and are cleaned up. It is safe while drivers are running. The id of a
    removed job can be used again, for a new job. The exit code is 1 if an old job could not be removed.
    """
    if watch and (as_json or prune is not None):
        raise click.UsageError("--watch cannot be combined with --json or --prune")
    if prune is not None:
        with open_places(store, state) as jobs:
            failed = _prune(jobs, prune, as_json)
        context.exit(1 if failed else 0)
    with open_places(store, state) as jobs:
        if watch:
            _watch(jobs)
            return
        found, unreadable = _read(jobs)
    if as_json:
        errors = [{"id": job, "error": error} for job, error in unreadable.items()]
        click.echo(json.dumps({"jobs": found, "unreadable": errors}, indent=2))
        return
    rows = _rows(found, unreadable)
    wide_console().print(table(_COLUMNS, rows) if rows else "no jobs")


def _read(jobs: Jobs) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Reads all jobs. Returns the readable ones in the order of their submission, and the errors of the others."""
    records, unreadable = jobs.all()
    # A job that is cleaned up has no process.
    found = [_summary(job, record, None if record.clean else jobs.process(job)) for job, (record, _) in records.items()]
    found.sort(key=lambda job: job["submitted"])
    return found, {job: str(error) for job, error in unreadable.items()}


def _rows(found: list[dict[str, Any]], unreadable: dict[str, str]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for job in found:
        process = job["process"]
        where = "" if process is None else f"{process['host']}:{process['pid']}"
        reason = job["reason"][:_REASON] if console.is_terminal else job["reason"]
        rows.append((job["id"], job["state"], str(job["run"]), _time(job["submitted"]), where, reason))
    return rows + [(id_, "unreadable", "", "", "", error) for id_, error in unreadable.items()]


def _watch(jobs: Jobs) -> None:
    """Shows the jobs until Ctrl-C. In a file or a pipe, each change is printed."""
    terminal = Console(highlight=False)
    before = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        live = stack.enter_context(Live(console=terminal, auto_refresh=False)) if terminal.is_terminal else None
        while True:
            try:
                rows = _rows(*_read(jobs))
            except StoreUnavailable as error:  # the next try may succeed
                rows = [("", "unavailable", "", "", "", str(error))]
            if rows != before:
                shown = table(_COLUMNS, rows) if rows else "no jobs"
                if live is None:
                    terminal.print(shown, soft_wrap=True)
                else:
                    live.update(shown, refresh=True)
                before = rows
            time.sleep(_WATCH_PERIOD)


def _prune(jobs: Jobs, older_than: float, as_json: bool) -> bool:
    """Removes old jobs and prints the outcome. Returns whether any of them could not be removed."""
    with Console(stderr=True).status("Removing old jobs ..."):
        pruned = list(jobs.prune(older_than))
    removed, failed = sum(one.removed for one in pruned), {one.job: one.reason for one in pruned if one.reason}
    if as_json:
        click.echo(json.dumps({"removed": removed, "failed": failed}))
    else:
        console.print(f"{removed} {'job' if removed == 1 else 'jobs'} removed")
        for job, reason in failed.items():
            console.print(f"{job}: {reason}", markup=False)
    return bool(failed)


@click.command()
@place_options
@json_option
@click.argument("id_", metavar="ID")
def cancel(store: str, state: str, as_json: bool, id_: str) -> None:
    """Request the end of a job. Its decided commits are finished first."""
    with open_places(store, state) as jobs:
        found = jobs.cancel(id_)
    if as_json:
        click.echo(json.dumps({"id": id_, "state": str(found), "requested": not found.is_terminal}))
    elif found.is_terminal:
        say(f"job {id_} has already ended ({found})")
    else:
        say(f"job {id_} was {found}; the leader will end it")


@click.command()
@place_options
@click.option("--wait", is_flag=True, help="Wait until the job has ended.")
@click.option("--timeout", type=float, metavar="SECONDS", help="Wait until the job has ended, but at most this long.")
@json_option
@click.argument("id_", metavar="ID")
@click.pass_context
def result(
    context: click.Context, store: str, state: str, wait: bool, timeout: float | None, as_json: bool, id_: str
) -> None:
    """Show how a job ended: its value or its error.

    The exit code is 0 if the job succeeded, 3 if it failed, 4 if it was cancelled, and 5 if it has not ended.
    """
    deadline = time.monotonic() + timeout if timeout is not None else None if wait else 0.0
    with open_places(store, state) as jobs:
        view, found = follow(jobs, id_, lambda _: None, deadline)
    show_result(id_, view, found, as_json)
    context.exit(exit_code(found))


def _summary(job: str, record: JobRecord, process: Any) -> dict[str, Any]:
    """Returns the fields that `stagecrew jobs` shows for a job."""
    return {
        "id": job,
        "state": str(record.state),
        "run": record.run,
        "submitted": record.submitted,
        "ended": record.ended,
        "reason": record.reason,
        "clean": record.clean,
        "process": process,
    }


def _time(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
