"""Fingerprints: digests that compare functions or values across processes. They run no user code."""

from __future__ import annotations

import dis
import hashlib
import pickle
import sys
import types
from collections.abc import Iterable
from typing import Any, Final

from pyspark import cloudpickle

__all__ = ["fingerprint"]

#: Pickle returns the same bytes for each of these in every process.
_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes, type(Ellipsis)})
_NAMED: Final = (types.FunctionType, types.BuiltinFunctionType, type)
#: The flag of a class that Python code defines. Other classes belong to the interpreter or to an extension.
_HEAP_TYPE: Final = 1 << 9
#: Attributes of a class that do not affect its behaviour.
_IGNORED: Final = frozenset(
    {"__module__", "__doc__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__", "_abc_impl"}
)


def fingerprint(function: Any, pickled: bytes) -> bytes:
    """Returns a digest that is the same in every process for equal functions or values, and different for others.

    A function or class that can be imported by its name is identified by that name. Any other is identified by its
    code (without line numbers), its defaults, the values of its closure, and the globals that it uses. Objects are
    identified by their pickled form. The order of sets and dicts does not matter. `pickled` is the function or value,
    pickled by cloudpickle. If an object can be pickled but not inspected, the digest of `pickled` is returned.

    Not promised: equal fingerprints for an object whose pickled form differs each time.
    """
    try:
        return _Walk().digest(function)
    except Exception:  # a user's __reduce__ raised, or the recursion is too deep
        return _hashed("pickled", [pickled])


def _hashed(kind: str, parts: Iterable[bytes]) -> bytes:
    made = hashlib.blake2b(kind.encode(), digest_size=16)
    for part in parts:
        made.update(b"%d:" % len(part))
        made.update(part)
    return made.digest()


def _name(value: Any) -> str | None:
    """Returns the name under which every process can import this function or class, or None."""
    if not isinstance(value, _NAMED) or value.__module__ in (None, "__main__"):
        return None
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    is_importable = found is value or (isinstance(value, type) and not value.__flags__ & _HEAP_TYPE)
    return f"{value.__module__}.{value.__qualname__}" if is_importable else None


def _global_names(code: types.CodeType) -> set[str]:
    """The names of the globals that the code, and the functions defined in it, use."""
    names = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_global_names(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return []


class _Walk:
    """Visits each object that a function refers to once. A cyclic reference is identified by its position."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[bytes, Any]] = {}  # with the object, so that its id is not reused
        self._open: dict[int, int] = {}

    def digest(self, value: Any) -> bytes:
        if type(value) in _PLAIN:
            return _hashed(type(value).__name__, [pickle.dumps(value, 4)])
        id_ = id(value)
        if id_ in self._done:
            return self._done[id_][0]
        if id_ in self._open:
            return _hashed("again", [b"%d" % self._open[id_]])
        self._open[id_] = len(self._open)
        digest = self._compute(value)
        del self._open[id_]
        self._done[id_] = (digest, value)
        return digest

    def _all(self, kind: str, *values: Any) -> bytes:
        return _hashed(kind, [self.digest(value) for value in values])

    def _compute(self, value: Any) -> bytes:
        if (name := _name(value)) is not None:
            return _hashed("name", [name.encode()])
        if isinstance(value, types.FunctionType):
            closure = [_content(cell) for cell in value.__closure__ or ()]
            all_globals = value.__globals__
            used = {name: all_globals[name] for name in _global_names(value.__code__) if name in all_globals}
            return self._all(
                "function", value.__code__, value.__defaults__, value.__kwdefaults__, closure, used, value.__dict__
            )
        if isinstance(value, types.CodeType):
            names = (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
            counts = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags)
            return self._all("code", value.co_code, value.co_consts, value.co_exceptiontable, *names, *counts)
        if isinstance(value, type):
            slots = (types.GetSetDescriptorType, types.MemberDescriptorType)
            own = {k: v for k, v in vars(value).items() if k not in _IGNORED and not isinstance(v, slots)}
            return self._all("class", type(value), value.__qualname__, value.__bases__, own)
        if type(value) in (tuple, list):
            return self._all(type(value).__name__, *value)
        if type(value) in (set, frozenset):
            return _hashed(type(value).__name__, sorted(map(self.digest, value)))
        if type(value) is dict:
            keys = {self.digest(key): key for key in value}
            return _hashed("dict", [part for key in sorted(keys) for part in (key, self.digest(value[keys[key]]))])
        return self._object(value)

    def _object(self, value: Any) -> bytes:
        reduce = cloudpickle.CloudPickler.dispatch_table.get(type(value))
        reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        if isinstance(reduced, str):
            return self._all("name", getattr(value, "__module__", None) or type(value).__module__, reduced)
        call, args, *more = reduced
        state, items, pairs = [*more, None, None, None][:3]
        return self._all("object", call, args, state, list(items or ()), list(pairs or ()))
