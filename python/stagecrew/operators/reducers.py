"""How the values of a superstep become one: pure functions of a list, in the order of subtasks. No Spark."""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from stagecrew.errors import OperatorMisused, SuperstepsFailed

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["Described", "Reducer", "described", "reduced"]

#: The name of one that is ready-made, or a function of two values.
Reducer = str | Callable[[Any, Any], Any]

#: Of how many functions a task remembers that it has looked into them.
_KNOWN: Final = 64


class Described(NamedTuple):
    """A reducer as it travels, as a plain tuple. An own one comes with its pickled function."""

    name: str
    #: Of an own one: by what tasks compare theirs.
    fingerprint: bytes = b""
    function: bytes | None = None

    def is_like(self, other: Described) -> bool:
        """Whether both are the same function."""
        return self[:2] == other[:2]


def reduced(reducer: Described, values: Sequence[Any]) -> Any:
    """One value of these, which are in the order of subtasks; None is left out, and is the result where all are None.

    Raises `SuperstepsFailed` for values that do not go together.
    """
    present = {subtask: value for subtask, value in enumerate(values) if value is not None}
    if not present:
        return None
    if reducer.function is not None:
        return functools.reduce(pickle.loads(reducer.function), present.values())
    _alike(reducer.name, present)
    return NAMES[reducer.name](list(present.values()))


def described(reducer: Reducer, known: dict[bytes, bytes]) -> Described:
    """A reducer as it travels. `known` is the caller's, for all its calls: what was pickled alike is looked into once.

    Raises `OperatorMisused` for a name that is none, for what cannot be called, and for a function that cannot be pickled.
    """
    if isinstance(reducer, str):
        if reducer not in NAMES:
            raise OperatorMisused(
                f"reduce() knows {', '.join(NAMES)}, and functions of two values; {reducer!r} is none of them"
            )
        return Described(reducer)
    if not callable(reducer):
        raise OperatorMisused(
            f"reduce() takes the name of a reducer or a function of two values, not {type(reducer).__name__}"
        )
    from pyspark import cloudpickle

    from stagecrew.listeners.fingerprints import fingerprint

    name = f"{getattr(reducer, '__module__', '')}.{getattr(reducer, '__qualname__', type(reducer).__qualname__)}"
    try:
        pickled: bytes = cloudpickle.dumps(reducer)  # type: ignore[no-untyped-call]
    except Exception as error:  # of anybody's __reduce__
        raise OperatorMisused(
            f"the driver reduces, and {name} cannot be sent there ({type(error).__name__}: {error}): give it only what can be pickled"
        ) from error
    key = hashlib.blake2b(pickled).digest()
    if key not in known:
        if len(known) >= _KNOWN:
            known.clear()
        known[key] = fingerprint(reducer, pickled)
    return Described(name, known[key], pickled)


def _alike(name: str, values: Mapping[int, Any]) -> None:
    """Whether the subtasks' values can be one: of one kind, and where it is done element by element, of one shape."""
    found = {subtask: (_kind(value), _shape(value) if name != "concat" else None) for subtask, value in values.items()}
    first, *others = found
    for other in others:
        if found[other] != found[first]:
            raise SuperstepsFailed(
                f"{name} of values that differ: {_words(found[first])} of subtask {first} and {_words(found[other])} of "
                f"subtask {other}"
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
        if numbers is _add:
            values = [_counted(value) for value in values]
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


def _counted(value: Any) -> Any:
    """A boolean, or an array of them, as numbers: numpy's sum of two is their "or", and Arrow has none."""
    if isinstance(value, pa.Array | pa.ChunkedArray):
        return value.cast(pa.int64()) if pa.types.is_boolean(value.type) else value
    if type(value).__module__ == "numpy" and _numpy().asarray(value).dtype.kind == "b":
        return value.astype("int64") if value.shape else int(value)
    return int(value) if isinstance(value, bool) else value


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
