"""Listeners on their own: how they are recognised, how they travel, and what `get` says outside a task."""

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
from stagecrew import (
    Lifetime,
    Listener,
    ListenerContext,
    LoggingContext,
    Resource,
    ResourceNotOpen,
    Scope,
    Task,
    resource,
)
from stagecrew.errors import ConfigurationError
from stagecrew.listeners.identity import Identity, Registration
from stagecrew.listeners.listener import decorates, listener_name
from stagecrew.listeners.not_open import NotRegisteredError, explained
from stagecrew.listeners.not_open import Task as TaskOf
from stagecrew.listeners.resolution import resolving
from stagecrew.listeners.resource import opened_value, registering

CONTEXT = ListenerContext("app", "topology", "id", "1", "localhost", Scope.WORKER)
SECRET = "a-password-in-an-argument"


class Pool(Listener):
    """Holds what it was made with."""

    def __init__(self, dsn: str, *, size: int = 1) -> None:
        self.dsn, self.size = dsn, size


@resource
def pool(context, dsn, *, size=1):
    """Yields what it was made with."""
    yield f"{dsn} on {context.executor}"


def same(one: Listener, other: Listener) -> bool:
    """Whether both are the same listener; the question must have one answer from both sides."""
    answer = one._stagecrew.same(other._stagecrew)
    assert other._stagecrew.same(one._stagecrew) == answer
    return answer


def travelled(listener: Any) -> Any:
    """As it arrives with its registration."""
    with registering():
        return pickle.loads(cloudpickle.dumps(listener))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A function that imports a module anew from its source, as a worker does."""
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
    """Once or several times, whole or as a reference in a function; also by `copy`."""
    once = travelled(listener)
    assert once is not listener
    assert same(once, listener)
    assert same(travelled(once), listener)
    assert same(pickle.loads(cloudpickle.dumps(lambda: listener))(), listener)
    assert same(copy.copy(listener), listener)


def test_a_module_that_is_imported_anew_makes_the_same_listeners(module):
    """Equal names and arguments are the same listener, though the objects and classes are others."""
    here, there = module(), module()
    assert here.by_class is not there.by_class
    assert same(here.by_class, there.by_class)
    assert same(here.by_function, there.by_function)
    assert not same(here.by_function, there.other)
    assert not same(here.by_class, there.by_function)


def test_two_of_one_factory_differ_by_their_arguments():
    """By position, by name, and not by the default that was not written."""
    assert same(pool("a"), pool("a"))
    assert not same(pool("a"), pool("b"))
    assert not same(pool("a", size=2), pool("a", size=3))
    assert same(Pool("a", size=2), Pool("a", size=2))
    assert not same(Pool("a", size=2), Pool("a", size=3))


def test_arguments_that_are_equal_but_pickle_differently_are_the_same():
    """Equality decides, not bytes: a dict in another order, a number as float."""
    assert same(pool({"a": 1, "b": 2}), pool({"b": 2, "a": 1}))
    assert same(pool(1), pool(1.0))


def test_arguments_that_cannot_be_pickled_or_compared_are_never_guessed():
    """Then only the very listener is the same, and nothing is raised."""

    class Incomparable:
        def __eq__(self, other):
            raise ValueError("ambiguous")

        __hash__ = None

    one, other = pool(lambda: 1), pool(lambda: 1)
    assert same(one, one)
    assert not same(one, other)
    assert same(one, travelled(one))
    assert not same(pool(Incomparable()), pool(Incomparable()))


def test_a_notebook_cell_that_is_run_again():
    """The function of the old cell finds the listener of the new one and the other way round: name and arguments agree."""
    cell = "@resource\ndef cell_pool(context, dsn):\n    yield dsn\nlistener = cell_pool('a')\n"
    runs = []
    for _ in range(2):
        names: dict[str, Any] = {"resource": resource, "__name__": "__main__"}
        exec(cell, names)
        runs.append(names["listener"])
    assert same(*runs)


def test_a_reference_is_known_without_its_arguments():
    """It has no arguments, and is not mistaken for a listener with others; a cell that was run again is the same."""
    one, again, other = pool("a"), pool("a"), pool("b")
    one._stagecrew.registered_for("topology 'enrich'", "enrich-1")
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
from stagecrew.worker.descriptions import described
from stagecrew.worker.lifecycle import Lifecycle

targets, function = pickle.load(sys.stdin.buffer)
hooks = SimpleNamespace(
    open=lambda topology, one: one.listener.open(None), close=lambda topology, one: one.listener.close(None)
)
entries = [{"kind": "name", "index": i, "name": "", "target": target} for i, target in enumerate(targets)]
lifecycle = Lifecycle(hooks)
body = json.dumps({"name": "application", "listeners": entries})
lifecycle.describe(described({"topology": "application", "body": body, "blobs": []}, lambda _: True))
lifecycle.begin(["application"], None)
with resolving(lifecycle.find):
    print(function())
"""


def test_listeners_that_the_configuration_names_are_found_from_another_process(tmp_path, monkeypatch):
    """A function that travels by value finds each by module and name: of one factory, with equal arguments, with arguments
    that differ where the worker imports them, as an attribute of a class, and made from a factory without arguments."""
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


def test_where_a_listener_was_registered_stays_short():
    """Each place once, the last few: it travels with each task's function."""
    one = pool("a")
    for i in (*range(50), 49, 48):
        one._stagecrew.registered_for(f"topology 'run {i}'", f"run-{i}")
    assert one._stagecrew.topologies == [(f"topology 'run {i}'", f"run-{i}", False) for i in (45, 46, 47, 49, 48)]


def test_identities_of_different_factories_differ():
    """Equal arguments do not make two classes one."""
    assert not Identity("m:A", (1,), {}).same(Identity("m:B", (1,), {}))


# -- how they travel


def test_a_resource_in_a_function_travels_without_its_arguments():
    """No secret is in the bytes, and what arrives can be asked for, not opened."""
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


def test_a_resource_is_registered_whole():
    """With its arguments, scope, lifetime and name; its copy opens."""
    made = resource(scope=Scope.EXECUTOR, lifetime=Lifetime.EXECUTION, required=False, name="orders")(pool.function)(
        SECRET
    )
    arrived = travelled(made)
    assert (arrived.scope, arrived.lifetime, arrived.required) == (Scope.EXECUTOR, Lifetime.EXECUTION, False)
    assert listener_name(arrived) == "orders"
    arrived.open(CONTEXT)
    assert opened_value(arrived) == f"{SECRET} on 1"
    arrived.close(CONTEXT)
    assert opened_value(arrived) is None


def test_registering_ends_with_its_block_and_counts_for_its_thread_alone():
    """While one thread registers, another's function still travels without arguments; so does its own afterwards."""
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
    """Leaves out what cannot travel, and everything of ours."""

    def __init__(self, dsn: str) -> None:
        self.dsn, self.lock = dsn, threading.Lock()

    def __getstate__(self):
        return {"dsn": self.dsn}

    def __setstate__(self, state):
        self.dsn, self.lock = state["dsn"], None


class WithReduce(Listener):
    """Says itself how it is made again."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    def __reduce__(self):
        return (WithReduce, (self.dsn,))


class WithSlots(Listener):
    """Has slots beside the dictionary of its base."""

    __slots__ = ("dsn",)

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn


@dataclasses.dataclass
class AsDataclass(Listener):
    """Equal by its fields."""

    dsn: str


@dataclasses.dataclass(frozen=True)
class Frozen(Listener):
    """Cannot be assigned to."""

    dsn: str


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots(Listener):
    """Frozen, with slots: the decorator makes the class anew."""

    dsn: str


class KeywordOnly(Listener):
    """Takes its arguments by name in `__new__` too."""

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
def test_listeners_of_every_make_travel(made):
    """With what they hold and as the same listener, however their class is pickled, and by every protocol."""
    made._stagecrew.topologies.append("topology 'enrich'")
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        arrived = pickle.loads(pickle.dumps(made, protocol))
        assert type(arrived) is type(made)
        assert arrived.dsn == "a"
        assert arrived._stagecrew.id == made._stagecrew.id
        assert arrived._stagecrew.topologies == ["topology 'enrich'"]


def test_a_class_of_main_travels():
    """A listener whose class is not importable travels with its class."""
    names: dict[str, Any] = {"Listener": Listener, "__name__": "__main__"}
    exec("class Local(Listener):\n    def __init__(self, dsn): self.dsn = dsn\n", names)
    made = names["Local"]("a")
    arrived = travelled(made)
    assert arrived.dsn == "a"
    assert same(arrived, made)


def test_a_resource_inside_another_listener_is_registered_whole():
    """What a listener is made of travels with it when it is registered, and not in a function."""
    made = Pool(SECRET)
    made.inner = pool("inner-" + SECRET)
    arrived = travelled(made)
    arrived.inner.open(CONTEXT)
    assert opened_value(arrived.inner) == f"inner-{SECRET} on 1"


# -- resource


def test_resource_bare_and_with_arguments():
    """Both ways of decorating give a factory that looks like the function."""
    assert pool.__name__ == "pool"
    assert pool.__doc__ == "Yields what it was made with."
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
    """Up to `yield` in open, behind it in close; it may be opened again afterwards, and a second close does nothing."""
    events = []

    @resource
    def tracked(context):
        events.append("open")
        yield len(events)
        events.append("close")

    made = tracked()
    for _ in range(2):
        made.open(CONTEXT)
        assert made.opened() is not None
        made.close(CONTEXT)
        made.close(CONTEXT)
    assert events == ["open", "close"] * 2


def test_a_resource_whose_generator_raises():
    """Before its `yield` the exception is open's, and close has nothing to do; behind it, it is close's."""

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
    """It is an error of open or of close, not a silent value."""

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
        "a function that a task runs; a function given to foreachBatch runs on the driver. In a test, use "
        "`with stagecrew.testing.opened(pool, value=...)`."
    )


ENRICH = Registration("topology 'enrich'", "enrich-1")
THREAD = "it was registered for topology 'enrich', and the action ran in a thread outside of that"
AFTER = "it was registered for topology 'enrich', and the action ran after that had closed"
INNER = NotRegisteredError(["inner", "outer", "application"], ["orders", "planes"])


@pytest.mark.parametrize(
    ("registrations", "task", "missing", "cause", "remedy"),
    [
        ([], TaskOf(), None, "this task belongs to no topology.", "Run the action inside `with crew.topology("),
        ([], TaskOf(), NotRegisteredError(["application"], ["a"]), "belongs to no topology (it has: 'a')", "configure(builder"),
        ([], TaskOf(left=("my-run-2",)), None, "was in topology 'my-run', which has closed", "topology.keep(dataset)"),
        ([], TaskOf("t-1"), INNER, "this task runs in topology 'inner' inside 'outer', which does not have it", "topology('inner',"),
        ([], TaskOf("t-1"), INNER, "(it has: 'orders', 'planes')", "listeners=[pool]"),
        ([ENRICH], TaskOf("t-1"), INNER, "it was registered for topology 'enrich'", "Register it there"),
        ([ENRICH], TaskOf(), None, THREAD, "topology.wrap(f)"),
        ([ENRICH], TaskOf(left=("other-1",)), None, THREAD, "topology.wrap(f)"),
        ([ENRICH], TaskOf(), NotRegisteredError(["application"], ["a"]), THREAD, "topology.wrap(f)"),
        ([], TaskOf(), NotRegisteredError([], [], "", ["enrich"]), THREAD, "topology.wrap(f)"),
        ([ENRICH._replace(ended=True)], TaskOf(), None, AFTER, "Run the action inside `with crew.topology("),
        ([ENRICH], TaskOf(left=("other-1", "enrich-1")), None, AFTER, "topology.keep(dataset)"),
        ([ENRICH], TaskOf("enrich-1"), None, AFTER, "Run the action inside"),
        ([ENRICH], TaskOf("t-1", left=("enrich-1",)), INNER, AFTER, "Run the action inside"),
        ([Registration("the application", "application")], TaskOf(), None, "of another session", "configure(builder"),
        ([ENRICH], None, None, "get() was called outside of a task", "stagecrew.testing.opened(pool"),
        ([ENRICH], TaskOf("t-1"), NotRegisteredError(["t"], [], "it is a copy. Do this"), "it is a copy", "Do this"),
    ],
)  # fmt: skip
def test_each_cause_has_its_message(registrations, task, missing, cause, remedy):
    """Not registered in the task's topology, no topology, a thread without `wrap`, after the topology, another definition."""
    text = explained("pool", registrations, task, missing)
    assert text.startswith("listener 'pool' is not open here: ")
    assert cause in text
    assert remedy in text
    assert (THREAD in text) + (AFTER in text) + ("belongs to no topology" in text) + ("does not have it" in text) <= 1
    assert text.count("..") == text.count("...")


def test_get_asks_the_innermost_resolver_first():
    """It asks the outer ones next, and then reports the reason of the innermost."""
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


def test_get_answers_in_every_thread():
    """A thread that a task started asks for the same resources; afterwards it gets the error."""
    orders, answers = pool("a"), []

    def ask():
        try:
            answers.append(orders.get())
        except ResourceNotOpen as error:
            answers.append(type(error))

    def in_thread():
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(10)

    with resolving(lambda identity: "a value"):
        in_thread()
    in_thread()
    assert answers == ["a value", ResourceNotOpen]


# -- built in


def record_of(message: str) -> logging.LogRecord:
    """What a log call makes."""
    return logging.getLogRecordFactory()("n", logging.INFO, "p", 1, message, (), None)


def test_logging_context_sets_and_restores():
    """Records in a task carry its attributes, others do not, also after an exception and one inside another."""
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
    """Makes its records in its own way."""

    def makeRecord(self, *args, **kwargs):
        return super().makeRecord(*args, **kwargs)


@pytest.mark.parametrize("kind", [logging.Logger, OwnLogger])
def test_what_a_log_call_gives_by_extra_stands_before_the_context(kind):
    """It does not raise, inside several contexts too, and whatever factories others have set between them."""
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


def test_only_an_overridden_decorate_counts():
    """The base's decoration is no decoration; it can be entered all the same."""
    assert decorates(LoggingContext())
    assert not decorates(Pool("a"))
    assert not decorates(pool("a"))
    task = Task("app", "t", "t-1", "1", 0, 0, 0, 0, 0)
    with Pool("a").decorate(task):
        pass
    with contextlib.nullcontext():
        assert Pool("a").open(CONTEXT) is None
        assert Pool("a").close(CONTEXT) is None


def test_the_context_does_not_show_the_configuration():
    """It may hold what the user would not log: not in `repr`."""
    context = dataclasses.replace(CONTEXT, configuration={"spark.key": SECRET})
    assert SECRET not in repr(context)
    assert SECRET not in str(context)


def test_a_resource_does_not_show_its_arguments():
    """Neither `repr` nor an error of `get` has them."""
    orders = pool(SECRET)
    assert SECRET not in f"{orders!r} {orders}"
    with pytest.raises(ResourceNotOpen) as raised:
        orders.get()
    assert SECRET not in str(raised.value)
    assert stagecrew.Resource is Resource
