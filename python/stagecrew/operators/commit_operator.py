"""Commits a DataFrame: runs the action that stages its rows, with a coordinator that tracks the tasks."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from stagecrew.coordination.contract import Coordinator
from stagecrew.coordination.evaluation import Evaluation
from stagecrew.errors import OperatorMisused
from stagecrew.observability.spans import span
from stagecrew.operators.commits import commit
from stagecrew.operators.committer import CommitReport, Committer, Message, Staging
from stagecrew.spark_version import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.gateway import Gateway
    from stagecrew.coordination.operator import OperatorScope
    from stagecrew.operators.commit_log import CommitLog
    from stagecrew.worker.task_gateway import TaskGateway

__all__ = ["CommitCoordinator", "commit_dataset"]

_log = logging.getLogger("stagecrew")

_METHODS: Final = ("begin", "stage", "commit", "done", "discard")


class CommitCoordinator(Coordinator):
    """Tracks the tasks that stage rows, to report progress, and to wait until the tasks end.

    The result rows of the action decide which data is committed. This coordinator does not.
    """

    kind = "commit"

    def __init__(self, context: CoordinatorContext) -> None:
        super().__init__(context)
        self._live: set[int] = set()
        self._staged: set[int] = set()
        self._changed = threading.Condition()

    def ready(self, evaluation: Evaluation, gateway: Gateway) -> None:
        """See `Coordinator`."""
        with self._changed:
            self._live.add(evaluation.id)
        self._report()

    def failed(self, evaluation: Evaluation, reason: str) -> None:
        """See `Coordinator`."""
        self._remove(evaluation)

    def finished(self, evaluation: Evaluation) -> None:
        """See `Coordinator`."""
        self._remove(evaluation)

    def abandoned(self, evaluation: Evaluation) -> None:
        """See `Coordinator`."""
        self._remove(evaluation)

    def handle_event(self, evaluation: Evaluation, event: Any) -> None:
        """Records that a task has staged all of its rows."""
        self._staged.add(evaluation.id)
        self._report()

    def waits_for(self) -> str:
        """See `Coordinator`."""
        number = len(self._live)
        return f"{number} task{'' if number == 1 else 's'} to stage their rows" if number else ""

    def close(self) -> None:
        """See `Coordinator`."""
        with self._changed:
            self._live.clear()
            self._changed.notify_all()

    def wait_for_tasks(self, seconds: float) -> bool:
        """Waits until no task is staging rows. Called on another thread. Returns False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._live, seconds)

    def _remove(self, evaluation: Evaluation) -> None:
        with self._changed:
            self._live.discard(evaluation.id)
            self._changed.notify_all()
        self._report()

    def _report(self) -> None:
        self.context.report(staging=len(self._live), staged=len(self._staged))


def commit_dataset(
    scope: OperatorScope,
    dataset: DataFrame,
    sink: Committer,
    name: str,
    commit_id: str,
    commit_log: CommitLog,
    task_timeout: float,
    content: str | None = None,
    writer: tuple[str, int] | None = None,
) -> CommitReport:
    """Implements `Topology.commit`.

    `task_timeout` is how many seconds the driver waits for tasks that are still staging rows that it does not need.
    """
    from stagecrew.coordination.operator import Operator

    _check(dataset, sink)
    coordinators: list[CommitCoordinator] = []

    def make_coordinator(context: CoordinatorContext) -> Coordinator:
        coordinators.append(CommitCoordinator(context))
        return coordinators[-1]

    operator = Operator(scope, name, make_coordinator, is_transient=True)

    def execute(staging: Staging) -> Sequence[Message]:
        task_sink = getattr(sink, "in_tasks", lambda: sink)()

        def stage(gateway: TaskGateway, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            from pyspark import TaskContext

            context = TaskContext.get()
            assert context is not None
            message = task_sink.stage(staging, context.partitionId(), context.taskAttemptId(), batches)
            for _ in batches:  # a sink may stop before the last batch
                pass
            if message is not None:
                gateway.send(context.taskAttemptId())
                yield pa.record_batch({"message": [json.dumps(message)]})

        rows = operator.map(dataset, stage, "message string").collect()
        return [json.loads(row.message) for row in rows]  # messages of accepted attempts only

    def wait_for_tasks() -> None:
        if coordinators and not coordinators[-1].wait_for_tasks(task_timeout):
            _log.warning(
                "commit %r: after %g s, tasks whose rows are not needed are still staging; their data is deleted",
                commit_id, task_timeout,
            )  # fmt: skip

    schema = arrow_schema(dataset.schema)
    try:
        with span("commit", {"stagecrew.operator": name, "stagecrew.commit_id": commit_id}, scope.operators.id):
            report = commit(
                sink, commit_log, commit_id, schema, execute, wait_for_tasks, content=content, writer=writer
            )
        if coordinators:
            coordinators[-1].context.report(committed=report.parts)
        return report
    finally:
        operator.end()


def _check(dataset: Any, sink: Any) -> None:
    if not hasattr(dataset, "mapInArrow"):
        raise OperatorMisused(f"commit() takes a DataFrame, not {type(dataset).__name__}: pass the dataset to write")
    missing = [method for method in _METHODS if not callable(getattr(sink, method, None))]
    if missing:
        raise OperatorMisused(
            f"{type(sink).__name__} is not a Committer: it has no {', '.join(missing)}. Pass a sink of "
            "stagecrew.operators.sinks, or define these methods"
        )
