"""The lifecycle of listeners in one process: property tests against a model, and an example of each rule."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stagecrew import Listener, resource
from stagecrew.errors import TaskKilled
from stagecrew.listeners.not_open import NotRegisteredError
from stagecrew.worker.lifecycle import Lifecycle, RegisteredListener, TopologyDescription


class Plain(Listener):
    """A listener without a decoration."""

    def __init__(self, argument: object = None) -> None:
        self.argument = argument


class Decorating(Plain):
    """A listener that decorates tasks."""

    @contextlib.contextmanager
    def decorate(self, task: Any):
        yield


class HookError(Exception):
    """The error of a failing hook."""


@dataclasses.dataclass
class FakeHooks:
    """Records the calls of hooks, and raises the errors in `plan`: by hook, topology and index of the listener."""

    plan: dict[tuple[str, str, int], BaseException] = dataclasses.field(default_factory=dict)
    log: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)

    def _called(self, hook: str, topology: TopologyDescription, registered: RegisteredListener, *more: Any) -> None:
        assert topology.listeners[registered.index] is registered
        self.log.append((hook, topology.id, registered.index, *more))
        if error := self.plan.get((hook, topology.id, registered.index)):
            raise error

    def open(self, topology, registered):
        self._called("open", topology, registered)

    def close(self, topology, registered):
        self._called("close", topology, registered)

    def enter(self, topology, registered, task):
        self._called("enter", topology, registered, task)
        self.log.append(("entered", topology.id, registered.index))
        return lambda error: self._called("leave", topology, registered, error)


def topology(id_: str, *listeners: RegisteredListener | Listener) -> TopologyDescription:
    """A topology with these listeners, numbered in their order."""
    registered = [
        dataclasses.replace(one, index=i)
        if isinstance(one, RegisteredListener)
        else RegisteredListener(i, type(one).__name__, one._stagecrew, one.required, one)
        for i, one in enumerate(listeners)
    ]
    return TopologyDescription(id_, f"name of {id_}", tuple(registered))


def optional(listener: Listener) -> Listener:
    """Makes a listener optional."""
    listener.required = False
    return listener


def opened_elsewhere(listener: Listener, value: Any) -> RegisteredListener:
    """A listener that is open in another process, with its value, or with the error that fetching the value raises."""

    def value_or_error() -> Any:
        if isinstance(value, LookupError):
            raise value
        return value

    return RegisteredListener(0, "elsewhere", listener._stagecrew, required=True, listener=None, value=value_or_error)


# -- properties

CHAINS = [("app",), ("app", "outer"), ("app", "outer", "inner"), ("app", "inner"), ("app", "other"), ("other",), ()]
HOOKS = ("open", "close", "enter", "leave")


def some_topologies() -> list[TopologyDescription]:
    """Topologies with all kinds of listeners: `shared` is registered twice, and there are two equal `twin`
    listeners."""
    shared, remote = Decorating("shared"), Plain("remote")
    return [
        topology("app", Decorating("twin"), optional(Plain()), opened_elsewhere(remote, "a port"), Decorating()),
        topology("outer", optional(Decorating("o")), shared, Plain("o")),
        topology(
            "inner",
            Decorating("twin"),
            opened_elsewhere(Plain("lost"), LookupError("not open there")),
            optional(shared),
        ),
        topology("other", Plain("x"), optional(Decorating("y"))),
    ]


SLOTS = [(each.id, one.index) for each in some_topologies() for one in each.listeners if one.listener is not None]
PLANS = st.dictionaries(
    st.tuples(st.sampled_from(HOOKS), st.sampled_from(SLOTS)).map(lambda pair: (pair[0], *pair[1])),
    st.sampled_from([HookError, TaskKilled, KeyboardInterrupt]).map(lambda kind: kind("planned")),
    max_size=4,
)


class LifecycleMachine(RuleBasedStateMachine):
    """Begins tasks and closes topologies in any order, with failing hooks. A model predicts the calls and their
    order."""

    @initialize()
    def start(self):
        self.topologies = {each.id: each for each in some_topologies()}
        self.hooks = FakeHooks()
        self.lifecycle = Lifecycle(self.hooks)
        self.history: list[tuple[Any, ...]] = []
        self.tasks = 0
        # The state of the model.
        self.described: set[str] = set()
        self.opened: list[tuple[str, int]] = []
        self.disabled: set[tuple[str, int]] = set()
        self.entered: list[tuple[str, int]] = []
        self.current: tuple[str, ...] = ()
        self.running = False
        self.due: list[str] = []

    # The model: each method appends the expected calls to `expected`, and raises like the real lifecycle.

    def _expect(self, hook: str, key: tuple[str, int], *more: Any) -> None:
        self.expected.append((hook, *key, *more))
        if error := self.hooks.plan.get((hook, *key)):
            raise error

    def _expect_each(self, hook: str, keys: list[tuple[str, int]], *more: Any) -> None:
        raised = None
        for key in keys:
            try:
                self._expect(hook, key, *more)
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised

    def _model_end(self, error: BaseException | None) -> None:
        entered, self.entered = self.entered, []
        self.current, self.running = (), False
        self._expect_each("leave", entered[::-1], error)

    def _model_close(self, topologies: set[str]) -> None:
        closing = [key for key in reversed(self.opened) if key[0] in topologies]
        self.opened = [key for key in self.opened if key[0] not in topologies]
        self.disabled = {key for key in self.disabled if key[0] not in topologies}
        self.described -= topologies
        self.due = [one for one in self.due if one not in topologies]
        self._expect_each("close", closing)

    def _model_open(self, described: TopologyDescription) -> None:
        for one in described.listeners:
            key = (described.id, one.index)
            if one.listener is None or key in self.opened or key in self.disabled:
                continue
            try:
                self._expect("open", key)
            except BaseException as error:
                self._expect("close", key)
                if one.required or not isinstance(error, Exception):
                    raise
                self.disabled.add(key)
            else:
                self.opened.append(key)

    def _model_begin(self, chain: tuple[str, ...], task: Any) -> None:
        if self.running:
            self._model_end(None)
        self.current, self.running = chain, True
        try:
            for each in chain:
                self._model_open(self.topologies[each])
            for each in chain:
                for one in self.topologies[each].listeners:
                    if isinstance(one.listener, Decorating) and (each, one.index) in self.opened:
                        self._expect("enter", (each, one.index), task)
                        self.expected.append(("entered", each, one.index))
                        self.entered.append((each, one.index))
        except BaseException as error:
            self._model_end(error)
            raise

    def _compare(self, plan, model, real):
        """Runs the model and the real lifecycle. Both must make the same calls in the same order, and return or raise
        the same."""
        self.hooks.plan, self.hooks.log, self.expected = plan, [], []
        outcomes = []
        for run in (model, real):
            try:
                outcomes.append((run(), None))
            except (HookError, TaskKilled, KeyboardInterrupt) as error:
                outcomes.append((None, error))
        assert self.hooks.log == self.expected
        assert outcomes[0][1] is outcomes[1][1]
        if outcomes[0][1] is None:
            assert outcomes[0][0] == outcomes[1][0]
        self.history += self.hooks.log

    @rule(chain=st.sampled_from(CHAINS), plan=PLANS)
    def begin(self, chain, plan):
        for each in chain:
            self.lifecycle.add_topology(self.topologies[each])
            self.described.add(each)
        self.tasks += 1
        task = f"task {self.tasks}"
        self._compare(plan, lambda: self._model_begin(chain, task), lambda: self.lifecycle.begin(chain, task))

    @rule(plan=PLANS, error=st.sampled_from([None, HookError("task"), TaskKilled("task")]))
    def end(self, plan, error):
        self._compare(plan, lambda: self._model_end(error), lambda: self.lifecycle.end(error))

    @rule(each=st.sampled_from(["app", "outer", "inner", "other", "never described"]), plan=PLANS)
    def close(self, each, plan):
        def model():
            if each not in self.due:
                self.due.append(each)
            done = [one for one in self.due if one not in self.current]
            self._model_close(set(done))
            return done

        self._compare(plan, model, lambda: self.lifecycle.close(each))

    @rule(plan=PLANS)
    def close_due(self, plan):
        def model():
            done = [one for one in self.due if one not in self.current]
            self._model_close(set(done))
            return done

        self._compare(plan, model, self.lifecycle.close_due)

    @precondition(lambda self: self.tasks)
    @rule(plan=PLANS)
    def close_all(self, plan):
        def model():
            known = set(self.described)
            raised = None
            steps = (lambda: self._model_end(None), lambda: self._model_close(known | set(self.due)))
            for step in steps:
                try:
                    step()
                except BaseException as error:
                    raised = error
            if raised is not None:
                raise raised
            return known

        self._compare(plan, model, lambda: set(self.lifecycle.close_all()))

    @invariant()
    def queries_follow_from_the_calls(self):
        """`busy`, `knows`, `is_open` and `anything_open` must agree with the model."""
        assert self.lifecycle.busy == self.running
        assert self.lifecycle.anything_open == bool(self.opened)
        for each in self.topologies.values():
            assert self.lifecycle.knows(each.id) == (each.id in self.described)
            for one in each.listeners:
                assert self.lifecycle.is_open(each.id, one.index) == ((each.id, one.index) in self.opened)

    @invariant()
    def documented_rules_hold(self):
        """The recorded calls must keep the documented rules. This check does not use the model."""
        attempted: list[tuple[str, int]] = []
        entered: list[tuple[str, int]] = []
        for hook, each, index, *_ in self.history:
            key = (each, index)
            if hook == "open":
                assert key not in attempted, "opened at most once until it is closed"
                attempted.append(key)
            elif hook == "close":
                assert key in attempted, "closed once for each attempted open"
                attempted.remove(key)
                assert each not in {topology for topology, _ in entered}, "not closed while in use"
            elif hook == "enter":
                assert key in attempted, "decorated only while open"
            elif hook == "entered":
                entered.append(key)
            else:
                assert entered.pop() == key, "left in reverse, each once"
        assert entered == [] or self.running, "no decoration is entered after the task"
        assert set(attempted) == set(self.lifecycle._opened)

    @invariant()
    def find_uses_the_current_chain(self):
        """`find` must return a listener of the current chain: the exact listener, or else the innermost equal one."""
        inside = [(each, one) for each in reversed(self.current) for one in self.topologies[each].listeners]
        for each in self.topologies.values():
            for one in each.listeners:
                exact = [place for place in inside if place[1].identity.id == one.identity.id]
                alike = [place for place in inside if place[1].identity.same(one.identity)]
                places = exact or alike
                if not places:
                    expected = None
                elif places[0][1].value is not None:
                    expected = (
                        "a port" if places[0][1].identity.same(self.topologies["app"].listeners[2].identity) else None
                    )
                else:
                    expected = places[0][1].listener if (places[0][0], places[0][1].index) in self.opened else None
                try:
                    found = self.lifecycle.find(one.identity)
                except LookupError:
                    found = None
                assert found is expected

    def teardown(self):
        if hasattr(self, "lifecycle"):
            self.hooks.plan = {}
            self.lifecycle.close_all()
            self.history += self.hooks.log
            assert not self.lifecycle.anything_open
            assert self.lifecycle.close_all() == []


LifecycleMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestLifecycleMachine = LifecycleMachine.TestCase


# -- examples


def new_lifecycle(*topologies: TopologyDescription) -> tuple[Lifecycle, FakeHooks]:
    """Creates a lifecycle that knows these topologies, with fake hooks."""
    hooks = FakeHooks()
    lifecycle = Lifecycle(hooks)
    for each in topologies:
        lifecycle.add_topology(each)
    return lifecycle, hooks


def test_listeners_open_in_order_and_close_in_reverse():
    """Listeners open from the outer topology to the inner one, in the order of registration, and close in reverse."""
    lifecycle, hooks = new_lifecycle(topology("a", Decorating(), Plain()), topology("b", Decorating()))
    lifecycle.begin(["a", "b"], "task")
    lifecycle.end(None)
    assert lifecycle.close_all() == ["a", "b"]
    assert hooks.log == [
        *[("open", "a", 0), ("open", "a", 1), ("open", "b", 0)],
        *[("enter", "a", 0, "task"), ("entered", "a", 0), ("enter", "b", 0, "task"), ("entered", "b", 0)],
        *[("leave", "b", 0, None), ("leave", "a", 0, None)],
        *[("close", "b", 0), ("close", "a", 1), ("close", "a", 0)],
    ]


def test_a_listener_opens_once_for_many_tasks():
    """A listener that the first task of a topology opened stays open for the second task."""
    lifecycle, hooks = new_lifecycle(topology("a", Plain()))
    for task in ("one", "two"):
        lifecycle.begin(["a"], task)
        lifecycle.end(None)
    assert lifecycle.close("a") == ["a"]
    assert hooks.log == [("open", "a", 0), ("close", "a", 0)]


def test_a_failed_open_is_closed_once_and_can_be_retried():
    """If a listener's `open` fails, `begin` raises its error and closes it once. Earlier listeners stay open, and later
    listeners are not opened. The next task tries the failed open again."""
    lifecycle, hooks = new_lifecycle(topology("a", Plain(), Plain(), Plain()))
    hooks.plan = {("open", "a", 1): HookError("no database")}
    with pytest.raises(HookError, match="no database"):
        lifecycle.begin(["a"], "task")
    assert hooks.log == [("open", "a", 0), ("open", "a", 1), ("close", "a", 1)]
    assert not lifecycle.busy
    hooks.plan, hooks.log = {}, []
    lifecycle.begin(["a"], "task")
    lifecycle.end(None)
    lifecycle.close_all()
    assert hooks.log == [("open", "a", 1), ("open", "a", 2), ("close", "a", 2), ("close", "a", 1), ("close", "a", 0)]


def test_a_failing_optional_listener_is_disabled():
    """If an optional listener's `open` fails, the task continues. The listener is closed once, and neither entered nor
    opened again. `find` raises the reason."""
    pool = optional(Decorating())
    lifecycle, hooks = new_lifecycle(topology("a", pool, Plain()))
    hooks.plan = {("open", "a", 0): HookError("no database")}
    for _ in range(2):
        lifecycle.begin(["a"], "task")
        with pytest.raises(LookupError, match=r"its open failed here, and it is not required \(topology 'name of a'\)"):
            lifecycle.find(pool._stagecrew)
        lifecycle.end(None)
    assert hooks.log == [("open", "a", 0), ("close", "a", 0), ("open", "a", 1)]
    assert not lifecycle.is_open("a", 0)


def test_a_new_description_enables_disabled_listeners():
    """A closed topology is forgotten. After it is described again, its disabled listeners are opened again."""
    pool = optional(Plain())
    described = topology("a", pool)
    lifecycle, hooks = new_lifecycle(described)
    hooks.plan = {("open", "a", 0): HookError("no database")}
    lifecycle.begin(["a"], "task")
    lifecycle.end(None)
    lifecycle.close("a")
    assert not lifecycle.knows("a")
    hooks.plan = {}
    lifecycle.add_topology(described)
    lifecycle.begin(["a"], "task")
    assert lifecycle.find(pool._stagecrew) is pool


def test_a_kill_during_open_disables_no_listener():
    """`TaskKilled` in `open` is not a failure of the listener. The listener is closed, the task ends, and a later task
    opens the listener."""
    lifecycle, hooks = new_lifecycle(topology("a", optional(Plain())))
    hooks.plan = {("open", "a", 0): TaskKilled("SIGTERM")}
    with pytest.raises(TaskKilled):
        lifecycle.begin(["a"], "task")
    hooks.plan = {}
    lifecycle.begin(["a"], "task")
    assert hooks.log == [("open", "a", 0), ("close", "a", 0), ("open", "a", 0)]


def test_a_failed_decoration_leaves_the_earlier_ones():
    """If a decoration cannot be entered, the earlier ones are left in reverse order with the exception. The failed one
    is not left."""
    lifecycle, hooks = new_lifecycle(topology("a", Decorating(), Decorating(), Decorating(), Decorating()))
    error = hooks.plan["enter", "a", 2] = HookError("no context")
    with pytest.raises(HookError, match="no context"):
        lifecycle.begin(["a"], "task")
    assert hooks.log[-3:] == [("enter", "a", 2, "task"), ("leave", "a", 1, error), ("leave", "a", 0, error)]
    hooks.log = []
    lifecycle.end(None)
    assert hooks.log == []


def test_decorations_receive_the_exception_of_the_task_once():
    """`end` passes the task's exception to each decoration. A second `end` does nothing."""
    lifecycle, hooks = new_lifecycle(topology("a", Decorating()))
    lifecycle.begin(["a"], "task")
    error = TaskKilled("SIGTERM")
    lifecycle.end(error)
    lifecycle.end(None)
    assert [call for call in hooks.log if call[0] == "leave"] == [("leave", "a", 0, error)]


def test_a_new_task_ends_an_unfinished_one():
    """A worker runs one task at a time, so it leaves the last task's decorations before it enters the next task's."""
    lifecycle, hooks = new_lifecycle(topology("a", Decorating()))
    lifecycle.begin(["a"], "one")
    lifecycle.begin(["a"], "two")
    assert hooks.log[-3:] == [("leave", "a", 0, None), ("enter", "a", 0, "two"), ("entered", "a", 0)]


@pytest.mark.parametrize("hook", ["leave", "close"])
@pytest.mark.parametrize("kind", [HookError, TaskKilled])
def test_a_failing_hook_does_not_stop_the_others(hook, kind):
    """Even if a hook breaks its promise not to raise, all listeners are left and closed once, and the error is
    raised."""
    lifecycle, hooks = new_lifecycle(topology("a", Decorating(), Decorating()), topology("b", Decorating()))
    lifecycle.begin(["a", "b"], "task")
    hooks.plan, hooks.log = {(hook, "b", 0): kind("broken"), (hook, "a", 1): kind("broken")}, []
    with pytest.raises(kind, match="broken"):
        lifecycle.close_all()
    places = [("b", 0), ("a", 1), ("a", 0)]
    assert hooks.log == [("leave", *place, None) for place in places] + [("close", *place) for place in places]
    assert not lifecycle.anything_open
    assert not lifecycle.busy
    assert not lifecycle.knows("a")
    hooks.log = []
    assert lifecycle.close_all() == []
    assert hooks.log == []


def test_a_topology_in_use_is_closed_after_its_task():
    """The close of a topology in use is deferred until its task has ended. Another topology closes immediately."""
    lifecycle, hooks = new_lifecycle(topology("a", Plain()), topology("b", Plain()))
    lifecycle.begin(["b"], "task")
    lifecycle.end(None)
    lifecycle.begin(["a"], "task")
    hooks.log = []
    assert lifecycle.close("a") == []
    assert lifecycle.close("a") == []
    assert lifecycle.close("b") == ["b"]
    assert hooks.log == [("close", "b", 0)]
    lifecycle.end(None)
    assert hooks.log == [("close", "b", 0)]
    assert lifecycle.close_due() == ["a"]
    assert lifecycle.close_due() == []
    assert hooks.log == [("close", "b", 0), ("close", "a", 0)]


def test_deferred_closes_run_innermost_first():
    """Deferred closes run from the innermost topology to the outermost, whichever close arrived first."""
    lifecycle, hooks = new_lifecycle(topology("outer", Plain()), topology("inner", Plain()))
    lifecycle.begin(["outer", "inner"], "task")
    lifecycle.close("outer")
    lifecycle.close("inner")
    lifecycle.end(None)
    hooks.log = []
    assert sorted(lifecycle.close_due()) == ["inner", "outer"]
    assert hooks.log == [("close", "inner", 0), ("close", "outer", 0)]


def test_closing_is_set_while_a_listener_closes():
    """`closing` is set from before a close is recorded until `close` returns, also after a failed open, so that a
    signal handler can see it."""
    lifecycle, hooks = new_lifecycle(topology("a", Plain(), optional(Plain())))
    seen = []

    class Opened(list):
        def remove(self, key):
            seen.append(("recorded", lifecycle.closing))
            super().remove(key)

    def open_hook(topology, registered):
        seen.append(("open", lifecycle.closing))
        if registered.index == 1:
            raise HookError

    lifecycle._opened = Opened()
    hooks.open = open_hook
    hooks.close = lambda topology, registered: seen.append(("close", lifecycle.closing))
    lifecycle.begin(["a"], "task")
    lifecycle.end(None)
    closes = [("recorded", True), ("close", True)]
    assert seen == [("open", False), ("open", False), *closes]
    assert not lifecycle.closing
    lifecycle.close("a")
    assert seen[4:] == closes
    assert not lifecycle.closing


def test_a_forked_child_finds_listeners_and_closes_none():
    """A forked child finds the open listeners, but neither leaves nor closes them, because its parent does."""
    first = Decorating("first")
    lifecycle, hooks = new_lifecycle(topology("a", first))
    lifecycle.begin(["a"], "task")
    lifecycle.disown()
    hooks.log = []
    assert lifecycle.find(first._stagecrew) is first
    assert lifecycle.open_count == 0
    assert not lifecycle.anything_open
    lifecycle.end(None)
    assert lifecycle.close_all() == ["a"]
    assert hooks.log == []


def test_the_close_of_an_unknown_topology_gets_a_response():
    """A process confirms the close of a topology of which it never ran a task, because the executor waits for it."""
    lifecycle, hooks = new_lifecycle()
    assert lifecycle.close("never described") == ["never described"]
    assert hooks.log == []


def test_a_known_topology_does_not_change():
    """A second description of a known topology does not replace its listeners."""
    first, second = Plain(), Plain()
    lifecycle, _ = new_lifecycle(topology("a", first))
    lifecycle.begin(["a"], "task")
    lifecycle.add_topology(topology("a", second))
    assert lifecycle.find(first._stagecrew) is first
    assert lifecycle.name_of("a") == "name of a"


def test_a_chain_with_an_unknown_topology_begins_no_task():
    """If the chain contains an unknown topology, `begin` raises and no task is running afterwards."""
    lifecycle, _ = new_lifecycle(topology("a", Decorating()))
    with pytest.raises(KeyError):
        lifecycle.begin(["a", "unknown"], "task")
    assert not lifecycle.busy


def test_only_listeners_that_override_decorate_are_entered():
    """A task does not enter a listener that does not override `decorate`."""
    lifecycle, hooks = new_lifecycle(topology("a", Plain()))
    lifecycle.begin(["a"], "task")
    lifecycle.end(None)
    assert hooks.log == [("open", "a", 0)]


def test_listeners_of_another_process_are_not_opened_or_closed_here():
    """A listener that another process opened is neither opened nor closed here. `find` fetches its value, or raises the
    error."""
    remote, gone = Plain("remote"), Plain("gone")
    lifecycle, hooks = new_lifecycle(
        topology("a", opened_elsewhere(remote, "a port"), opened_elsewhere(gone, LookupError("its agent is lost")))
    )
    lifecycle.begin(["a"], "task")
    assert lifecycle.find(remote._stagecrew) == "a port"
    with pytest.raises(LookupError, match="its agent is lost"):
        lifecycle.find(gone._stagecrew)
    lifecycle.end(None)
    lifecycle.close_all()
    assert hooks.log == []


def test_find_searches_the_current_chain_innermost_first():
    """Of equal listeners in several topologies, `find` returns the one of the innermost topology in the task's chain.

    It finds no listener of a topology outside the chain.
    """
    outer, inner, target = Plain("same"), Plain("same"), Plain("same")
    only_outer = Plain("only here")
    lifecycle, _ = new_lifecycle(topology("a", outer, only_outer), topology("b", inner))
    lifecycle.begin(["a", "b"], "task")
    assert lifecycle.find(target._stagecrew) is inner
    assert lifecycle.find(only_outer._stagecrew) is only_outer
    lifecycle.begin(["a"], "task")
    assert lifecycle.find(target._stagecrew) is outer
    lifecycle.begin(["b"], "task")
    with pytest.raises(LookupError):
        lifecycle.find(only_outer._stagecrew)


def test_find_prefers_the_exact_listener_to_an_equal_one():
    """If a function is defined several times under one name, each listener finds itself, also from an outer
    topology."""

    def defined(value: str):
        @resource
        def pool(context):
            yield value

        return pool()

    one, two, three = defined("one"), defined("two"), defined("three")
    lifecycle, hooks = new_lifecycle(topology("a", one, two), topology("b", three))
    hooks.open = lambda topology, registered: registered.listener.open(None)
    lifecycle.begin(["a", "b"], "task")
    assert one._stagecrew.same(three._stagecrew)
    assert [lifecycle.find(each._stagecrew) for each in (one, two, three)] == ["one", "two", "three"]
    assert [lifecycle.find(each._stagecrew.reference()) for each in (one, two, three)] == ["one", "two", "three"]


def test_the_error_of_find_names_where_it_searched():
    """The error of `find` names the task's topologies, innermost first, and their listeners. If the listener is
    registered but not open yet, the error says so."""
    target = Plain("asked")
    lifecycle, hooks = new_lifecycle(topology("a", Plain("first")), topology("b", Plain("second"), target))
    with pytest.raises(NotRegisteredError) as nowhere:
        lifecycle.find(target._stagecrew)
    assert (nowhere.value.inside, nowhere.value.registered) == ((), ())
    lifecycle.begin(["a"], "task")
    with pytest.raises(NotRegisteredError) as elsewhere:
        lifecycle.find(target._stagecrew)
    assert (elsewhere.value.inside, elsewhere.value.registered) == (("name of a",), ("Plain",))
    lifecycle.end(None)

    def find_target(topology, registered):
        lifecycle.find(target._stagecrew)

    hooks.open = find_target
    with pytest.raises(
        LookupError, match=r"it is not open yet: listeners open in the order in which they are registered"
    ):
        lifecycle.begin(["a", "b"], "task")
    hooks.open = lambda topology, registered: None
    lifecycle.begin(["a", "b"], "task")
    with pytest.raises(NotRegisteredError) as both:
        lifecycle.find(Plain("nowhere")._stagecrew)
    assert both.value.inside == ("name of b", "name of a")
    assert both.value.registered == ("Plain", "Plain", "Plain")
    assert both.value.reason == ""
    lifecycle.begin(["a"], "task")
    with pytest.raises(NotRegisteredError) as other:
        lifecycle.find(target._stagecrew)
    assert other.value.others == ("name of b",)


CELL = """
import stagecrew

DSN = "a"

@stagecrew.resource
def pool(context, size=1):
    yield DSN

class Pool(stagecrew.Listener):
    limit = 1

    def open(self, context):
        self.opened = "a"

listeners = pool(size=2), Pool()
"""


def cell(text: str) -> Any:
    """The listeners of a notebook cell that was run once."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, f"cell {id(names)}", "exec"), names)
    return names["listeners"]


def pickled_as(what: str) -> Any:
    """Returns a function that pickles and loads a listener's identity, complete ("copy") or as a "reference".

    A function that is sent to a task contains a reference.
    """
    return {
        "copy": lambda listener: pickle.loads(pickle.dumps(listener._stagecrew)),
        "reference": lambda listener: pickle.loads(pickle.dumps(listener._stagecrew.reference())),
    }[what]


@pytest.mark.parametrize("how", ["copy", "reference"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    yield DSN", '    yield DSN + "b"'),
        ('DSN = "a"', 'DSN = "b"'),
        ("size=1", "size=3"),
        ('self.opened = "a"', 'self.opened = "b"'),
        ("limit = 1", "limit = 2"),
    ],
)
def test_a_notebook_cell_run_again_with_other_code(how, old, new):
    """After a cell was run again with different code, `find` of a changed listener does not return the old value. The
    error says that the cell was run again."""
    before, after = cell(CELL), cell(CELL.replace(old, new))
    registered = topology("a", *before)
    travelled = TopologyDescription(
        registered.id,
        registered.name,
        tuple(dataclasses.replace(one, identity=pickled_as("copy")(one.listener)) for one in registered.listeners),
    )
    lifecycle, hooks = new_lifecycle(travelled)
    hooks.open = lambda topology, registered: registered.listener.open(None)
    lifecycle.begin(["a"], "task")
    changed = [one for one, two in zip(after, before, strict=True) if one._stagecrew.redefines(two._stagecrew)]
    assert len(changed) == 1
    for listener in after:
        if listener in changed:
            with pytest.raises(NotRegisteredError) as redefined:
                lifecycle.find(pickled_as(how)(listener))
            assert "was run again with different code" in redefined.value.reason
            assert "crew.close_all()" in redefined.value.reason
        else:
            lifecycle.find(pickled_as(how)(listener))
    for listener in before:
        lifecycle.find(pickled_as(how)(listener))  # the open listener is found, whatever is defined later


def test_a_notebook_cell_run_again_unchanged():
    """After a cell was run again, its listeners are found if only the code's position, its comments or the cell's name
    changed."""
    before, after = cell(CELL), cell("\n# a comment\n" + CELL.replace("    yield", "    # another\n    yield"))
    for one, two in zip(before, after, strict=True):
        assert not one._stagecrew.redefines(two._stagecrew)
    lifecycle, _ = new_lifecycle(topology("a", *before))
    lifecycle.begin(["a"], "task")
    for listener in after:
        lifecycle.find(pickled_as("reference")(listener))


def test_an_outer_topology_with_the_requested_definition():
    """`find` returns the value of an outer topology with the requested definition, even if an inner topology has an
    earlier definition."""
    before, after, again = (cell(CELL.replace("size=1", f"size={size}"))[0] for size in (1, 2, 2))
    lifecycle, hooks = new_lifecycle(topology("a", after), topology("b", before))
    hooks.open = lambda topology, registered: registered.listener.open(None)
    lifecycle.begin(["a", "b"], "task")
    assert lifecycle.find(pickled_as("reference")(again)) == "a"


def test_a_copy_from_another_process():
    """A copy that another process made cannot be compared with the open listener of that name, and the error says so.

    A listener with other arguments is not registered, and the error gives no such reason.
    """
    made = cell(CELL)[0]
    code = "import pickle, sys; sys.stdout.buffer.write(pickle.dumps(made._stagecrew.reference()))"
    script = f"import sys\n{CELL}\nmade = listeners[0]\n{code}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    foreign = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, env=environment, timeout=60
    ).stdout
    lifecycle, _ = new_lifecycle(topology("a", made))
    lifecycle.begin(["a"], "task")
    with pytest.raises(NotRegisteredError) as copied:
        lifecycle.find(pickle.loads(foreign))
    assert "a pickled copy of it that another process made" in copied.value.reason
    with pytest.raises(NotRegisteredError) as other:
        lifecycle.find(pickled_as("reference")(type(made)(made._factory, (), {"size": 7})))
    assert (other.value.registered, other.value.reason) == (("Resource",), "")


def test_a_listener_finds_listeners_that_opened_earlier():
    """`find` in an `open` finds listeners that were registered earlier."""
    first, second = Plain("first"), Plain("second")
    lifecycle, hooks = new_lifecycle(topology("a", first, second))
    found = []

    def open_hook(topology, registered):
        if registered.listener is second:
            found.append(lifecycle.find(first._stagecrew))

    hooks.open = open_hook
    lifecycle.begin(["a"], "task")
    assert found == [first]
