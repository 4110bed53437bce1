"""Log records say where they come from: topology, operator, stage, partition and attempt."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Container, Mapping
from types import FrameType
from typing import Any, Final, Protocol

__all__ = [
    "FIELDS",
    "HarmlessFormatter",
    "StructuredFormatter",
    "coordinates",
    "harmless",
    "mark",
    "set_current_evaluation",
]

#: What records may say, in this order.
FIELDS: Final = ("application", "topology", "operator", "subtask", "stage", "partition", "attempt")

#: How many frames above a record's factory its logger is looked for: factories of others stand in between.
_FRAMES: Final = 32


class StructuredFormatter(logging.Formatter):
    """Writes each record as one line of JSON, as Spark's own structured logs are: `pyspark.logger.SPARK_LOG_SCHEMA` reads both.

    `context` has, as text, those of `application`, `topology`, `operator`, `subtask`, `stage`, `partition` and `attempt` that the
    record has (of a task's from `LoggingContext`, of a coordinator's always), and what a `PySparkLogger` was given.

    >>> import json, logging
    >>> record = logging.makeLogRecord({"msg": "three rows", "topology": "nightly", "stage": 4})
    >>> json.loads(StructuredFormatter().format(record))["context"]
    {'topology': 'nightly', 'stage': '4'}
    """

    def __init__(self) -> None:
        super().__init__()
        from pyspark.logger.logger import JSONFormatter

        self._json = JSONFormatter()

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        given = record.__dict__.get("context")
        if not isinstance(given, Mapping):  # it is of another than PySpark's loggers
            given = {}
        fields = {name: value for name in FIELDS if (value := record.__dict__.get(name)) is not None}
        copy = logging.makeLogRecord(record.__dict__)
        copy.__dict__["context"] = {name: str(value) for name, value in {**fields, **given}.items()}
        return self._json.format(copy)


def harmless(text: str) -> str:
    """The text with escape sequences, and other characters that are not printable, as their codes; lines and tabs stay.

    >>> print(harmless("a\\u202eb \\x1b[2J"))
    a\\u202eb \\x1b[2J
    """
    shown = (one if one in "\n\t" or one.isprintable() else repr(one)[1:-1] for one in text)
    return "".join(shown)


def _in_one_record(text: str) -> str:
    """The text as part of one record: nothing of it looks like the beginning of another."""
    return harmless(text).replace("\n", "\n    ")


class HarmlessFormatter(logging.Formatter):
    """Formats the logs of stagecrew's own processes: no name and no error in them can control a terminal or forge a line.

    >>> record = logging.makeLogRecord({"msg": "job %r: %s", "args": ("nightly", "no\\x1b[2J\\nroom")})
    >>> print(HarmlessFormatter().format(record))
    job 'nightly': no\\x1b[2J
        room
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's)
        """The message, with the lines after its first one indented."""
        return _in_one_record(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """All of a record, with its traceback."""
        return harmless(super().format(record))


class _Harmless(logging.Filter):
    """Does the same to the arguments of our own records, for every handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                _in_one_record(str(one)) if isinstance(one, str | BaseException) else one for one in record.args
            )
        return True


logging.getLogger("stagecrew").addFilter(_Harmless())


def mark(record: logging.LogRecord, fields: Mapping[str, Any]) -> None:
    """Sets these fields of a record that a factory has just made, but for those that the caller gives it by `extra=`.

    `Logger.makeRecord` sets those itself when the factory has answered, and raises `KeyError` when they are there already. The
    factory is not told of them, so they are looked for in its frame: a log call must not fail for the name of a field.
    """
    given: Container[str] = ()
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "makeRecord":  # also that of a logger with its own
            found = frame.f_locals.get("extra")
            given = found if isinstance(found, Mapping) else ()
            break
        frame = frame.f_back
    record.__dict__.update({name: value for name, value in fields.items() if name not in given})


class LoggedEvaluation(Protocol):
    """The fields of an evaluation that log records get."""

    @property
    def subtask(self) -> int | None: ...
    @property
    def stage(self) -> int: ...
    @property
    def partition(self) -> int: ...
    @property
    def attempt(self) -> int: ...


class _Here(threading.local):
    """Of a coordinator's thread: whose it is, and whose message it handles."""

    place: tuple[str, str] | None = None
    evaluation: LoggedEvaluation | None = None


_here = _Here()
_installing = threading.Lock()
_installed = False


def coordinates(topology: str, operator: str) -> None:
    """Records of this thread are this coordinator's from now on, about no evaluation."""
    if not _installed:
        _install()
    _here.place, _here.evaluation = (topology, operator), None


def set_current_evaluation(evaluation: LoggedEvaluation | None) -> None:
    """What this thread, a coordinator's, logs from now on is about this evaluation, or about none."""
    _here.evaluation = evaluation


def _install() -> None:
    global _installed
    with _installing:
        if _installed:
            return
        _installed = True
        before = logging.getLogRecordFactory()

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = before(*args, **kwargs)
        if _here.place is not None:
            topology, operator = _here.place
            fields: dict[str, Any] = {"topology": topology, "operator": operator}
            if (one := _here.evaluation) is not None:
                fields |= {
                    "subtask": one.subtask,
                    "stage": one.stage,
                    "partition": one.partition,
                    "attempt": one.attempt,
                }
            mark(made, fields)
        return made

    logging.setLogRecordFactory(record)
