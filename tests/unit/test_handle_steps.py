"""State handles at each of their steps: whatever fails or interferes, every reference points to a complete state."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stagecrew.errors import (
    HandleError,
    PossiblyInconsistentError,
    RecoveryError,
    StateStorageError,
    StoreConflict,
    StoreUnavailable,
)
from stagecrew.recovery.state.handles import HandleExists, HandleMissing
from stagecrew.recovery.stores.contract import Create, Delete
from support.handle_faults import (
    MUTATING_METHODS,
    ROOT,
    FaultAtStep,
    Killed,
    Schedule,
    explore_schedules,
    model_world,
    quick_folder,
    sqlite_world,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def folder():
    with quick_folder() as path:
        yield path


def new_world(folder, number, make_world=model_world):
    """A new world with a handle `b`, a half-removed handle and an orphaned state."""
    world = make_world(f"{folder}/{number}")
    handles = world.handles()
    handles.add("b", b"old b")
    handles.add("half", b"half")
    world.observer.transact(Delete("jobs/half/locks"))
    world.storage.write("orphan", b"orphan", world.folder())
    return world


#: For each case: the action, and the handles that must exist after another instance has repeated it.
CASES = {
    "add": (lambda handles, world: handles.add("a", b"new a", [Create("also")]), {"a": b"new a", "b": b"old b"}),
    "add locked": (lambda handles, world: handles.add("a", b"new a", lock=True), {"a": b"new a", "b": b"old b"}),
    "add over half-removed": (
        lambda handles, world: handles.add("half", b"new"),
        {"half": b"new", "b": b"old b"},
    ),
    "replace": (lambda handles, world: handles.replace("b", 0, b"new b"), {"b": b"new b"}),
    "remove": (lambda handles, world: handles.remove("b"), {}),
    "remove locked": (lambda handles, world: (handles.lock("b"), handles.remove("b")), {}),
    "remove half-removed": (lambda handles, world: handles.remove("half"), {"b": b"old b"}),
    "clear": (lambda handles, world: handles.clear(), {}),
    "sweep": (None, {"b": b"old b"}),
}


def perform(case, world, on_step):
    action, _ = CASES[case]
    if action is None:
        world.sweep(on_step)
    else:
        action(world.handles(on_step), world)


def repeat(case, world):
    """Ends the first instance's session, and repeats its action in another instance."""
    world.expire_others()
    with contextlib.suppress(HandleExists, HandleMissing, StoreConflict):
        perform(case, world, None)


def each_step(folder, case, error, make_world=model_world):
    """For each step of a case, lets the action die or fail there in a new world.

    Yields the world, its data before the action, the fault, and the exception that the action raised.
    """
    for step_number in range(1, 200):
        world = new_world(folder, step_number, make_world)
        before = world.readable_data()
        fault = FaultAtStep(step_number, error)
        raised = None
        try:
            perform(case, world, fault)
        except (Killed, RecoveryError) as caught:
            raised = caught
        yield world, before, fault, raised
        if fault.count < step_number:
            assert step_number > 4
            return
    raise AssertionError("the action does not end")


@pytest.fixture(params=["model", "sqlite"])
def make_world(request):
    """Makes worlds with each kind of store."""
    with contextlib.ExitStack() as stack:
        yield model_world if request.param == "model" else lambda folder: stack.enter_context(sqlite_world(folder))


@pytest.mark.parametrize("case", CASES)
def test_an_instance_can_die_at_each_step(folder, case, make_world):
    """An instance dies before or after any call to the store or the storage, or while it writes a state.

    Immediately afterwards, every reference points to a complete state, and another instance can complete the action.
    """
    after = CASES[case][1]
    for world, before, _fault, _raised in each_step(folder, case, None, make_world):
        assert world.readable_data() in (before, after)
        repeat(case, world)
        assert world.readable_data() == after
        assert world.assert_clean() == after


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["definite", "unknown"])
def test_each_step_can_fail(folder, case, kind):
    """One call at a time fails, or its reply is lost. If the write certainly did not happen, no new state is left."""

    failed_method = []

    def error(method, when):
        failed_method[:] = [method]
        if method in ("write", "discard", "names", "now"):
            return StateStorageError("the disk is unavailable")
        if kind == "unknown":
            return PossiblyInconsistentError("lost") if method in ("transact", "ensure") else None
        return StoreUnavailable("unavailable") if when == "before" else None

    after = CASES[case][1]
    for world, before, fault, raised in each_step(folder, case, error):
        assert world.readable_data() in (before, after)
        if (
            raised is not None
            and not isinstance(raised, PossiblyInconsistentError)
            and case.startswith(("add", "replace"))
        ):
            assert world.readable_data() == before
            assert len(world.files()) <= 3 or failed_method == ["write"]
        if fault.fired and raised is None:
            assert world.readable_data() == after
        repeat(case, world)
        assert world.readable_data() == after
        assert world.assert_clean() == after


def check_error(actor):
    """Asserts that the actor has not failed, or has failed with a RecoveryError."""
    assert actor.error is None or isinstance(actor.error, RecoveryError), actor.error


RACES = {
    "add, sweep": ("add a", "sweep"),
    "replace, sweep": ("replace b", "sweep"),
    "add, remove": ("add b", "remove b"),
    "add, clear": ("add b", "clear"),
    "replace, remove": ("replace b", "remove b"),
    "replace, replace": ("replace b", "replace b"),
    "remove, remove": ("remove b", "remove b"),
    "get, remove": ("get b", "remove b"),
    "get, replace": ("get b", "replace b"),
    "add, add": ("add a", "add a"),
    "remove half-removed, add": ("remove half", "add half"),
    "lock, remove": ("lock b", "remove b"),
}
ACTIONS = {
    "add a": lambda world, handles: handles.add("a", b"new a"),
    "add b": lambda world, handles: handles.add("b", b"new b"),
    "add half": lambda world, handles: handles.add("half", b"new"),
    "replace b": lambda world, handles: handles.replace("b", 0, b"new b"),
    "remove b": lambda world, handles: handles.remove("b"),
    "remove half": lambda world, handles: handles.remove("half"),
    "get b": lambda world, handles: handles.get("b").data,
    "lock b": lambda world, handles: (handles.lock("b"), handles.get("b").data)[1],
    "clear": lambda world, handles: handles.clear(),
}


def race(folder, names, repeats=False):
    """Returns a function that makes the worlds of a race.

    The instances are warmed up first, so that their one-time setup adds no steps to the race.
    """
    numbers = iter(range(1_000_000))

    def make(schedule):
        number = next(numbers)
        world = new_world(folder, number)
        world.actors = []
        for name in names:
            if name == "sweep":
                world.actors.append(schedule.start(world.sweep))
                continue
            step_listener = []
            handles = world.handles(
                lambda *step, step_listener=step_listener: step_listener[0](*step) if step_listener else None,
                repeats=repeats,
            )
            handles.add("warm", b"")
            handles.remove("warm")

            def run(on_step, step_listener=step_listener, handles=handles, name=name):
                step_listener.append(on_step)
                return ACTIONS[name](world, handles)

            world.actors.append(schedule.start(run))
        return world

    return make


#: The maximum numbers of switches between the two actors. Trying all orders would take millions of runs.
SWITCHES = [2, pytest.param(4, marks=pytest.mark.long)]


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("names", RACES.values(), ids=RACES)
def test_each_schedule_of_two_actors(folder, names, switches):
    """In every order of two actors' steps, every reference points to a complete state at all times.

    Each actor's result matches what happened, and no orphaned state is left.
    """

    def check(world, schedule, ended):
        held = world.readable_data()
        if not ended:
            return
        first, second = world.actors
        for actor in world.actors:
            check_error(actor)
        done = {name: actor.error is None for name, actor in zip(names, world.actors, strict=True)}
        if names in (("add a", "add a"), ("replace b", "replace b")):
            assert [first.error is None, second.error is None].count(True) == 1
        if names == ("add a", "sweep"):
            assert done == {"add a": True, "sweep": True}
            assert held["a"] == b"new a"
        if names == ("replace b", "sweep"):
            assert held["b"] == b"new b"
        if names == ("add b", "remove b"):
            assert ("b" in held) == done["add b"]
        if names in (("replace b", "remove b"), ("remove b", "remove b"), ("get b", "remove b")):
            assert "b" not in held
        if names[0] in ("get b", "lock b") and done[names[0]]:
            assert first.result in (b"old b", b"new b")
        if names == ("lock b", "remove b"):
            assert [first.error is None, second.error is None].count(True) == 1
            assert isinstance(first.error or second.error, HandleMissing | HandleError)
        if names == ("get b", "replace b"):
            assert done == {"get b": True, "replace b": True}
        if names == ("remove half", "add half"):
            assert done == {"remove half": True, "add half": True}
            assert ("half" in held) == (not first.result)
        assert world.assert_clean() == held

    count = explore_schedules(race(folder, names), check, switches)
    assert count > 10


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("names", [("add a", "sweep"), ("remove b", "add b"), ("replace b", "remove b")], ids=", ".join)
def test_each_schedule_when_the_store_repeats_requests(folder, names, switches):
    """Every reply is lost, so the store's client sends each request again.

    A write that was applied, and then undone by another instance, is not applied again.
    """

    def check(world, schedule, ended):
        held = world.readable_data()
        if ended:
            for actor in world.actors:
                check_error(actor)
            if names == ("add a", "sweep"):
                assert held["a"] == b"new a"
            if names == ("remove b", "add b"):
                assert world.actors[0].result is True
            assert world.assert_clean() == held

    explore_schedules(race(folder, names, repeats=True), check, switches)


def test_an_add_repeated_after_its_removal_does_not_restore_the_handle(folder):
    """If another instance removes a handle before the store's client repeats its add, the handle stays removed."""
    world = model_world(folder)
    removed = []

    def on_step(method, when, arguments=()):
        if (method, when) == ("transact", "lost") and world.handles().exists("a") and not removed:
            removed.append(world.handles().remove("a"))

    world.handles(on_step, repeats=True).add("a", b"1")
    assert removed == [True]
    assert world.assert_clean() == {}


class HandleMachine(RuleBasedStateMachine):
    """Two processes and a sweeper take single steps in any order, with faults, deaths and late transactions.

    `instances` contains each process's current handles, with a one-element list for its `on_step`.
    """

    def __init__(self):
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.world = model_world(self.stack.enter_context(quick_folder()))
        self.schedule = Schedule()
        self.instances = {}
        self.actors = {}
        self.late = {}
        self.number = 0
        for process in ("one", "two"):
            self.start_instance(process)
        self.instances["one"][0].add("a", b"0")

    def start_instance(self, process):
        step_listener = [None]
        handles = self.world.handles(lambda *step: step_listener[0](*step) if step_listener[0] else None)
        handles.add(process, b"warm")  # warm up, so that one-time setup is not among the steps under test
        handles.remove(process)
        self.instances[process] = (handles, step_listener)

    def idle(self, process):
        return process not in self.actors or self.actors[process].ended

    def start(self, process, action):
        if not self.idle(process):
            return
        handles, step_listener = self.instances[process]

        def run(on_step):
            step_listener[0] = on_step
            try:
                return action(handles)
            finally:
                step_listener[0] = None

        self.actors[process] = self.schedule.start(run)

    PROCESS = st.sampled_from(["one", "two"])
    NAME = st.sampled_from(["a", "b"])

    @rule(
        process=PROCESS,
        name=NAME,
        action=st.sampled_from(
            [
                "add",
                "add",
                "add until outcome known",
                "add until outcome known",
                "replace",
                "replace",
                "remove",
                "remove",
                "get",
                "clear",
                "release",
            ]
        ),
        lock=st.booleans(),
        stale=st.booleans(),
    )
    def begin(self, process, name, action, lock, stale):
        """Starts an action in a process. `lock` locks the handle; `stale` makes `replace` use an old version."""
        self.number += 1
        data = b"%d" % self.number
        entry = self.world.observer.read(f"{ROOT}/{name}")
        version = max(0, entry.version - stale) if entry else 0

        def add_until_outcome_known(handles):
            state = handles.prepare(data)
            for _ in range(3):
                with contextlib.suppress(PossiblyInconsistentError):
                    return handles.add(name, state)
            return None

        actions = {
            "add": lambda handles: handles.add(name, data, lock=lock),
            "add until outcome known": add_until_outcome_known,
            "replace": lambda handles: handles.replace(name, version, data),
            "remove": lambda handles: handles.remove(name),
            "get": lambda handles: handles.get(name, lock=lock),
            "clear": lambda handles: handles.clear(),
            "release": lambda handles: handles.release_all(),
        }
        self.start(process, actions[action])

    @rule()
    def sweep(self):
        if self.idle("sweeper"):
            self.actors["sweeper"] = self.schedule.start(self.world.sweep)

    @rule(process=st.sampled_from(["one", "two", "sweeper"]), steps=st.sampled_from([8, 4, 2, 1, 100]))
    def step(self, process, steps):
        for _ in range(steps):
            if not self.idle(process):
                self.late_transaction_arrives(process)
                self.actors[process].step()

    @rule(
        process=PROCESS,
        kind=st.sampled_from(["definite", "not done", "done", "late"]),
        fails_in=st.sampled_from(MUTATING_METHODS),
    )
    def fail(self, process, kind, fails_in):
        """The process's next call to the method `fails_in` fails, or its reply is lost."""
        actor = self.actors.get(process)
        while not self.idle(process) and actor.at[0] != fails_in:
            self.late_transaction_arrives(process)
            actor.step()
            self.world.readable_data()
        if self.idle(process):
            return
        method, _when = actor.at
        if method in ("write", "discard", "names", "now"):
            actor.step(StateStorageError("the disk is unavailable"))
        elif method in ("transact", "ensure") and kind != "definite":
            self.late_transaction_arrives(process)
            if kind in ("done", "late") and method == "transact":
                self.late[process] = (self.instances[process][0]._store.session, actor.arguments)
            if kind == "done":
                self.late_transaction_arrives(process)
            actor.step(PossiblyInconsistentError("lost"))
        elif method:
            actor.step(StoreUnavailable("unavailable"))

    @rule(process=PROCESS)
    def late_transaction_arrives(self, process):
        """A transaction with an unknown outcome reaches the store late, but before the session's next transaction.

        It has an effect only if the session is still alive.
        """
        session, operations = self.late.pop(process, (None, ()))
        if session in self.world.server.live:
            with contextlib.suppress(StoreConflict):
                self.world.server.apply(session, operations)

    @rule(process=PROCESS, session_ends=st.booleans())
    def die(self, process, session_ends):
        """A process dies and another one replaces it. The dead process's session ends immediately or later."""
        if not self.idle(process):
            while not self.actors[process].ended:
                self.actors[process].step(Killed())
        self.instances[process][1][0] = None
        session = self.instances[process][0]._store.session
        if session_ends:
            self.world.expire(session)
        self.late.pop(process, None)
        self.start_instance(process)

    @rule()
    def expire(self):
        """The sessions of dead processes end."""
        live = {handles._store.session for handles, _ in self.instances.values()} | {self.world.observer.session}
        for session in list(self.world.server.live - live):
            self.world.expire(session)

    @invariant()
    def every_reference_points_to_a_complete_state(self):
        self.world.readable_data()

    def teardown(self):
        try:
            for process in ("one", "two"):
                self.late_transaction_arrives(process)
            self.schedule.finish()
            for actor in self.actors.values():
                assert actor.error is None or isinstance(actor.error, RecoveryError | Killed), actor.error
            self.expire()
            for process in ("one", "two"):
                self.instances[process][1][0] = None
                self.instances[process][0].release_all()
            held = self.world.readable_data()
            assert self.world.assert_clean() == held
            for name in held:
                assert self.world.handles().remove(name)
            assert self.world.files() == []
        finally:
            self.schedule.finish()
            self.stack.close()


TestHandlesUnderRandomFaults = HandleMachine.TestCase
TestHandlesUnderRandomFaults.settings = settings(max_examples=100, stateful_step_count=60)


@pytest.mark.long
class TestHandlesUnderRandomFaultsLong(HandleMachine.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=60)
