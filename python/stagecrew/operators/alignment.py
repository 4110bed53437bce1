"""Alignment in event time: tasks that are ahead wait for those that are behind, and splits are given in the order of events."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from stagecrew.coordination.contract import Coordinator
from stagecrew.coordination.evaluation import Evaluation
from stagecrew.errors import AlignmentFailed, OperatorMisused, RequestFailed, RequestTimeout, SplitsFailed
from stagecrew.operators.splits import Once
from stagecrew.operators.watermarks import WatermarkGroup

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.gateway import Gateway
    from stagecrew.coordination.operator import Operator, Scope
    from stagecrew.worker.evaluations import TaskGateway

__all__ = ["Aligner", "Alignment", "AlignmentCoordinator", "EventTimeSplits", "align"]

#: How often it is looked who is idle, and whom that lets go on, in seconds.
_LOOK: Final = 0.2


class AlignmentCoordinator(Coordinator):
    """Knows the watermarks of all sources, and keeps those waiting that are ahead.

    The one state are the watermarks; whoever waits is looked at again after each change, and from time to time.
    """

    kind = "alignment"

    def __init__(self, context: CoordinatorContext, drift: Any, idle_after: float | None) -> None:
        super().__init__(context)
        self._group: WatermarkGroup[tuple[int, Any]] = WatermarkGroup(drift, idle_after)
        self._waiting: dict[tuple[int, Any], tuple[Any, Future[None]]] = {}
        self._of: dict[int, set[tuple[int, Any]]] = {}  # evaluation -> its sources
        self._subtasks: dict[int, str] = {}

    def start(self) -> None:
        """See `Coordinator`."""
        self.context.every(_LOOK, self._let_go, while_live=True)

    def handle_request(self, evaluation: Evaluation, request: Any) -> Future[None]:
        """A task has come so far with one of its sources, and waits until it may read on."""
        source, watermark = request
        key = (evaluation.id, source)
        self._of.setdefault(evaluation.id, set()).add(key)
        self._group.report(key, watermark)
        may: Future[None] = Future()
        self._waiting[key] = (watermark, may)
        self._let_go()
        return may

    def handle_event(self, evaluation: Evaluation, event: Any) -> None:
        """One of its sources has nothing more to give, or nothing for now."""
        what, source = event
        key = (evaluation.id, source)
        self._of.setdefault(evaluation.id, set()).add(key)
        self._waiting.pop(key, None)  # it has given up: nobody says so while it waits
        (self._group.finish if what == "finish" else self._group.remove)(key)
        self._let_go()

    def ready(self, evaluation: Evaluation, gateway: Gateway) -> None:
        """See `Coordinator`."""
        self._subtasks[evaluation.id] = (
            f"partition {evaluation.partition}" if evaluation.subtask is None else f"subtask {evaluation.subtask}"
        )

    def failed(self, evaluation: Evaluation, reason: str) -> None:
        """See `Coordinator`. Another attempt is a source of its own."""
        self._forget(evaluation)

    def finished(self, evaluation: Evaluation) -> None:
        """See `Coordinator`."""
        self._forget(evaluation)

    def abandoned(self, evaluation: Evaluation) -> None:
        """See `Coordinator`."""
        self._forget(evaluation)

    def waits_for(self) -> str:
        """See `Coordinator`."""
        if not self._waiting or (slowest := self._group.slowest_of) is None:
            return ""
        (id_, source), watermark = slowest
        name = "its source" if source is None else f"source {source!r}"
        number = len(self._waiting)
        return (
            f"{name} of {self._subtasks.get(id_, 'a task')}, which is at {watermark}: {number} other{'' if number == 1 else 's'} "
            f"may not go on before"
        )

    def _forget(self, evaluation: Evaluation) -> None:
        self._subtasks.pop(evaluation.id, None)
        for key in self._of.pop(evaluation.id, ()):
            self._group.forget(key)
            self._waiting.pop(key, None)
        self._let_go()

    def _let_go(self) -> None:
        for key, (watermark, _) in self._waiting.items():
            self._group.report(key, watermark)  # who waits is not idle
        for key in [key for key, (watermark, _) in self._waiting.items() if self._group.allows(watermark)]:
            self._waiting.pop(key)[1].set_result(None)
        self.context.report(slowest=self._group.slowest, waiting=len(self._waiting))


class Aligner:
    """A task's side of an alignment. Usable from several threads of the task, each with sources of its own."""

    def __init__(self, gateway: TaskGateway) -> None:
        self._gateway = gateway

    @property
    def subtask(self) -> int | None:
        """The partition of the dataset that is worked on."""
        return self._gateway.subtask

    def advance(self, watermark: Any, source: Any = None, timeout: float | None = None) -> None:
        """The source has come so far; it returns when that is not too far ahead of the slowest any more.

        `source` names one of several in the task. Raises `AlignmentFailed` after `timeout` seconds, by default
        `spark.stagecrew.request.timeout`: the slowest source stands still, and is not idle.
        """
        try:
            self._gateway.request((source, watermark), timeout)
        except RequestTimeout as error:
            raise AlignmentFailed(
                f"source {self._name(source)} waits at {watermark!r}: the slowest source has not come near enough in time; let a source "
                f"that has nothing for now call idle(), or set idle_after"
            ) from error
        except RequestFailed as error:
            raise AlignmentFailed(
                f"source {self._name(source)} reported {watermark!r}, which cannot be compared with the others' watermarks: "
                f"{error.__cause__}"
            ) from error

    def idle(self, source: Any = None) -> None:
        """The source has nothing for now, and holds nobody until it advances again."""
        self._gateway.send(("idle", source))

    def finish(self, source: Any = None) -> None:
        """The source has come to its end. Those of a task that ends need not say so."""
        self._gateway.send(("finish", source))

    def _name(self, source: Any) -> str:
        return f"of subtask {self.subtask}" if source is None else f"{source!r} of subtask {self.subtask}"


class Alignment:
    """Tasks that advance in event time together. Made by `Topology.align`."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._used = False

    def map(
        self,
        dataset: DataFrame,
        work: Callable[[Aligner, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        schema: StructType | str,
    ) -> DataFrame:
        """`dataset.mapInArrow` whose function gets an `Aligner` first: `work(aligner, batches)`.

        Its tasks are aligned with each other. Raises `OperatorMisused` for a second dataset, which would not be.
        """
        if self._used:
            raise OperatorMisused(
                "an alignment holds the tasks of one dataset together: union the datasets before, and map that once"
            )
        if not callable(work):
            raise OperatorMisused(f"an alignment maps a function work(aligner, batches), not {type(work).__name__}")
        mapped = self._operator.map(dataset, lambda gateway, batches: work(Aligner(gateway), batches), schema)
        self._used = True  # a call that was refused has used nothing
        return mapped


def align(scope: Scope, name: str, drift: Any, idle_after: float | None) -> Alignment:
    """See `Topology.align`."""
    from stagecrew.coordination.operator import Operator

    if idle_after is not None and not idle_after > 0:
        raise OperatorMisused(f"idle_after is after how many seconds a silent source holds nobody, not {idle_after!r}")
    return Alignment(Operator(scope, name, lambda context: AlignmentCoordinator(context, drift, idle_after), name))


class EventTimeSplits:
    """An enumerator for `Topology.splits` that merges several: splits are given in the order of their event times.

    `sources` are enumerators, or iterables, of splits in the order of their event times, by name; the rows of a split are at or
    behind its event time, which `event_time(split)` tells. A split is given when all that are still being read lie at most `drift`
    behind it. So a subtask's rows are in the order of events, but for the drift and what one split spans, and with
    `parallelism=1` all rows are. Tasks that have ended hold nobody, nor does one that has read at a split for `idle_after` seconds.
    Without `idle_after` one that hangs while it reads holds all others for ever: nothing times out then, and `waits_for` in the
    topology's report says it. Give `idle_after`, or let `read` have a time-out of its own.

    A task's splits are `(name, split)`. When a source goes back in time, the topology fails: the `with` raises `CoordinatorFailed`, whose
    `__cause__` is `SplitsFailed`.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        event_time: Callable[[Any], Any],
        drift: Any,
        idle_after: float | None = None,
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise OperatorMisused("EventTimeSplits merges sources by their names: give a dict of at least one")
        if not callable(event_time):
            raise OperatorMisused(f"event_time is a function of a split, not {type(event_time).__name__}")
        self._sources = {
            name: Once(source, f"source {name!r} of EventTimeSplits") if isinstance(source, Iterator) else source
            for name, source in sources.items()
        }
        self._event_time = event_time
        self.drift, self.idle_after = drift, idle_after

    def event_time(self, split: tuple[str, Any]) -> Any:
        """The event time of a split."""
        return self._event_time(split[1])

    def splits(self) -> Iterator[tuple[str, Any]]:
        """The splits of all sources, the earliest first."""

        def of(name: str, source: Any) -> Iterator[tuple[Any, str, Any]]:
            last: Any = None
            splits: Iterable[Any] = source.splits() if hasattr(source, "splits") else source
            for split in splits:
                event_time = self._event_time(split)
                if last is not None and event_time < last:
                    raise SplitsFailed(
                        f"source {name!r} goes back in time: a split of {event_time!r} comes behind one of {last!r}; a source gives "
                        f"its splits in the order of their event times"
                    )
                last = event_time
                yield event_time, name, split

        merged = heapq.merge(*(of(name, source) for name, source in self._sources.items()), key=lambda one: one[:2])
        for _, name, split in merged:
            yield name, split
