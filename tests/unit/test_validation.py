"""Wrong arguments are refused on the driver, with one sentence that says what to write."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle

from stagecrew import Lifetime, Listener, ListenerContext, Scope, resource
from stagecrew.errors import ConfigurationError, OperatorMisused
from stagecrew.operators.commit_log import FileCommitLog, MemoryCommitLog, commit_log_of
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.session.registration import checked, pickled

CONTEXT = ListenerContext("app", "topology", "id", "1", "localhost", Scope.WORKER)


def resource_with(**options: Any) -> Any:
    """Returns a resource whose function was decorated with these options."""

    @resource(**options)
    def pool(context):
        yield 1

    return pool()


def class_with(scope: Any = Scope.WORKER, lifetime: Any = Lifetime.APPLICATION) -> Any:
    """Returns a listener whose class has these attributes."""
    return type("Pool", (Listener,), {"scope": scope, "lifetime": lifetime})()


def instance_with(**attributes: Any) -> Any:
    """Returns a registered listener that got these attributes after its creation."""
    listener = Listener()
    vars(listener).update(attributes)
    return checked([listener])[0]


class ScopedByProperty(Listener):
    """Computes its scope in a property."""

    def __init__(self, where: str) -> None:
        self.where = where

    @property
    def scope(self) -> Any:
        return Scope(self.where)


@dataclasses.dataclass(frozen=True)
class Frozen(Listener):
    """Takes its scope as an argument, and is immutable."""

    scope: Any = Scope.WORKER


# -- scopes and lifetimes


@pytest.mark.parametrize("make", [resource_with, class_with, instance_with])
def test_scopes_and_lifetimes_can_be_given_as_text(make):
    """`"executor"` works like `Scope.EXECUTOR`, and `"execution"` like `Lifetime.EXECUTION`, even when pickled."""
    listener = pickle.loads(pickled([make(scope="executor", lifetime="execution")])[0])
    assert (listener.scope, listener.lifetime) == (Scope.EXECUTOR, Lifetime.EXECUTION)


@pytest.mark.parametrize("make", [resource_with, class_with, instance_with])
@pytest.mark.parametrize("wrong", ["node", "EXECUTOR", None, 1, Lifetime.EXECUTION])
def test_an_unknown_scope_is_refused(make, wrong):
    """An unknown scope is refused when the class is defined, the function decorated or the listener registered. The
    error lists the valid scopes."""
    with pytest.raises(ConfigurationError, match=r"^scope .* is none of 'worker', 'executor'"):
        make(scope=wrong)


@pytest.mark.parametrize("make", [resource_with, class_with, instance_with])
def test_an_unknown_lifetime_is_refused(make):
    """An unknown lifetime is refused when the class is defined, the function decorated or the listener registered."""
    with pytest.raises(ConfigurationError, match=r"^lifetime .* is none of 'application', 'execution'"):
        make(lifetime="job")


def test_a_listener_can_compute_its_scope():
    """A listener's scope can be a property, or a field of a frozen dataclass."""
    assert checked([ScopedByProperty("executor")])[0].scope is Scope.EXECUTOR
    assert checked([Frozen("executor")])[0].scope is Scope.EXECUTOR


# -- resources


def test_a_resource_needs_a_generator_function():
    """`@resource` refuses anything but a generator function with a first parameter."""

    def plain(context):
        return 1

    async def later(context):
        yield 1

    for wrong in (plain, later, lambda context: iter([1])):
        with pytest.raises(ConfigurationError, match=r"^@resource decorates a generator function, but .* has no yield"):
            resource(wrong)
    with pytest.raises(ConfigurationError, match="not 7"):
        resource(7)
    with pytest.raises(ConfigurationError, match="first parameter"):

        @resource
        def nothing():
            yield 1


def test_everything_that_creates_generators_is_accepted():
    """`@resource` accepts a wrapped generator function, a partial of one, and an object whose `__call__` is one."""

    def pool(context, dsn):
        yield dsn

    @functools.wraps(pool)
    def wrapped(*args):
        return pool(*args)

    class Pools:
        def __call__(self, context, dsn):
            yield dsn

    for function in (pool, wrapped):
        made = resource(function)("a")
        made.open(CONTEXT)
        assert made._opened() == "a"
    for function in (functools.partial(pool, dsn="b"), Pools()):
        made = resource(name="orders")(function)(dsn="b")
        made.open(CONTEXT)
        assert made._opened() == "b"


@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        ((), {}, "missing a required argument: 'dsn'"),
        (("a", 2), {}, "too many positional arguments"),
        (("a",), {"sise": 2}, "got an unexpected keyword argument 'sise'"),
    ],
)
def test_a_resource_takes_the_arguments_of_its_function(args, kwargs, problem):
    """Wrong arguments are refused when a resource is created, before any task runs. The error contains no values,
    because they could be secrets."""

    @resource(name="pool")
    def pool(context, dsn, *, size=1):
        yield dsn

    with pytest.raises(ConfigurationError) as raised:
        pool(*args, **kwargs)
    assert str(raised.value) == f"resource 'pool' cannot be created: {problem}. Its arguments: dsn, size"


def test_a_pickled_resource_is_not_checked_again():
    """A pickled resource is not checked again, because the driver has checked it."""

    @resource
    def pool(context, *, size=1):
        yield size

    arrived = pickle.loads(cloudpickle.dumps(pool))
    assert arrived(size=3)._kwargs == {"size": 3}


# -- commit logs


def test_a_commit_log_by_its_folder(tmp_path):
    """A path, given as a text or an object, is used as the folder of a commit log."""
    for folder in (str(tmp_path / "one"), tmp_path / "two"):
        commit_log = commit_log_of(folder)
        assert isinstance(commit_log, FileCommitLog)
        commit_log.write("id", {"state": "opened"}, 0)
        assert list(Path(folder).iterdir())
    memory = MemoryCommitLog()
    assert commit_log_of(memory) is memory


@pytest.mark.parametrize("wrong", ["s3://bucket/decisions", "", 7, FileCommitLog])
def test_invalid_commit_logs_are_refused(wrong):
    """A URI, an empty text, a number or a class is refused as a commit log."""
    with pytest.raises(OperatorMisused, match=r"^commit_log=.* is neither a folder .* nor a commit log"):
        commit_log_of(wrong)


# -- jobs

MODULE = """
import functools
def load(day, *, limit=10): return day
def anything(**settings): return settings
def positional(a, /, b): return a
@functools.cache
def decorated(day): return day
if True:
    def twice(a): return a
else:
    def twice(b): return b
replaced = lambda: 1
def replaced(a): return a
replaced = functools.partial(replaced, 1)
class Job:
    def __init__(self, day): pass
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The folder with a module of the submitter, and an archive with the same module in a package."""
    (tmp_path / "validated_etl.py").write_text(MODULE)
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        archive.writestr("zipped_etl/__init__.py", "")
        archive.writestr("zipped_etl/nightly.py", MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["validated_etl", "zipped_etl.nightly"])
@pytest.mark.parametrize(
    ("function", "arguments", "problem"),
    [
        ("load", {}, "is called without day"),
        ("load", {"day": 1, "limits": 2}, "does not take limits"),
        ("load", {"days": 1}, "is called without day and does not take days"),
        ("positional", {"a": 1, "b": 1}, "takes a by position only"),
    ],
)
def test_a_job_must_match_the_arguments_of_its_function(module, name, function, arguments, problem):
    """At submission, a job's arguments are compared with the source of its function, which is not run."""
    with pytest.raises(ConfigurationError) as raised:
        JobSpec.of_function(f"{name}:{function}", arguments, py_files=[module / "package.zip"])
    assert f"{name}:{function}" in str(raised.value)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("load", {"day": 1}),
        ("load", {"day": 1, "limit": 2}),
        ("anything", {"a": 1}),
        ("decorated", {"b": 1}),
        ("twice", {"b": 1}),
        ("replaced", {}),
        ("Job", {}),
    ],
)
def test_arguments_that_match_or_are_unknown_are_accepted(module, function, arguments):
    """Arguments are accepted if they match the function, or if its source does not determine its arguments."""
    for name in ("validated_etl", "zipped_etl.nightly"):
        JobSpec.of_function(f"{name}:{function}", arguments, py_files=[module / "package.zip"])


def test_arguments_of_installed_functions_are_checked():
    """Arguments are also compared with the source of a function in an installed module."""
    with pytest.raises(ConfigurationError, match="json:loads is called without s"):
        JobSpec.of_function("json:loads", {})
    JobSpec.of_function("json:loads", {"s": "1"})
    JobSpec.of_function("math:sqrt", {})  # written in C, so its arguments are unknown
