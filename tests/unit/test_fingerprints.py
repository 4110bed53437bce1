"""Fingerprints of functions: equal for equal code and values in any process, and different otherwise."""

from __future__ import annotations

import dataclasses
import functools
import operator
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark import cloudpickle

from stagecrew.listeners.fingerprints import fingerprint

SCALE = 2
NAMES = {f"name {n}" for n in range(20)}


def in_closure(value: Any) -> Callable[[Any, Any], Any]:
    return lambda a, b: (a, b, value)


def by_default(value: Any) -> Callable[[Any, Any], Any]:
    def reduce(a: Any, b: Any, c: Any = value, *, d: Any = None) -> Any:
        return a, b, c, d

    return reduce


def by_keyword(value: Any) -> Callable[[Any, Any], Any]:
    def reduce(a: Any, b: Any, c: Any = None, *, d: Any = value) -> Any:
        return a, b, c, d

    return reduce


def recursive(last: int) -> Callable[[Any, Any], Any]:
    def reduce(a: Any, b: Any) -> Any:
        return last if a > b else reduce(b, a)

    return reduce


def by_global(more: int) -> Callable[[Any, Any], Any]:
    scope: dict[str, Any] = {"more": more, "unused": object(), "np": np}
    exec("def inner(a): return a + more\ndef reduce(a, b): return [inner(x) + np.abs(x) for x in (a, b)]", scope)
    return scope["reduce"]


def an_object(value: Any, sign: int = 1) -> Any:
    class Base:
        def __init__(self) -> None:
            self.value = value

    if sign == 1:

        class Reducer(Base):
            def __call__(self, a: Any, b: Any) -> Any:
                return super().__new__, a + b

            def method(self, a: Any, b: Any) -> Any:
                return a + b
    else:

        class Reducer(Base):  # type: ignore[no-redef]
            def __call__(self, a: Any, b: Any) -> Any:
                return super().__new__, a - b

    return Reducer()


def a_dataclass(value: int) -> Any:
    @dataclasses.dataclass
    class Reducer:
        value: int
        found: dict[str, int] = dataclasses.field(default_factory=dict)

        @property
        def twice(self) -> int:
            return 2 * self.value

        @staticmethod
        def sign() -> int:
            return 1

        def __call__(self, a: Any, b: Any) -> Any:
            return a, b

    return Reducer(value)


def with_attribute(value: Any) -> Any:
    def reduce(a: Any, b: Any) -> Any:
        return a, b, reduce.value

    reduce.value = value
    return reduce


def with_unassigned_variable() -> Any:
    def reduce(a: Any, b: Any) -> Any:
        return later(a, b)

    if not NAMES:
        later = max
    return reduce


#: Each maker returns a function. No two makers return equal functions.
MAKERS: list[Callable[[], Any]] = [
    lambda: lambda a, b: a + b,
    lambda: lambda a, b: a * b,
    lambda: lambda a, b: a + b + 1,
    lambda: lambda a, b: a + b + 1.0,
    lambda: lambda a, b: a + b + True,
    lambda: lambda a, b: a.real + b,
    lambda: lambda a, b: a.imag + b,
    lambda: lambda a, b: [x + 1 for x in (a, b)],
    lambda: lambda a, b: [x + 2 for x in (a, b)],
    lambda: lambda a, b: a + b + SCALE,
    *(functools.partial(in_closure, value) for value in (1, "1", b"1", 1j, 0.0, -0.0, None, ..., (), [], [1], (1,))),
    *(functools.partial(in_closure, value) for value in ({"a": 1, "b": 2}, {"a": 2, "b": 1})),
    *(functools.partial(in_closure, value) for value in ({1, 2}, frozenset({1, 2}))),
    *(functools.partial(in_closure, value) for value in (np.arange(3), np.arange(3.0), np.int64(1), np.arange(4)[1:])),
    *(functools.partial(in_closure, value) for value in (np.maximum, np.add, len, dict, [].append, str.join, range(3))),
    lambda: in_closure({f"name {n}" for n in range(20)}),
    lambda: in_closure(max(NAMES)),
    lambda: in_closure(dict.fromkeys(NAMES, 1)),
    *(functools.partial(maker, value) for maker in (by_default, by_keyword, recursive) for value in (1, 2)),
    *(functools.partial(maker, value) for maker in (by_global, a_dataclass) for value in (1, 2)),
    *(functools.partial(maker, value) for maker in (with_attribute, an_object) for value in (1, 2)),
    lambda: an_object(1, sign=-1),
    lambda: an_object(1).method,
    lambda: an_object(2).method,
    lambda: functools.partial(in_closure(1), 5),
    lambda: functools.partial(in_closure(1), 6),
    lambda: functools.partial(in_closure(2), 5),
    lambda: functools.partial(max, key=in_closure(1)),
    lambda: functools.lru_cache(in_closure(3)).__wrapped__,
    lambda: operator.add,
    lambda: operator.mul,
    lambda: np.minimum,
    lambda: operator.itemgetter(1),
    with_unassigned_variable,
]  # fmt: skip


def digest(function: Any) -> str:
    digested = fingerprint(function, b"1")
    assert digested == fingerprint(function, b"2"), "the function could not be inspected"
    return digested.hex()


def test_different_functions_have_different_fingerprints():
    """Functions that differ in code, constants, defaults, closures, globals or state have different fingerprints."""
    digests = [digest(maker()) for maker in MAKERS]
    for number, value in enumerate(digests):
        assert value not in digests[:number], f"maker {number} equals maker {digests.index(value)}"


@pytest.mark.parametrize("number", range(len(MAKERS)))
def test_equal_functions_have_equal_fingerprints(number):
    """A function that is created twice, or unpickled twice, has the same fingerprint."""
    maker = MAKERS[number]
    assert digest(maker()) == digest(maker())
    pickled = cloudpickle.dumps(maker())
    one, other = cloudpickle.loads(pickled), cloudpickle.loads(pickled)
    assert digest(one) == digest(other)


def test_fingerprints_are_equal_in_other_processes():
    """Fingerprints do not depend on hash seeds, the order of sets or the ids of objects."""
    code = "import test_fingerprints as t; print([t.digest(maker()) for maker in t.MAKERS])"
    folder = str(Path(__file__).parent)
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join([folder, *sys.path])},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].count(",") == len(MAKERS) - 1


def test_a_function_that_cannot_be_inspected_uses_its_pickled_bytes():
    """For a function that cannot be inspected, the pickled bytes are used, so different functions never seem equal."""

    class NotPicklable:
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("cannot be pickled")

    function = in_closure(NotPicklable())
    assert fingerprint(function, b"1") == fingerprint(in_closure(NotPicklable()), b"1") != fingerprint(function, b"2")
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert fingerprint(in_closure(deep), b"1") == fingerprint(function, b"1")


def test_the_line_number_of_a_function_does_not_matter():
    """Functions with the same code on different lines have the same fingerprint."""
    one = lambda a, b: a + b  # noqa: E731
    other = lambda a, b: a + b  # noqa: E731
    assert digest(one) == digest(other)
