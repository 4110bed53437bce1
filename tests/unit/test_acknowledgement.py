"""A future that comes into being when somebody looks: to whoever looks it is as one that was there from the beginning."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from concurrent.futures import Future, wait

import pytest
from pyspark import cloudpickle

from stagecrew.coordination import acknowledgement
from stagecrew.coordination.acknowledgement import Acknowledgement
from support.waiting import eventually

ERROR = ValueError("over")


@pytest.mark.parametrize("looked", ["before", "after"])
@pytest.mark.parametrize("error", [None, ERROR])
def test_it_is_a_future(error, looked):
    """State, result, exception and callbacks, whether the first look was before or after it was settled."""
    future = Acknowledgement()
    called = []
    if looked == "before":
        assert not future.done()
        future.add_done_callback(called.append)
    future.settle(error)
    if looked == "after":
        future.add_done_callback(called.append)
    assert isinstance(future, Future)
    assert future.done()
    assert not future.running()
    assert not future.cancelled()
    assert called == [future]
    assert future.exception(0) is error
    assert wait([future], 0).done == {future}
    if error is None:
        assert future.result(0) is None
    else:
        with pytest.raises(ValueError, match="over"):
            future.result(0)


def test_nothing_is_made_until_somebody_looks():
    """That is what it is for."""
    future = Acknowledgement()
    assert vars(future) == {}
    future.settle()
    assert "_condition" not in vars(future)
    assert "finished" in repr(future)
    assert "_condition" in vars(future)


def test_it_cannot_be_cancelled():
    """What was sent is sent: an acknowledgement that comes later finds it as it was."""
    future = Acknowledgement()
    assert not future.cancel()
    future.settle()
    assert future.result(0) is None


def test_what_no_future_has():
    """An AttributeError that says so."""
    with pytest.raises(AttributeError, match="no 'nonsense'"):
        Acknowledgement().nonsense  # noqa: B018 (the look is the test)


def test_asyncio_waits_for_it():
    """As for any other."""

    async def main():
        future = Acknowledgement()
        threading.Timer(0.05, future.settle).start()
        return await asyncio.wait_for(asyncio.wrap_future(future), 10)

    assert asyncio.run(main()) is None


@pytest.fixture
def during_the_look(monkeypatch):
    """What a list has runs in another thread in the midst of each first look, which waits for its end for a while."""
    todo, threads = [], []

    def made():
        while todo:
            thread = threading.Thread(target=todo.pop())
            threads.append(thread)
            thread.start()
            thread.join(0.2)  # it should wait for this look, and not be over
        return Future()

    monkeypatch.setattr(acknowledgement, "Future", made)
    yield todo
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_two_first_looks_at_once(during_the_look):
    """Both see the same: no callback is lost."""
    future, called = Acknowledgement(), []
    during_the_look.append(lambda: future.add_done_callback(lambda _: called.append("theirs")))
    future.add_done_callback(lambda _: called.append("ours"))
    eventually(lambda: len(future._done_callbacks) == 2, 10, "both have looked")
    future.settle()
    assert sorted(called) == ["ours", "theirs"]


def test_a_first_look_while_it_is_settled(during_the_look):
    """The settlement is not lost, whichever comes first."""
    future, called = Acknowledgement(), []
    during_the_look.append(future.settle)
    future.add_done_callback(called.append)
    assert future.result(10) is None
    assert called == [future]


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(), ValueError()])
def test_a_callback_that_raises(error, caplog):
    """It is logged; who settles goes on with the next."""

    def fails(_):
        raise error

    future = Acknowledgement()
    future.add_done_callback(fails)
    future.settle()
    assert caplog.records[-1].levelname == "ERROR"
    assert future.done()


def test_one_that_its_receiver_settled(caplog):
    """Who is not to settle it has done no harm to others."""
    future = Acknowledgement()
    future.set_result(None)
    future.settle()
    assert "could not be settled" in caplog.text


@pytest.mark.parametrize("looked", [True, False])
def test_it_does_not_travel(looked):
    """As no future: a copy would never be done."""
    future = Acknowledgement()
    if looked:
        assert not future.done()
    for travels in (pickle.dumps, cloudpickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="cannot be pickled"):
            travels(future)
