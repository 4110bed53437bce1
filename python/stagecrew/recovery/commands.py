"""The commands that submit jobs, run them and look at them."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console

from stagecrew.conf import parse_seconds
from stagecrew.errors import RecoveryMisused, SessionLost, StoreUnavailable
from stagecrew.observability.console import harmless, table
from stagecrew.observability.logs import HarmlessFormatter

if TYPE_CHECKING:
    from stagecrew.recovery.jobs import Jobs

__all__ = ["add_to"]

#: Exit codes of `result`.
_ENDED: Final = {"succeeded": 0, "failed": 3, "cancelled": 4}
_NOT_ENDED: Final = 5

console = Console(highlight=False, soft_wrap=True)


def _say(text: str) -> None:
    """One line for people. Nothing of it is markup, and nothing of it changes the terminal: it may have others' words in it."""
    console.print(harmless(text), markup=False)


class _Place(click.types.StringParamType):
    """An address, whose option is named with an example when it is missing."""

    def __init__(self, example: str) -> None:
        self._example = example

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """See `StringParamType`."""
        return f"Set STAGECREW_{str(param.name).upper()}, or give --{param.name}, such as {self._example}"


_store = click.option(
    "--store", envvar="STAGECREW_STORE", required=True, metavar="URL",
    type=_Place("sqlite:////var/lib/jobs.db (an absolute path) or zookeeper://host:2181/jobs"),
    help="sqlite:///path or zookeeper://host:port,host:port/chroot. Or STAGECREW_STORE.",
)  # fmt: skip
_state = click.option(
    "--state", envvar="STAGECREW_STATE", required=True, metavar="URI",
    type=_Place("/var/lib/states, a folder that exists, or s3://bucket/folder"),
    help="Where state lies: a folder, or a URI such as s3://bucket/folder. Or STAGECREW_STATE.",
)  # fmt: skip


def _places(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say where jobs are kept."""
    return _store(_state(command))


def _opened(store: str, state: str) -> contextlib.AbstractContextManager[Jobs]:
    from stagecrew.recovery.jobs import open_jobs  # which takes a while

    return open_jobs(store, state)


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for machines.")


def _pairs(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        key, is_there, value = text.partition("=")
        if not is_there or not key:
            raise click.BadParameter(f"{text!r} is no key=value", context, parameter)
        found[key] = value
    return found


def _age(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """Seconds. A number needs its unit: Spark would read 30 as milliseconds."""
    if text is None:
        return None
    if re.fullmatch(r"\d{1,9}[smhd]", text) is None:
        raise click.BadParameter(
            f"{text!r} is no age: write a number and s, m, h or d, such as 30d", context, parameter
        )
    return parse_seconds(text)


class _Submit(click.Command):
    """Takes options after a function too; what follows a script is the script's own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See `click.Command`."""
        ctx.allow_interspersed_args = False
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        ctx.allow_interspersed_args = not str(given.get("target")).endswith(".py")
        return super().parse_args(ctx, args)


@click.command(cls=_Submit)
@_places
@click.option(
    "--id", "id_", help="The job's id; the same id with the same content is the same job. Made up without it."
)
@click.option("--conf", multiple=True, callback=_pairs, metavar="KEY=VALUE", help="Of Spark, as for spark-submit.")
@click.option(
    "--py-files",
    metavar="FILES",
    default="",
    help="Modules and packages, as .py, .zip or .egg, with commas between them.",
)
@click.option("--arg", "args", multiple=True, callback=_pairs, metavar="NAME=TEXT", help="An argument of the function.")
@click.option(
    "--max-attempts", type=click.IntRange(min=1), default=10, show_default=True, help="Runs before it has failed."
)
@_json
@click.argument("target", metavar="(MODULE:FUNCTION | SCRIPT.py)")
@click.argument("argument", nargs=-1, type=click.UNPROCESSED)
def submit(
    store: str,
    state: str,
    id_: str | None,
    conf: dict[str, str],
    py_files: str,
    args: dict[str, str],
    max_attempts: int,
    as_json: bool,
    target: str,
    argument: tuple[str, ...],
) -> None:
    """Store a job for whichever driver leads, and print its id.

    It is durable when the id is printed, with the bytes of all its files: nothing of this machine is needed any more. What a
    function returns is the job's result. What follows a script is its command line: options of this command come before it.
    """
    from stagecrew.recovery.specs import JobSpec

    files = [path for path in py_files.split(",") if path]
    if target.endswith(".py"):
        if args:
            raise RecoveryMisused("--arg is for functions; what follows a script is its command line")
        spec = JobSpec.of_script(target, argument, conf, files, max_attempts)
    elif argument:
        raise RecoveryMisused(f"a function takes --arg name=text, not {' '.join(argument)!r}")
    else:
        sys.path.insert(0, str(Path.cwd()))  # as for `python -m`: a module beside you is meant
        spec = JobSpec.of_function(target, args, conf, files, max_attempts)
    with _opened(store, state) as jobs:
        job = jobs.submit(spec, id_)
    click.echo(json.dumps({"id": job}) if as_json else job)


@click.command()
@_places
@click.option(
    "--work", type=click.Path(file_okay=False, path_type=Path), default=Path("stagecrew-work"), show_default=True,
    help="Folder for the output of jobs, and for their files while they run.",
)  # fmt: skip
@click.option("--at-once", type=click.IntRange(min=1), default=16, show_default=True, help="Jobs that run at once.")
@click.option(
    "--keep", callback=_age, metavar="AGE",
    help="Remove jobs that ended longer ago than this, such as 90d or 12h, with their results. All are kept without it.",
)  # fmt: skip
def driver(store: str, state: str, work: Path, at_once: int, keep: float | None) -> None:
    """Campaign for leadership, and while it is held run every job that is stored.

    Start one on each host; one leads, the others wait. SIGTERM and Ctrl-C hand over: the jobs of this one go on elsewhere.
    """
    from stagecrew.recovery.driver import Driver, Launcher
    from stagecrew.recovery.election import TERM
    from stagecrew.recovery.storage import StateStorage
    from stagecrew.recovery.stores import open_store

    handler = logging.StreamHandler()
    handler.setFormatter(HarmlessFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("stagecrew.zookeeper").setLevel(logging.WARNING)
    try:
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=work).close()
    except OSError as error:
        raise RecoveryMisused(f"the folder {work} cannot be written ({error}): name another with --work") from error
    stop = threading.Event()

    def told(number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, told)
    signal.signal(signal.SIGINT, told)
    try:
        with contextlib.closing(open_store(store)) as opened:
            opened.read(TERM)  # by which one that is elsewhere is reached
    except (StoreUnavailable, SessionLost) as error:
        logging.getLogger("stagecrew").warning("the store cannot be reached yet, and is tried again: %s", error)
    launcher = Launcher(store, state, work.resolve())
    running = Driver(lambda: open_store(store), StateStorage(state), launcher, at_once, keep)
    logging.getLogger("stagecrew").info("this driver campaigns, as process %d", os.getpid())
    stop.wait()
    running.close()


@click.command("jobs")
@_places
@click.option(
    "--prune", callback=_age, metavar="AGE",
    help="List nothing: remove jobs that ended longer ago than this, such as 30d or 12h, with their results.",
)  # fmt: skip
@_json
@click.pass_context
def list_jobs(context: click.Context, store: str, state: str, prune: float | None, as_json: bool) -> None:
    """List all jobs, and those that cannot be read; or remove old ones.

    `--prune` removes jobs that have ended and are cleaned up, and nothing else. It may run beside drivers. The id of a removed job
    is free: submitting it again runs a new job. The exit code is 1 when an old job could not be removed.
    """
    from stagecrew.recovery.driver import shown

    if prune is not None:
        with _opened(store, state) as jobs, Console(stderr=True).status("Removing old jobs ..."):
            pruned = list(jobs.prune(prune))
        removed, left = sum(one.removed for one in pruned), {one.job: one.reason for one in pruned if one.reason}
        if as_json:
            click.echo(json.dumps({"removed": removed, "failed": left}))
        else:
            console.print(f"{removed} {'job' if removed == 1 else 'jobs'} removed")
            for job, reason in left.items():
                console.print(f"{job}: {reason}", markup=False)
        context.exit(1 if left else 0)
    with _opened(store, state) as jobs:
        records, unreadable = jobs.all()
        # A clean job has no process.
        found = [
            shown(record, job, None if record.clean else jobs.process(job)) for job, (record, _) in records.items()
        ]
    found.sort(key=lambda one: one["submitted"])
    if as_json:
        errors = [{"id": job, "error": str(error)} for job, error in unreadable.items()]
        click.echo(json.dumps({"jobs": found, "unreadable": errors}, indent=2))
        return
    rows = []
    for one in found:
        process = one["process"]
        where = "" if process is None else f"{process['host']}:{process['pid']}"
        rows.append((one["id"], one["state"], str(one["run"]), _time(one["submitted"]), where, one["reason"][:80]))
    rows += [(job, "unreadable", "", "", "", str(error)) for job, error in unreadable.items()]
    console.print(table(("id", "state", "run", "submitted", "process", "reason"), rows) if rows else "no jobs")


@click.command()
@_store
@click.option("--state", hidden=True, expose_value=False)
@_json
@click.pass_context
def leader(context: click.Context, store: str, as_json: bool) -> None:
    """Show who leads: term, host, process. The exit code is 1 when nobody does.

    Only the store is asked: it answers also while the state storage is away.
    """
    from stagecrew.recovery.election import leader_of
    from stagecrew.recovery.stores import open_store

    with contextlib.closing(open_store(store)) as opened:
        found = leader_of(opened)
    if as_json:
        click.echo(json.dumps(None if found is None else {"term": found.term, "host": found.host, "pid": found.pid}))
    elif found is None:
        console.print("nobody leads: start `stagecrew driver`")
    else:
        _say(f"term {found.term}: process {found.pid} on {found.host}")
    context.exit(1 if found is None else 0)


@click.command()
@_places
@_json
@click.argument("id_", metavar="ID")
def cancel(store: str, state: str, as_json: bool, id_: str) -> None:
    """Ask for the end of a job. What it has decided to commit is committed first."""
    with _opened(store, state) as jobs:
        found = jobs.cancel(id_)
    if as_json:
        click.echo(json.dumps({"id": id_, "state": str(found), "requested": not found.is_terminal}))
    elif found.is_terminal:
        _say(f"job {id_} has {found} already")
    else:
        _say(f"job {id_} was {found}; whoever leads ends it")


@click.command()
@_places
@click.option("--wait", is_flag=True, help="Wait until the job has ended.")
@click.option("--timeout", type=float, metavar="SECONDS", help="Wait, so long at most.")
@_json
@click.argument("id_", metavar="ID")
@click.pass_context
def result(
    context: click.Context, store: str, state: str, wait: bool, timeout: float | None, as_json: bool, id_: str
) -> None:
    """Show how a job has ended: its value, or its error.

    The exit code is 0 when it succeeded, 3 when it failed, 4 when it was cancelled, 5 while it has not ended.
    """
    due, wait = (None, wait) if timeout is None else (time.monotonic() + timeout, True)
    with _opened(store, state) as jobs:
        while not (record := jobs.read(id_)[0]).state.is_terminal and wait and (due is None or time.monotonic() < due):
            time.sleep(0.2)
        found = jobs.result(id_) if record.state.is_terminal else None
    if as_json:
        body = {"id": id_, "state": str(record.state), "run": record.run}
        if found is not None:
            body |= {"value": found.shown, "reason": found.reason, "traceback": found.traceback}
        click.echo(json.dumps(body, indent=2))
    elif found is None:
        _say(f"job {id_} is {record.state}, in run {record.run}")
    elif found.state == "succeeded":
        click.echo(harmless(found.shown) if isinstance(found.shown, str) else json.dumps(found.shown))
    else:
        _say(f"job {id_} has {found.state}: {found.reason}")
        if found.traceback:
            click.echo(harmless(found.traceback.rstrip()))
    context.exit(_NOT_ENDED if found is None else _ENDED[found.state])


@click.command()
@_places
@click.option(
    "--grace", type=click.FloatRange(min=0), default=3600.0, show_default=True, metavar="SECONDS",
    help="Leave what is younger.",
)  # fmt: skip
@_json
@click.pass_context
def sweep(context: click.Context, store: str, state: str, grace: float, as_json: bool) -> None:
    """Delete state that nothing refers to: what processes left that died while they wrote.

    It may run at any time, beside drivers and submitters. The exit code is 1 when something could not be looked at or deleted.
    """
    with _opened(store, state) as jobs:
        found = jobs.sweep(grace)
    if as_json:
        click.echo(
            json.dumps({"kept": found.kept, "removed": found.removed, "bytes": found.bytes, "failed": found.failed})
        )
    else:
        _say(f"{found.removed} states deleted, {found.bytes} bytes; {found.kept} kept")
        for name, reason in found.failed.items():
            _say(f"{name}: {reason}")
    context.exit(1 if found.failed else 0)


def _time(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def add_to(group: click.Group) -> None:
    """Puts the commands into the group."""
    for command in (submit, driver, list_jobs, leader, cancel, result, sweep):
        group.add_command(command)
