"""State handles at each of their steps: whoever dies, fails, is slow or comes between, what refers to a state has it, whole."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stagecrew.errors import (
    HandleExists,
    HandleLocked,
    HandleMissing,
    PossiblyInconsistentError,
    RecoveryError,
    StateStorageError,
    StoreConflict,
    StoreUnavailable,
)
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


@pytest.fixture
def folder():
    with quick_folder() as found:
        yield found


def fresh(folder, number, made=model_world):
    """A world of its own, with a handle `b`, one that is half removed, and an orphan."""
    world = made(f"{folder}/{number}")
    handles = world.handles()
    handles.add("b", b"old b")
    handles.add("half", b"half")
    world.observer.transact(Delete("jobs/half/locks"))
    world.storage.write("orphan", b"orphan", world.folder())
    return world


#: What is done; what is done when it is repeated by another; and what must be there then, beside what was.
CASES = {
    "add": (lambda handles, world: handles.add("a", b"new a", [Create("also")]), {"a": b"new a", "b": b"old b"}),
    "add locked": (lambda handles, world: handles.add("a", b"new a", lock=True), {"a": b"new a", "b": b"old b"}),
    "add on marked": (
        lambda handles, world: handles.add("half", b"new"),
        {"half": b"new", "b": b"old b"},
    ),
    "replace": (lambda handles, world: handles.replace("b", 0, b"new b"), {"b": b"new b"}),
    "remove": (lambda handles, world: handles.remove("b"), {}),
    "remove locked": (lambda handles, world: (handles.lock("b"), handles.remove("b")), {}),
    "remove marked": (lambda handles, world: handles.remove("half"), {"b": b"old b"}),
    "clear": (lambda handles, world: handles.clear(), {}),
    "sweep": (None, {"b": b"old b"}),
}


def attempt(case, world, moment):
    act, _ = CASES[case]
    if act is None:
        world.sweep(moment)
    else:
        act(world.handles(moment), world)


def again(case, world):
    """The first is over, and another instance does what that may have done."""
    world.expire_others()
    with contextlib.suppress(HandleExists, HandleMissing, StoreConflict):
        attempt(case, world, None)


def enumerated(folder, case, error, made=model_world):
    """Each step of a case, with the world in which it dies or fails there."""
    for at in range(1, 200):
        world = fresh(folder, at, made)
        before = world.readable_data()
        step = FaultAtStep(at, error)
        raised = None
        try:
            attempt(case, world, step)
        except (Killed, RecoveryError) as found:
            raised = found
        yield world, before, step, raised
        if step.count < at:
            assert at > 4
            return
    raise AssertionError("it does not end")


@pytest.fixture(params=["model", "sqlite"])
def made(request):
    """Makes worlds."""
    with contextlib.ExitStack() as stack:
        yield model_world if request.param == "model" else lambda folder: stack.enter_context(sqlite_world(folder))


@pytest.mark.parametrize("case", CASES)
def test_dies_at_each_step(folder, case, made):
    """Before and after each call to store or storage, and in the middle of writing a state: whole at once, done by the next."""
    after = CASES[case][1]
    for world, before, _step, _raised in enumerated(folder, case, None, made):
        assert world.readable_data() in (before, after)
        again(case, world)
        assert world.readable_data() == after
        assert world.assert_clean() == after


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["definite", "unknown"])
def test_fails_at_each_step(folder, case, kind):
    """Each call raises, or its answer is lost: as above; and what is definitely not done leaves no state behind."""

    where = []

    def error(method, when):
        where[:] = [method]
        if method in ("write", "discard", "names", "now"):
            return StateStorageError("the disk is away")
        if kind == "unknown":
            return PossiblyInconsistentError("lost") if method in ("transact", "ensure") else None
        return StoreUnavailable("away") if when == "before" else None

    after = CASES[case][1]
    for world, before, step, raised in enumerated(folder, case, error):
        assert world.readable_data() in (before, after)
        if (
            raised is not None
            and not isinstance(raised, PossiblyInconsistentError)
            and case.startswith(("add", "replace"))
        ):
            assert world.readable_data() == before
            assert len(world.files()) <= 3 or where == ["write"]
        if step.fired and raised is None:
            assert world.readable_data() == after
        again(case, world)
        assert world.readable_data() == after
        assert world.assert_clean() == after


def answered(world, actor):
    """What an actor was answered is true: for those that must not fail otherwise."""
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
    "remove marked, add": ("remove half", "add half"),
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
    """Makes the worlds of a race: warm instances, whose next steps are those that matter."""
    numbers = iter(range(1_000_000))

    def make(schedule):
        number = next(numbers)
        world = fresh(folder, number)
        world.actors = []
        for name in names:
            if name == "sweep":
                world.actors.append(schedule.start(lambda moment: world.sweep(moment)))
                continue
            hook = []
            handles = world.handles(lambda *at, hook=hook: hook[0](*at) if hook else None, repeats=repeats)
            handles.add("warm", b"")
            handles.remove("warm")

            def run(moment, hook=hook, handles=handles, name=name):
                hook.append(moment)
                return ACTIONS[name](world, handles)

            world.actors.append(schedule.start(run))
        return world

    return make


#: The orders with so many switches from one to the other are tried: all orders are millions.
SWITCHES = [2, pytest.param(4, marks=pytest.mark.long)]


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("names", RACES.values(), ids=RACES)
def test_each_schedule_of_two(folder, names, switches):
    """In each order of the steps of two, at every moment: whole; what each is answered is true; nothing is left in the end."""

    def check(world, schedule, over):
        held = world.readable_data()
        if not over:
            return
        first, second = world.actors
        for actor in world.actors:
            answered(world, actor)
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
            assert isinstance(first.error or second.error, HandleMissing | HandleLocked)
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
def test_each_schedule_when_the_store_repeats(folder, names, switches):
    """The same where each answer is lost, and the store asks again: what was done and undone since is not done twice."""

    def check(world, schedule, over):
        held = world.readable_data()
        if over:
            for actor in world.actors:
                answered(world, actor)
            if names == ("add a", "sweep"):
                assert held["a"] == b"new a"
            if names == ("remove b", "add b"):
                assert world.actors[0].result is True
            assert world.assert_clean() == held

    explore_schedules(race(folder, names, repeats=True), check, switches)


def test_an_add_that_the_store_repeats_after_all_was_removed(folder):
    """It was done, and removed by another, before the store asked for it again: the handle does not come back without its state."""
    world = model_world(folder)
    removed = []

    def moment(method, when, arguments=()):
        if (method, when) == ("transact", "lost") and world.handles().exists("a") and not removed:
            removed.append(world.handles().remove("a"))

    world.handles(moment, repeats=True).add("a", b"1")
    assert removed == [True]
    assert world.assert_clean() == {}


class Machine(RuleBasedStateMachine):
    """Two instances and a sweeper, each at one step of something, in any order, with faults, deaths and late transactions."""

    def __init__(self):
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.world = model_world(self.stack.enter_context(quick_folder()))
        self.schedule = Schedule()
        self.instances = {}
        self.actors = {}
        self.late = {}
        self.number = 0
        for who in ("one", "two"):
            self.instance(who)
        self.instances["one"][0].add("a", b"0")

    def instance(self, who):
        hook = [None]
        handles = self.world.handles(lambda *at: hook[0](*at) if hook[0] else None)
        handles.add(who, b"warm")  # what follows are the steps that matter
        handles.remove(who)
        self.instances[who] = (handles, hook)

    def idle(self, who):
        return who not in self.actors or self.actors[who].ended

    def start(self, who, action):
        if not self.idle(who):
            return
        handles, hook = self.instances[who]

        def run(moment):
            hook[0] = moment
            try:
                return action(handles)
            finally:
                hook[0] = None

        self.actors[who] = self.schedule.start(run)

    WHO = st.sampled_from(["one", "two"])
    NAME = st.sampled_from(["a", "b"])

    @rule(
        who=WHO,
        name=NAME,
        action=st.sampled_from(
            [
                "add",
                "add",
                "add until known",
                "add until known",
                "replace",
                "replace",
                "remove",
                "remove",
                "get",
                "clear",
                "release",
            ]
        ),
        flag=st.booleans(),
    )
    def begin(self, who, name, action, flag):
        self.number += 1
        data = b"%d" % self.number
        entry = self.world.observer.read(f"{ROOT}/{name}")
        version = max(0, entry.version - flag) if entry else 0

        def repeated(handles):
            state = handles.prepare(data)
            for _ in range(3):
                with contextlib.suppress(PossiblyInconsistentError):
                    return handles.add(name, state)
            return None

        actions = {
            "add": lambda handles: handles.add(name, data, lock=flag),
            "add until known": repeated,
            "replace": lambda handles: handles.replace(name, version, data),
            "remove": lambda handles: handles.remove(name),
            "get": lambda handles: handles.get(name, lock=flag),
            "clear": lambda handles: handles.clear(),
            "release": lambda handles: handles.release_all(),
        }
        self.start(who, actions[action])

    @rule()
    def sweep(self):
        if self.idle("sweeper"):
            self.actors["sweeper"] = self.schedule.start(lambda moment: self.world.sweep(moment))

    @rule(who=st.sampled_from(["one", "two", "sweeper"]), steps=st.sampled_from([8, 4, 2, 1, 100]))
    def step(self, who, steps):
        for _ in range(steps):
            if not self.idle(who):
                self.arrives(who)
                self.actors[who].step()

    @rule(
        who=WHO, kind=st.sampled_from(["definite", "not done", "done", "late"]), where=st.sampled_from(MUTATING_METHODS)
    )
    def fail(self, who, kind, where):
        """The next call to this method fails, or its answer is lost."""
        actor = self.actors.get(who)
        while not self.idle(who) and actor.at[0] != where:
            self.arrives(who)
            actor.step()
            self.world.readable_data()
        if self.idle(who):
            return
        method, _when = actor.at
        if method in ("write", "discard", "names", "now"):
            actor.step(StateStorageError("the disk is away"))
        elif method in ("transact", "ensure") and kind != "definite":
            self.arrives(who)
            if kind in ("done", "late") and method == "transact":
                self.late[who] = (self.instances[who][0]._store.session, actor.arguments)
            if kind == "done":
                self.arrives(who)
            actor.step(PossiblyInconsistentError("lost"))
        elif method:
            actor.step(StoreUnavailable("away"))

    @rule(who=WHO)
    def arrives(self, who):
        """A transaction that was given up arrives, if its session lives: at the latest before the next of that session."""
        session, operations = self.late.pop(who, (None, ()))
        if session in self.world.server.live:
            with contextlib.suppress(StoreConflict):
                self.world.server.apply(session, operations)

    @rule(who=WHO, at_once=st.booleans())
    def die(self, who, at_once):
        """A process dies, and another comes; its session ends at once, or only later."""
        if not self.idle(who):
            while not self.actors[who].ended:
                self.actors[who].step(Killed())
        self.instances[who][1][0] = None
        session = self.instances[who][0]._store.session
        if at_once:
            self.world.expire(session)
        self.late.pop(who, None)
        self.instance(who)

    @rule()
    def expire(self):
        """The sessions of the dead are over."""
        live = {handles._store.session for handles, _ in self.instances.values()} | {self.world.observer.session}
        for session in list(self.world.server.live - live):
            self.world.expire(session)

    @invariant()
    def whole(self):
        self.world.readable_data()

    def teardown(self):
        try:
            for who in ("one", "two"):
                self.arrives(who)
            self.schedule.finish()
            for actor in self.actors.values():
                assert actor.error is None or isinstance(actor.error, RecoveryError | Killed), actor.error
            self.expire()
            for who in ("one", "two"):
                self.instances[who][1][0] = None
                self.instances[who][0].release_all()
            held = self.world.readable_data()
            assert self.world.assert_clean() == held
            for name in held:
                assert self.world.handles().remove(name)
            assert self.world.files() == []
        finally:
            self.schedule.finish()
            self.stack.close()


TestHandlesUnderAnything = Machine.TestCase
TestHandlesUnderAnything.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


@pytest.mark.long
class TestHandlesUnderAnythingAtLength(Machine.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=60, deadline=None)
