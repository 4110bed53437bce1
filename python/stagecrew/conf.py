"""Every configuration key of stagecrew, typed and documented.

The documentation's table is generated from `KEYS`. `Settings.scala` has the same keys and defaults; a test compares
them.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Final

from stagecrew.errors import ConfigurationError

__all__ = ["KEYS", "PLUGIN", "Key", "closest", "parse_bytes", "parse_seconds", "table"]

PLUGIN: Final = "stagecrew.StagecrewPlugin"


@dataclasses.dataclass(frozen=True)
class Key:
    """One configuration key: its name, the type of its value, its default as text, and its effect."""

    name: str
    type: str
    default: str
    doc: str


KEYS: Final[tuple[Key, ...]] = (
    Key(
        "spark.stagecrew.listeners",
        "names",
        "",
        "Python listeners for the whole application, as `module:name`, separated by commas. Each name refers to a "
        "listener, or to a `Listener` class or a resource that needs no arguments. The driver imports the modules to "
        "check the names, and the executors import them to use the listeners.",
    ),
    Key(
        "spark.stagecrew.jvmListeners",
        "classes",
        "",
        "JVM listeners for the whole application: classes that implement `stagecrew.TopologyListener`, separated by "
        "commas.",
    ),
    Key(
        "spark.stagecrew.open.timeout",
        "duration",
        "60s",
        "How long one `open` of a listener may take. After that it is interrupted. If it ignores the interruption, its "
        "process is killed.",
    ),
    Key(
        "spark.stagecrew.close.timeout",
        "duration",
        "10s",
        "How long one `close` of a listener or a coordinator may take. The exit of a topology waits this long for all "
        "coordinators, and at most 5 s longer for all listeners.",
    ),
    Key(
        "spark.stagecrew.shutdown.timeout",
        "duration",
        "5s",
        "How long an executor that is shutting down, or a driver that ends without `stop`, waits for listeners to "
        "close.",
    ),
    Key(
        "spark.stagecrew.channel",
        "choice",
        "auto",
        "How Python processes connect to their executor, and to the driver's JVM. `unix`: through a Unix domain "
        "socket, which other users cannot reach. `tcp`: through a port of the loopback interface. `auto`: `unix` if "
        "the operating system and the local directories allow it, and `spark.python.unix.domain.socket.enabled` is "
        "not set to `false`; otherwise `tcp`.",
    ),
    Key(
        "spark.stagecrew.channel.timeout",
        "duration",
        "10s",
        "How long a process that connects to an executor's channel may take to identify itself, and how long a Python "
        "process waits for a reply from its executor.",
    ),
    Key(
        "spark.stagecrew.channel.direct",
        "boolean",
        "true",
        "Whether the driver's Python connects to the channels of executors on its own host. Requests and events then "
        "take a third of the time. Other executors are reached through Spark's RPC. `false`: all are, so that Spark's "
        "own encryption also covers messages within the driver's host.",
    ),
    Key(
        "spark.stagecrew.channel.maxFrame",
        "bytes",
        "64m",
        "The largest frame on a channel; a listener larger than this cannot be registered.",
    ),
    Key(
        "spark.stagecrew.report.interval",
        "duration",
        "1s",
        "How often an executor sends its counts of opens, closes and failures to the driver, if they have changed.",
    ),
    Key(
        "spark.stagecrew.ui.retainedTopologies",
        "count",
        "1000",
        "How many closed topologies the driver keeps for the UI and for reports. In the configuration of a History "
        "Server: how many it shows for each application.",
    ),
    Key(
        "spark.stagecrew.ui.retainedDeadExecutors",
        "count",
        "100",
        "How many lost executors of a running topology are listed individually: those that were lost last. The counts "
        "of the others are added up under `forgotten`.",
    ),
    Key(
        "spark.stagecrew.tracing",
        "boolean",
        "false",
        "Whether the driver exports OpenTelemetry spans of topologies, tasks, listeners, requests, commits, supersteps "
        "and steps. It needs `pip install 'stagecrew[otel]'` on the driver.",
    ),
    Key(
        "spark.stagecrew.eventLog.interval",
        "duration",
        "10s",
        "With `spark.eventLog.enabled`: how often the state of a changed topology is written to the event log. Its "
        "start and its end are written at once.",
    ),
    Key(
        "spark.stagecrew.eventLog.maxEvents",
        "count",
        "100",
        "How many times one topology is written to the event log before its end. Its end is always written.",
    ),
    Key(
        "spark.stagecrew.processes.interval",
        "duration",
        "10s",
        "How often an executor samples the memory, CPU time, threads and open files of its Python processes. `0` means "
        "never.",
    ),
    Key(
        "spark.stagecrew.shuffle.delegate",
        "class",
        "org.apache.spark.shuffle.sort.io.LocalDiskShuffleDataIO",
        "The ShuffleDataIO whose partitions are tracked. The plugin sets it from `spark.shuffle.sort.io.plugin.class`; "
        "name another implementation there.",
    ),
    Key(
        "spark.stagecrew.event.maxSize",
        "bytes",
        "16m",
        "The largest serialized event, request or reply between a task and its coordinator.",
    ),
    Key(
        "spark.stagecrew.request.timeout",
        "duration",
        "60s",
        "How long a task's request may take in total, until it can be sent and its reply arrives. Also how long a task "
        "that has sent many events waits until its coordinator handles some of them.",
    ),
    Key(
        "spark.stagecrew.ack.timeout",
        "duration",
        "30s",
        "How long an executor may take to acknowledge a coordinator's event. After that the attempt of the task fails.",
    ),
    Key(
        "spark.stagecrew.mailbox.events",
        "count",
        "100000",
        "How many of its coordinator's events may be queued for one evaluation. One more fails the evaluation's "
        "attempt.",
    ),
    Key(
        "spark.stagecrew.mailbox.bytes",
        "bytes",
        "64m",
        "How many bytes of events may be queued for one evaluation. More bytes fail the evaluation's attempt.",
    ),
)

_DURATION: Final = re.compile(r"\s*(\d+)\s*(ms|s|m|min|h|d)?\s*")
_UNITS: Final = {"ms": 0.001, None: 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE: Final = re.compile(r"\s*(\d+)\s*([kmgt]?)b?\s*", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def parse_seconds(text: str) -> float:
    """Parses a duration in Spark's syntax. Returns seconds. A number without a unit is in milliseconds, as in Spark.

    >>> parse_seconds("90s"), parse_seconds("1500ms"), parse_seconds("2m")
    (90.0, 1.5, 120.0)
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            f"{text!r} is not a duration; write a number with a unit (ms, s, m, h, d), such as '30s'"
        )
    return int(match[1]) * _UNITS[match[2]]


def parse_bytes(text: str) -> int:
    """Parses a size in Spark's syntax. Returns bytes.

    >>> parse_bytes("64m")
    67108864
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigurationError(f"{text!r} is not a size; write a number with a unit (k, m, g), such as '64m'")
    return int(match[1]) << _POWERS[match[2].lower()]


def closest(name: str) -> str | None:
    """Returns the known key that is most similar to this unknown name, or None if no key is similar."""
    import difflib

    found = difflib.get_close_matches(name, [key.name for key in KEYS], n=1)
    return found[0] if found else None


def table() -> str:
    """Returns the keys as a Markdown table, for the documentation."""
    rows = ["| key | type | default | what it does |", "| --- | --- | --- | --- |"]
    rows += [f"| `{key.name}` | {key.type} | {f'`{key.default}`' if key.default else ''} | {key.doc} |" for key in KEYS]
    return "\n".join(rows) + "\n"
