"""How the values of a superstep become one: pure functions of a list, in the order of subtasks. No Spark."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from stagecrew.errors import OperatorMisused, SuperstepsFailed

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["Reducer", "reduced"]

#: The name of one that is ready-made, or a function of two values.
Reducer = str | Callable[[Any, Any], Any]


def reduced(name: str, function: bytes | None, values: Sequence[Any]) -> Any:
    """One value of these, which are in the order of subtasks; None is left out, and is the result where all are None.

    `name` is one of `NAMES`, or that of an own reducer, whose pickled function comes with it. Raises `SuperstepsFailed` for
    values that do not go together.
    """
    present = [value for value in values if value is not None]
    if not present:
        return None
    if function is not None:
        return functools.reduce(pickle.loads(function), present)
    _alike(name, present)
    return NAMES[name](present)


def described(reducer: Reducer) -> tuple[str, bytes | None]:
    """A reducer as it travels: its name, by which tasks compare theirs, and its function where it is an own one.

    Raises `OperatorMisused` for a name that is none, and for what cannot be called.
    """
    if isinstance(reducer, str):
        if reducer not in NAMES:
            raise OperatorMisused(
                f"reduce() knows {', '.join(NAMES)}, and functions of two values; {reducer!r} is none of them"
            )
        return reducer, None
    if not callable(reducer):
        raise OperatorMisused(
            f"reduce() takes the name of a reducer or a function of two values, not {type(reducer).__name__}"
        )
    from pyspark import cloudpickle

    name = f"{getattr(reducer, '__module__', '')}.{getattr(reducer, '__qualname__', type(reducer).__qualname__)}"
    return name, cloudpickle.dumps(reducer)  # type: ignore[no-untyped-call]


def _alike(name: str, values: Sequence[Any]) -> None:
    """Whether the values can be one: of one kind, and where it is done element by element, of one shape."""
    first, *others = [(_kind(value), _shape(value) if name != "concat" else None) for value in values]
    for number, other in enumerate(others, 1):
        if other != first:
            raise SuperstepsFailed(
                f"{name} of values that differ: {_words(first)} and {_words(other)} (value {number})"
            )


def _words(of: tuple[str, Any]) -> str:
    return of[0] if of[1] is None else f"{of[0]} of shape {of[1]}"


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


def _elementwise(numbers: Callable[[Any, Any], Any], arrays: str, arrow: str) -> Callable[[Sequence[Any]], Any]:
    def reduce(values: Sequence[Any]) -> Any:
        if isinstance(values[0], pa.Array | pa.ChunkedArray):
            import pyarrow.compute as pc

            return functools.reduce(getattr(pc, arrow), values)
        if _kind(values[0]) == "numpy array":
            return _folded(getattr(_numpy(), arrays), values)
        if _kind(values[0]) != "number" and numbers is _add:
            raise SuperstepsFailed(
                f"no sum of {_kind(values[0])}: numbers, numpy and Arrow arrays have one; see concat"
            )
        return functools.reduce(numbers, values)

    return reduce


def _folded(of_two: Any, values: Sequence[Any]) -> Any:
    """As `functools.reduce`, but what is made of the first two takes the others in, where it is of a type that can."""
    result, *others = values
    for number, other in enumerate(others):
        fits = number > 0 and _numpy().result_type(result, other) == result.dtype
        result = of_two(result, other, out=result) if fits else of_two(result, other)
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
    raise SuperstepsFailed(
        f"no concatenation of {_kind(first)}: lists, tuples, text, bytes, numpy and Arrow arrays have one"
    )


def _numpy() -> ModuleType:
    import numpy as np

    return np


NAMES: Final[dict[str, Callable[[Sequence[Any]], Any]]] = {
    "sum": _elementwise(_add, "add", "add_checked"),
    "min": _elementwise(min, "minimum", "min_element_wise"),
    "max": _elementwise(max, "maximum", "max_element_wise"),
    "concat": _concat,
}
