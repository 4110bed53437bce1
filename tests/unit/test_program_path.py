"""The identity of a use of an operator: its position in the program, which is the same in every run."""

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


class Inside:
    """Enters a place of the program as a context manager."""

    def __init__(self, place):
        self.place = place

    def __enter__(self):
        self._token = PLACE.set(self.place)
        return self.place

    def __exit__(self, *_):
        self.place.ended = True
        PLACE.reset(self._token)


def step(name, parent=None):
    return Inside(Place(parent or current_place(), "step", name))


def topology(name, parent=None):
    return Inside(Place(parent or current_place(), "topology", name))


def in_thread(f):
    """Calls `f` in another thread, and returns its result or the exception that it raised."""
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
def _outside_all_places():
    """Begins each test outside of all places."""
    token = PLACE.set(None)
    yield
    PLACE.reset(token)


def test_a_key_has_the_place_and_an_ordinal_in_it():
    """A key consists of the place, the operator's name and an ordinal, which counts the operator's uses in this place
    only."""
    program = Place()
    uses = Uses(program, is_application=True)
    assert [uses.key("c"), uses.key("c"), uses.key("other")] == ["c/1", "c/2", "other/1"]
    with step("load", program) as load:
        assert uses.key("c") == "step=load:c/1"
        with Inside(Place(load, "batch", "3")), topology("daily"):
            assert uses.key("c") == "step=load/batch=3/topology=daily:c/1"
        assert uses.key("c") == "step=load:c/2"
    assert uses.key("c") == "c/3"


def test_topologies_of_one_name_are_counted():
    """Topologies with one name that begin in the same place are numbered, and each is a place of its own."""
    program = Place()
    uses = Uses(program, is_application=True)
    keys = []
    for _ in range(3):
        with topology("daily", program):
            keys += [uses.key("c"), uses.key("c")]
    assert keys == [f"topology=daily{number}:c/{use}" for number in ("", "#2", "#3") for use in (1, 2)]


def test_a_use_in_another_thread_needs_a_name():
    """A use in another thread is refused and not counted unless it has a name. A name can be used once per place."""
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


def test_a_copied_context_does_not_change_who_owns_a_place():
    """If a context is copied into another thread, as `Topology.wrap` does, uses in that thread still need names."""
    uses = Uses(Place(), is_application=True)
    with step("a"):
        context = contextvars.copy_context()
        error = in_thread(lambda: context.run(uses.key, "c"))
        assert isinstance(error, OperatorMisused)
        assert "step 'a'" in str(error)
        assert in_thread(lambda: context.run(uses.key, "c", "x")) == "step=a:c/name=x"


def test_a_step_in_another_thread_counts_its_own_uses():
    """A thread that begins a step can use operators in the step without names, because the step itself has a name."""
    uses = Uses(Place(), is_application=True)

    def load():
        with step("load"):
            return [uses.key("c"), uses.key("c")]

    assert in_thread(load) == ["step=load:c/1", "step=load:c/2"]


def test_a_topology_begun_by_another_thread():
    """In a topology that another thread began, uses of the topology's own operators are counted.

    Uses of the application's operators need names, because topologies in several threads have no order.
    """
    program = Place()
    application = Uses(program, is_application=True)

    def run():
        with topology("customer", program) as place:
            uses = Uses(place)
            keys = [uses.key("splits"), uses.key("splits"), application.key("c", "x")]
            try:
                application.key("c")
            except OperatorMisused as error:
                return keys, str(error)

    keys, refused = in_thread(run)
    assert keys == [
        "splits/1", "splits/2", "topology=customer?:c/name=x",
    ]  # fmt: skip
    assert "name=" in refused


def test_a_repeated_place_counts_from_1():
    """The uses of a batch that Spark repeats get the same keys as in its first execution."""
    uses = Uses(Place(), is_application=True)
    other = Place(Place(None, "step", "load"), "batch", "10")
    for _ in range(2):
        batch = Place(Place(None, "step", "load"), "batch", "1")
        uses.forget(batch)
        with Inside(batch):
            assert [uses.key("c"), uses.key("c", "x")] == ["step=load/batch=1:c/1", "step=load/batch=1:c/name=x"]
    with Inside(other):
        assert uses.key("c") == "step=load/batch=10:c/1"


@pytest.mark.parametrize("name", ["c", "a/b", "a:b", "50%", "a=b#1?", "é ü"])
def test_names_give_distinct_stable_keys(name):
    """Two places never share a key, whatever the names of steps, topologies and operators contain."""
    uses = Uses(Place(), is_application=True)
    with step(name):
        key = uses.key(name)
    assert operator_of(key) == operator_of(unused(name)) == name
    assert key.count(":") == 1
    assert key != Uses(Place(), is_application=True).key(name)


def test_a_place_knows_its_keys():
    """`is_in` is true for the keys of a place and of its inner places, but not for those of a place whose path begins
    with the same text."""
    batch = Place(Place(None, "step", "load"), "batch", "1")
    uses = Uses(Place(), is_application=True)
    assert uses.is_in("step=load/batch=1:c/1", batch)
    assert uses.is_in("step=load/batch=1/topology=t:c/1", batch)
    assert not uses.is_in("step=load/batch=10:c/1", batch)
    assert not uses.is_in("c/1", batch)


def test_the_keys_of_a_topology_begin_at_the_topology():
    """The keys of a topology's own uses do not contain the topology, because a checkpoint belongs to one topology."""
    program = Place()
    with step("a", program), topology("t") as place:
        uses = Uses(place)
        assert uses.key("splits") == "splits/1"
        with step("b") as inner, Inside(Place(inner, "batch", "2")) as batch:
            key = uses.key("splits")
            assert (key, uses.is_in(key, batch)) == ("step=b/batch=2:splits/1", True)


# -- which use of an operator gets which state


@pytest.fixture
def instances():
    """The list to which each new coordinator is appended."""
    return []


def operators_of(instances, *, prepared=False, restore=None):
    operators = Operators(FakeTopology(), lambda: 5.0, uses=Uses(Place(), is_application=True))
    if prepared:
        operators.prepare("c", lambda context: TextCoordinator(context, instances), restore or Checkpoint(-1, {}))
        operators.begin(HOST)
    else:
        operators.name_operator("c")
    return operators


HOST = Host(DroppingWire(), 1 << 20, 30.0)


def use(operators, instances, text=""):
    """Binds the operator here, and appends to its coordinator's text. Returns the coordinator's previous text."""
    before = list(instances)
    operators.add("c", lambda context: TextCoordinator(context, instances), HOST)
    [new] = [one for one in instances if one not in before] or [instances[0]]
    found = new.text
    new.text += text
    return found


def test_an_unclaimed_state_is_kept_and_not_reused(instances):
    """The state of a skipped place stays in later checkpoints. A use in another place does not get this state."""
    first = operators_of(instances)
    with step("a"):
        use(first, instances, "of a")
    checkpoint_of_first = first.checkpoint(None, 5)
    first.close("the process ends")
    instances.clear()

    second = operators_of(instances)
    second.reset(checkpoint_of_first)
    assert use(second, instances, "outside") == ""
    later = second.checkpoint(None, 5)
    assert later.states == {"step=a:c/1": b"of a", "c/1": b"outside"}
    with step("a"):
        assert use(second, instances) == "of a"
    assert second.checkpoint(None, 5).states == later.states
    second.close("the topology ends")


def test_a_prepared_coordinator_gets_the_key_of_its_first_use(instances):
    """A prepared coordinator (created before the session) gets the key of its operator's first use.

    Until then, a checkpoint stores its state under its operator's name. A use in a place with a restored state gets
    that state instead of the prepared coordinator.
    """
    first = operators_of(instances, prepared=True)
    instances[0].text = "before"
    unclaimed = first.checkpoint(None, 5)
    assert unclaimed.states == {"c/unused": b"before"}
    with step("a"):
        assert use(first, instances, " a") == "before"
    assert use(first, instances) == ""
    assert first.checkpoint(None, 5).states == {"step=a:c/1": b"before a", "c/1": b""}
    first.close("the process ends")
    instances.clear()

    second = operators_of(instances, prepared=True)
    second.reset(Checkpoint(7, {"step=a:c/1": b"of a"}))
    with step("a"):
        assert use(second, instances) == "of a"
    assert use(second, instances, "!") == ""  # the prepared coordinator
    assert second.checkpoint(None, 5).states == {"step=a:c/1": b"of a", "c/1": b"!"}
    second.close("the process ends")


def test_prepared_coordinators_are_used_by_their_places(instances):
    """Each state that was restored before the session is used by the place with its key, in whatever order the places
    are used."""
    restore = Checkpoint(4, {"c/1": b"first", "c/2": b"second", "step=a:c/1": b"of a"})
    operators = operators_of(instances, prepared=True, restore=restore)
    with step("b"):
        operators.add("c", lambda context: TextCoordinator(context, instances), HOST)
        assert instances[-1].text == ""
    with step("a"):
        operators.add("c", lambda context: TextCoordinator(context, instances), HOST)
    states = operators.checkpoint(None, 5).states
    assert states == {**restore.states, "step=b:c/1": b""}
    assert operators.checkpoint(None, 5).id == 6
    operators.close("the process ends")


def test_a_factory_that_raises_leaves_the_state_unclaimed(instances):
    """If a use's factory raises, the use's state is not lost. It stays in the next checkpoint."""
    operators = operators_of(instances)
    operators.reset(Checkpoint(1, {"c/1": b"x"}))

    def failing(context):
        raise KeyError("k")

    with pytest.raises(KeyError):
        operators.add("c", failing, HOST)
    with pytest.raises(KeyError):  # a failed use is counted, so this is the place's second use
        operators.add("c", failing, HOST)
    assert operators.checkpoint(None, 5).states == {"c/1": b"x"}
    operators.close("the process ends")


def test_a_factory_that_raises_does_not_use_up_a_name(instances):
    """If the factory of a named use raises, another use can have the name."""
    operators, fails = operators_of(instances), [True]

    def factory(context):
        if fails:
            raise KeyError("k")
        return TextCoordinator(context, instances)

    with pytest.raises(KeyError):
        operators.add("c", factory, HOST, name="eu")
    fails.clear()
    operators.add("c", factory, HOST, name="eu")
    with pytest.raises(OperatorMisused, match="already has a use with name='eu'"):
        operators.add("c", factory, HOST, name="eu")
    operators.close("the process ends")


def test_a_finished_batch_leaves_nothing(instances):
    """When a batch can never run again, the operators' uses in it end, and their states are dropped."""
    operators = operators_of(instances)
    batch = Place(Place(None, "step", "load"), "batch", "1")
    with Inside(batch):
        use(operators, instances, "x")
    use(operators, instances, "y")
    operators.forget(batch)
    assert operators.checkpoint(None, 5).states == {"c/1": b"y"}
    assert instances[0].context.state == "closed"
    operators.reset(Checkpoint(9, {"step=load/batch=1:c/1": b"x", "c/1": b"z"}))
    operators.forget(batch)
    assert operators.checkpoint(None, 5).states == {"c/1": b"z"}
    operators.close("the process ends")


def test_a_use_that_ends_has_no_state_and_no_thread(instances):
    """A use that ends, like that of a commit, leaves no thread, and no state in a checkpoint. Its progress stays."""
    operators = operators_of(instances)
    threads = threading.active_count()
    for _ in range(50):
        operators.end(operators.add_transient("commit", lambda context: TextCoordinator(context, instances), HOST))
    assert threading.active_count() == threads
    assert len({one.context.state for one in instances}) == 1
    assert operators.checkpoint(None, 5).states == {}
    assert set(operators.progress()) == {f"commit/{number}" for number in range(1, 51)}
    operators.close("the process ends")
