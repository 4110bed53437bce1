"""A coordinator's gateway to one evaluation: `send`, the futures of `send_acknowledged`, `close` and `hold`."""

from __future__ import annotations

import asyncio
import pickle
import threading
from concurrent.futures import Future, wait

import pytest
from pyspark import cloudpickle

from stagecrew.coordination import gateway as gateway_module
from stagecrew.coordination.evaluation import Evaluation
from stagecrew.coordination.gateway import Gateway
from stagecrew.coordination.outbox import Outbox
from stagecrew.errors import EvaluationEnded

EVALUATION = Evaluation(1, "o", 0, 1, 0, 0, 0, "1", 0, 1)


@pytest.fixture
def gateway():
    """A gateway whose frames are taken immediately, as if they were sent."""
    return Gateway(EVALUATION, 1 << 20, lambda: 30.0, lambda dirty: dirty.take())


@pytest.mark.parametrize("callback_added", ["before", "after"])
@pytest.mark.parametrize("ends", [False, True])
def test_send_acknowledged_returns_a_future(gateway, ends, callback_added):
    """When an event is acknowledged, or its evaluation ends, its future completes: with None, or `EvaluationEnded`.

    A callback is called whether it was added before or after that.
    """
    future = gateway.send_acknowledged("x")
    called = []
    if callback_added == "before":
        assert not future.done()
        future.add_done_callback(called.append)
    if ends:
        gateway.end("killed")
    else:
        gateway.acknowledge(1)
    if callback_added == "after":
        future.add_done_callback(called.append)
    assert type(future) is Future
    assert future.done()
    assert not future.running()
    assert not future.cancelled()
    assert called == [future]
    assert wait([future], 0).done == {future}
    if ends:
        assert isinstance(future.exception(0), EvaluationEnded)
        with pytest.raises(EvaluationEnded, match="has ended: killed"):
            future.result(0)
    else:
        assert future.exception(0) is None
        assert future.result(0) is None


def test_send_returns_none_and_makes_no_future(gateway, monkeypatch):
    """`send` returns None and creates no future, because a future would cost more than the rest of a send."""

    def fail():
        raise AssertionError("send made a future")

    monkeypatch.setattr(gateway_module, "Future", fail)
    assert gateway.send("x") is None
    assert gateway.sent == 1
    assert gateway.due == 30.0
    assert gateway.acknowledge(1) == 30.0
    assert gateway.due is None
    gateway.end("finished")
    assert gateway.send("dropped") is None


def test_a_future_cannot_be_cancelled(gateway):
    """The future of a sent event cannot be cancelled. A later acknowledgement still completes it."""
    for future in (gateway.send_acknowledged("x"), gateway.close()):
        assert not future.cancel()
        gateway.acknowledge(2)
        assert future.result(0) is None


def test_asyncio_can_wait_for_a_future(gateway):
    """`asyncio.wrap_future` can wait for a future that `send_acknowledged` has returned."""

    async def main():
        future = gateway.send_acknowledged("x")
        threading.Timer(0.05, gateway.acknowledge, (1,)).start()
        return await asyncio.wait_for(asyncio.wrap_future(future), 10)

    assert asyncio.run(main()) is None


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(), ValueError()])
@pytest.mark.parametrize("ends", [False, True])
def test_a_callback_that_raises_is_logged(gateway, ends, error, caplog):
    """An exception in a callback of a future is logged, and the futures of later events still complete."""

    def fails(_):
        raise error

    first, second = gateway.send_acknowledged("a"), gateway.send_acknowledged("b")
    first.add_done_callback(fails)
    if ends:
        gateway.end("killed")
    else:
        gateway.acknowledge(2)
    assert caplog.records[-1].levelname == "ERROR"
    assert first.done()
    assert second.done()


def test_a_future_that_the_user_completed(gateway, caplog):
    """If user code completes a future itself, an error is logged, and the futures of other events still complete."""
    first, second = gateway.send_acknowledged("a"), gateway.send_acknowledged("b")
    first.set_result(None)
    gateway.acknowledge(2)
    assert "could not complete the future of an event" in caplog.text
    assert second.result(0) is None


@pytest.mark.parametrize("is_done", [True, False])
def test_a_future_cannot_be_pickled(gateway, is_done):
    """A future cannot be pickled, because the copy would never complete."""
    future = gateway.send_acknowledged("x")
    if is_done:
        gateway.acknowledge(1)
    for dumps in (pickle.dumps, cloudpickle.dumps):
        with pytest.raises(TypeError, match="cannot pickle"):
            dumps(future)


def test_a_hold_waits_for_events_with_and_without_futures():
    """`hold` returns a future that completes when the last earlier event is acknowledged.

    If that event has a future too, that one completes first.
    """
    outbox = Outbox()
    assert outbox.hold() is None  # nothing was sent, so there is nothing to wait for
    outbox.release(1.0)
    acknowledged: Future[None] = Future()
    outbox.add(b"a", 1.0)
    outbox.add(b"b", 1.0, acknowledged)
    held = outbox.hold()
    assert held is not None
    outbox.add(b"held back", 1.0)
    assert outbox.take() == (1, [b"a", b"b"])
    assert outbox.take() is None
    assert outbox.acknowledge(1) == []
    assert outbox.acknowledge(3) == [acknowledged, held]  # 3 is not sent yet: this acknowledges 1 and 2
    outbox.release(2.0)
    assert outbox.take() == (3, [b"held back"])
    assert (outbox.unacknowledged, outbox.deadline) == (1, 2.0)
    assert outbox.acknowledge(3) == []
    assert outbox.hold() is None  # everything is acknowledged


def test_the_end_of_an_evaluation_fails_every_future(gateway):
    """When an evaluation ends, the futures of a hold, of earlier events and of held-back events all fail."""
    before = gateway.send_acknowledged("before")
    gateway.send("no future")
    held = gateway.hold()
    after = gateway.send_acknowledged("after")
    gateway.end("killed")
    gateway.end("a second reason")
    for future in (before, held, after):
        with pytest.raises(EvaluationEnded, match="has ended: killed"):
            future.result(0)
    assert gateway.take() is None
    assert gateway.due is None
