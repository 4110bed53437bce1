"""Operators: named places in a dataset's plan whose tasks talk to one coordinator."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

from stagecrew.coordination.context import CoordinatorContext
from stagecrew.coordination.coordinator import Coordinator
from stagecrew.errors import OperatorMisused, TopologyClosed
from stagecrew.worker.evaluations import Bound, evaluate

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from stagecrew.topology import Topology

__all__ = ["Operator"]

#: The column that carries a row's subtask below a bound function.
SUBTASK: Final = "__stagecrew_subtask"

R = TypeVar("R")


class Operator:
    """A named place whose tasks talk to a coordinator. Made by `Topology.coordinate`.

    Each use on a dataset is a binding of its own, with a coordinator of its own: made by the factory when it is bound,
    closed when the topology ends.
    """

    def __init__(self, topology: Topology, name: str, factory: Callable[[CoordinatorContext], Coordinator]) -> None:
        self._topology = topology
        self.name = name
        self._factory = factory

    def __repr__(self) -> str:
        return f"<operator {self.name!r} of {self._topology!r}>"

    def map(
        self,
        dataset: DataFrame,
        work: Callable[[Any, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        schema: StructType | str,
    ) -> DataFrame:
        """`dataset.mapInArrow` whose function gets a gateway to the coordinator first: `work(gateway, batches)`.

        Each partition of the dataset is a subtask, and keeps its number whatever stands above it: `coalesce`, unions, joins,
        caches, retries. An evaluation of an empty partition has none. Run its actions inside the topology.

        Raises `OperatorMisused` for a dataset that is none, or work that cannot be called, and `TopologyClosed`.
        """
        from pyspark.sql import functions as f

        if not hasattr(dataset, "mapInArrow"):
            raise OperatorMisused(f"operator {self.name!r} maps a DataFrame, not {type(dataset).__name__}")
        bound = self._bound(work, subtask=SUBTASK)

        def mapped(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            rows: Iterator[pa.RecordBatch] = evaluate(bound, work, batches)
            return rows

        return dataset.withColumn(SUBTASK, f.spark_partition_id()).mapInArrow(mapped, schema)

    def bind(self, work: Callable[..., R]) -> Callable[..., R]:
        """`work(gateway, ...)` as a function without the gateway, for every other entry point of PySpark.

        It has no subtask, and nothing is reset or replayed. One that answers an iterator (`mapInPandas`, `mapPartitions`) is one
        evaluation; of one that answers a value each call is.

        Raises `OperatorMisused` for work that cannot be called, and `TopologyClosed`.
        """
        bound = self._bound(work, subtask=None)

        def called(*args: Any) -> Any:
            return evaluate(bound, work, *args)

        called.__name__ = getattr(work, "__name__", type(work).__name__)
        return called

    def _bound(self, work: Any, subtask: str | None) -> Bound:
        if not callable(work):
            raise OperatorMisused(
                f"operator {self.name!r} binds a function work(gateway, ...), not {type(work).__name__}"
            )
        if not self._topology.is_active:
            raise TopologyClosed(f"operator {self.name!r} belongs to {self._topology!r}; bind it inside the `with`")
        id_ = f"{self._topology.id}/{self.name}/{uuid.uuid4().hex[:12]}"
        self._topology.host_binding(id_, self.name, self._factory)
        conf = self._topology.coordination_settings
        return Bound(id_, self.name, self._topology.name, subtask, *conf)
