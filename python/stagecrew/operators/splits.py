"""Splits: a dynamic source whose idle tasks pull what they read next."""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, Protocol

import pyarrow as pa

from stagecrew.coordination.contract import Coordinator
from stagecrew.coordination.evaluation import Evaluation
from stagecrew.errors import OperatorMisused, RequestTimeout, SplitsFailed
from stagecrew.operators.splitlog import HELD, SplitLog
from stagecrew.operators.watermarks import WatermarkGroup

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.operator import Scope
    from stagecrew.worker.evaluations import TaskGateway

__all__ = ["Enumerator", "SplitCoordinator", "read_splits"]

#: How often it is looked whether the enumerator is late, in seconds.
_WATCH: Final = 1.0
#: How long one request reads ahead where the enumerator knows locations, in seconds.
_AHEAD: Final = 1.0
#: How often it is looked who is idle, where splits have event times.
_LOOK: Final = 0.2
#: How long a request for a split that may not be given yet is held before its task asks again: far below its time-out.
_HOLD: Final = 5.0


class Enumerator(Protocol):
    """What has splits: `splits()` is read lazily, from the beginning each time it is called.

    It may also have `locations(split)`: the hosts on which the split is read best, as Spark names them.
    """

    def splits(self) -> Iterable[Any]:
        """Picklable splits, each once, in the order in which they should be begun: the largest first, if that is known."""


@dataclasses.dataclass
class _Held:
    """Who waits for a split that may not be given yet; after a while it is told to ask again."""

    evaluation: Evaluation
    index: int
    host: str
    until: float
    later: Future[bytes | None]


class SplitCoordinator(Coordinator):
    """Gives splits to subtasks by their logs. Its enumerator is read on its thread, one split at a time."""

    kind = "splits"

    def __init__(self, context: CoordinatorContext, enumerator: Any, patience: float) -> None:
        super().__init__(context)
        self._patience = patience
        self._is_there = isinstance(enumerator, Sequence)
        self._splits = len(enumerator) if self._is_there else None
        self._read: dict[int, int] = {}  # subtask -> how many splits of its log were read
        self._log = SplitLog(enumerator, f"operator {context.operator!r}", self._came)
        #: While a split is looked for: when that began, and since when none has come.
        self._asked = 0.0
        self._since: float | None = None
        #: Where splits have event times: what evaluations are reading, and those that wait for the slowest of them.
        self._reading: WatermarkGroup[int] | None = None
        self._held: dict[int, _Held] = {}
        if hasattr(enumerator, "event_time"):
            self._reading = WatermarkGroup(enumerator.drift, enumerator.idle_after)

    def start(self) -> None:
        """See `Coordinator`."""
        if not self._is_there:
            self.context.call_async(self._watch, _nothing, period=min(_WATCH, self._patience / 4), while_live=True)
        if self._reading is not None:
            self.context.every(_LOOK, self._let_go, while_live=True)

    def handle_request(self, evaluation: Evaluation, request: Any) -> bytes | Future[bytes | None] | None:
        """A task asks for the split at a place of its subtask's log; None at its end. It has read the one before."""
        index, host = request
        assert evaluation.subtask is not None
        if index > self._read.get(evaluation.subtask, 0):
            self._read[evaluation.subtask] = index
        if self._reading is None:
            return self._at(evaluation, index, host)
        self._reading.remove(evaluation.id)
        split = self._at(evaluation, index, host, self._reading)
        if split != HELD:
            self._let_go()
            return split
        held = self._held[evaluation.id] = _Held(
            evaluation, index, host, time.monotonic() + min(_HOLD, self._patience / 4), Future()
        )
        return held.later

    def failed(self, evaluation: Evaluation, reason: str) -> None:
        """See `Coordinator`."""
        self._over(evaluation)

    def finished(self, evaluation: Evaluation) -> None:
        """See `Coordinator`."""
        self._over(evaluation)

    def abandoned(self, evaluation: Evaluation) -> None:
        """See `Coordinator`."""
        self._over(evaluation)

    def _over(self, evaluation: Evaluation) -> None:
        if self._reading is not None:
            self._reading.remove(evaluation.id)
            self._held.pop(evaluation.id, None)
            self._let_go()

    def _at(
        self, evaluation: Evaluation, index: int, host: str, reading: WatermarkGroup[int] | None = None
    ) -> bytes | None:
        assert evaluation.subtask is not None
        self._asked = self._since = time.monotonic()
        try:
            if reading is None:
                return self._log.at(evaluation.subtask, index, host)
            split = self._log.at(evaluation.subtask, index, host, reading)
            if split is not None and split != HELD:
                reading.report(evaluation.id, self._log.event_time(split))
            return split
        except SplitsFailed as error:
            self.context.fail(error)
            raise
        finally:
            self._since = None

    def _came(self) -> bool:
        self._since = now = time.monotonic()
        return now - self._asked < min(_AHEAD, self._patience / 4)

    def _let_go(self) -> None:
        """Gives those that wait what they may have now."""
        assert self._reading is not None
        now = time.monotonic()
        for id_, held in list(self._held.items()):
            try:
                split = self._at(held.evaluation, held.index, held.host, self._reading)
            except SplitsFailed as error:
                held.later.set_exception(error)
            else:
                if split == HELD and now < held.until:
                    continue
                held.later.set_result(split)
            del self._held[id_]

    def waits_for(self) -> str:
        """See `Coordinator`."""
        if not self._held:
            return ""
        return f"those who read the earliest splits: {_counted(len(self._held), 'subtask')} may not read on before"

    def progress(self) -> dict[str, Any]:
        """See `Coordinator`. Those are done after which a task has asked for the next; how many are left is known of a list."""
        given, done = self._log.given, sum(self._read.values())
        found = {"splits done": done, "splits in work": given - done}
        left = 0 if self._log.sealed else None if self._splits is None else self._splits - given
        return found if left is None else found | {"splits left": left}

    def checkpoint(self, checkpoint_id: int) -> bytes | None:
        """See `Coordinator`."""
        return self._log.state()

    def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        """See `Coordinator`."""
        if state is not None:
            self._log.restore(state)

    def _watch(self) -> None:
        since = self._since
        if since is not None and time.monotonic() - since > self._patience:
            self.context.fail(
                SplitsFailed(
                    f"the enumerator of {self._log.name} has not given its next split within {self._patience:g} s: it blocks, or is slow. "
                    f"Make it faster, or raise spark.stagecrew.request.timeout"
                )
            )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _nothing(_result: Any, _error: BaseException | None) -> None:
    """What was watched has been told."""


def read_splits(
    scope: Scope,
    context: SparkContext,
    enumerator: Any,
    read: Callable[[Any], Iterable[pa.RecordBatch]],
    schema: StructType | str,
    parallelism: int | None,
    use: str | None,
) -> DataFrame:
    """See `Topology.splits`."""
    from pyspark.sql import SparkSession

    from stagecrew.coordination.operator import Operator

    name = use or "splits"
    if not hasattr(enumerator, "splits") and not isinstance(enumerator, Iterable):
        raise OperatorMisused(
            f"splits() takes an iterable of splits, or an object whose splits() answers one; {type(enumerator).__name__} is neither"
        )
    if not callable(read):
        raise OperatorMisused(f"splits() reads with a function read(split), not {type(read).__name__}")
    if isinstance(enumerator, Iterator):
        enumerator = Once(enumerator, f"the splits of operator {name!r}")
    tasks = context.defaultParallelism if parallelism is None else parallelism
    if not isinstance(tasks, int) or tasks < 1:
        raise OperatorMisused(f"parallelism is the number of tasks, at least 1, not {tasks!r}")
    patience = 0.9 * scope.request_timeout
    operator = Operator(scope, name, lambda made_for: SplitCoordinator(made_for, enumerator, patience), use)
    session = SparkSession.getActiveSession() or SparkSession(context)

    def work(gateway: TaskGateway, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return read_subtask(gateway, batches, read)

    return operator.map(session.range(0, tasks, 1, tasks), work, schema)


class Once:
    """An iterator, which can be read once: a coordinator that begins anew cannot begin it anew."""

    def __init__(self, iterator: Iterator[Any], name: str) -> None:
        self._iterator, self._name, self._begun = iterator, name, False

    def splits(self) -> Iterator[Any]:
        """The iterator, the first time."""
        if self._begun:
            raise SplitsFailed(
                f"{self._name} came from an iterator, which cannot be read again, as after a reset; give a list, or an object whose "
                f"splits() begins anew"
            )
        self._begun = True
        return self._iterator


def read_subtask(
    gateway: TaskGateway, batches: Iterator[pa.RecordBatch], read: Callable[[Any], Iterable[pa.RecordBatch]]
) -> Iterator[pa.RecordBatch]:
    """The task's side: reads the splits of its subtask's log, and then those that it is given."""
    for _ in batches:  # the one row that makes it a subtask
        pass
    index = 0
    while True:
        try:
            packed = gateway.request((index, gateway.host))
        except RequestTimeout as error:
            raise SplitsFailed(f"no split came: {error}") from error
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
                raise OperatorMisused(f"read(split) yields pyarrow.RecordBatch objects, not {type(batch).__name__}")
