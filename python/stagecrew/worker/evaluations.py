"""Evaluations: calls of bound functions in tasks, each with a gateway to the coordinator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

from stagecrew.errors import OperatorMisused
from stagecrew.observability.error_summary import error_text
from stagecrew.worker.connection import connected
from stagecrew.worker.process import ADDRESS_FILE
from stagecrew.worker.task_gateway import Bound, TaskGateway

__all__ = ["PARTITION", "evaluate"]

#: The maximum length of an error's text for the driver.
_MAX_TEXT: Final = 8000

#: Used instead of a column name: the subtask is the task's partition id. Empty partitions also have a subtask.
PARTITION: Final = ""


def evaluate(bound: Bound, work: Callable[..., Any], *args: Any) -> Any:
    """Calls `work(gateway, *args)` as one evaluation.

    If `work` returns an iterator, the evaluation ends when the iterator is exhausted, fails or is closed.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    address_file = context.getLocalProperty(ADDRESS_FILE) if context is not None else None
    if not address_file:
        raise OperatorMisused(
            f"a function bound to operator {bound.operator!r} ran outside of topology {bound.topology!r}: run the "
            f"action inside its `with` statement, because the coordinator ends with the topology. If the dataset's "
            f"stored partitions were released with the topology, call `topology.keep(dataset)` inside it to keep them"
        )
    connection = connected(address_file)
    subtask: int | None = None
    if bound.subtask == PARTITION:
        assert context is not None  # only a task has an address file
        subtask = context.partitionId()
    elif bound.subtask is not None:
        subtask, batches = _read_subtask(bound.subtask, args[0])
        args = (batches,)
    gateway = TaskGateway(connection, bound, subtask, context)
    try:
        result = work(gateway, *args)
    except BaseException as error:
        gateway._finish("failed", error_text(error)[:_MAX_TEXT])
        raise
    if hasattr(result, "__next__"):
        rows = _iterate(gateway, result)
        next(rows)
        return rows
    gateway._finish("finished", "")
    return result


def _iterate(gateway: TaskGateway, rows: Iterator[Any]) -> Iterator[Any]:
    try:
        yield None  # taken by `evaluate`: so the evaluation also ends if Spark drops the iterator before its first row
        yield from rows
    except GeneratorExit:
        gateway._finish("abandoned", "Spark needed no more of its rows")
        raise
    except BaseException as error:
        gateway._finish("failed", error_text(error)[:_MAX_TEXT])
        raise
    gateway._finish("finished", "")


def _read_subtask(column: str, batches: Iterator[Any]) -> tuple[int | None, Iterator[Any]]:
    """Reads the subtask from the first row. Returns the subtask, and the batches without the subtask's column."""
    first = next(batches, None)
    if first is None:
        return None, iter(())
    while first.num_rows == 0:
        following = next(batches, None)
        if following is None:
            return None, iter([first.drop_columns([column])])
        first = following
    subtask = int(first.column(column)[0].as_py())
    return subtask, (batch.drop_columns([column]) for batch in itertools.chain([first], batches))
