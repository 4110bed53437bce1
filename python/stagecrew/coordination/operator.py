"""Operators: named places in a dataset's plan whose tasks exchange messages with one coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, cast

from stagecrew.coordination.bound_function import BoundFunction
from stagecrew.errors import OperatorMisused, TopologyError
from stagecrew.spark_version import arrow_schema
from stagecrew.worker.evaluations import evaluate
from stagecrew.worker.task_gateway import Bound, TaskGateway

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from stagecrew.coordination.host import Host
    from stagecrew.coordination.operators import Factory, Operators

__all__ = ["Operator"]

#: The column that carries a row's subtask below a bound function.
SUBTASK: Final = "__stagecrew_subtask"

P = ParamSpec("P")
R = TypeVar("R")


class OperatorScope(Protocol):
    """The topology that an operator belongs to, or the application."""

    name: str
    operators: Operators

    @property
    def is_active(self) -> bool:
        """Whether new work may begin in this scope."""

    def host(self) -> Host:
        """The host that serves the coordinators of this scope."""

    @property
    def request_timeout(self) -> float:
        """How long a task waits for a reply by default, in seconds."""


class Operator:
    """A named place in a plan whose tasks exchange messages with a coordinator. Each use has its own coordinator.

    `Topology.coordinate` creates an operator, and `Crew.operator` returns an operator of the application. When an
    operator is bound to a dataset, the factory creates a coordinator, which is closed when the topology ends.

    Args:
        scope: The topology, or the application.
        name: The operator's name.
        factory: Creates a coordinator from its `CoordinatorContext`.
        use: For operators that are used once: the name of the use if it is in a thread that did not begin the place.
        is_transient: Whether the uses have no state, and end when `end` is called.

    Examples:
        # Counts the rows of all tasks together.
        class Counter(stagecrew.Coordinator):
            rows = 0

            def handle_request(self, evaluation, rows):
                self.rows += rows
                return self.rows

        def count(gateway, batches):
            for batch in batches:
                yield pa.record_batch({"so_far": [gateway.request(batch.num_rows)]})

        with crew.topology("counted") as topology:
            counter = topology.coordinate("counter", Counter)
            counter.map(dataset, count, "so_far long").collect()

    Not promised: a common coordinator. Two uses of one operator have two coordinators, which share `context.store`.
    """

    def __init__(
        self, scope: OperatorScope, name: str, factory: Factory, use: str | None = None, is_transient: bool = False
    ) -> None:
        self._scope = scope
        self.name = name
        self._factory = factory
        self._use = use
        self._is_transient = is_transient
        #: The ids of the transient bindings.
        self._transient: list[str] = []

    def __repr__(self) -> str:
        return f"<operator {self.name!r} of {self._scope!r}>"

    def map(
        self,
        dataset: DataFrame,
        work: Callable[[TaskGateway, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        schema: StructType | str,
        name: str | None = None,
    ) -> DataFrame:
        """Maps a dataset like `mapInArrow`, with a function that also receives a gateway to the coordinator.

        Each partition of the dataset is a subtask. A subtask keeps its number through `coalesce`, unions, joins, caches
        and retries. The evaluation of an empty partition has no subtask. Run the dataset's actions inside the topology.

        Args:
            dataset: The dataset.
            work: Called as `work(gateway, batches)`. It yields the batches of the result.
            schema: The schema of the result.
            name: Identifies this use after a recovery. The default is the position of the use in the program: the steps
                and topologies around it, and its ordinal among the uses of the operator there. A name is required in a
                thread that did not begin the place, and in `foreachBatch` outside of `job.batch`.

        Returns:
            The mapped dataset.

        Raises:
            OperatorMisused: `dataset` is not a DataFrame, `work` is not callable, `schema` is no schema, the name is
                taken in this place, or the use needs a name and has none.
            TopologyError: The topology is not running.
            CoordinatorFailed: A coordinator of the topology has failed.
        """
        from pyspark.sql import functions as f
        from pyspark.sql.types import StructType

        if not hasattr(dataset, "mapInArrow"):
            raise OperatorMisused(f"operator {self.name!r} maps a DataFrame, not {type(dataset).__name__}")
        # Spark would refuse the schema only after the use is created.
        parsed: Any = StructType.fromDDL(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, StructType):
            raise OperatorMisused(
                f"the schema of operator {self.name!r} must be a StructType or a text such as 'id long', not {schema!r}"
            )
        arrow_schema(parsed)
        bound = self.bound(work, subtask=SUBTASK, name=name)

        def mapped(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            rows: Iterator[pa.RecordBatch] = evaluate(bound, work, batches)
            return rows

        return dataset.withColumn(SUBTASK, f.spark_partition_id()).mapInArrow(mapped, parsed)

    def bind(self, work: Callable[Concatenate[TaskGateway, P], R], name: str | None = None) -> Callable[P, R]:
        """Binds a function for all other entry points of PySpark, such as UDFs, `applyInPandas` and RDDs.

        Its evaluations have no subtask, so `subtask_reset` is never called. If the function returns an iterator
        (`mapInPandas`, `mapPartitions`), the whole iteration is one evaluation; otherwise each call is an evaluation.

        Use the function for one dataset. If a second DataFrame or RDD is created with it, this raises
        `OperatorMisused`. UDFs are not checked, because a UDF does not belong to a dataset.

        Args:
            work: Called as `work(gateway, ...)`.
            name: As for `map`.

        Returns:
            The function without its first parameter.

        Raises:
            OperatorMisused: `work` is not callable, the name is taken in this place, or the use needs a name and has
                none.
            TopologyError: The topology is not running.
            CoordinatorFailed: A coordinator of the topology has failed.
        """
        return cast("Callable[P, R]", BoundFunction(self.bound(work, subtask=None, name=name), work))

    def end(self) -> None:
        """Ends the operator's transient uses, and closes their coordinators."""
        for id_ in self._transient:
            self._scope.operators.end(id_)
        self._transient.clear()

    def bound(self, work: Any, subtask: str | None, name: str | None = None) -> Bound:
        """Adds a use of the operator. stagecrew's own operators call this method; users call `map` or `bind`.

        Args:
            work: The function that will be bound.
            subtask: The column with the subtask, or None if there are no subtasks.
            name: As for `map`.

        Returns:
            The identity of the binding, for `stagecrew.worker.evaluations.evaluate`.

        Raises:
            OperatorMisused: As for `bind`.
            TopologyError: The topology is not running.
            CoordinatorFailed: A coordinator of the topology has failed.
        """
        if not callable(work):
            raise OperatorMisused(
                f"operator {self.name!r} binds a function work(gateway, ...), not {type(work).__name__}"
            )
        scope = self._scope
        if not scope.is_active:
            raise TopologyError(
                f"operator {self.name!r} belongs to {scope!r}, which is not running: bind the operator while the "
                "session runs and, for a topology, inside its `with` statement"
            )
        host = scope.host()
        if self._is_transient:
            id_ = scope.operators.add_transient(self.name, self._factory, host)
            self._transient.append(id_)
        else:
            id_ = scope.operators.add(self.name, self._factory, host, name, self._use)
        return Bound(id_, self.name, scope.name, subtask, host.limit, scope.request_timeout)
