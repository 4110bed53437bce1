"""Supersteps: tasks compute together, step by step. Each step ends with one value that all tasks get."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow as pa

from stagecrew.errors import OperatorMisused
from stagecrew.operators.arguments import check_seconds
from stagecrew.operators.superstep_context import SuperstepContext
from stagecrew.operators.superstep_coordinator import StopWhen, SuperstepCoordinator
from stagecrew.operators.superstep_messages import limited_piece
from stagecrew.worker.evaluations import PARTITION, evaluate

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from stagecrew.coordination.operator import OperatorScope
    from stagecrew.worker.task_gateway import TaskGateway

__all__ = ["note_remedy", "run_supersteps"]

_log = logging.getLogger("stagecrew")

#: Part of Spark's error message for a barrier stage that has more tasks than slots (SPARK-24819).
_TOO_FEW_SLOTS: Final = "requires more slots than the total number of slots"
#: The column that keeps the rows of a subtask together in the shuffle after the stage.
_SUBTASK: Final = "__stagecrew_together"


def run_supersteps(
    scope: OperatorScope,
    dataset: DataFrame,
    work: Callable[[SuperstepContext, Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]],
    schema: StructType | str,
    use: str | None,
    stop_when: StopWhen | None,
    timeout: float,
    await_slots: Callable[[int], int],
) -> DataFrame:
    """Implements `Topology.supersteps`. `await_slots` waits for this many slots, and returns how many there are."""
    from pyspark.sql.types import LongType, StructField, StructType

    from stagecrew.coordination.operator import Operator

    _check(dataset, work, stop_when, timeout)
    name = use or "supersteps"
    _warn_of_few_slots(dataset, name, await_slots)
    piece = limited_piece(scope.host().limit)
    operator = Operator(scope, name, lambda context: SuperstepCoordinator(context, stop_when, timeout, piece), use)
    request_timeout = timeout + scope.request_timeout  # longer, so that the coordinator names the late subtasks first

    def run_steps(gateway: TaskGateway, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import BarrierTaskContext

        members = len(BarrierTaskContext.get().getTaskInfos())
        for batch in work(SuperstepContext(gateway, members, request_timeout, piece), batches):
            yield from _with_subtask(batch, gateway.subtask)

    bound = operator.bound(run_steps, subtask=PARTITION)

    def evaluate_subtask(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows: Iterator[pa.RecordBatch] = evaluate(bound, run_steps, batches)
        return rows

    result = cast(StructType, StructType.fromDDL(schema)) if isinstance(schema, str) else schema
    shuffled = StructType([*result.fields, StructField(_SUBTASK, LongType())])
    # The shuffle makes the tasks a map stage. If one fails, Spark runs the stage again instead of failing the job, and
    # an action that reads only some rows reads them from tasks that all ran.
    return dataset.mapInArrow(evaluate_subtask, shuffled, barrier=True).repartition(_SUBTASK).drop(_SUBTASK)


def _check(dataset: Any, work: Any, stop_when: Any, timeout: float) -> None:
    if not hasattr(dataset, "mapInArrow"):
        raise OperatorMisused(f"supersteps run over a DataFrame, not {type(dataset).__name__}: pass the dataset first")
    if not callable(work):
        raise OperatorMisused(f"supersteps run a function work(steps, batches), not {type(work).__name__}")
    if stop_when is not None and not callable(stop_when):
        raise OperatorMisused(
            f"stop_when is a function of a step's number and its result, not {type(stop_when).__name__}"
        )
    check_seconds("timeout", timeout)
    if dataset.sparkSession.conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        raise OperatorMisused(
            "all tasks of a superstep run at once, and Spark refuses that with dynamic allocation: set "
            "spark.dynamicAllocation.enabled to false"
        )


def _warn_of_few_slots(dataset: DataFrame, name: str, await_slots: Callable[[int], int]) -> None:
    """Waits for executors to register, and warns if there are too few slots.

    Without this wait, Spark would refuse the barrier stage immediately, even if executors register a second later.
    Adaptive execution may reduce the number of partitions, so too few slots need not be an error here.
    """
    plan = dataset._jdf.queryExecution().executedPlan()
    partitions = plan.outputPartitioning().numPartitions()
    slots = await_slots(partitions)
    if slots < partitions and plan.getClass().getSimpleName() != "AdaptiveSparkPlanExec":
        _log.warning(
            "%s: the dataset has %d partitions, and %d tasks can run at once: Spark refuses to run it, as all tasks of "
            "a superstep run at once. Use `dataset.repartition(%d)`, or give Spark more cores",
            name, partitions, slots, max(1, slots),
        )  # fmt: skip


def note_remedy(error: BaseException, slots: Callable[[], int]) -> None:
    """Adds the remedy to Spark's error for supersteps that need more slots than Spark has."""
    if type(error).__module__.partition(".")[0] in ("pyspark", "py4j") and _TOO_FEW_SLOTS in str(error):
        error.add_note(
            "stagecrew: all tasks of a superstep run at once. Repartition the dataset of `topology.supersteps` to at "
            f"most {max(1, slots())} partitions, or give Spark more cores"
        )


def _with_subtask(batch: Any, subtask: int | None) -> Iterator[pa.RecordBatch]:
    """Adds the subtask's number to a batch as its last column."""
    if isinstance(batch, pa.Table):
        for part in batch.to_batches():
            yield from _with_subtask(part, subtask)
    elif isinstance(batch, pa.RecordBatch):
        numbers = pa.array([subtask] * batch.num_rows, pa.int64())
        yield pa.RecordBatch.from_arrays([*batch.columns, numbers], names=[*batch.schema.names, _SUBTASK])
    else:
        raise OperatorMisused(f"work(steps, batches) yields pyarrow.RecordBatch objects, not {type(batch).__name__}")
