"""The functions that `Operator.bind` returns. Each is pickled together with the identity of its binding."""

from __future__ import annotations

import inspect
import pickle
import sys
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from stagecrew.errors import OperatorMisused
from stagecrew.worker.evaluations import evaluate
from stagecrew.worker.task_gateway import Bound

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["BoundFunction"]


class _UsedTwiceError(OperatorMisused, pickle.PicklingError):
    """A bound function is used on two datasets. PySpark wraps all errors of pickling except `PicklingError`."""


class BoundFunction:
    """A user's function without its gateway parameter. It may be used on one dataset only."""

    def __init__(self, bound: Bound, work: Callable[..., Any]) -> None:
        self._bound, self._work = bound, work
        self._dataset: object = None
        # PySpark reads the name, the signature and the type hints of a function, which must not show the gateway.
        self.__name__ = getattr(work, "__name__", type(work).__name__)
        self.__doc__ = work.__doc__
        gateway: str | None = None
        try:
            signature = inspect.signature(work)
            gateway, *others = signature.parameters
            self.__signature__ = signature.replace(parameters=[signature.parameters[name] for name in others])
        except (ValueError, TypeError):  # a function without a signature, or without parameters: the call will fail
            pass
        try:
            hints = typing.get_type_hints(work)
        except Exception:  # names that cannot be resolved: the annotations are used unresolved
            hints = getattr(work, "__annotations__", {})
        self.__annotations__ = {name: hint for name, hint in hints.items() if name != gateway}

    def __call__(self, *args: Any) -> Any:
        """Evaluates the function with a gateway as its first argument."""
        return evaluate(self._bound, self._work, *args)

    def __reduce__(self) -> Any:
        """Pickles the function. Raises if PySpark is pickling it for a second dataset."""
        dataset = _dataset_being_built()
        if dataset is not None:
            if self._dataset is not None and self._dataset != dataset:
                raise _UsedTwiceError(
                    f"the function bound to operator {self._bound.operator!r} is used on two datasets, which cannot "
                    f"share a coordinator's evaluations; call bind() once for each dataset"
                )
            self._dataset = dataset
        return BoundFunction, (self._bound, self._work)


def _dataset_being_built() -> object:
    """Identifies the RDD or the DataFrame method call for which PySpark is pickling a function. None for a UDF.

    This function walks the frames of its callers, because nothing else identifies the dataset at this point:

    - PySpark passes a function to nothing but the pickler, and a pickler passes no context to `__reduce__`.
    - The number of pickles is not the number of datasets. An RDD pickles its functions again in every RDD that is
      pipelined after it (`rdd.mapPartitions(f).map(g)`), and a UDF is pickled once and used in many datasets.
    - Tasks cannot identify the dataset: two actions on one DataFrame may run as different RDDs, as two DataFrames do.
    - Wrapping `RDD.mapPartitions`, `DataFrame.mapInPandas` and all similar methods would patch PySpark in many places.

    If a version of PySpark renames the modules or classes below, only the early error is lost, because this function
    then returns None.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        this: Any
        module, this = str(frame.f_globals.get("__name__")), frame.f_locals.get("self")
        if module == "pyspark.core.rdd" and hasattr(this, "_prev_jrdd"):
            return this._prev_jrdd.id()  # equal in all RDDs that are pipelined after it
        if module.startswith("pyspark.sql.") and type(this).__name__ in _DATASETS:
            return object()  # each call of such a method creates a new dataset, and pickles the function once
        frame = frame.f_back
    return None


_DATASETS: Final = frozenset({"DataFrame", "GroupedData", "PandasCogroupedOps"})
