"""`stagecrew.testing.opened`, with which functions that use listeners are tested without Spark."""

from __future__ import annotations

import pickle
import threading

import pytest
from pyspark import cloudpickle

from stagecrew import Listener, Scope, resource
from stagecrew.errors import ResourceNotOpen
from stagecrew.testing import opened


class Pool(Listener):
    """Records its calls."""

    scope = Scope.EXECUTOR

    def __init__(self, dsn, fails=False):
        self.dsn, self.fails, self.events = dsn, fails, []

    def open(self, context):
        self.events.append(("open", context.executor, context.topology, context.scope))
        if self.fails:
            raise OSError("no database")

    def close(self, context):
        self.events.append(("close", context.executor, context.topology, context.scope))


@resource
def numbers(context, first):
    """Yields a list, and empties it at the end."""
    value = [first]
    yield value
    value.clear()


def test_a_fake_value():
    """`get` returns the given fake value, even None, and the listener is not opened."""
    pool = Pool("a")
    for fake in ("fake", None):
        with opened(pool, value=fake) as value:
            assert value is fake
            assert pool.get() is fake
    assert pool.events == []


def test_two_equal_listeners():
    """Two listeners with equal arguments each have their own value."""
    one, two = numbers(1), numbers(1)
    with opened(one, value="one"), opened(two, value="two"):
        assert (one.get(), two.get()) == ("one", "two")
        assert numbers(1).get() == "two"  # a third equal listener gets the innermost value
    with pytest.raises(ResourceNotOpen):
        one.get()


def test_opened_without_a_value():
    """Without a value, the listener is opened as on an executor named `test`, and closed at the end of the block."""
    pool = Pool("a")
    with opened(pool) as value:
        assert value is pool
        assert pool.get() is pool
    assert [event[0] for event in pool.events] == ["open", "close"]
    assert {event[1:] for event in pool.events} == {("test", "test", Scope.EXECUTOR)}
    made = numbers(1)
    with opened(made) as value:
        assert made.get() is value
        assert value == [1]
    assert value == []


def test_closed_when_the_body_raises():
    """If the block raises, the listener is closed, the exception is unchanged, and `get` fails afterwards."""
    pool = Pool("a")
    with pytest.raises(ZeroDivisionError), opened(pool):
        raise ZeroDivisionError
    assert [event[0] for event in pool.events] == ["open", "close"]
    with pytest.raises(ResourceNotOpen):
        pool.get()


def test_closed_when_open_raises():
    """If `open` raises, the listener is closed once, as on an executor, and the exception is raised."""
    pool = Pool("a", fails=True)
    with pytest.raises(OSError, match="no database"), opened(pool):
        raise AssertionError("the body must not run")
    assert [event[0] for event in pool.events] == ["open", "close"]
    with pytest.raises(ResourceNotOpen):
        pool.get()


def test_several_opened_listeners():
    """Each opened listener has its own value. `get` of a listener that is not opened raises an error with the
    reason."""
    one, two, other = numbers(1), numbers(2), numbers(3)
    with opened(one, value="one"), opened(two, value="two"):
        assert (one.get(), two.get()) == ("one", "two")
        with opened(one, value="inner"):
            assert one.get() == "inner"
        assert one.get() == "one"
        with pytest.raises(
            ResourceNotOpen, match=r"stagecrew\.testing\.opened has opened a different listener; open this one, too"
        ):
            other.get()


def test_in_other_threads_and_pickled_functions():
    """Other threads and pickled functions get the same value."""
    made, values = numbers(1), []
    with opened(made, value="fake"):
        thread = threading.Thread(target=lambda: values.append(made.get()))
        thread.start()
        thread.join(10)
        values.append(pickle.loads(cloudpickle.dumps(lambda: made.get()))())
    assert values == ["fake", "fake"]
