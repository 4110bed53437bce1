"""Log records say where they come from: topology, operator, stage, partition and attempt."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from stagecrew.coordination.coordinator import Evaluation

__all__ = ["FIELDS", "StructuredFormatter", "coordinates", "handles"]

#: What records may say, in this order.
FIELDS: Final = ("application", "topology", "operator", "subtask", "stage", "partition", "attempt")


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


class _Here(threading.local):
    """Of a coordinator's thread: whose it is, and whose message it handles."""

    place: tuple[str, str] | None = None
    evaluation: Evaluation | None = None


_here = _Here()
_installing = threading.Lock()
_installed = False


def coordinates(topology: str, operator: str) -> None:
    """Records of this thread are a coordinator's from now on."""
    _install()
    _here.place = (topology, operator)


def handles(evaluation: Evaluation | None) -> None:
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
            made.topology, made.operator = _here.place
            if (one := _here.evaluation) is not None:
                made.subtask, made.stage, made.partition, made.attempt = (
                    one.subtask,
                    one.stage,
                    one.partition,
                    one.attempt,
                )
        return made

    logging.setLogRecordFactory(record)
