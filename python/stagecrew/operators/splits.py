"""A dynamic source of splits. A task that has read its split requests the next split from the coordinator."""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from stagecrew.coordination.contract import Coordinator
from stagecrew.coordination.evaluation import Evaluation
from stagecrew.errors import CoordinationTimeout, OperatorFailed, OperatorMisused
from stagecrew.operators.enumerators.enumerator import SinglePassEnumerator
from stagecrew.operators.split_progress import SplitProgress
from stagecrew.operators.splitlog import HELD, SplitLog
from stagecrew.operators.watermarks import WatermarkGroup

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.operator import OperatorScope
    from stagecrew.worker.task_gateway import TaskGateway

__all__ = ["SplitCoordinator", "read_splits"]

#: How often, in seconds, the coordinator checks whether the enumerator is late.
_ENUMERATOR_CHECK: Final = 1.0
#: The maximum time in seconds that one request spends on reading ahead, if the enumerator has the locations of splits.
_MAX_READ_AHEAD: Final = 1.0
#: How often, in seconds, the coordinator checks for idle evaluations, if splits have event times.
_IDLE_CHECK: Final = 0.2
#: The maximum time in seconds until a held request gets the reply `HELD`, and its task asks again. It is always far
#: below the request timeout.
_MAX_HOLD: Final = 5.0


@dataclasses.dataclass
class _HeldRequest:
    """A request that is waiting because no split may be assigned yet.

    At the time `until`, the task gets the reply `HELD`, and asks again.
    """

    evaluation: Evaluation
    index: int
    host: str
    until: float
    reply: Future[bytes | None]


class SplitCoordinator(Coordinator):
    """Assigns splits to subtasks, and records them in the split log.

    Takes splits from the enumerator on the coordinator's thread, one at a time.
    """

    kind = "splits"
    _live_reset_problem = (
        "the topology was reset while tasks were reading splits: Spark keeps the rows of tasks that have finished, so "
        "some splits would be read twice. Reset a topology between its actions"
    )

    def __init__(
        self, context: CoordinatorContext, enumerator: Any, enumerator_timeout: float, subtasks: int | None = None
    ) -> None:
        super().__init__(context)
        #: The number of subtasks. After a recovery, it may be smaller than before.
        self._subtasks = subtasks
        #: How many seconds the enumerator may take for one split.
        self._enumerator_timeout = enumerator_timeout
        self._is_list = isinstance(enumerator, Sequence)
        #: The number of splits, if it is known from the beginning.
        self._split_count = len(enumerator) if self._is_list else None
        self._progress = SplitProgress(subtasks)
        self._log = SplitLog(enumerator, f"operator {context.operator!r}", self._on_split)
        #: When the last request began.
        self._request_began = 0.0
        #: While a request waits for the enumerator: when it began, or when the last split arrived. Otherwise None.
        self._waiting_since: float | None = None
        #: If splits have event times: the event time of the split that each evaluation is reading.
        self._watermarks: WatermarkGroup[int] | None = None
        #: The requests that wait for the evaluation with the earliest split, by evaluation.
        self._held: dict[int, _HeldRequest] = {}
        if hasattr(enumerator, "event_time"):
            self._watermarks = WatermarkGroup(enumerator.drift, enumerator.idle_after)

    def start(self) -> None:
        """See `Coordinator`."""
        if not self._is_list:
            self.context.call_async(
                self._check_enumerator,
                _ignore,
                period=min(_ENUMERATOR_CHECK, self._enumerator_timeout / 4),
                while_live=True,
            )
        if self._watermarks is not None:
            self.context.every(_IDLE_CHECK, self._release_held, while_live=True)

    def handle_request(self, evaluation: Evaluation, request: Any) -> bytes | Future[bytes | None] | None:
        """Returns the split at an index of the subtask's log. The task has read all splits before this index.

        The reply is None after the last split. It is a future if no split may be assigned yet.
        """
        index, host = request
        self._progress.asks(evaluation, index)
        if self._watermarks is None:
            return self._split_at(evaluation, index, host)
        self._watermarks.remove(evaluation.id)
        split = self._split_at(evaluation, index, host, self._watermarks)
        if split != HELD:
            self._release_held()
            return split
        until = time.monotonic() + min(_MAX_HOLD, self._enumerator_timeout / 4)
        held = self._held[evaluation.id] = _HeldRequest(evaluation, index, host, until, Future())
        return held.reply

    def failed(self, evaluation: Evaluation, reason: str) -> None:
        """See `Coordinator`."""
        self._remove(evaluation)

    def finished(self, evaluation: Evaluation) -> None:
        """See `Coordinator`."""
        self._remove(evaluation)

    def abandoned(self, evaluation: Evaluation) -> None:
        """See `Coordinator`."""
        self._remove(evaluation)

    def _remove(self, evaluation: Evaluation) -> None:
        self._progress.ended(evaluation)
        if self._watermarks is not None:
            self._watermarks.remove(evaluation.id)
            self._held.pop(evaluation.id, None)
            self._release_held()

    def _split_at(
        self, evaluation: Evaluation, index: int, host: str, watermarks: WatermarkGroup[int] | None = None
    ) -> bytes | None:
        assert evaluation.subtask is not None
        self._request_began = self._waiting_since = time.monotonic()
        try:
            split = self._log.read(evaluation.subtask, index, host, watermarks)
            if split is not None and split != HELD:
                self._progress.reads(evaluation, self._request_began)
                if watermarks is not None:
                    watermarks.report(evaluation.id, self._log.event_time(split))
            return split
        except OperatorFailed as error:
            self.context.fail(error)
            raise
        finally:
            self._waiting_since = None

    def _on_split(self) -> bool:
        """Records that the enumerator has yielded a split. Returns whether the request has time to read ahead."""
        self._waiting_since = now = time.monotonic()
        # All subtasks may be waiting for this request: together, their requests take at most half of the timeout.
        share = self._enumerator_timeout / (2 * max(2, self._subtasks or 0))
        return now - self._request_began < min(_MAX_READ_AHEAD, share)

    def _release_held(self) -> None:
        """Replies to held requests for which a split may be assigned now, or that were held long enough."""
        assert self._watermarks is not None
        for id_, held in list(self._held.items()):
            try:
                split = self._split_at(held.evaluation, held.index, held.host, self._watermarks)
            except Exception as error:  # it concerns this request, not the one that released it
                held.reply.set_exception(error)
            else:
                if split == HELD and time.monotonic() < held.until:
                    continue
                held.reply.set_result(split)
            del self._held[id_]

    def waits_for(self) -> str:
        """See `Coordinator`."""
        if not self._held:
            return ""
        return f"the subtasks with the earliest splits: {_counted(len(self._held), 'other subtask')} must wait for them"

    def progress(self) -> dict[str, Any]:
        """See `Coordinator`.

        A split is done when its task asks for the next split. The number of splits left is known if the splits are a
        list, and when all splits are in logs. The slowest split is reported after one second.
        """
        assigned = self._log.assigned
        left = 0 if self._log.sealed else None if self._split_count is None else self._split_count - assigned
        return self._progress.values(assigned, left, time.monotonic())

    def checkpoint(self, checkpoint_id: int) -> bytes | None:
        """See `Coordinator`."""
        return self._log.state()

    def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        """See `Coordinator`."""
        if state is not None:
            self._log.restore(state, self._subtasks)

    def _check_enumerator(self) -> None:
        since = self._waiting_since
        if since is not None and time.monotonic() - since > self._enumerator_timeout:
            self.context.fail(
                OperatorFailed(
                    f"the enumerator of {self._log.name} has not yielded its next split within "
                    f"{self._enumerator_timeout:g} s: it blocks, or is slow. Make it faster, or raise "
                    "spark.stagecrew.request.timeout"
                )
            )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _ignore(_result: Any, _error: BaseException | None) -> None:
    """Does nothing, because `_check_enumerator` itself fails the topology."""


def read_splits(
    scope: OperatorScope,
    context: SparkContext,
    enumerator: Any,
    read: Callable[[Any], Iterable[pa.RecordBatch]],
    schema: StructType | str,
    parallelism: int | None,
    use: str | None,
) -> DataFrame:
    """Implements `Topology.splits`."""
    from pyspark.sql import SparkSession

    from stagecrew.coordination.operator import Operator

    name = use or "splits"
    if not hasattr(enumerator, "splits") and not isinstance(enumerator, Iterable):
        raise OperatorMisused(
            "Topology.splits() takes an iterable of splits, or an enumerator with a method splits() that returns one; "
            f"{type(enumerator).__name__} is neither"
        )
    if not callable(read):
        raise OperatorMisused(f"read must be a function that takes a split, not {type(read).__name__}")
    if isinstance(enumerator, Iterator):
        enumerator = SinglePassEnumerator(enumerator, f"the splits of operator {name!r}")
    tasks = context.defaultParallelism if parallelism is None else parallelism
    if not isinstance(tasks, int) or tasks < 1:
        raise OperatorMisused(f"parallelism must be a whole number of at least 1, not {tasks!r}")
    # Shorter than the request timeout, so that the coordinator reports a late enumerator first.
    enumerator_timeout = 0.9 * scope.request_timeout
    operator = Operator(
        scope,
        name,
        lambda coordinator_context: SplitCoordinator(coordinator_context, enumerator, enumerator_timeout, tasks),
        use,
    )
    session = SparkSession.getActiveSession() or SparkSession(context)

    def work(gateway: TaskGateway, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return read_subtask(gateway, batches, read)

    return operator.map(session.range(0, tasks, 1, tasks), work, schema)


def read_subtask(
    gateway: TaskGateway, batches: Iterator[pa.RecordBatch], read: Callable[[Any], Iterable[pa.RecordBatch]]
) -> Iterator[pa.RecordBatch]:
    """Runs in the task. Requests the splits of this subtask one after the other, and yields their rows."""
    for _ in batches:  # the single row of this subtask contains no data
        pass
    index = 0
    while True:
        try:
            packed = gateway.request((index, gateway.host))
        except CoordinationTimeout as error:
            raise OperatorFailed(
                f"subtask {gateway.subtask} got no split in time: {error}. Raise spark.stagecrew.request.timeout if "
                "the driver is slow"
            ) from error
        if packed is None:
            return
        if packed == HELD:
            continue
        index += 1
        split = pickle.loads(packed)
        for batch in read(split):
            if isinstance(batch, pa.Table):
                yield from batch.to_batches()
            elif isinstance(batch, pa.RecordBatch):
                yield batch
            else:
                raise OperatorMisused(
                    f"read(split) must yield pyarrow.RecordBatch or pyarrow.Table objects, not {type(batch).__name__}"
                )
