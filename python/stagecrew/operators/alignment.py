"""Alignment in event time: a source that is too far ahead waits for the slowest source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from stagecrew.coordination.contract import Coordinator
from stagecrew.coordination.evaluation import Evaluation
from stagecrew.errors import CoordinationTimeout, OperatorFailed, OperatorMisused, RequestFailed
from stagecrew.operators.arguments import check_seconds
from stagecrew.operators.watermarks import WatermarkGroup

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.gateway import Gateway
    from stagecrew.coordination.operator import Operator, OperatorScope
    from stagecrew.worker.task_gateway import TaskGateway

__all__ = ["Aligner", "Alignment", "AlignmentCoordinator", "align"]

#: The period, in seconds, of the check for idle sources.
_IDLE_CHECK: Final = 0.2

#: The id of an evaluation, and the name of one of its sources.
_Source = tuple[int, Any]


class AlignmentCoordinator(Coordinator):
    """Holds the watermarks of all sources, and the requests of sources that are too far ahead.

    The coordinator checks every waiting request after each change, and periodically. So a lost or repeated message
    cannot block a source forever.
    """

    kind = "alignment"

    def __init__(self, context: CoordinatorContext, drift: Any, idle_after: float | None) -> None:
        super().__init__(context)
        self._group: WatermarkGroup[_Source] = WatermarkGroup(drift, idle_after)
        self._waiting: dict[_Source, tuple[Any, Future[None]]] = {}
        self._sources: dict[int, set[_Source]] = {}  # by evaluation
        self._subtasks: dict[int, str] = {}

    def start(self) -> None:
        """See `Coordinator`."""
        self.context.every(_IDLE_CHECK, self._release, while_live=True)

    def handle_request(self, evaluation: Evaluation, request: Any) -> Future[None]:
        """Handles the watermark of a source. Replies when the source may continue."""
        name, watermark = request
        source = self._source_of(evaluation, name)
        self._group.report(source, watermark)
        permission: Future[None] = Future()
        self._waiting[source] = (watermark, permission)
        self._release()
        return permission

    def handle_event(self, evaluation: Evaluation, event: Any) -> None:
        """Handles the message that a source has ended or is idle."""
        kind, name = event
        source = self._source_of(evaluation, name)
        self._waiting.pop(source, None)  # a waiting source sends no events, so its request has timed out
        (self._group.finish if kind == "finish" else self._group.remove)(source)
        self._release()

    def ready(self, evaluation: Evaluation, gateway: Gateway) -> None:
        """See `Coordinator`."""
        self._subtasks[evaluation.id] = (
            f"partition {evaluation.partition}" if evaluation.subtask is None else f"subtask {evaluation.subtask}"
        )

    def failed(self, evaluation: Evaluation, reason: str) -> None:
        """See `Coordinator`. The next attempt has new sources."""
        self._forget(evaluation)

    def finished(self, evaluation: Evaluation) -> None:
        """See `Coordinator`."""
        self._forget(evaluation)

    def abandoned(self, evaluation: Evaluation) -> None:
        """See `Coordinator`."""
        self._forget(evaluation)

    def waits_for(self) -> str:
        """See `Coordinator`."""
        if not self._waiting or (slowest := self._group.slowest_source) is None:
            return ""
        (id_, name), watermark = slowest
        source = "the source" if name is None else f"source {name!r}"
        others = "1 other source must" if len(self._waiting) == 1 else f"{len(self._waiting)} other sources must"
        return f"{source} of {self._subtasks.get(id_, 'a task')}, which is at {watermark}: {others} wait for it"

    def _source_of(self, evaluation: Evaluation, name: Any) -> _Source:
        source = (evaluation.id, name)
        self._sources.setdefault(evaluation.id, set()).add(source)
        return source

    def _forget(self, evaluation: Evaluation) -> None:
        self._subtasks.pop(evaluation.id, None)
        for source in self._sources.pop(evaluation.id, ()):
            self._group.forget(source)
            self._waiting.pop(source, None)
        self._release()

    def _release(self) -> None:
        """Replies to the sources that may continue."""
        for source, (watermark, _) in self._waiting.items():
            self._group.report(source, watermark)  # a waiting source is not idle
        for source in [source for source, (watermark, _) in self._waiting.items() if self._group.allows(watermark)]:
            self._waiting.pop(source)[1].set_result(None)
        self.context.report(slowest=self._group.slowest_watermark, waiting=len(self._waiting))


class Aligner:
    """The task's side of an alignment. `advance` waits while a source is too far ahead of the slowest source.

    `Alignment.map` passes the aligner to the user's function. Several threads of a task may use it at the same time,
    each for its own sources.

    Args:
        gateway: The task's connection to the coordinator.

    Examples:
        >>> def work(aligner, batches):
        ...     for batch in batches:
        ...         yield batch
        ...         aligner.advance(max(batch.column("time").to_pylist()))
        >>> with crew.topology("join") as topology:  # doctest: +SKIP
        ...     topology.align("sources", drift=60).map(events, work, events.schema).collect()
    """

    def __init__(self, gateway: TaskGateway) -> None:
        self._gateway = gateway

    @property
    def subtask(self) -> int | None:
        """The number of the dataset's partition, from 0. None if the partition is empty."""
        return self._gateway.subtask

    def advance(self, watermark: Any, source: Any = None, timeout: float | None = None) -> None:
        """Reports that a source has reached a watermark. Waits while the source is too far ahead of the slowest source.

        Args:
            watermark: The event time that the source has reached. All remaining rows of the source
                have this time or a later one.
            source: The name of the source, if the task has several sources. Any picklable, hashable value.
            timeout: The maximum wait in seconds, by default `spark.stagecrew.request.timeout`.

        Raises:
            OperatorFailed: If the permission to continue did not arrive in time, usually because the slowest source did
                not advance and is not idle. Or if the coordinator rejected the watermark, usually because it cannot
                be compared with the watermarks of other sources.
        """
        try:
            self._gateway.request((source, watermark), timeout)
        except CoordinationTimeout as error:
            raise OperatorFailed(
                f"source {self._name(source)} waited at {watermark!r}, and may not continue: {error}. If the slowest "
                "source has no rows for now, call idle() for it, or set idle_after"
            ) from error
        except RequestFailed as error:
            if isinstance(error.__cause__, TypeError):
                raise OperatorFailed(
                    f"source {self._name(source)} reported {watermark!r}, which cannot be compared with other sources' "
                    f"watermarks: {error.__cause__}. All sources must report event times of the same type"
                ) from error
            raise OperatorFailed(f"source {self._name(source)} could not report {watermark!r}: {error}") from error

    def idle(self, source: Any = None) -> None:
        """Reports that a source has no rows for now. Until it advances again, it does not hold back other sources.

        Args:
            source: The name of the source, if the task has several sources.
        """
        self._gateway.send(("idle", source))

    def finish(self, source: Any = None) -> None:
        """Reports that a source has ended. When a task ends, all of its sources end without this call.

        Args:
            source: The name of the source, if the task has several sources.
        """
        self._gateway.send(("finish", source))

    def _name(self, source: Any) -> str:
        return f"of subtask {self.subtask}" if source is None else f"{source!r} of subtask {self.subtask}"


class Alignment:
    """Aligns the tasks of one dataset in event time. `Topology.align` creates an alignment.

    Args:
        operator: The operator that the tasks use.

    Examples:
        >>> with crew.topology("join") as topology:  # doctest: +SKIP
        ...     aligned = topology.align("sources", drift=60).map(events, work, events.schema)
    """

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._is_used = False

    def map(
        self,
        dataset: DataFrame,
        work: Callable[[Aligner, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        schema: StructType | str,
    ) -> DataFrame:
        """Maps a dataset like `DataFrame.mapInArrow`, with an `Aligner` as the function's first argument.

        Args:
            dataset: The dataset whose tasks are aligned with each other.
            work: Called as `work(aligner, batches)` for each partition. Yields batches of `schema`.
            schema: The schema of the result.

        Returns:
            The mapped dataset.

        Raises:
            OperatorMisused: If this alignment has already mapped a dataset, or if `work` is not callable. One alignment
                is only for the tasks of one dataset.
        """
        if self._is_used:
            raise OperatorMisused(
                "an alignment aligns the tasks of one dataset only: union the datasets first, and map the union"
            )
        if not callable(work):
            raise OperatorMisused(f"Alignment.map needs a function work(aligner, batches), not {type(work).__name__}")
        mapped = self._operator.map(dataset, lambda gateway, batches: work(Aligner(gateway), batches), schema)
        self._is_used = True  # set last, so that a refused call does not use up the alignment
        return mapped


def align(scope: OperatorScope, name: str, drift: Any, idle_after: float | None) -> Alignment:
    """Implements `Topology.align`."""
    from stagecrew.coordination.operator import Operator

    if idle_after is not None:
        check_seconds("idle_after", idle_after)
    return Alignment(Operator(scope, name, lambda context: AlignmentCoordinator(context, drift, idle_after), name))
