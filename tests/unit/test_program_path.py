"""The identity of a use of an operator: its place in the program, the same in every run."""

from __future__ import annotations

import contextvars
import threading

import pytest

from stagecrew.coordination.checkpoints import Checkpoint
from stagecrew.coordination.host import Host
from stagecrew.coordination.operators import Operators
from stagecrew.coordination.program_path import PLACE, Place, Uses, current_place, operator_of, unused
from stagecrew.errors import OperatorMisused
from support.operator_fakes import DroppingWire, FakeTopology, TextCoordinator


class At:
    """What the program does inside a place."""

    def __init__(self, place):
        self.place = place

    def __enter__(self):
        self._token = PLACE.set(self.place)
        return self.place

    def __exit__(self, *_):
        self.place.ended = True
        PLACE.reset(self._token)


def step(name, parent=None):
    return At(Place(parent or current_place(), "step", name))


def topology(name, parent=None):
    return At(Place(parent or current_place(), "topology", name))


def in_thread(f):
    """What `f` returns or raises in another thread."""
    results = []

    def run():
        try:
            results.append(f())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    return results[0]


@pytest.fixture(autouse=True)
def _nowhere():
    """Each test begins outside of all places."""
    token = PLACE.set(None)
    yield
    PLACE.reset(token)


def test_a_key_names_the_place_and_counts_in_it_alone():
    """The ordinal of a use counts the uses of its operator in its own place, whatever other places did."""
    program = Place()
    uses = Uses(program, is_application=True)
    assert [uses.key("c"), uses.key("c"), uses.key("other")] == ["c/1", "c/2", "other/1"]
    with step("load", program) as load:
        assert uses.key("c") == "step=load:c/1"
        with At(Place(load, "batch", "3")), topology("daily"):
            assert uses.key("c") == "step=load/batch=3/topology=daily:c/1"
        assert uses.key("c") == "step=load:c/2"
    assert uses.key("c") == "c/3"


def test_topologies_of_one_name_are_counted():
    """Each topology of a name that begins in a place is a place of its own."""
    program = Place()
    uses = Uses(program, is_application=True)
    keys = []
    for _ in range(3):
        with topology("daily", program):
            keys += [uses.key("c"), uses.key("c")]
    assert keys == [f"topology=daily{number}:c/{use}" for number in ("", "#2", "#3") for use in (1, 2)]


def test_a_use_in_another_thread_needs_a_name():
    """Without one it is refused, and counts nothing; with one it is a use of its own, once in each place."""
    program = Place()
    uses = Uses(program, is_application=True)
    error = in_thread(lambda: uses.key("c"))
    assert isinstance(error, OperatorMisused)
    assert "name=" in str(error)
    assert in_thread(lambda: uses.key("c", "eu")) == "c/name=eu"
    with pytest.raises(OperatorMisused, match="already has a use with name='eu'"):
        uses.key("c", "eu")
    assert in_thread(lambda: uses.key("c", otherwise="mine")) == "c/name=mine"
    assert [uses.key("c", otherwise="mine"), uses.key("c")] == ["c/1", "c/2"]


def test_a_copied_context_in_another_thread_is_another_thread():
    """A place that a context carries into another thread, as `Topology.wrap` does, is not counted in there."""
    uses = Uses(Place(), is_application=True)
    with step("a"):
        context = contextvars.copy_context()
        error = in_thread(lambda: context.run(uses.key, "c"))
        assert isinstance(error, OperatorMisused)
        assert "step 'a'" in str(error)
        assert in_thread(lambda: context.run(uses.key, "c", "x")) == "step=a:c/name=x"


def test_a_step_in_another_thread_counts_its_own_uses():
    """A step has a name of its own, so that its thread may use operators there without names."""
    uses = Uses(Place(), is_application=True)

    def load():
        with step("load"):
            return [uses.key("c"), uses.key("c")]

    assert in_thread(load) == ["step=load:c/1", "step=load:c/2"]


def test_a_topology_that_another_thread_begins():
    """Its own operators are counted in it; those of the application need names, as nothing orders it among others of its name."""
    program = Place()
    application = Uses(program, is_application=True)

    def run():
        with topology("customer", program) as place:
            own = Uses(place)
            keys = [own.key("splits"), own.key("splits"), application.key("c", "x")]
            try:
                application.key("c")
            except OperatorMisused as error:
                return keys, str(error)

    keys, refused = in_thread(run)
    assert keys == [
        "splits/1", "splits/2", "topology=customer?:c/name=x",
    ]  # fmt: skip
    assert "name=" in refused


def test_a_place_that_is_executed_again_counts_from_1():
    """A batch that Spark repeats has the uses, and the names, of its first execution."""
    uses = Uses(Place(), is_application=True)
    other = Place(Place(None, "step", "load"), "batch", "10")
    for _ in range(2):
        batch = Place(Place(None, "step", "load"), "batch", "1")
        uses.forget(batch)
        with At(batch):
            assert [uses.key("c"), uses.key("c", "x")] == ["step=load/batch=1:c/1", "step=load/batch=1:c/name=x"]
    with At(other):
        assert uses.key("c") == "step=load/batch=10:c/1"


@pytest.mark.parametrize("name", ["c", "a/b", "a:b", "50%", "a=b#1?", "é ü"])
def test_names_are_told_apart_and_found_again(name):
    """Whatever is in the names of steps, topologies and operators, two places never share a key."""
    uses = Uses(Place(), is_application=True)
    with step(name):
        key = uses.key(name)
    assert operator_of(key) == operator_of(unused(name)) == name
    assert key.count(":") == 1
    assert key != Uses(Place(), is_application=True).key(name)


def test_a_place_knows_its_keys():
    """The keys of a place are those of its uses and of the places inside it; not those of a place whose name begins alike."""
    batch = Place(Place(None, "step", "load"), "batch", "1")
    uses = Uses(Place(), is_application=True)
    assert uses.is_in("step=load/batch=1:c/1", batch)
    assert uses.is_in("step=load/batch=1/topology=t:c/1", batch)
    assert not uses.is_in("step=load/batch=10:c/1", batch)
    assert not uses.is_in("c/1", batch)


def test_the_keys_of_a_topology_begin_at_the_topology():
    """A topology's own uses do not name the topology: a checkpoint belongs to one topology."""
    program = Place()
    with step("a", program), topology("t") as place:
        own = Uses(place)
        assert own.key("splits") == "splits/1"
        with step("b") as inner, At(Place(inner, "batch", "2")) as batch:
            key = own.key("splits")
            assert (key, own.is_in(key, batch)) == ("step=b/batch=2:splits/1", True)


# -- Operators: who gets which state


@pytest.fixture
def made():
    """The coordinators that were made, in their order."""
    return []


def operators_of(made, *, prepared=False, restore=None):
    operators = Operators(FakeTopology(), lambda: 5.0, uses=Uses(Place(), is_application=True))
    if prepared:
        operators.prepare("c", lambda context: TextCoordinator(context, made), restore or Checkpoint(-1, {}))
        operators.begin(HOST)
    else:
        operators.name_operator("c")
    return operators


HOST = Host(DroppingWire(), 1 << 20, 30.0)


def use(operators, made, text=""):
    """Binds the operator here; returns the text that its coordinator begins with, and adds to it."""
    before = list(made)
    operators.add("c", lambda context: TextCoordinator(context, made), HOST)
    [new] = [one for one in made if one not in before] or [made[0]]
    found = new.text
    new.text += text
    return found


def test_a_state_that_no_place_claims_is_kept_and_given_to_nobody(made):
    """A state whose place is skipped stays in later checkpoints, and the use of another place begins empty."""
    first = operators_of(made)
    with step("a"):
        use(first, made, "of a")
    taken = first.checkpoint(None, 5)
    first.close("the process ends")
    made.clear()

    second = operators_of(made)
    second.reset(taken)
    assert use(second, made, "outside") == ""
    later = second.checkpoint(None, 5)
    assert later.states == {"step=a:c/1": b"of a", "c/1": b"outside"}
    with step("a"):
        assert use(second, made) == "of a"
    assert second.checkpoint(None, 5).states == later.states
    second.close("the topology ends")


def test_a_fresh_prepared_coordinator_takes_the_key_of_its_first_use(made):
    """It is not given to a place whose own state is known; what it did before its first use is kept under its operator's name."""
    first = operators_of(made, prepared=True)
    made[0].text = "before"
    unclaimed = first.checkpoint(None, 5)
    assert unclaimed.states == {"c/unused": b"before"}
    with step("a"):
        assert use(first, made, " a") == "before"
    assert use(first, made) == ""
    assert first.checkpoint(None, 5).states == {"step=a:c/1": b"before a", "c/1": b""}
    first.close("the process ends")
    made.clear()

    second = operators_of(made, prepared=True)
    second.reset(Checkpoint(7, {"step=a:c/1": b"of a"}))
    with step("a"):
        assert use(second, made) == "of a"
    assert use(second, made, "!") == ""  # the prepared one
    assert second.checkpoint(None, 5).states == {"step=a:c/1": b"of a", "c/1": b"!"}
    second.close("the process ends")


def test_prepared_coordinators_go_to_their_own_places(made):
    """Those that were restored before the session ran are used by the places with their keys, in any order."""
    restore = Checkpoint(4, {"c/1": b"first", "c/2": b"second", "step=a:c/1": b"of a"})
    operators = operators_of(made, prepared=True, restore=restore)
    with step("b"):
        operators.add("c", lambda context: TextCoordinator(context, made), HOST)
        assert made[-1].text == ""
    with step("a"):
        operators.add("c", lambda context: TextCoordinator(context, made), HOST)
    states = operators.checkpoint(None, 5).states
    assert states == {**restore.states, "step=b:c/1": b""}
    assert operators.checkpoint(None, 5).id == 6
    operators.close("the process ends")


def test_a_factory_that_raises_leaves_the_state_unclaimed(made):
    """A use that fails to begin loses no state: it is in the next checkpoint."""
    operators = operators_of(made)
    operators.reset(Checkpoint(1, {"c/1": b"x"}))

    def failing(context):
        raise KeyError("k")

    with pytest.raises(KeyError):
        operators.add("c", failing, HOST)
    with pytest.raises(KeyError):  # its place counts on: the next use is the second
        operators.add("c", failing, HOST)
    assert operators.checkpoint(None, 5).states == {"c/1": b"x"}
    operators.close("the process ends")


def test_a_batch_that_is_over_leaves_nothing(made):
    """The uses of a batch end, and their states are dropped, when it will never be executed again."""
    operators = operators_of(made)
    batch = Place(Place(None, "step", "load"), "batch", "1")
    with At(batch):
        use(operators, made, "x")
    use(operators, made, "y")
    operators.forget(batch)
    assert operators.checkpoint(None, 5).states == {"c/1": b"y"}
    assert made[0].context.state == "closed"
    operators.reset(Checkpoint(9, {"step=load/batch=1:c/1": b"x", "c/1": b"z"}))
    operators.forget(batch)
    assert operators.checkpoint(None, 5).states == {"c/1": b"z"}
    operators.close("the process ends")


def test_a_use_that_ends_has_no_state_and_no_thread(made):
    """The use of a commit ends when it is done: 50 of them leave no thread, and nothing in a checkpoint."""
    operators = operators_of(made)
    threads = threading.active_count()
    for _ in range(50):
        operators.end(operators.add_transient("commit", lambda context: TextCoordinator(context, made), HOST))
    assert threading.active_count() == threads
    assert len({one.context.state for one in made}) == 1
    assert operators.checkpoint(None, 5).states == {}
    assert set(operators.progress()) == {f"commit/{number}" for number in range(1, 51)}
    operators.close("the process ends")
