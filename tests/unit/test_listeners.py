"""Listeners without a worker: their identity, how they are pickled, and the errors of `get` outside a task."""

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
from stagecrew.listeners.identity import Identity, RegisteredTopology
from stagecrew.listeners.listener import decorates, listener_name
from stagecrew.listeners.not_open import NotRegisteredError, explain
from stagecrew.listeners.not_open import Task as TaskOf
from stagecrew.listeners.resolution import resolving
from stagecrew.listeners.resource import opened_value, registering

CONTEXT = ListenerContext("app", "topology", "id", "1", "localhost", Scope.WORKER)
SECRET = "a-password-in-an-argument"


class Pool(Listener):
    """Keeps its arguments."""

    def __init__(self, dsn: str, *, size: int = 1) -> None:
        self.dsn, self.size = dsn, size


@resource
def pool(context, dsn, *, size=1):
    """Yields its argument."""
    yield f"{dsn} on {context.executor}"


def is_same(one: Listener, other: Listener) -> bool:
    """Returns whether both objects are the same listener, and asserts that the comparison is symmetric."""
    result = one._stagecrew.same(other._stagecrew)
    assert other._stagecrew.same(one._stagecrew) == result
    return result


def pickled_and_loaded(listener: Any) -> Any:
    """Returns the listener as it arrives in a worker when it is registered: pickled with its arguments."""
    with registering():
        return pickle.loads(cloudpickle.dumps(listener))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Returns a function that imports a module from its source each time it is called, as a new worker does."""
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
    """A listener is the same after it was pickled once or twice, completely or as a reference in a function, or copied
    with `copy`."""
    once = pickled_and_loaded(listener)
    assert once is not listener
    assert is_same(once, listener)
    assert is_same(pickled_and_loaded(once), listener)
    assert is_same(pickle.loads(cloudpickle.dumps(lambda: listener))(), listener)
    assert is_same(copy.copy(listener), listener)


def test_a_module_imported_again_creates_the_same_listeners(module):
    """Listeners with equal names and arguments are the same, although the objects and classes of two imports differ."""
    first_import, second_import = module(), module()
    assert first_import.by_class is not second_import.by_class
    assert is_same(first_import.by_class, second_import.by_class)
    assert is_same(first_import.by_function, second_import.by_function)
    assert not is_same(first_import.by_function, second_import.other)
    assert not is_same(first_import.by_class, second_import.by_function)


def test_listeners_of_one_factory_differ_by_arguments():
    """Listeners of one factory are the same only if their arguments are equal, given by position or by name."""
    assert is_same(pool("a"), pool("a"))
    assert not is_same(pool("a"), pool("b"))
    assert not is_same(pool("a", size=2), pool("a", size=3))
    assert is_same(Pool("a", size=2), Pool("a", size=2))
    assert not is_same(Pool("a", size=2), Pool("a", size=3))


def test_equal_arguments_that_pickle_differently_are_the_same():
    """Arguments are compared by equality, not by their pickled bytes, so the order of a dict does not matter, and 1
    equals 1.0."""
    assert is_same(pool({"a": 1, "b": 2}), pool({"b": 2, "a": 1}))
    assert is_same(pool(1), pool(1.0))


def test_arguments_that_cannot_be_compared_are_never_equal():
    """A listener whose arguments cannot be pickled or compared equals only itself. The comparison does not raise."""

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
    """Listeners of two runs of a notebook cell are the same, because their names and arguments are equal."""
    cell = "@resource\ndef cell_pool(context, dsn):\n    yield dsn\nlistener = cell_pool('a')\n"
    runs = []
    for _ in range(2):
        names: dict[str, Any] = {"resource": resource, "__name__": "__main__"}
        exec(cell, names)
        runs.append(names["listener"])
    assert is_same(*runs)


def test_a_reference_is_identified_without_arguments():
    """A reference, which contains no arguments, matches listeners with the same arguments, for example from a cell that
    was run again, and does not match a listener with other arguments."""
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
from stagecrew.worker.descriptions import decode_description
from stagecrew.worker.lifecycle import Lifecycle

targets, function = pickle.load(sys.stdin.buffer)
hooks = SimpleNamespace(
    open=lambda topology, one: one.listener.open(None), close=lambda topology, one: one.listener.close(None)
)
entries = [{"kind": "name", "index": i, "name": "", "target": target} for i, target in enumerate(targets)]
lifecycle = Lifecycle(hooks)
body = json.dumps({"name": "application", "listeners": entries})
lifecycle.add_topology(decode_description(Frame("OPEN", {"topology": "application", "body": body, "blobs": []}), lambda _: True))
lifecycle.begin(["application"], None)
with resolving(lifecycle.find):
    print(function())
"""


def test_configured_listeners_are_found_from_another_process(tmp_path, monkeypatch):
    """A function that is pickled by value finds each configured listener by its module and name.

    This holds for two listeners with equal arguments, a listener whose arguments differ in the worker, an attribute of
    a class, and a factory that is called without arguments.
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
    """A listener keeps only its last five places of registration, each once, because they are sent with each task's
    function."""
    one = pool("a")
    for i in (*range(50), 49, 48):
        one._stagecrew.note_registration(f"topology 'run {i}'", f"run-{i}")
    assert one._stagecrew.topologies == [(f"topology 'run {i}'", f"run-{i}", False) for i in (45, 46, 47, 49, 48)]


def test_identities_of_different_factories_differ():
    """Listeners of different classes differ even if their arguments are equal."""
    assert not Identity("m:A", (1,), {}).same(Identity("m:B", (1,), {}))


# -- pickling


def test_a_resource_in_a_function_is_pickled_without_arguments():
    """A resource in a function is pickled without its arguments, so the bytes contain no secret. The loaded resource
    cannot be opened."""
    orders = pool(SECRET, size=7)

    def work(batches):
        return orders.get()

    data = cloudpickle.dumps(work)
    assert SECRET.encode() not in data
    assert SECRET.encode() not in pickle.dumps(orders)
    arrived = pickle.loads(pickle.dumps(orders))
    assert repr(arrived) == repr(orders) == "<resource pool>"
    assert repr(pool) == "<resource 'pool', not called: call it with its arguments to create a listener>"
    with pytest.raises(ConfigurationError, match="this is only a reference to resource 'pool'"):
        arrived.open(CONTEXT)
    arrived.close(CONTEXT)


def test_a_resource_is_registered_with_its_arguments():
    """A registered resource is pickled with its arguments, scope, lifetime and name, and its copy can be opened."""
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
    """While one thread registers, functions that other threads pickle contain no arguments. The same is true of the
    thread's own functions afterwards."""
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
    """Its `__getstate__` leaves out a lock, which cannot be pickled, and all attributes of stagecrew."""

    def __init__(self, dsn: str) -> None:
        self.dsn, self.lock = dsn, threading.Lock()

    def __getstate__(self):
        return {"dsn": self.dsn}

    def __setstate__(self, state):
        self.dsn, self.lock = state["dsn"], None


class WithReduce(Listener):
    """Defines `__reduce__`."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    def __reduce__(self):
        return (WithReduce, (self.dsn,))


class WithSlots(Listener):
    """Has slots, and inherits a `__dict__`."""

    __slots__ = ("dsn",)

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn


@dataclasses.dataclass
class AsDataclass(Listener):
    """A dataclass, which is compared by its fields."""

    dsn: str


@dataclasses.dataclass(frozen=True)
class Frozen(Listener):
    """A frozen dataclass, whose attributes cannot be assigned."""

    dsn: str


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots(Listener):
    """A frozen dataclass with slots, for which the decorator creates a second class."""

    dsn: str


class KeywordOnly(Listener):
    """Takes keyword-only arguments, also in `__new__`."""

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
    """Listeners keep their data and identity with every pickle protocol, however their class defines pickling."""
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
    """A resource that is an attribute of a registered listener is pickled with its arguments, and can be opened."""
    made = Pool(SECRET)
    made.inner = pool("inner-" + SECRET)
    arrived = pickled_and_loaded(made)
    arrived.inner.open(CONTEXT)
    assert opened_value(arrived.inner) == f"inner-{SECRET} on 1"


# -- resource


def test_resource_with_and_without_arguments():
    """The decorator, with and without arguments, returns a factory with the function's name and docstring."""
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
    """`open` runs the generator up to its `yield`, and `close` runs the rest.

    A closed resource can be opened again. A second `close` does nothing.
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
    """`open` raises an exception from before the `yield`, and `close` raises one from after it.

    After a failed `open`, `close` does nothing.
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
    """If the generator does not yield, `open` raises an error. If it yields more than once, `close` does."""

    @resource
    def wrong(context):
        yield from range(yields)

    made = wrong()
    with pytest.raises(RuntimeError, match=text):
        made.open(CONTEXT)
        made.close(CONTEXT)


# -- get


def test_get_outside_of_a_task():
    """The error of `get` outside of a task names the listener, the cause and the remedy."""
    with pytest.raises(ResourceNotOpen) as never:
        pool("a").get()
    assert str(never.value) == (
        "listener 'pool' is not open here: get() was called outside of a task, and listeners are only open in tasks. "
        "Call it in a function that a task runs. A function for foreachBatch runs on the driver. In a test, use "
        "`with stagecrew.testing.opened(pool, value=...)`."
    )


ENRICH = RegisteredTopology("topology 'enrich'", "enrich-1")
THREAD = "it was registered for topology 'enrich', and the action ran in a thread outside of this topology"
AFTER = "it was registered for topology 'enrich', and the action ran after this topology had closed"
INNER = NotRegisteredError(["inner", "outer", "application"], ["orders", "planes"])


@pytest.mark.parametrize(
    ("registrations", "task", "missing", "cause", "remedy"),
    [
        ([], TaskOf(), None, "this task belongs to no topology.", "Run the action inside `with crew.topology("),
        (
            [], TaskOf(), NotRegisteredError(["application"], ["a"]),
            "belongs to no topology (it has: 'a')", "configure(builder",
        ),
        (
            [], TaskOf(closed=("my-run-2",)), None,
            "was in topology 'my-run', which has closed", "topology.keep(dataset)",
        ),
        (
            [], TaskOf("t-1"), INNER,
            "this task runs in topology 'inner' inside 'outer', which does not have it", "topology('inner',",
        ),
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
        ([RegisteredTopology("the application", "application")], TaskOf(), None, "of another session", "configure(builder"),
        ([ENRICH], None, None, "get() was called outside of a task", "stagecrew.testing.opened(pool"),
        ([ENRICH], TaskOf("t-1"), NotRegisteredError(["t"], [], "it is a copy. Do this"), "it is a copy", "Do this"),
    ],
)  # fmt: skip
def test_each_cause_has_its_own_message(registrations, task, missing, cause, remedy):
    """Each cause has its own message: the listener is not registered in the task's topology, the task has no topology,
    a thread was not wrapped, the topology has closed, or the listener was defined again."""
    text = explain("pool", registrations, task, missing)
    assert text.startswith("listener 'pool' is not open here: ")
    assert cause in text
    assert remedy in text
    assert (THREAD in text) + (AFTER in text) + ("belongs to no topology" in text) + ("does not have it" in text) <= 1
    assert text.count("..") == text.count("...")


def test_get_asks_the_innermost_resolver_first():
    """`get` asks the innermost resolver first, and then the outer ones. If none finds the listener, the error contains
    the innermost resolver's reason."""
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
    """`get` works in a thread that a task started, and raises an error in any thread after the task."""
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
    """Log records in a task have the task's attributes, and later records do not, also after an exception. A nested
    context restores the outer one."""
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
    """A logger that overrides `makeRecord`."""

    def makeRecord(self, *args, **kwargs):
        return super().makeRecord(*args, **kwargs)


@pytest.mark.parametrize("kind", [logging.Logger, OwnLogger])
def test_extra_takes_precedence_over_the_context(kind):
    """A log call with `extra` does not raise, and its fields take precedence over the task's, even in nested contexts
    between which other code has set a record factory."""
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
    """The base class's `decorate` does not count as a decoration, but can be entered nevertheless."""
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
    """The configuration, which can contain secrets, is not in a context's `repr`."""
    context = dataclasses.replace(CONTEXT, configuration={"spark.key": SECRET})
    assert SECRET not in repr(context)
    assert SECRET not in str(context)


def test_repr_of_a_resource_hides_its_arguments():
    """Neither a resource's `repr` nor an error raised by `get` contains its arguments."""
    orders = pool(SECRET)
    assert SECRET not in f"{orders!r} {orders}"
    with pytest.raises(ResourceNotOpen) as raised:
        orders.get()
    assert SECRET not in str(raised.value)
    assert stagecrew.Resource is Resource
