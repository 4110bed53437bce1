"""Listeners by themselves: their identity, how they are pickled, and the errors of `get` outside a task."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import importlib
import logging
import os
import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest
from pyspark import cloudpickle

import stagecrew
from stagecrew import Lifetime, Listener, ListenerContext, LoggingContext, Resource, Scope, Task, resource
from stagecrew.errors import ConfigurationError, ResourceNotOpen
from stagecrew.listeners.identity import Identity, Registration
from stagecrew.listeners.listener import decorates, listener_name
from stagecrew.listeners.not_open import NotRegisteredError, explain
from stagecrew.listeners.not_open import Task as TaskOf
from stagecrew.listeners.resolution import resolving
from stagecrew.listeners.resource import opened_value, registering

CONTEXT = ListenerContext("app", "topology", "id", "1", "localhost", Scope.WORKER)
SECRET = "a-password-in-an-argument"


class Pool(Listener):
    """Keeps its argument."""

    def __init__(self, dsn: str, *, size: int = 1) -> None:
        self.dsn, self.size = dsn, size


@resource
def pool(context, dsn, *, size=1):
    """Yields its argument."""
    yield f"{dsn} on {context.executor}"


def is_same(one: Listener, other: Listener) -> bool:
    """Returns whether both are the same listener, and asserts that the comparison is symmetric."""
    result = one._stagecrew.same(other._stagecrew)
    assert other._stagecrew.same(one._stagecrew) == result
    return result


def pickled_and_loaded(listener: Any) -> Any:
    """Returns the listener as it arrives with its registration."""
    with registering():
        return pickle.loads(cloudpickle.dumps(listener))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Returns a function that imports a module again from its source, as a worker does."""
    source = """
        import stagecrew

        class Pool(stagecrew.Listener):
            def __init__(self, dsn): self.dsn = dsn

        @stagecrew.resource
        def pool(context, dsn):
            yield dsn

        by_class, by_function, other = Pool("a"), pool("a"), pool("b")
    """
    name = "pools_of_this_test"
    (tmp_path / f"{name}.py").write_text("\n".join(line[8:] for line in source.splitlines()))
    monkeypatch.syspath_prepend(tmp_path)

    def imported():
        sys.modules.pop(name, None)
        return importlib.import_module(name)

    yield imported
    sys.modules.pop(name, None)


# -- identity


@pytest.mark.parametrize("listener", [Pool(SECRET), pool(SECRET)])
def test_a_pickled_copy_is_the_same(listener):
    """Pickled once or several times, complete or as a reference in a function, or copied with `copy`."""
    once = pickled_and_loaded(listener)
    assert once is not listener
    assert is_same(once, listener)
    assert is_same(pickled_and_loaded(once), listener)
    assert is_same(pickle.loads(cloudpickle.dumps(lambda: listener))(), listener)
    assert is_same(copy.copy(listener), listener)


def test_a_module_imported_again_creates_the_same_listeners(module):
    """Equal names and arguments give the same listener, though the objects and classes differ."""
    first_import, second_import = module(), module()
    assert first_import.by_class is not second_import.by_class
    assert is_same(first_import.by_class, second_import.by_class)
    assert is_same(first_import.by_function, second_import.by_function)
    assert not is_same(first_import.by_function, second_import.other)
    assert not is_same(first_import.by_class, second_import.by_function)


def test_listeners_of_one_factory_differ_by_arguments():
    """By position and by name. A default value need not be written."""
    assert is_same(pool("a"), pool("a"))
    assert not is_same(pool("a"), pool("b"))
    assert not is_same(pool("a", size=2), pool("a", size=3))
    assert is_same(Pool("a", size=2), Pool("a", size=2))
    assert not is_same(Pool("a", size=2), Pool("a", size=3))


def test_equal_arguments_that_pickle_differently_are_the_same():
    """Arguments are compared by equality and not by bytes: dicts in another order, or a number as float."""
    assert is_same(pool({"a": 1, "b": 2}), pool({"b": 2, "a": 1}))
    assert is_same(pool(1), pool(1.0))


def test_arguments_that_cannot_be_compared_are_never_equal():
    """If arguments cannot be pickled or compared, a listener equals only itself. The comparison raises nothing."""

    class Incomparable:
        def __eq__(self, other):
            raise ValueError("ambiguous")

        __hash__ = None

    one, other = pool(lambda: 1), pool(lambda: 1)
    assert is_same(one, one)
    assert not is_same(one, other)
    assert is_same(one, pickled_and_loaded(one))
    assert not is_same(pool(Incomparable()), pool(Incomparable()))


def test_a_notebook_cell_that_runs_again():
    """A function of the old cell finds the listener of the new one, and vice versa: name and arguments are equal."""
    cell = "@resource\ndef cell_pool(context, dsn):\n    yield dsn\nlistener = cell_pool('a')\n"
    runs = []
    for _ in range(2):
        names: dict[str, Any] = {"resource": resource, "__name__": "__main__"}
        exec(cell, names)
        runs.append(names["listener"])
    assert is_same(*runs)


def test_a_reference_is_identified_without_arguments():
    """A reference has no arguments. It does not match a listener with others, and matches a cell that was run again."""
    one, again, other = pool("a"), pool("a"), pool("b")
    one._stagecrew.note_registration("topology 'enrich'", "enrich-1")
    bare = one._stagecrew.reference()
    assert bare.same(one._stagecrew)
    assert one._stagecrew.same(bare)
    assert bare.same(pickle.loads(pickle.dumps(again._stagecrew)))
    assert not bare.same(other._stagecrew)
    assert not bare.same(pickle.loads(pickle.dumps(other._stagecrew)))
    assert bare.topologies == [("topology 'enrich'", "enrich-1", False)]
    assert pickle.loads(pickle.dumps(bare)).same(one._stagecrew)


WORKER = """
import json, pickle, sys
from types import SimpleNamespace
from stagecrew.listeners.resolution import resolving
from stagecrew.wire.frames import Frame
from stagecrew.worker.descriptions import described
from stagecrew.worker.lifecycle import Lifecycle

targets, function = pickle.load(sys.stdin.buffer)
hooks = SimpleNamespace(
    open=lambda topology, one: one.listener.open(None), close=lambda topology, one: one.listener.close(None)
)
entries = [{"kind": "name", "index": i, "name": "", "target": target} for i, target in enumerate(targets)]
lifecycle = Lifecycle(hooks)
body = json.dumps({"name": "application", "listeners": entries})
lifecycle.describe(described(Frame("OPEN", {"topology": "application", "body": body, "blobs": []}), lambda _: True))
lifecycle.begin(["application"], None)
with resolving(lifecycle.find):
    print(function())
"""


def test_configured_listeners_are_found_from_another_process(tmp_path, monkeypatch):
    """A function that is pickled by value finds each listener by module and name.

    The listeners come from one factory with equal arguments, have arguments that differ on the worker, are an attribute
    of a class, or come from a factory without arguments.
    """
    (tmp_path / "configured_pools.py").write_text(
        "import os, stagecrew\n"
        "@stagecrew.resource\n"
        "def pool(context, dsn='default'):\n    yield dsn\n"
        "class Plain(stagecrew.Listener):\n"
        "    def __init__(self, of): self.of = of\n"
        "    def open(self, context): self.opened = self.of\n"
        "orders, planes = pool('orders'), pool('planes')\n"
        "one, two = Plain('same'), Plain('same')\n"
        "here = Plain(os.getpid())\n"
        "class Holder:\n    inner = pool('inner')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    pools = importlib.import_module("configured_pools")
    names = ("orders", "planes", "Holder.inner", "one", "two", "here", "pool")
    targets = [f"configured_pools:{name}" for name in names]
    conf = {"spark.stagecrew.listeners": ", ".join(targets)}
    session = type("Session", (), {"_conf": conf})()
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", session)
    orders, planes, inner, plain = pools.orders, pools.planes, pools.Holder.inner, pools.pool()
    one, two, here = pools.one, pools.two, pools.here

    def work():
        assert one.get() is not two.get()
        return [orders.get(), planes.get(), inner.get(), one.get().opened, here.get().opened, plain.get()]

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        sent = cloudpickle.dumps((targets, work))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    worker = subprocess.run(
        [sys.executable, "-c", WORKER], input=sent, env=environment, capture_output=True, timeout=60, check=False
    )
    assert worker.returncode == 0, worker.stderr.decode()
    found = ast.literal_eval(worker.stdout.decode())
    assert [*found[:4], found[5]] == ["orders", "planes", "inner", "same", "default"]
    assert found[4] != os.getpid()


def test_the_places_of_registration_stay_short():
    """Only the last few places are kept, each once: they travel with each task's function."""
    one = pool("a")
    for i in (*range(50), 49, 48):
        one._stagecrew.note_registration(f"topology 'run {i}'", f"run-{i}")
    assert one._stagecrew.topologies == [(f"topology 'run {i}'", f"run-{i}", False) for i in (45, 46, 47, 49, 48)]


def test_identities_of_different_factories_differ():
    """Equal arguments do not make two classes equal."""
    assert not Identity("m:A", (1,), {}).same(Identity("m:B", (1,), {}))


# -- pickling


def test_a_resource_in_a_function_is_pickled_without_arguments():
    """The bytes contain no secret, and the result has a `get` but cannot be opened."""
    orders = pool(SECRET, size=7)

    def work(batches):
        return orders.get()

    data = cloudpickle.dumps(work)
    assert SECRET.encode() not in data
    assert SECRET.encode() not in pickle.dumps(orders)
    arrived = pickle.loads(pickle.dumps(orders))
    assert repr(arrived) == repr(orders) == "<resource pool>"
    with pytest.raises(ConfigurationError, match="this is only a reference to resource 'pool'"):
        arrived.open(CONTEXT)
    arrived.close(CONTEXT)


def test_a_resource_is_registered_with_its_arguments():
    """With its arguments, scope, lifetime and name. Its copy can be opened."""
    made = resource(scope=Scope.EXECUTOR, lifetime=Lifetime.EXECUTION, required=False, name="orders")(pool.function)(
        SECRET
    )
    arrived = pickled_and_loaded(made)
    assert (arrived.scope, arrived.lifetime, arrived.required) == (Scope.EXECUTOR, Lifetime.EXECUTION, False)
    assert listener_name(arrived) == "orders"
    arrived.open(CONTEXT)
    assert opened_value(arrived) == f"{SECRET} on 1"
    arrived.close(CONTEXT)
    assert opened_value(arrived) is None


def test_registering_is_limited_to_its_block_and_thread():
    """While one thread registers, functions of other threads travel without arguments; so do its own afterwards."""
    orders, inside, done, seen = pool(SECRET), threading.Event(), threading.Event(), []

    def other():
        inside.wait(10)
        seen.append(cloudpickle.dumps(orders))
        with registering():
            done.set()
            release.wait(10)
            seen.append(cloudpickle.dumps(orders))

    release = threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(ZeroDivisionError), registering(), registering():
        inside.set()
        assert done.wait(10)
        assert SECRET.encode() in cloudpickle.dumps(orders)
        raise ZeroDivisionError
    assert SECRET.encode() not in cloudpickle.dumps(orders)
    release.set()
    thread.join(10)
    assert not thread.is_alive()
    assert [SECRET.encode() in data for data in seen] == [False, True]


class WithState(Listener):
    """Leaves out attributes that cannot be pickled, and all of stagecrew's attributes."""

    def __init__(self, dsn: str) -> None:
        self.dsn, self.lock = dsn, threading.Lock()

    def __getstate__(self):
        return {"dsn": self.dsn}

    def __setstate__(self, state):
        self.dsn, self.lock = state["dsn"], None


class WithReduce(Listener):
    """Defines how it is rebuilt."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    def __reduce__(self):
        return (WithReduce, (self.dsn,))


class WithSlots(Listener):
    """Has slots and its base's dictionary."""

    __slots__ = ("dsn",)

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn


@dataclasses.dataclass
class AsDataclass(Listener):
    """Compared by its fields."""

    dsn: str


@dataclasses.dataclass(frozen=True)
class Frozen(Listener):
    """A frozen dataclass, whose attributes cannot be assigned."""

    dsn: str


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots(Listener):
    """Frozen and with slots: the decorator creates the class again."""

    dsn: str


class KeywordOnly(Listener):
    """Takes keyword-only arguments, in `__new__` too."""

    def __new__(cls, *, dsn):
        return super().__new__(cls, dsn=dsn)

    def __init__(self, *, dsn):
        self.dsn = dsn

    def __getnewargs_ex__(self):
        return (), {"dsn": self.dsn}


@pytest.mark.parametrize(
    "made",
    [
        WithState("a"),
        WithReduce("a"),
        WithSlots("a"),
        AsDataclass("a"),
        Frozen("a"),
        FrozenSlots("a"),
        KeywordOnly(dsn="a"),
        Pool("a"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_all_kinds_of_listeners_can_be_pickled(made):
    """Listeners keep their data and identity with every pickle protocol, however their class is pickled."""
    made._stagecrew.topologies.append("topology 'enrich'")
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        arrived = pickle.loads(pickle.dumps(made, protocol))
        assert type(arrived) is type(made)
        assert arrived.dsn == "a"
        assert arrived._stagecrew.id == made._stagecrew.id
        assert arrived._stagecrew.topologies == ["topology 'enrich'"]


def test_a_class_of_main_can_be_pickled():
    """A listener whose class cannot be imported is pickled together with its class."""
    names: dict[str, Any] = {"Listener": Listener, "__name__": "__main__"}
    exec("class Local(Listener):\n    def __init__(self, dsn): self.dsn = dsn\n", names)
    made = names["Local"]("a")
    arrived = pickled_and_loaded(made)
    assert arrived.dsn == "a"
    assert is_same(arrived, made)


def test_a_resource_inside_a_listener_is_registered_with_its_arguments():
    """A listener's parts are pickled with it when it is registered, and not when it is in a function."""
    made = Pool(SECRET)
    made.inner = pool("inner-" + SECRET)
    arrived = pickled_and_loaded(made)
    arrived.inner.open(CONTEXT)
    assert opened_value(arrived.inner) == f"inner-{SECRET} on 1"


# -- resource


def test_resource_with_and_without_arguments():
    """With and without arguments, the decorator returns a factory that looks like the function."""
    assert pool.__name__ == "pool"
    assert pool.__doc__ == "Yields its argument."
    assert pool("a").scope is Scope.WORKER
    assert isinstance(pool("a"), Resource)

    @resource(scope=Scope.EXECUTOR, required=False)
    def server(context):
        yield 1

    assert (server().scope, server().required, server().lifetime) == (Scope.EXECUTOR, False, Lifetime.APPLICATION)
    assert listener_name(server()).endswith("server")
    with pytest.raises(ConfigurationError, match="@resource decorates a generator function, not 7"):
        resource(7)


def test_a_resource_opens_and_closes_its_generator():
    """`open` runs it up to its `yield`, `close` runs the rest.

    It can be opened again, and a second close does nothing.
    """
    events = []

    @resource
    def tracked(context):
        events.append("open")
        yield len(events)
        events.append("close")

    made = tracked()
    for _ in range(2):
        made.open(CONTEXT)
        assert made._opened() is not None
        made.close(CONTEXT)
        made.close(CONTEXT)
    assert events == ["open", "close"] * 2


def test_a_resource_whose_generator_raises():
    """An exception before the `yield` is raised by `open`, and `close` does nothing.

    One after it is raised by `close`.
    """

    @resource
    def broken(context, where):
        try:
            if where == "open":
                raise ZeroDivisionError(where)
            yield 1
            raise ZeroDivisionError(where)
        finally:
            ended.append(where)

    ended: list[str] = []
    failing = broken("open")
    with pytest.raises(ZeroDivisionError, match="open"):
        failing.open(CONTEXT)
    assert ended == ["open"]
    failing.close(CONTEXT)
    closing = broken("close")
    closing.open(CONTEXT)
    with pytest.raises(ZeroDivisionError, match="close"):
        closing.close(CONTEXT)
    closing.close(CONTEXT)
    assert ended == ["open", "close"]


@pytest.mark.parametrize(("yields", "text"), [(0, "generator didn't yield"), (2, "generator didn't stop")])
def test_a_resource_that_does_not_yield_once(yields, text):
    """`open` or `close` raises an error, instead of returning a wrong value."""

    @resource
    def wrong(context):
        yield from range(yields)

    made = wrong()
    with pytest.raises(RuntimeError, match=text):
        made.open(CONTEXT)
        made.close(CONTEXT)


# -- get


def test_get_outside_of_a_task():
    """The error names the listener, the cause and the remedy."""
    with pytest.raises(ResourceNotOpen) as never:
        pool("a").get()
    assert str(never.value) == (
        "listener 'pool' is not open here: get() was called outside of a task, and listeners are only open in tasks. Call it in "
        "a function that a task runs. A function for foreachBatch runs on the driver. In a test, use "
        "`with stagecrew.testing.opened(pool, value=...)`."
    )


ENRICH = Registration("topology 'enrich'", "enrich-1")
THREAD = "it was registered for topology 'enrich', and the action ran in a thread outside of this topology"
AFTER = "it was registered for topology 'enrich', and the action ran after this topology had closed"
INNER = NotRegisteredError(["inner", "outer", "application"], ["orders", "planes"])


@pytest.mark.parametrize(
    ("registrations", "task", "missing", "cause", "remedy"),
    [
        ([], TaskOf(), None, "this task belongs to no topology.", "Run the action inside `with crew.topology("),
        ([], TaskOf(), NotRegisteredError(["application"], ["a"]), "belongs to no topology (it has: 'a')", "configure(builder"),
        ([], TaskOf(closed=("my-run-2",)), None, "was in topology 'my-run', which has closed", "topology.keep(dataset)"),
        ([], TaskOf("t-1"), INNER, "this task runs in topology 'inner' inside 'outer', which does not have it", "topology('inner',"),
        ([], TaskOf("t-1"), INNER, "(it has: 'orders', 'planes')", "listeners=[pool]"),
        ([ENRICH], TaskOf("t-1"), INNER, "it was registered for topology 'enrich'", "Register it there"),
        ([ENRICH], TaskOf(), None, THREAD, "topology.wrap(f)"),
        ([ENRICH], TaskOf(closed=("other-1",)), None, THREAD, "topology.wrap(f)"),
        ([ENRICH], TaskOf(), NotRegisteredError(["application"], ["a"]), THREAD, "topology.wrap(f)"),
        ([], TaskOf(), NotRegisteredError([], [], "", ["enrich"]), THREAD, "topology.wrap(f)"),
        ([ENRICH._replace(ended=True)], TaskOf(), None, AFTER, "Run the action inside `with crew.topology("),
        ([ENRICH], TaskOf(closed=("other-1", "enrich-1")), None, AFTER, "topology.keep(dataset)"),
        ([ENRICH], TaskOf("enrich-1"), None, AFTER, "Run the action inside"),
        ([ENRICH], TaskOf("t-1", closed=("enrich-1",)), INNER, AFTER, "Run the action inside"),
        ([Registration("the application", "application")], TaskOf(), None, "of another session", "configure(builder"),
        ([ENRICH], None, None, "get() was called outside of a task", "stagecrew.testing.opened(pool"),
        ([ENRICH], TaskOf("t-1"), NotRegisteredError(["t"], [], "it is a copy. Do this"), "it is a copy", "Do this"),
    ],
)  # fmt: skip
def test_each_cause_has_its_own_message(registrations, task, missing, cause, remedy):
    """Not registered in the task's topology, no topology, a thread without `wrap`, a closed topology, another
    definition.
    """
    text = explain("pool", registrations, task, missing)
    assert text.startswith("listener 'pool' is not open here: ")
    assert cause in text
    assert remedy in text
    assert (THREAD in text) + (AFTER in text) + ("belongs to no topology" in text) + ("does not have it" in text) <= 1
    assert text.count("..") == text.count("...")


def test_get_asks_the_innermost_resolver_first():
    """If it finds nothing it asks the outer resolvers, and then reports the reason of the innermost one."""
    orders = pool("a")

    def refuses(text):
        def resolve(identity):
            raise NotRegisteredError([], [], text)

        return resolve

    with resolving(lambda identity: "outer"), resolving(refuses("inner")):
        assert orders.get() == "outer"
    with resolving(lambda identity: "outer"), resolving(lambda identity: "inner"):
        assert orders.get() == "inner"
    with (
        resolving(refuses("this task runs elsewhere")),
        pytest.raises(ResourceNotOpen, match="this task runs elsewhere"),
    ):
        orders.get()
    with pytest.raises(ResourceNotOpen):
        orders.get()


def test_get_works_in_every_thread():
    """A thread that a task started gets the same resources. After the task it gets the error."""
    orders, results = pool("a"), []

    def ask():
        try:
            results.append(orders.get())
        except ResourceNotOpen as error:
            results.append(type(error))

    def in_thread():
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(10)

    with resolving(lambda identity: "a value"):
        in_thread()
    in_thread()
    assert results == ["a value", ResourceNotOpen]


# -- built-in listeners


def record_of(message: str) -> logging.LogRecord:
    """Returns the record of a log call."""
    return logging.getLogRecordFactory()("n", logging.INFO, "p", 1, message, (), None)


def test_logging_context_sets_and_restores():
    """Records in a task have its attributes and others do not, also after an exception and in nested contexts."""
    task = Task("app", "enrich", "enrich-1", "3", 4, 0, 5, 67, 0)
    before = logging.getLogRecordFactory()
    with pytest.raises(ZeroDivisionError), LoggingContext().decorate(task):
        record = record_of("hello")
        text = logging.Formatter(
            "%(application)s %(topology)s %(stage)s/%(partition)s #%(attempt)s %(message)s"
        ).format(record)
        assert text == "app enrich 4/5 #67 hello"
        with LoggingContext().decorate(dataclasses.replace(task, topology="inner")):
            assert record_of("x").topology == "inner"
        assert record_of("x").topology == "enrich"
        raise ZeroDivisionError
    assert logging.getLogRecordFactory() is before
    assert not hasattr(record_of("x"), "topology")


class OwnLogger(logging.Logger):
    """Creates its records in its own way."""

    def makeRecord(self, *args, **kwargs):
        return super().makeRecord(*args, **kwargs)


@pytest.mark.parametrize("kind", [logging.Logger, OwnLogger])
def test_extra_takes_precedence_over_the_context(kind):
    """`extra` does not raise, in nested contexts too, even if other code has set record factories between them."""
    task = Task("app", "enrich", "enrich-1", "3", 4, 0, 5, 67, 0)
    before, found = logging.getLogRecordFactory(), []
    logger = kind("mine")
    logger.handle = found.append

    def others(*args, **kwargs):
        made = outer(*args, **kwargs)
        made.theirs = True
        return made

    try:
        with LoggingContext().decorate(task):
            outer = logging.getLogRecordFactory()
            logging.setLogRecordFactory(others)
            with LoggingContext().decorate(dataclasses.replace(task, topology="inner")):
                logger.warning("x", extra={"stage": "load", "topology": "t", "mine": 1})
                logging.LoggerAdapter(logger, {"attempt": 3}).warning("x")
    finally:
        logging.setLogRecordFactory(before)
    one, two = found
    names = ("application", "topology", "stage", "partition", "attempt", "theirs")
    assert [one.__dict__[name] for name in (*names, "mine")] == ["app", "t", "load", 5, 67, True, 1]
    assert [two.__dict__[name] for name in names] == ["app", "inner", 4, 5, 3, True]


def test_only_an_overridden_decorate_is_a_decoration():
    """The base's `decorate` does not count as a decoration, and still can be entered."""
    assert decorates(LoggingContext())
    assert not decorates(Pool("a"))
    assert not decorates(pool("a"))
    task = Task("app", "t", "t-1", "1", 0, 0, 0, 0, 0)
    with Pool("a").decorate(task):
        pass
    with contextlib.nullcontext():
        assert Pool("a").open(CONTEXT) is None
        assert Pool("a").close(CONTEXT) is None


def test_repr_of_a_context_hides_the_configuration():
    """The configuration may contain secrets, so it is not in `repr`."""
    context = dataclasses.replace(CONTEXT, configuration={"spark.key": SECRET})
    assert SECRET not in repr(context)
    assert SECRET not in str(context)


def test_repr_of_a_resource_hides_its_arguments():
    """Neither `repr` nor an error of `get` contains the arguments."""
    orders = pool(SECRET)
    assert SECRET not in f"{orders!r} {orders}"
    with pytest.raises(ResourceNotOpen) as raised:
        orders.get()
    assert SECRET not in str(raised.value)
    assert stagecrew.Resource is Resource
