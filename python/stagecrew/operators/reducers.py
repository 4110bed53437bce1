"""Reduces the values of a superstep to one value. Needs no Spark session; PySpark's cloudpickle pickles functions."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from stagecrew.errors import OperatorFailed, OperatorMisused
from stagecrew.observability.error_summary import error_text

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["Reducer", "ReducerCall", "reduced", "reducer_call"]

#: The name of a ready-made reducer, or a function of two values.
Reducer = str | Callable[[Any, Any], Any]


class ReducerCall(NamedTuple):
    """A reducer as a task sends it. Two tasks use the same reducer if the names are equal."""

    name: str
    #: The user's function, pickled. None for a ready-made reducer.
    function: bytes | None = None


def reduced(reducer: ReducerCall, values: Sequence[Any]) -> Any:
    """Reduces values, which are in the order of subtasks. Ignores None. Returns None if all values are None.

    Raises `OperatorFailed` for values that cannot be reduced together.
    """
    present = {subtask: value for subtask, value in enumerate(values) if value is not None}
    if not present:
        return None
    if reducer.function is not None:
        return functools.reduce(pickle.loads(reducer.function), present.values())
    _require_alike(reducer.name, present)
    return READY_MADE[reducer.name](list(present.values()))


def reducer_call(reducer: Reducer, name: str | None = None) -> ReducerCall:
    """Returns a reducer as a task sends it, with `name` or its own name.

    Raises `OperatorMisused` for an unknown ready-made reducer, for an object that cannot be called or pickled, and
    for a function that needs a `name` and has none.
    """
    if isinstance(reducer, str):
        if reducer not in READY_MADE:
            raise OperatorMisused(
                f"reduce() knows {', '.join(READY_MADE)}, and functions of two values; {reducer!r} is none of them"
            )
        if name is not None:
            raise OperatorMisused(
                f"name={name!r} names a function of your own, and {reducer!r} is ready-made: leave name= out"
            )
        return ReducerCall(reducer)
    if not callable(reducer):
        raise OperatorMisused(
            f"reduce() takes the name of a reducer or a function of two values, not {type(reducer).__name__}"
        )
    own_name = _checked_name(name) if name is not None else _importable_name(reducer)
    if own_name is None:
        raise OperatorMisused(
            f"reduce() compares the reducers of all tasks by name, and {_described(reducer)} cannot be imported by its "
            "name. Pass a name that is the same in all tasks: reduce(value, function, name='...')"
        )
    return ReducerCall(own_name, _pickled(reducer))


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise OperatorMisused(f"name= is the name of a reducer, a text that is not empty, not {name!r}")
    if name in READY_MADE:
        raise OperatorMisused(f"name={name!r} is the name of a ready-made reducer: give your function another one")
    return name


def _importable_name(reducer: Any) -> str | None:
    """The name under which every process can import the function. None without such a name, as for a lambda."""
    module = getattr(reducer, "__module__", None)
    path = getattr(reducer, "__qualname__", None) or getattr(reducer, "__name__", None)
    if not isinstance(module, str) or not isinstance(path, str) or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return f"{module}.{path}" if found is reducer else None


def _described(reducer: Any) -> str:
    path = getattr(reducer, "__qualname__", None)
    module = getattr(reducer, "__module__", None)
    return f"a {type(reducer).__qualname__}" if path is None else f"{module}.{path}" if module else str(path)


def _pickled(reducer: Any) -> bytes:
    from pyspark import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(reducer)  # type: ignore[no-untyped-call]
    except Exception as error:  # a user's __reduce__ may raise anything
        raise OperatorMisused(
            f"{_described(reducer)} cannot be pickled to send it to the driver, which reduces the values "
            f"({error_text(error)}): use a function that refers only to objects that can be pickled"
        ) from error
    return pickled


def _require_alike(name: str, values: Mapping[int, Any]) -> None:
    """Raises `OperatorFailed` unless all values have the same kind, and, except for "concat", the same shape."""
    found = {subtask: (_kind(value), _shape(value) if name != "concat" else None) for subtask, value in values.items()}
    first, *others = found
    for other in others:
        if found[other] != found[first]:
            raise OperatorFailed(
                f"{name} cannot combine different values: {_kind_and_shape(found[first])} in subtask {first} and "
                f"{_kind_and_shape(found[other])} in subtask {other}. Pass values of one kind and shape in all subtasks"
            )


def _kind_and_shape(found: tuple[str, Any]) -> str:
    kind, shape = found
    return kind if shape is None else f"{kind} of shape {shape}"


def _kind(value: Any) -> str:
    if isinstance(value, bool | int | float | complex):
        return "number"
    if isinstance(value, pa.Array | pa.ChunkedArray):
        return f"Arrow array of {value.type}"
    if type(value).__module__ == "numpy":
        return "number" if not getattr(value, "shape", ()) else "numpy array"
    return type(value).__name__


def _shape(value: Any) -> Any:
    if isinstance(value, pa.Array | pa.ChunkedArray):
        return (len(value),)
    return getattr(value, "shape", None) or None


def _sum(values: Sequence[Any]) -> Any:
    """Sums numbers, numpy arrays or Arrow arrays. A sum of booleans is the number of true ones.

    Scalars become Python's integers, which cannot overflow. Numpy's arrays of integers get 64 bits, and can overflow
    beyond that.
    """
    first = values[0]
    if isinstance(first, pa.Array | pa.ChunkedArray):
        import pyarrow.compute as pc

        if pa.types.is_boolean(first.type):
            values = [value.cast(pa.int64()) for value in values]
        return functools.reduce(pc.add_checked, values)
    if _kind(first) == "numpy array":
        return _numpy_sum(values)
    if _kind(first) != "number":
        raise OperatorFailed(
            f"cannot sum values of type {_kind(first)}: 'sum' takes numbers, numpy arrays and Arrow arrays; use "
            "'concat' or a function"
        )
    if all(_has_kind(value, "biu") for value in values):
        return sum(map(int, values))
    return functools.reduce(_add, [int(value) if _has_kind(value, "b") else value for value in values])


def _numpy_sum(values: Sequence[Any]) -> Any:
    np = _numpy()
    common = np.result_type(*values)
    if common.kind not in "biu":
        return _reduced_in_place(
            np.add, [value.astype("int64") if value.dtype.kind == "b" else value for value in values]
        )
    result = values[0].astype("uint64" if common.kind == "u" else "int64")
    for other in values[1:]:
        np.add(result, other, out=result)
    return result


def _has_kind(value: Any, kinds: str) -> bool:
    """Whether a number has one of these kinds of numpy: b (boolean), i or u (integer)."""
    if type(value).__module__ == "numpy":
        return _numpy().asarray(value).dtype.kind in kinds
    return isinstance(value, bool) or ("i" in kinds and isinstance(value, int))


def _extreme(choose: Callable[[Any, Any], Any], arrays: str, arrow: str) -> Callable[[Sequence[Any]], Any]:
    """The minimum or the maximum.

    Uses the ufunc `arrays` for numpy arrays, and the function `arrow` for Arrow arrays.
    """

    def reduce(values: Sequence[Any]) -> Any:
        if isinstance(values[0], pa.Array | pa.ChunkedArray):
            import pyarrow.compute as pc

            return functools.reduce(_nan_first(getattr(pc, arrow)), values)
        if _kind(values[0]) == "numpy array":
            return _reduced_in_place(getattr(_numpy(), arrays), values)
        return functools.reduce(_nan_or(choose), values)

    return reduce


def _nan_or(choose: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Chooses one of two values. As in numpy, a NaN is chosen before other numbers, in whatever order they are."""

    def chosen(one: Any, other: Any) -> Any:
        if _kind(one) == "number":
            for value in (one, other):
                if value != value:  # noqa: PLR0124 (true for a NaN of any type)
                    return value
        return choose(one, other)

    return chosen


def _nan_first(choose: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Like `_nan_or`, for the elements of Arrow arrays."""
    import pyarrow.compute as pc

    def chosen(one: Any, other: Any) -> Any:
        found = choose(one, other)
        for values in (one, other):
            if pa.types.is_floating(values.type):
                found = pc.if_else(pc.fill_null(pc.is_nan(values), False), values, found)
        return found

    return chosen


def _reduced_in_place(ufunc: Any, values: Sequence[Any]) -> Any:
    """Like `functools.reduce`, but reuses the first intermediate array for later results of the same type."""
    result, *others = values
    for number, other in enumerate(others):
        fits = number > 0 and _numpy().result_type(result, other) == result.dtype
        result = ufunc(result, other, out=result) if fits else ufunc(result, other)
    return result


def _add(one: Any, other: Any) -> Any:
    return one + other


def _concat(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, pa.ChunkedArray):
        return pa.chunked_array([chunk for value in values for chunk in value.chunks], first.type)
    if isinstance(first, pa.Array):
        return pa.concat_arrays(values)
    if isinstance(first, pa.Table):
        return pa.concat_tables(values)
    if isinstance(first, pa.RecordBatch):
        return pa.Table.from_batches(values)
    if _kind(first) == "numpy array":
        return _numpy().concatenate(values)
    if isinstance(first, bytes):
        return b"".join(values)
    if isinstance(first, str):
        return "".join(values)
    if isinstance(first, list | tuple):
        return functools.reduce(_add, values)
    raise OperatorFailed(
        f"cannot concatenate values of type {_kind(first)}: 'concat' takes lists, tuples, text, bytes, numpy arrays, "
        "and Arrow arrays, record batches and tables; use a function"
    )


def _numpy() -> ModuleType:
    import numpy as np

    return np


READY_MADE: Final[dict[str, Callable[[Sequence[Any]], Any]]] = {
    "sum": _sum,
    "min": _extreme(min, "minimum", "min_element_wise"),
    "max": _extreme(max, "maximum", "max_element_wise"),
    "concat": _concat,
}
