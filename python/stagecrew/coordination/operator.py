"""Operators: named places in a dataset's plan whose tasks talk to one coordinator."""

from __future__ import annotations

import inspect
import pickle
import sys
import typing
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from stagecrew.errors import OperatorMisused, TopologyClosed
from stagecrew.worker.evaluations import Bound, evaluate

if TYPE_CHECKING:
    from types import FrameType

    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from stagecrew.coordination.host import Host
    from stagecrew.coordination.operators import Factory, Operators

__all__ = ["Operator"]

#: The column that carries a row's subtask below a bound function.
SUBTASK: Final = "__stagecrew_subtask"

R = TypeVar("R")


class Scope(Protocol):
    """The topology of an operator, or the application."""

    name: str
    operators: Operators

    @property
    def is_active(self) -> bool:
        """Whether it takes work."""

    def host(self) -> Host:
        """What serves its coordinators."""

    @property
    def request_timeout(self) -> float:
        """How long a task waits for its coordinator, in seconds."""


class Operator:
    """A named place whose tasks talk to a coordinator. Made by `Topology.coordinate`, or `Crew.operator` for the application's.

    Each use on a dataset is a binding of its own, with a coordinator of its own: made by the factory when it is bound,
    closed when the topology ends.
    """

    def __init__(
        self, scope: Scope, name: str, factory: Factory, use: str | None = None, is_transient: bool = False
    ) -> None:
        self._scope = scope
        self.name = name
        self._factory = factory
        #: The name of its use in another thread, for one that is used once.
        self._use = use
        #: Whether its uses end with `end`, and have no state; and their bindings.
        self._is_transient = is_transient
        self._transient: list[str] = []

    def __repr__(self) -> str:
        return f"<operator {self.name!r} of {self._scope!r}>"

    def map(
        self,
        dataset: DataFrame,
        work: Callable[[Any, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        schema: StructType | str,
        name: str | None = None,
    ) -> DataFrame:
        """`dataset.mapInArrow` whose function gets a gateway to the coordinator first: `work(gateway, batches)`.

        Each partition of the dataset is a subtask, and keeps its number whatever stands above it: `coalesce`, unions, joins,
        caches, retries. An evaluation of an empty partition has none. Run its actions inside the topology.

        `name` identifies this use after a recovery. By default that is its place in the program: the steps and topologies around it,
        and its ordinal among the uses of this operator there. A use in another thread than the one that began the place, or in
        `foreachBatch` outside of `job.batch`, needs a name of its own.

        Raises `OperatorMisused` for a dataset that is none, work that cannot be called, a name that was used before in this place, or
        a use that needs a name; and `TopologyClosed`.
        """
        from pyspark.sql import functions as f

        if not hasattr(dataset, "mapInArrow"):
            raise OperatorMisused(f"operator {self.name!r} maps a DataFrame, not {type(dataset).__name__}")
        bound = self.bound(work, subtask=SUBTASK, name=name)

        def mapped(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            rows: Iterator[pa.RecordBatch] = evaluate(bound, work, batches)
            return rows

        return dataset.withColumn(SUBTASK, f.spark_partition_id()).mapInArrow(mapped, schema)

    def bind(self, work: Callable[..., R], name: str | None = None) -> Callable[..., R]:
        """`work(gateway, ...)` as a function without the gateway, for every other entry point of PySpark.

        It has no subtask, and nothing is reset or replayed. One that answers an iterator (`mapInPandas`, `mapPartitions`) is one
        evaluation; of one that answers a value each call is. It belongs to one dataset: a second DataFrame or RDD that is made
        with it raises `OperatorMisused` (not where it is within a UDF, which belongs to no dataset).

        `name` is that of `map`. Raises `OperatorMisused` for work that cannot be called and for a name as `map`, and `TopologyClosed`.
        """
        return BoundFunction(self.bound(work, subtask=None, name=name), work)

    def end(self) -> None:
        """Ends its transient uses: each coordinator is closed, and has no thread any more."""
        for id_ in self._transient:
            self._scope.operators.end(id_)
        self._transient.clear()

    def bound(self, work: Any, subtask: str | None, name: str | None = None) -> Bound:
        """One more use of the operator, and the coordinator for it: what `work` carries to its tasks."""
        if not callable(work):
            raise OperatorMisused(
                f"operator {self.name!r} binds a function work(gateway, ...), not {type(work).__name__}"
            )
        scope = self._scope
        if not scope.is_active:
            raise TopologyClosed(f"operator {self.name!r} belongs to {scope!r}; bind it inside the `with`")
        host = scope.host()
        if self._is_transient:
            id_ = scope.operators.add_transient(self.name, self._factory, host)
            self._transient.append(id_)
        else:
            id_ = scope.operators.add(self.name, self._factory, host, name, self._use)
        return Bound(id_, self.name, scope.name, subtask, host.limit, scope.request_timeout)


class _UsedTwice(OperatorMisused, pickle.PicklingError):
    """PySpark passes on an error of pickling; of any other it makes one that is not ours."""


class BoundFunction:
    """What `Operator.bind` answers: the function without its gateway. It travels to tasks, for one dataset."""

    def __init__(self, bound: Bound, work: Callable[..., Any]) -> None:
        self._bound, self._work = bound, work
        self._dataset: object = None
        # What PySpark looks at: the name, and the types, of which the gateway's is none of its business.
        self.__name__ = getattr(work, "__name__", type(work).__name__)
        self.__doc__ = work.__doc__
        gateway: str | None = None
        try:
            signature = inspect.signature(work)
            gateway, *others = signature.parameters
            self.__signature__ = signature.replace(parameters=[signature.parameters[name] for name in others])
        except (
            ValueError,
            TypeError,
        ):  # one that was not written in Python, or takes no gateway: then its call says so
            pass
        try:
            hints = typing.get_type_hints(work)
        except Exception:  # names that cannot be resolved: as they stand
            hints = getattr(work, "__annotations__", {})
        self.__annotations__ = {name: hint for name, hint in hints.items() if name != gateway}

    def __call__(self, *args: Any) -> Any:
        return evaluate(self._bound, self._work, *args)

    def __reduce__(self) -> Any:
        # PySpark pickles a function when it is used; which dataset that is for stands in the frames above.
        dataset = _being_built()
        if dataset is not None:
            if self._dataset is not None and self._dataset != dataset:
                raise _UsedTwice(
                    f"the function bound to operator {self._bound.operator!r} is used on two datasets, which cannot share a "
                    f"coordinator's evaluations: call bind() once for each"
                )
            self._dataset = dataset
        return BoundFunction, (self._bound, self._work)


def _being_built() -> object:
    """What PySpark is about to give a function to, as far as it can be told: an RDD, or a call of a DataFrame's method.

    None for a UDF, which is an expression and belongs to no dataset.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        this: Any
        module, this = str(frame.f_globals.get("__name__")), frame.f_locals.get("self")
        if module == "pyspark.core.rdd" and hasattr(this, "_prev_jrdd"):
            return this._prev_jrdd.id()  # the same for what is pipelined behind it
        if module.startswith("pyspark.sql.") and type(this).__name__ in _DATASETS:
            return object()  # each call makes a dataset, and pickles once
        frame = frame.f_back
    return None


_DATASETS: Final = frozenset({"DataFrame", "GroupedData", "PandasCogroupedOps"})
