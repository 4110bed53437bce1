"""Log records that carry their origin: topology, operator, stage, partition and attempt."""

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
    "add_fields",
    "harmless",
    "set_current_coordinator",
    "set_current_evaluation",
]

#: The fields that records may have, in this order.
FIELDS: Final = ("application", "topology", "operator", "subtask", "stage", "partition", "attempt")

#: The number of frames to search for `makeRecord` above a record factory. Other factories may be in between.
_MAX_FRAMES: Final = 32


class StructuredFormatter(logging.Formatter):
    """Writes each record as one line of JSON, in the format of Spark's own structured logs.

    `pyspark.logger.SPARK_LOG_SCHEMA` reads the lines of both. The column `context` contains, as text, those of the
    fields `application`, `topology`, `operator`, `subtask`, `stage`, `partition` and `attempt` that the record carries,
    and the context of a `PySparkLogger`. Records of a task carry them if the topology has the `LoggingContext`
    listener. Records of a coordinator always carry them.

    Examples:
        >>> import json, logging
        >>> record = logging.makeLogRecord({"msg": "three rows", "topology": "nightly", "stage": 4})
        >>> json.loads(StructuredFormatter().format(record))["context"]
        {'topology': 'nightly', 'stage': '4'}

    Not promised: these fields on records of threads that a coordinator starts.

    Source: `JSONFormatter` in pyspark/logger/logger.py.
    """

    def __init__(self) -> None:
        super().__init__()
        from pyspark.logger.logger import JSONFormatter

        self._json = JSONFormatter()

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record.

        Args:
            record: The record. It is not changed.

        Returns:
            One line of JSON, without a line break at its end.
        """
        given: Mapping[str, Any] = {}
        for name in ("kwargs", "context"):  # PySpark 4.0 calls it `kwargs`
            if isinstance(found := record.__dict__.get(name), Mapping):  # only PySpark's loggers set a mapping
                given = found
        fields = {name: value for name in FIELDS if (value := record.__dict__.get(name)) is not None}
        copy = logging.makeLogRecord(record.__dict__)
        context = {name: str(value) for name, value in {**fields, **given}.items()}
        copy.__dict__["context"] = copy.__dict__["kwargs"] = context
        return self._json.format(copy)


def harmless(text: str) -> str:
    r"""Escapes terminal escape sequences and other characters that are not printable, except line breaks and tabs.

    >>> print(harmless("a\u202eb \x1b[2J"))
    a\u202eb \x1b[2J
    """
    return "".join(one if one in "\n\t" or one.isprintable() else repr(one)[1:-1] for one in text)


def _in_one_record(text: str) -> str:
    """Indents later lines, so that no line of the text looks like the beginning of another record."""
    return harmless(text).replace("\n", "\n    ")


class HarmlessFormatter(logging.Formatter):
    r"""Formats the logs of stagecrew's own processes, so that no text in them can control a terminal or forge a line.

    >>> record = logging.makeLogRecord({"msg": "job %r: %s", "args": ("nightly", "no\x1b[2J\nroom")})
    >>> print(HarmlessFormatter().format(record))
    job 'nightly': no\x1b[2J
        room
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's)
        """Formats the message, and indents its second and later lines."""
        return _in_one_record(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """Formats the record with its traceback."""
        return harmless(super().format(record))


class _HarmlessArguments(logging.Filter):
    """Escapes the arguments of stagecrew's own records, for every handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                _in_one_record(str(one)) if isinstance(one, str | BaseException) else one for one in record.args
            )
        return True


logging.getLogger("stagecrew").addFilter(_HarmlessArguments())


def add_fields(record: logging.LogRecord, fields: Mapping[str, Any]) -> None:
    """Sets fields on a record that a record factory has just made, except those that the log call passes in `extra=`.

    A log call must not fail because of the name of a field. But `Logger.makeRecord` calls the factory first, and then
    raises `KeyError` for every name of `extra` that is in `record.__dict__`. The factory does not receive `extra`, so
    this function reads it from the frame of `makeRecord`. The alternatives promise less:

    - A subclass of `LogRecord` that computes the fields on access: `%(stage)s` in formats, `SocketHandler`, and other
      libraries' formatters read `record.__dict__`.
    - A filter: a logger's filters do not see the records of its children, and handlers may be added at any time.
    - A logger class, or a replaced `Logger.makeRecord`: existing loggers, and classes with a `makeRecord` of their own,
      are not covered.
    """
    given: Container[str] = ()
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "makeRecord":  # also that of another library's logger class
            extra = frame.f_locals.get("extra")
            given = extra if isinstance(extra, Mapping) else ()
            break
        frame = frame.f_back
    record.__dict__.update({name: value for name, value in fields.items() if name not in given})


class LoggedEvaluation(Protocol):
    """The fields of an evaluation that log records carry."""

    @property
    def subtask(self) -> int | None: ...
    @property
    def stage(self) -> int: ...
    @property
    def partition(self) -> int: ...
    @property
    def attempt(self) -> int: ...


class _Current(threading.local):
    """The coordinator that runs on this thread, and the evaluation whose message it handles."""

    coordinator: tuple[str, str] | None = None
    evaluation: LoggedEvaluation | None = None


_current = _Current()
_installing = threading.Lock()
_installed = False


def set_current_coordinator(topology: str, operator: str) -> None:
    """Assigns later log records of this thread to the coordinator of an operator, and to no evaluation."""
    if not _installed:
        _install()
    _current.coordinator, _current.evaluation = (topology, operator), None


def set_current_evaluation(evaluation: LoggedEvaluation | None) -> None:
    """Assigns later log records of this thread, which runs a coordinator, to an evaluation or to none."""
    _current.evaluation = evaluation


def _install() -> None:
    """Installs a record factory that adds the fields of the current coordinator."""
    global _installed
    with _installing:
        if _installed:
            return
        _installed = True
        before = logging.getLogRecordFactory()

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = before(*args, **kwargs)
        if _current.coordinator is not None:
            topology, operator = _current.coordinator
            fields: dict[str, Any] = {"topology": topology, "operator": operator}
            if (one := _current.evaluation) is not None:
                fields |= {
                    "subtask": one.subtask,
                    "stage": one.stage,
                    "partition": one.partition,
                    "attempt": one.attempt,
                }
            add_fields(made, fields)
        return made

    logging.setLogRecordFactory(record)
