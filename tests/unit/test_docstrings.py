"""Docstrings of public names: the arguments, results and errors that they describe match the code."""

import builtins
import importlib
import inspect
import logging

import griffe
import pytest

import stagecrew
from stagecrew import errors

#: The modules from which users import.
MODULES = [
    "stagecrew",
    "stagecrew.operators",
    "stagecrew.operators.enumerators",
    "stagecrew.operators.sinks",
    "stagecrew.recovery",
    "stagecrew.testing",
]


#: The protocols that sinks and commit logs implement, and that describe their methods.
PROTOCOLS = (stagecrew.operators.Committer, stagecrew.operators.CommitLog)
DESCRIBED_BY_PROTOCOLS = {name for protocol in PROTOCOLS for name in vars(protocol)} | {"in_tasks", "stored_mark"}


def is_described_elsewhere(cls, attribute):
    """Returns whether a base class or a protocol describes this method."""
    if any(attribute in vars(base) for base in cls.__mro__[1:-1]):
        return True
    implements = cls.__module__.startswith(("stagecrew.operators.sinks.", "stagecrew.operators.commit_log"))
    return implements and cls not in PROTOCOLS and attribute in DESCRIBED_BY_PROTOCOLS


def public_objects():
    """Returns the public classes and functions by name, and the public methods and properties of the classes."""
    found = {}
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isroutine(value) or inspect.isclass(value):
                found.setdefault(f"{value.__module__}.{value.__qualname__}", value)
    for name, value in list(found.items()):
        if inspect.isclass(value) and not issubclass(value, BaseException):
            for attribute, member in vars(value).items():
                is_member = inspect.isroutine(member) or isinstance(member, property)
                if is_member and not attribute.startswith("_") and not is_described_elsewhere(value, attribute):
                    found[f"{name}.{attribute}"] = member
    return found


OBJECTS = public_objects()


def function_of(value):
    value = getattr(value, "fget", value)
    return inspect.unwrap(getattr(value, "__func__", value))


def sections(value):
    """Returns the sections of a Google-style docstring by kind."""
    logging.getLogger("griffe").setLevel(logging.ERROR)
    docstring = griffe.Docstring(inspect.getdoc(value) or "", parser="google")
    return {section.kind.value: section.value for section in docstring.parse(warnings=False)}


def arguments_of(function):
    parameters = list(inspect.signature(function).parameters.values())
    return [one.name for one in parameters if one.name not in ("self", "cls")]


FUNCTIONS = {
    name: value for name, value in OBJECTS.items() if inspect.isroutine(value) and not isinstance(value, property)
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_arguments_are_those_of_the_signature(name):
    """A docstring describes all arguments of its function, in the order of the signature."""
    function = function_of(FUNCTIONS[name])
    described = [one.name.lstrip("*") for one in sections(FUNCTIONS[name]).get("parameters", [])]
    assert described == arguments_of(function)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_result_is_described(name):
    """A docstring describes what its function returns or yields, unless this is None."""
    function = function_of(FUNCTIONS[name])
    result = str(inspect.signature(function).return_annotation)
    described = {"returns", "yields"} & sections(FUNCTIONS[name]).keys()
    assert bool(described) == (result not in ("None", "NoReturn"))


@pytest.mark.parametrize("name", OBJECTS)
def test_each_error_that_is_described_exists(name):
    """Every name in a Raises section is a stagecrew error or a built-in exception."""
    for one in sections(OBJECTS[name]).get("raises", []):
        found = getattr(errors, str(one.annotation), None) or getattr(builtins, str(one.annotation), None)
        assert isinstance(found, type), one.annotation
        assert issubclass(found, BaseException), one.annotation


def test_every_public_name_has_a_docstring():
    """Every public class, function and method has a docstring of its own, not only an inherited one."""
    assert [name for name, value in OBJECTS.items() if value.__doc__ is None] == []


def test_every_class_and_function_has_an_example():
    """Every public class and function has an example. `test_doctests` and `test_docs_examples` run the examples."""
    first = {
        name: value
        for name, value in OBJECTS.items()
        if (inspect.isclass(value) and not issubclass(value, BaseException))
        or (inspect.isfunction(value) and "." not in value.__qualname__)
    }
    assert [name for name, value in first.items() if "Examples:" not in (value.__doc__ or "")] == []
