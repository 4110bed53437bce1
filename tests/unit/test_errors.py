"""The tree of errors is the one that its docstring draws."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from stagecrew import errors


def drawn() -> dict[str, str | None]:
    """Each name of the drawing with the name above it; None for the roots."""
    parents: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        if match := re.match(r"^    ([│├└─ ]*)([A-Z]\w+)(\s|$)", line):
            depth = len(match[1]) // 4
            above = [one for one in above if one[0] < depth]
            parents[match[2]] = above[-1][1] if depth else None
            above.append((depth, match[2]))
    return parents


def test_the_drawing_is_the_tree():
    """Every class is drawn below its first base, and no other name is."""
    classes = {name: value for name, value in vars(errors).items() if inspect.isclass(value)}
    real = {name: value.__bases__[0].__name__ for name, value in classes.items()}
    roots = {"StagecrewError": "Exception", "TaskKilled": "BaseException"}
    assert {name: parent or roots[name] for name, parent in drawn().items()} == real
    assert len(real) >= 17


def test_all_are_public_and_sorted():
    """`__all__` names each of them."""
    assert errors.__all__ == sorted(drawn())


@pytest.mark.parametrize("name", errors.__all__)
def test_each_error(name):
    """It is documented, keeps its message, travels by pickle, and is caught by the root, except `TaskKilled`."""
    kind = getattr(errors, name)
    assert kind.__doc__.strip()
    error = kind("what happened")
    assert str(error) == "what happened"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert again.args == error.args
    assert isinstance(error, errors.StagecrewError) == (name != "TaskKilled")
    assert isinstance(error, Exception) == (name != "TaskKilled")


def test_a_timeout_is_also_pythons():
    """Who catches `TimeoutError` catches a hook's timeout."""
    assert issubclass(errors.HookTimeout, TimeoutError)
