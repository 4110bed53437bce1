"""`stagecrew jobs`, `stagecrew result` and `stagecrew cancel`."""

from __future__ import annotations

import datetime as dt
import json
import time
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console

from stagecrew.observability.console import harmless, table
from stagecrew.recovery.commands.options import console, json_option, open_places, parse_age, place_options, say

if TYPE_CHECKING:
    from stagecrew.recovery.jobs.record import JobRecord
    from stagecrew.recovery.jobs.store import Jobs

__all__ = ["cancel", "list_jobs", "result"]

#: The exit codes of `result`.
_EXIT_CODES: Final = {"succeeded": 0, "failed": 3, "cancelled": 4}
_EXIT_NOT_ENDED: Final = 5
#: How often `result --wait` reads the job, in seconds.
_POLL_PERIOD: Final = 0.2


@click.command("jobs")
@place_options
@click.option(
    "--prune", callback=parse_age, metavar="AGE",
    help="Instead of listing jobs, remove those that ended longer ago than AGE, such as 30d, with their results.",
)  # fmt: skip
@json_option
@click.pass_context
def list_jobs(context: click.Context, store: str, state: str, prune: float | None, as_json: bool) -> None:
    """List all jobs, including unreadable ones, or remove old jobs.

    `--prune` only removes jobs that have ended and are cleaned up. It is safe while drivers are running. The id of a
    removed job can be used again, for a new job. The exit code is 1 if an old job could not be removed.
    """
    if prune is not None:
        with open_places(store, state) as jobs:
            failed = _prune(jobs, prune, as_json)
        context.exit(1 if failed else 0)
    with open_places(store, state) as jobs:
        records, unreadable = jobs.all()
        # A job that is cleaned up has no process.
        found = [
            _summary(job, record, None if record.clean else jobs.process(job)) for job, (record, _) in records.items()
        ]
    found.sort(key=lambda job: job["submitted"])
    if as_json:
        errors = [{"id": job, "error": str(error)} for job, error in unreadable.items()]
        click.echo(json.dumps({"jobs": found, "unreadable": errors}, indent=2))
        return
    rows = []
    for job in found:
        process = job["process"]
        where = "" if process is None else f"{process['host']}:{process['pid']}"
        rows.append((job["id"], job["state"], str(job["run"]), _time(job["submitted"]), where, job["reason"][:80]))
    rows += [(id_, "unreadable", "", "", "", str(error)) for id_, error in unreadable.items()]
    console.print(table(("id", "state", "run", "submitted", "process", "reason"), rows) if rows else "no jobs")


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
        say(f"job {id_} is already {found}")
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
    deadline, wait = (None, wait) if timeout is None else (time.monotonic() + timeout, True)
    with open_places(store, state) as jobs:
        while True:
            record, _ = jobs.read(id_)
            expired = deadline is not None and time.monotonic() >= deadline
            if record.state.is_terminal or not wait or expired:
                break
            time.sleep(_POLL_PERIOD)
        found = jobs.result(id_) if record.state.is_terminal else None
    if as_json:
        body = {"id": id_, "state": str(record.state), "run": record.run}
        if found is not None:
            body |= {"value": found.shown, "reason": found.reason, "traceback": found.traceback}
        click.echo(json.dumps(body, indent=2))
    elif found is None:
        say(f"job {id_} is {record.state}, in run {record.run}")
    elif found.state == "succeeded":
        click.echo(harmless(found.shown) if isinstance(found.shown, str) else json.dumps(found.shown))
    else:
        say(f"job {id_} has {'been cancelled' if found.state == 'cancelled' else found.state}: {found.reason}")
        if found.traceback:
            click.echo(harmless(found.traceback.rstrip()))
    context.exit(_EXIT_NOT_ENDED if found is None else _EXIT_CODES[found.state])


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
