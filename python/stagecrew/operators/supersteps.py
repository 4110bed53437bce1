"""Supersteps: tasks that compute together, step by step, each step ended by one value that all of them get."""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow as pa

from stagecrew.coordination.contract import Coordinator
from stagecrew.coordination.evaluation import Evaluation
from stagecrew.errors import OperatorMisused, RequestFailed, RequestTimeout, SuperstepsFailed
from stagecrew.operators.reducers import Described, Reducer, described, reduced
from stagecrew.operators.superstep_group import Gathering
from stagecrew.wire.serialization import Packed, packed
from stagecrew.worker.evaluations import PARTITION, evaluate

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.gateway import Gateway
    from stagecrew.coordination.operator import Scope
    from stagecrew.worker.evaluations import TaskGateway

__all__ = ["SuperstepContext", "SuperstepCoordinator", "run_supersteps"]

_log = logging.getLogger("stagecrew")

#: In Spark's error for a barrier stage that has more tasks than slots (SPARK-24819).
_TOO_FEW: Final = "requires more slots than the total number of slots"
#: The column by which the rows of a subtask stay together behind the stage.
_TOGETHER: Final = "__stagecrew_together"
#: Values travel in pieces of at most so many bytes, and of less where `spark.stagecrew.event.maxSize` is small.
_PIECE: Final = 4 << 20
#: How many bytes of that size a piece leaves for what stands around it.
_AROUND: Final = 64
#: How a reply begins that is the result, and one that says in how many pieces it comes.
_WHOLE: Final = b"\0"
_PIECES: Final = b"\1%d"
#: How often it is looked who is late, in seconds.
_WATCH: Final = 1.0

StopWhen = Callable[[int, Any], bool]


class SuperstepCoordinator(Coordinator):
    """Gathers the values of each step from the tasks of one attempt at a stage, and gives all of them the reduced one.

    A task that fails takes the attempt at its stage with it, and the next begins at step 0: nothing of the one before is left.
    """

    kind = "supersteps"

    def __init__(
        self, context: CoordinatorContext, stop_when: StopWhen | None, timeout: float, piece: int = _PIECE
    ) -> None:
        super().__init__(context)
        self._stop_when, self._timeout, self._piece = stop_when, timeout, piece
        self._groups: dict[tuple[int, int], _Group] = {}
        self._pieces: dict[Evaluation, list[bytes]] = {}

    def start(self) -> None:
        """See `Coordinator`."""
        self.context.every(min(_WATCH, self._timeout / 4), self._look_who_is_late, while_live=True)

    def ready(self, evaluation: Evaluation, gateway: Gateway) -> None:
        """See `Coordinator`. A new attempt at a stage ends those before."""
        key = (evaluation.stage, evaluation.stage_attempt)
        for old in [one for one in self._groups if one[0] == key[0] and one[1] < key[1]]:
            self._groups.pop(old).fail(f"attempt {old[1]} at stage {old[0]} is over: the stage runs again")
        newest = not any(one[0] == key[0] and one[1] > key[1] for one in self._groups)
        if key not in self._groups and newest:
            self._groups[key] = _Group(f"operator {self.context.operator!r}", evaluation.partitions)

    def failed(self, evaluation: Evaluation, reason: str) -> None:
        """See `Coordinator`. Its stage runs again: nobody waits for it any more."""
        self._pieces.pop(evaluation, None)
        if (group := self._group_of(evaluation)) is not None:
            group.fail(f"subtask {evaluation.subtask} failed, and the stage runs again: {reason}")

    def finished(self, evaluation: Evaluation) -> None:
        """See `Coordinator`."""
        group = self._group_of(evaluation)
        if group is None or group.over is not None:  # Spark ends it, and runs all of its stage again
            return
        if self._contained(group, group.gathering.end, evaluation):
            del self._groups[evaluation.stage, evaluation.stage_attempt]

    def abandoned(self, evaluation: Evaluation) -> None:
        """See `Coordinator`. A shuffle takes all rows: what is cut short has failed."""
        self.failed(evaluation, "it was cut short")

    def handle_event(self, evaluation: Evaluation, event: bytes) -> None:
        """A piece of a request that is too large for one message."""
        self._pieces.setdefault(evaluation, []).append(event)

    def handle_request(self, evaluation: Evaluation, request: bytes) -> Future[Packed] | Packed:
        """A task has come to a step, or asks for one more piece of its result."""
        if (pieces := self._pieces.pop(evaluation, None)) is not None:
            request = b"".join([*pieces, request])
        group = self._group_of(evaluation)
        if group is None or group.over is not None:
            raise SuperstepsFailed(
                f"operator {self.context.operator!r}: subtask {evaluation.subtask} is of an attempt at its stage that is over"
                + ("" if group is None else f": {group.over}")
            )
        what, *details = pickle.loads(request)
        if what == "piece":
            return group.piece(*details)
        step, members, reducer, value = details
        if members < group.gathering.subtasks:
            # Spark runs only those again whose output it lost (G23): when one of them fails, all of them.
            raise SuperstepsFailed(
                f"operator {self.context.operator!r}: Spark runs {members} of {group.gathering.subtasks} tasks of stage "
                f"{evaluation.stage} again, which cannot go on without the others; this attempt fails so that all run again"
            )
        reply: Future[Packed] = Future()
        if not group.waiting:
            group.since = time.monotonic()
        group.waiting[evaluation] = reply
        reducer = Described(*reducer)
        values = self._contained(group, group.gathering.add, evaluation, step, reducer, value)
        if values is not None:
            self._answer(group, step, reducer, values)
        return reply

    def _answer(self, group: _Group, step: int, reducer: Described, values: list[Any]) -> None:
        try:
            value = reduced(reducer, values)
            if self._stop_when is not None and not group.stopped:
                group.stopped = bool(self._stop_when(step, value))
            result = _pickled((group.stopped, value))
        except Exception as error:
            failure = SuperstepsFailed(
                f"operator {self.context.operator!r}: step {step} could not be reduced: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self._fail(group, failure)
            raise failure from error
        self.context.report(step=step + 1, **({"stopped": True} if group.stopped else {}))
        group.answer(result, self._piece)

    def _contained(self, group: _Group, change: Callable[..., Any], evaluation: Evaluation, *args: Any) -> Any:
        """What it answers; what it raises fails the topology: all attempts at the stage would go the same way."""
        try:
            return change(evaluation.subtask, *args)
        except SuperstepsFailed as error:
            self._fail(group, error)
            raise

    def _fail(self, group: _Group, error: SuperstepsFailed) -> None:
        self.context.fail(error)
        group.fail(str(error))

    def _group_of(self, evaluation: Evaluation) -> _Group | None:
        return self._groups.get((evaluation.stage, evaluation.stage_attempt))

    def _look_who_is_late(self) -> None:
        for (stage, attempt), group in self._groups.items():
            missing = group.gathering.missing
            if missing and group.over is None and time.monotonic() - group.since > self._timeout:
                shown = _shown(missing)
                error = SuperstepsFailed(
                    f"operator {self.context.operator!r}, stage {stage}, attempt {attempt}: for {self._timeout:g} s "
                    f"{len(group.waiting)} subtasks have waited in step {group.gathering.step} for these: {shown}"
                )
                self._fail(group, error)

    def waits_for(self) -> str:
        """See `Coordinator`."""
        waiting = [group for group in self._groups.values() if group.over is None and group.gathering.missing]
        return "; ".join(
            f"subtask {_shown(group.gathering.missing)}, which {len(group.waiting)} of {group.gathering.subtasks} wait for in step "
            f"{group.gathering.step}"
            for group in waiting
        )


def _shown(subtasks: list[int]) -> str:
    return ", ".join(map(str, subtasks[:10])) + (", ..." if len(subtasks) > 10 else "")


class _Group:
    """One attempt at a stage: who has come, and who waits for the result."""

    def __init__(self, name: str, subtasks: int) -> None:
        self.gathering = Gathering(name, subtasks)
        self.waiting: dict[Evaluation, Future[Packed]] = {}
        self.since = 0.0
        self.stopped = False
        self.over: str | None = None
        self._pieces: list[Packed] = []

    def answer(self, result: bytes, piece: int) -> None:
        """All get the result, or how many pieces it has. It is kept once for all of them, until the next."""
        self._pieces = []
        reply = packed(_WHOLE, result)
        if len(result) > piece:
            self._pieces = [packed(memoryview(result)[at : at + piece]) for at in range(0, len(result), piece)]
            reply = packed(_PIECES % len(self._pieces))
        waiting, self.waiting = self.waiting, {}
        for future in waiting.values():
            future.set_result(reply)

    def piece(self, number: int) -> Packed:
        """One piece of the last result: nobody is at the next step before all have all of it."""
        return self._pieces[number]

    def fail(self, reason: str) -> None:
        """Nobody gets a result any more."""
        self.over = self.over or reason
        waiting, self.waiting = self.waiting, {}
        for future in waiting.values():
            future.set_exception(SuperstepsFailed(reason))


class SuperstepContext:
    """A task's way through the supersteps.

    `subtask` is its number, from 0, of `subtasks`; `step` how often it reduced; `stopped` whether the driver's `stop_when` said
    so of the last result: for all tasks alike. Of one thread.
    """

    def __init__(self, gateway: TaskGateway, members: int, timeout: float, piece: int = _PIECE) -> None:
        self._gateway, self._timeout, self._piece = gateway, timeout, piece
        assert gateway.subtask is not None
        self.subtask, self.subtasks = gateway.subtask, members
        self.step = 0
        self.stopped = False
        self._known: dict[bytes, bytes] = {}

    def __repr__(self) -> str:
        return f"<superstep {self.step} of subtask {self.subtask} of {self.subtasks}>"

    def reduce(self, value: Any, op: Reducer = "sum") -> Any:
        """One value of all tasks' values, the same for all of them. It waits for the others.

        `op` is `"sum"`, `"min"`, `"max"` (of numbers; of numpy and Arrow arrays, element by element), `"concat"` (of arrays, tables,
        lists, text and bytes), or a function of two values. Values are reduced in the order of subtasks, so that a sum of floating
        point numbers is the same each time. In a sum True counts as 1, in boolean arrays too. None takes no part. Values are picklable;
        64 MB of each task are tested, and the driver holds those of all tasks at once.

        All tasks reduce by the same `op`. A function of an importable module is compared by its name; any other, such as a lambda, by
        its code and all that it holds: defaults, closure, the globals that it uses, the state of an object. Equal values make the
        same function, in whatever task they were made. Not promised: that one which holds what is never pickled alike, such as a random
        state, is the same in two tasks; and modules that differ between executors are not noticed: the driver's is used.

        Raises `SuperstepsFailed` when another task reduces otherwise or has ended, or `timeout` seconds are over; `OperatorMisused`.
        """
        request = _pickled(("reduce", self.step, self.subtasks, tuple(described(op, self._known)), value))
        if len(request) > self._piece:
            pieces = [request[at : at + self._piece] for at in range(0, len(request), self._piece)]
            request = pieces.pop()
            for piece in pieces:
                self._gateway.send(piece)
        reply = self._ask(request)
        if reply.startswith(_PIECES[:1]):
            reply = b"".join([_WHOLE, *(self._ask(_pickled(("piece", n))) for n in range(int(reply[1:])))])
        self.step += 1
        self.stopped, result = pickle.loads(memoryview(reply)[1:])
        return result

    def _ask(self, request: bytes) -> bytes:
        try:
            reply: bytes = self._gateway.request(request, timeout=self._timeout)
        except RequestFailed as error:
            if not isinstance(error.__cause__, SuperstepsFailed):
                raise
            raise SuperstepsFailed(str(error.__cause__)) from error
        except RequestTimeout as error:
            raise SuperstepsFailed(
                f"step {self.step} of subtask {self.subtask} has not come to its end: {error}"
            ) from error
        return reply


def _pickled(value: Any) -> bytes:
    with contextlib.suppress(Exception):
        return pickle.dumps(value, 5)
    from pyspark import cloudpickle

    return bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]


def run_supersteps(
    scope: Scope,
    dataset: DataFrame,
    work: Callable[[SuperstepContext, Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]],
    schema: StructType | str,
    use: str | None,
    stop_when: StopWhen | None,
    timeout: float,
    await_slots: Callable[[int], int],
) -> DataFrame:
    """See `Topology.supersteps`."""
    from pyspark.sql.types import LongType, StructField, StructType

    from stagecrew.coordination.operator import Operator

    if not hasattr(dataset, "mapInArrow"):
        raise OperatorMisused(f"supersteps run over a DataFrame, not {type(dataset).__name__}")
    if not callable(work):
        raise OperatorMisused(f"supersteps run a function work(steps, batches), not {type(work).__name__}")
    if stop_when is not None and not callable(stop_when):
        raise OperatorMisused(
            f"stop_when is a function of a step's number and its result, not {type(stop_when).__name__}"
        )
    if not timeout > 0:
        raise OperatorMisused(f"timeout is how many seconds a step may wait for its last task, not {timeout!r}")
    if dataset.sparkSession.conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        raise OperatorMisused(
            "supersteps need all their tasks at once, and Spark refuses that with dynamic allocation: set "
            "spark.dynamicAllocation.enabled to false"
        )
    # Where executors have not come yet, Spark refuses a stage at once that it would run a second later. AQE may make fewer of
    # these partitions: so this is no reason to refuse.
    plan = dataset._jdf.queryExecution().executedPlan()
    wanted_slots = plan.outputPartitioning().numPartitions()
    slots = await_slots(wanted_slots)
    if slots < wanted_slots and plan.getClass().getSimpleName() != "AdaptiveSparkPlanExec":
        _log.warning(
            "%s: the dataset has %d partitions, and %d tasks can run at once: Spark refuses to run it, as all tasks of a "
            "superstep run at once. Use `dataset.repartition(%d)`, or give Spark more cores",
            use or "supersteps", wanted_slots, slots, max(1, slots),
        )  # fmt: skip
    piece = max(1, min(_PIECE, scope.host().limit - _AROUND))
    operator = Operator(
        scope, use or "supersteps", lambda context: SuperstepCoordinator(context, stop_when, timeout, piece), use
    )
    wait = timeout + scope.request_timeout  # the coordinator says first who is late

    def stepped(gateway: TaskGateway, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import BarrierTaskContext

        members = len(BarrierTaskContext.get().getTaskInfos())
        for batch in work(SuperstepContext(gateway, members, wait, piece), batches):
            yield from _together(batch, gateway.subtask)

    bound = operator.bound(stepped, subtask=PARTITION)

    def mapped(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows: Iterator[pa.RecordBatch] = evaluate(bound, stepped, batches)
        return rows

    wanted = cast(StructType, StructType.fromDDL(schema)) if isinstance(schema, str) else schema
    carried = StructType([*wanted.fields, StructField(_TOGETHER, LongType())])
    # The shuffle makes a map stage of the tasks: where one of them fails, Spark runs the stage again instead of failing the
    # job, and whoever takes some of the rows takes them of tasks that all ran (G5).
    return dataset.mapInArrow(mapped, carried, barrier=True).repartition(_TOGETHER).drop(_TOGETHER)


def note_remedy(error: BaseException, slots: Callable[[], int]) -> None:
    """Adds the remedy to Spark's error for supersteps that need more slots than there are."""
    if type(error).__module__.partition(".")[0] in ("pyspark", "py4j") and _TOO_FEW in str(error):
        error.add_note(
            f"stagecrew: all tasks of a superstep run at once. Repartition the dataset of `topology.supersteps` to at most "
            f"{max(1, slots())} partitions, or give Spark more cores"
        )


def _together(batch: Any, subtask: int | None) -> Iterator[pa.RecordBatch]:
    if isinstance(batch, pa.Table):
        for one in batch.to_batches():
            yield from _together(one, subtask)
    elif isinstance(batch, pa.RecordBatch):
        marks = pa.array([subtask] * batch.num_rows, pa.int64())
        yield pa.RecordBatch.from_arrays([*batch.columns, marks], names=[*batch.schema.names, _TOGETHER])
    else:
        raise OperatorMisused(f"work(steps, batches) yields pyarrow.RecordBatch objects, not {type(batch).__name__}")
