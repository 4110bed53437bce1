"""`stagecrew submit`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from stagecrew.errors import ConfigurationError
from stagecrew.observability.console import harmless
from stagecrew.recovery.commands.following import exit_code, follow, show_result
from stagecrew.recovery.commands.options import json_option, open_places, parse_pairs, place_options

__all__ = ["submit"]


class _SubmitCommand(click.Command):
    """Accepts options after the name of a function. Everything after a script is the script's own command line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See `click.Command`."""
        ctx.allow_interspersed_args = False
        options, _, _ = self.make_parser(ctx).parse_args(list(args))
        ctx.allow_interspersed_args = not str(options.get("target")).endswith(".py")
        return super().parse_args(ctx, args)


@click.command(cls=_SubmitCommand)
@place_options
@click.option(
    "--id", "id_",
    help="The id of the job. Submitting the same content again with the same id has no effect. Default: a new id.",
)  # fmt: skip
@click.option(
    "--conf", multiple=True, callback=parse_pairs, metavar="KEY=VALUE", help="A Spark property, as for spark-submit."
)
@click.option(
    "--py-files", metavar="FILES", default="",
    help="Modules and packages as .py, .zip or .egg files, separated by commas.",
)  # fmt: skip
@click.option(
    "--arg", "args", multiple=True, callback=parse_pairs, metavar="NAME=TEXT", help="An argument of the function."
)
@click.option(
    "--max-attempts", type=click.IntRange(min=1), default=10, show_default=True,
    help="The maximum number of runs. If all of them are lost, the job fails.",
)  # fmt: skip
@click.option(
    "--wait", is_flag=True,
    help="Wait until the job has ended. Prints runs, steps and the address of the Spark UI to stderr, then the result.",
)  # fmt: skip
@json_option
@click.argument("target", metavar="(MODULE:FUNCTION | SCRIPT.py)")
@click.argument("argument", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def submit(
    context: click.Context,
    store: str,
    state: str,
    id_: str | None,
    conf: dict[str, str],
    py_files: str,
    args: dict[str, str],
    max_attempts: int,
    wait: bool,
    as_json: bool,
    target: str,
    argument: tuple[str, ...],
) -> None:
    """Store a job for the leading driver, and print its id.

    When the id is printed, the job and its files are stored durably, and this machine is no longer needed. The return
    value of a function is the job's result. Options of this command must precede a script; everything after the script
    is its command line.

    With --wait, the exit code is that of `stagecrew result`: 0 if the job succeeded, 3 if it failed, 4 if it was
    cancelled. Ctrl-C ends only the wait.
    """
    from stagecrew.recovery.jobs.spec import JobSpec

    files = [path for path in py_files.split(",") if path]
    if target.endswith(".py"):
        if args:
            raise ConfigurationError("--arg is only for functions: write the arguments of a script after its name")
        spec = JobSpec.of_script(target, argument, conf, files, max_attempts)
    elif argument:
        raise ConfigurationError(f"{' '.join(argument)!r} cannot be passed to a function: use --arg name=text")
    else:
        sys.path.insert(0, str(Path.cwd()))  # like `python -m`, so that modules in the current folder are found
        spec = JobSpec.of_function(target, args, conf, files, max_attempts)
    with open_places(store, state) as jobs:
        job = jobs.submit(spec, id_)
        if wait:
            console = Console(stderr=True, highlight=False, soft_wrap=True)
            console.print(harmless(f"job {job} is stored"), markup=False)
            view, found = follow(jobs, job, lambda line: console.print(harmless(line), markup=False))
            show_result(job, view, found, as_json)
            context.exit(exit_code(found))
    click.echo(json.dumps({"id": job}) if as_json else job)
