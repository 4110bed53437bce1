"""The command `stagecrew report`: shows what stagecrew recorded in the event log of an application."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

import click
from rich.text import Text

from stagecrew.errors import ConfigurationError
from stagecrew.jar import found_spark_submit, jar_path
from stagecrew.observability.console import harmless, table, wide_console
from stagecrew.observability.error_summary import error_line
from stagecrew.observability.notebook import html_table

__all__ = ["read_event_log", "report"]

_CLASS: Final = "org.apache.spark.stagecrew.Report"
#: The prefixes of the lines with the JVM's result and its error. All other lines are Spark's output.
_RESULT_PREFIX: Final = "stagecrew-report: "
_ERROR_PREFIX: Final = "stagecrew-report-error: "
#: Overrides the defaults of the installed Spark, so that the report runs in one local JVM.
_LOCAL: Final = ("--master", "local", "--deploy-mode", "client")
#: The JSON key of each count of an executor's partitions, and its column heading.
_PARTITIONS: Final = {
    "inProgress": "in progress",
    "outputs": "outputs",
    "outputBytes": "output bytes",
    "blocks": "blocks",
    "blockBytes": "block bytes",
    "released": "released",
    "releasedBytes": "bytes released",
    "releaseFailures": "release failures",
}


def read_event_log(log: str) -> dict[str, Any]:
    """Reads the data that stagecrew stored in an event log of Spark.

    Spark reads the log, as the History Server does. A log that is still being written, or was cut off, is read up to
    its current end.

    Args:
        log: A path or URI of a file, or of the folder of a rolling log, on any file system and in any compression that
            the installed Spark supports.

    Returns:
        The data of stagecrew's tab in the Spark UI, as a dict, with the additional keys `application` and `notes`.

    Raises:
        ConfigurationError: The log does not exist, or Spark cannot read it.
        ConfigurationError: Spark is not installed here.
    """
    command = [found_spark_submit(), *_LOCAL, "--class", _CLASS, "--conf", "spark.log.level=ERROR", jar_path(), log]
    # With SPARK_REMOTE, spark-submit refuses --master.
    environment = {key: value for key, value in os.environ.items() if key != "SPARK_REMOTE"}
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env=environment,
        check=False,
    )
    for line in done.stdout.split("\n"):  # not splitlines(): names in the JSON may contain other line separators
        if line.startswith(_ERROR_PREFIX):
            raise ConfigurationError(f"cannot read event log {log}: {line.removeprefix(_ERROR_PREFIX)}")
        if line.startswith(_RESULT_PREFIX):
            data: dict[str, Any] = json.loads(line.removeprefix(_RESULT_PREFIX))
            return data
    output = "\n".join(done.stderr.splitlines()[-20:])
    raise ConfigurationError(
        f"cannot read event log {log}: spark-submit exited with status {done.returncode}. The last lines of its "
        f"stderr:\n{output}"
    )


@click.command()
@click.argument("log", metavar="EVENT_LOG")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option(
    "--html", type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="FILE",
    help="Write the report as one HTML page instead.",
)  # fmt: skip
def report(log: str, as_json: bool, html: Path | None) -> None:
    """Show the data that stagecrew recorded in a Spark EVENT_LOG, without a History Server.

    EVENT_LOG is a path or a URI: a file, or the folder of a rolling log. In a pipe or a file, lines are not wrapped.
    """
    if as_json and html is not None:
        raise click.UsageError("--json cannot be combined with --html")
    data = read_event_log(log)
    if as_json:
        click.echo(json.dumps(data, indent=2))
        return
    if html is not None:
        html.write_text(_html(data), encoding="utf-8")
        return
    console = wide_console()
    for text in _head(data):
        console.print(Text(harmless(text)))  # a Text, so that it is not parsed as markup
    for title, columns, rows in _tables(data):
        console.print(Text(f"\n{title}"))
        console.print(table(columns, rows))


def _head(data: dict[str, Any]) -> Iterator[str]:
    application = data["application"]
    yield f"{application['name']} ({application['id']}), Spark {application['spark']}"
    started, ended = _time(application["started"]), _time(application["ended"])
    yield f"{started} to {ended or '(no end recorded: the application is still running, or was killed)'}"
    yield from data["notes"]
    if not data["topologies"]:
        yield "This log contains no stagecrew data. Was stagecrew 0.1.0 or newer enabled (spark.plugins)?"


def _tables(data: dict[str, Any]) -> Iterator[tuple[str, Sequence[str], list[tuple[Any, ...]]]]:
    """Yields the title, the columns and the rows of each table."""
    topologies = data["topologies"]
    if topologies:
        columns: tuple[str, ...] = (
            "topology", "id", "kind", "state", "began", "seconds", "Spark jobs", "executors", "unclosed listeners",
        )  # fmt: skip
        yield "Topologies", columns, [
            (
                *(one[key] for key in ("name", "id", "kind", "state")),
                _time(one["started"]),
                f"{(one['ended'] - one['started']) / 1000:.1f}" if one["ended"] else "",
                one["jobs"],
                len(one["askedBy"]) + one["forgottenExecutors"],  # askedBy: the executors that ran its tasks
                len(one["unclosed"]),
            )
            for one in topologies
        ]  # fmt: skip
    listeners = [
        (topology["name"], listener["name"], listener["scope"], executor, *_listener_cells(listener))
        for topology in topologies
        for executor, record in topology["executors"].items()
        for listener in record["listeners"]
    ]
    if listeners:
        names = ("opens", "closes", "failures", "lost", "open s", "close s", "last error")
        yield "Listeners", ("topology", "listener", "scope", "executor", *names), listeners
    stored = [
        (topology["name"], executor, *(record["partitions"].get(key, 0) for key in _PARTITIONS))
        for topology in topologies
        for executor, record in topology["executors"].items()
        if any(record["partitions"].values())
    ]
    if stored:
        yield "Partitions", ("topology", "executor", *_PARTITIONS.values()), stored
    operators = [(topology["name"], *_operator_cells(one)) for topology in topologies for one in topology["operators"]]
    if operators:
        columns = (
            "topology", "operator", "kind", "state", "evaluations", "failed", "events in", "events out", "requests",
            "reply ms p50, p99", "progress",
        )  # fmt: skip
        yield "Operators", columns, operators
    if data["processes"]:
        yield "Python processes", ("executor", "process", "role", "began", "peak RSS MB"), [
            (
                one["executor"],
                one["pid"],
                one["role"],
                _time(one["started"]),
                f"{max((sample['rss'] for sample in one['samples']), default=0) / 1e6:.0f}",
            )
            for one in data["processes"]
        ]  # fmt: skip
    if recovery := data.get("recovery"):
        yield "Stored job", ("", ""), list(recovery["facts"].items())
        forgotten = recovery.get("forgottenSteps", 0)
        total = len(recovery["steps"]) + forgotten
        title = f"Steps, {len(recovery['steps'])} of {total}" if forgotten else "Steps"
        yield title, ("step", "state", "began", "ended"), [
            (one["name"], one["state"], _time(one["started"]), _time(one["ended"])) for one in recovery["steps"]
        ]  # fmt: skip


_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 90em; padding: 0 1em; }
table { border-collapse: collapse; display: block; margin: 1.5em 0; overflow-x: auto; }
caption { font-weight: bold; padding: 0.5em 0; text-align: left; }
th, td { border-bottom: 1px solid #8884; padding: 0.3em 0.8em 0.3em 0; text-align: left; white-space: nowrap; }
"""


def _html(data: dict[str, Any]) -> str:
    """The report as one page without scripts and without other files."""
    heading, *notes = _head(data)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(harmless(heading))}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(harmless(heading))}</h1>",
            *(f"<p>{escape(harmless(note))}</p>" for note in notes),
            *(html_table(title, columns, rows, limit=None) for title, columns, rows in _tables(data)),
            "</body></html>\n",
        ]
    )


def _listener_cells(listener: dict[str, Any]) -> tuple[Any, ...]:
    return (
        *(listener[key] for key in ("opens", "closes", "failures", "lost")),
        f"{listener['openMicros'] / 1e6:.3f}",
        f"{listener['closeMicros'] / 1e6:.3f}",
        error_line(listener["lastError"])[:120],
    )


def _operator_cells(one: dict[str, Any]) -> tuple[Any, ...]:
    replies = one["replies"]
    return (
        *(one[key] for key in ("name", "kind", "state")),
        one["live"] + one["finished"] + one["failed"] + one["abandoned"],
        one["failed"],
        *(one[key] for key in ("eventsIn", "eventsOut", "requests")),
        f"{replies['p50'] / 1000:.1f}, {replies['p99'] / 1000:.1f}" if replies["count"] else "",
        ", ".join(f"{name} {value}" for name, value in one["progress"].items()),
    )


def _time(milliseconds: int) -> str:
    if not milliseconds:
        return ""
    return dt.datetime.fromtimestamp(milliseconds / 1000, tz=dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
