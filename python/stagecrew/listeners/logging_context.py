"""A ready-made listener that adds the topology, stage, partition and attempt of a task to its log records.

Every Python worker imports this module, so it uses only the standard library and starts no thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from stagecrew.listeners.listener import Listener, Task
from stagecrew.observability.logs import add_fields

__all__ = ["LoggingContext"]


class LoggingContext(Listener):
    """Adds `application`, `topology`, `stage`, `partition` and `attempt` to every Python log record of a task.

    A value in the `extra=` of a log call takes precedence.

    Examples:
        logging.Formatter("%(topology)s %(stage)s %(message)s", defaults={"topology": "-", "stage": "-"})

    Records outside of a task have none of these attributes, so give the formatter `defaults=` in processes that log
    both.
    """

    @contextlib.contextmanager
    def decorate(self, task: Task) -> Iterator[None]:
        """Adds the fields of the task to each log record while the task runs.

        Args:
            task: The task, from Spark's `TaskContext`.

        Yields:
            Nothing.
        """
        before = logging.getLogRecordFactory()
        fields = {
            "application": task.application,
            "topology": task.topology,
            "stage": task.stage,
            "partition": task.partition,
            "attempt": task.attempt,
        }

        def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
            made = before(*args, **kwargs)
            add_fields(made, fields)
            return made

        logging.setLogRecordFactory(record)
        try:
            yield
        finally:
            logging.setLogRecordFactory(before)
