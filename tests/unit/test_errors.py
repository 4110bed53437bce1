"""Errors are public, documented and picklable, and match the tree that the docstring of `stagecrew.errors` draws."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from stagecrew import errors


def drawn_tree() -> dict[str, str | None]:
    """Maps each name in the drawing to the name above it, or None for a root."""
    parents: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        if match := re.match(r"^    ([│├└─ ]*)([A-Z]\w+)(\s|$)", line):
            depth = len(match[1]) // 4
            above = [entry for entry in above if entry[0] < depth]
            parents[match[2]] = above[-1][1] if depth else None
            above.append((depth, match[2]))
    return parents


def test_the_drawing_matches_the_classes():
    """In the drawing, every class is below its first base class, and there are no other names."""
    classes = {name: value for name, value in vars(errors).items() if inspect.isclass(value)}
    actual = {name: value.__bases__[0].__name__ for name, value in classes.items()}
    roots = {"StagecrewError": "Exception", "TaskKilled": "BaseException"}
    assert {name: parent or roots[name] for name, parent in drawn_tree().items()} == actual
    assert len(actual) >= 17


def test_all_errors_are_public_and_sorted():
    """`__all__` is sorted and lists exactly the drawn names."""
    assert errors.__all__ == sorted(drawn_tree())


@pytest.mark.parametrize("name", errors.__all__)
def test_each_error_is_documented_and_can_be_pickled(name):
    """Each error has a docstring and keeps its message when pickled. All except TaskKilled are a StagecrewError."""
    kind = getattr(errors, name)
    assert kind.__doc__.strip()
    error = kind("what happened")
    assert str(error) == "what happened"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert copy.args == error.args
    assert isinstance(error, errors.StagecrewError) == (name != "TaskKilled")
    assert isinstance(error, Exception) == (name != "TaskKilled")


def test_a_hook_timeout_is_a_timeout_error():
    """`except TimeoutError` catches a HookTimeout."""
    assert issubclass(errors.HookTimeout, TimeoutError)
