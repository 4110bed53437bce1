"""`Acknowledgement` creates its future on first use. Callers cannot distinguish it from one that existed before."""

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

ERROR = ValueError("send failed")


@pytest.mark.parametrize("first_use", ["before", "after"])
@pytest.mark.parametrize("error", [None, ERROR])
def test_an_acknowledgement_behaves_like_a_future(error, first_use):
    """State, result, exception and callbacks are the same whether it is first used before or after it is settled."""
    future = Acknowledgement()
    called = []
    if first_use == "before":
        assert not future.done()
        future.add_done_callback(called.append)
    future.settle(error)
    if first_use == "after":
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
        with pytest.raises(ValueError, match="send failed"):
            future.result(0)


def test_settling_an_unused_acknowledgement_creates_no_future():
    """The future's state is created on first use only."""
    future = Acknowledgement()
    assert vars(future) == {}
    future.settle()
    assert "_condition" not in vars(future)
    assert "finished" in repr(future)
    assert "_condition" in vars(future)


def test_an_acknowledgement_cannot_be_cancelled():
    """The event is already sent, so `cancel` returns False and the acknowledgement can still be settled."""
    future = Acknowledgement()
    assert not future.cancel()
    future.settle()
    assert future.result(0) is None


def test_an_unknown_attribute_raises_attribute_error():
    """The error names the attribute."""
    with pytest.raises(AttributeError, match="no 'nonsense'"):
        Acknowledgement().nonsense  # noqa: B018 (the access is the test)


def test_asyncio_can_wait_for_an_acknowledgement():
    """`asyncio.wrap_future` accepts it."""

    async def main():
        future = Acknowledgement()
        threading.Timer(0.05, future.settle).start()
        return await asyncio.wait_for(asyncio.wrap_future(future), 10)

    assert asyncio.run(main()) is None


@pytest.fixture
def during_creation(monkeypatch):
    """A list of functions. Each first use pops one and runs it in another thread while the future is being created."""
    functions, threads = [], []

    def slow_future():
        while functions:
            thread = threading.Thread(target=functions.pop())
            threads.append(thread)
            thread.start()
            thread.join(0.2)  # the thread should block until the future exists, so it does not end here
        return Future()

    monkeypatch.setattr(acknowledgement, "Future", slow_future)
    yield functions
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_two_threads_that_use_it_first_share_one_future(during_creation):
    """No callback is lost."""
    future, called = Acknowledgement(), []
    during_creation.append(lambda: future.add_done_callback(lambda _: called.append("other thread")))
    future.add_done_callback(lambda _: called.append("this thread"))
    eventually(lambda: len(future._done_callbacks) == 2, 10, "both callbacks are registered")
    future.settle()
    assert sorted(called) == ["other thread", "this thread"]


def test_settling_during_the_first_use_is_not_lost(during_creation):
    """The future is done and its callback is called, whichever thread is first."""
    future, called = Acknowledgement(), []
    during_creation.append(future.settle)
    future.add_done_callback(called.append)
    assert future.result(10) is None
    assert called == [future]


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(), ValueError()])
def test_an_exception_in_a_callback_is_logged(error, caplog):
    """`settle` does not raise, so its caller continues."""

    def fails(_):
        raise error

    future = Acknowledgement()
    future.add_done_callback(fails)
    future.settle()
    assert caplog.records[-1].levelname == "ERROR"
    assert future.done()


def test_settling_a_future_that_the_receiver_completed_is_only_logged(caplog):
    """A receiver that completes the future itself does not make `settle` raise."""
    future = Acknowledgement()
    future.set_result(None)
    future.settle()
    assert "could not be settled" in caplog.text


@pytest.mark.parametrize("used", [True, False])
def test_an_acknowledgement_cannot_be_pickled_or_copied(used):
    """A copy would never be settled. Other futures refuse this too."""
    future = Acknowledgement()
    if used:
        assert not future.done()
    for copies in (pickle.dumps, cloudpickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="cannot be pickled"):
            copies(future)
