"""The states of a coordinator's context, and exceptions raised by each callback, with the harness."""

from __future__ import annotations

import asyncio
import threading

import pytest

import stagecrew
from stagecrew.testing import CoordinatorHarness

WRITES = {
    "fail": lambda context: context.fail(ValueError("on purpose")),
    "run_in_coordinator_thread": lambda context: context.run_in_coordinator_thread(lambda: None),
    "call_async": lambda context: context.call_async(lambda: None, lambda *_: None),
    "every": lambda context: context.every(1.0, lambda: None),
}


def reads(context):
    return context.operator, context.topology, context.store, context.state


@pytest.mark.parametrize("write", WRITES)
def test_a_context_cannot_be_used_for_writes_before_it_is_initialised(write):
    """An uninitialised context can be read, but a write raises an error that says where to do it."""
    seen = []

    class Early(stagecrew.Coordinator):
        def __init__(self, context):
            super().__init__(context)
            seen.append(reads(context))
            with pytest.raises(
                stagecrew.errors.OperatorMisused, match=rf"called context.{write} before .* call it in start"
            ):
                WRITES[write](context)

    with CoordinatorHarness(Early) as harness:
        assert seen == [("operator", "test", {}, "uninitialised")]
        assert harness.failure is None


@pytest.mark.parametrize("write", WRITES)
def test_writes_to_a_closed_context_do_nothing(write):
    """Writes to a closed context have no effect, but its attributes can still be read."""
    called = []
    with CoordinatorHarness(stagecrew.Coordinator) as harness:
        old = harness.coordinator.context
        harness.reset()
        assert reads(old) == ("operator", "test", {}, "closed")
        old.run_in_coordinator_thread(called.append, 1)
        old.call_async(lambda: called.append(2), lambda *_: called.append(3))
        old.every(1.0, lambda: called.append(4))
        WRITES[write](old)
        harness.advance(5)
        assert called == []
        assert harness.failure is None


def test_the_store_is_shared_and_survives_a_reset():
    """After a reset, the new instance finds the values that the old one put into the store."""
    with CoordinatorHarness(stagecrew.Coordinator) as harness:
        harness.coordinator.context.store["x"] = 1
        harness.reset()
        assert harness.coordinator.context.store == {"x": 1}


def test_run_in_coordinator_thread_keeps_the_order_of_each_calling_thread():
    """Each function that a thread enqueues is called once, in the order in which this thread enqueued its functions."""
    called = []
    with CoordinatorHarness(stagecrew.Coordinator) as harness:
        context = harness.coordinator.context
        threads = [
            threading.Thread(
                target=lambda n=n: [context.run_in_coordinator_thread(called.append, (n, i)) for i in range(100)]
            )
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        harness.run()
    for n in range(8):
        assert [i for thread, i in called if thread == n] == list(range(100))


def trigger(callback, harness):
    """Makes the harness call this callback of the coordinator."""
    if callback in ("failed", "abandoned", "finished"):
        getattr(harness.evaluation(0), callback[:4] if callback == "failed" else callback.removesuffix("ed"))()
    elif callback == "subtask_reset":
        harness.evaluation(0).fail()
        harness.evaluation(0)
    elif callback == "ready":
        harness.evaluation(0)
    elif callback == "handle_event":
        harness.evaluation(0).send(1)
    elif callback == "checkpoint_complete":
        harness.checkpoint()
    elif callback == "checkpoint_aborted":
        task = harness.evaluation(0)
        task.acknowledges = False
        harness.coordinator.context.run_in_coordinator_thread(lambda: harness.gateway.send(1))
        harness.run()
        with pytest.raises(stagecrew.errors.CheckpointFailed):
            harness.checkpoint()
    elif callback == "call_async":
        harness.coordinator.context.call_async(lambda: None, lambda *_: harness.coordinator.raises())
        harness.run()
    elif callback == "every":
        harness.coordinator.context.every(1.0, harness.coordinator.raises)
        harness.advance(5)


@pytest.mark.parametrize(
    "callback",
    [
        "start",
        "ready",
        "failed",
        "finished",
        "abandoned",
        "subtask_reset",
        "handle_event",
        "checkpoint_complete",
        "checkpoint_aborted",
        "call_async",
        "every",
    ],
)
def test_an_exception_in_any_callback_fails_the_topology(callback):
    """An exception in any callback fails the topology: CoordinatorFailed is raised with that exception as its cause."""

    class Raising(stagecrew.Coordinator):
        def raises(self, *_):
            raise ZeroDivisionError(callback)

    def ready(self, _evaluation, gateway):
        harness.gateway = gateway

    Raising.ready = ready
    if callback not in ("call_async", "every"):
        setattr(Raising, callback, Raising.raises)
    harness = CoordinatorHarness(Raising)
    trigger(callback, harness)
    assert isinstance(harness.failure, ZeroDivisionError)
    assert str(harness.failure) == callback
    assert harness.failure.__traceback__ is not None
    with pytest.raises(stagecrew.errors.CoordinatorFailed, match=callback) as caught:
        harness.operators.raise_failure()
    assert caught.value.__cause__ is harness.failure
    harness.close()


class UnprintableError(Exception):
    """An exception whose text cannot be made."""

    def __str__(self):
        raise TypeError("no text")


def test_an_exception_without_a_text_fails_the_topology():
    """An exception fails the topology, even if its `__str__` raises."""

    class Raising(stagecrew.Coordinator):
        def handle_event(self, evaluation, event):
            raise UnprintableError

    harness = CoordinatorHarness(Raising)
    harness.evaluation().send("event")
    assert isinstance(harness.failure, UnprintableError)
    with pytest.raises(stagecrew.errors.CoordinatorFailed, match="UnprintableError: <its text cannot be shown>"):
        harness.operators.raise_failure()
    harness.close()


def test_a_long_exception_is_shortened_for_tasks():
    """Tasks get a short text of the exception that failed their topology, however long its own text is."""

    class Raising(stagecrew.Coordinator):
        def handle_event(self, evaluation, event):
            raise ValueError("x" * 10_000_000)

    harness = CoordinatorHarness(Raising)
    evaluation = harness.evaluation()
    evaluation.send("event")
    assert "ValueError: xxx" in evaluation.abort_reason
    assert len(evaluation.abort_reason) < 2000
    harness.close()


def test_a_request_whose_exception_has_no_text_fails_alone():
    """A request fails if the coordinator raises an exception whose `__str__` raises. The topology does not fail."""

    class Raising(stagecrew.Coordinator):
        def handle_request(self, evaluation, request):
            raise UnprintableError

    with CoordinatorHarness(Raising) as harness:
        with pytest.raises(stagecrew.errors.RequestFailed, match="UnprintableError"):
            harness.evaluation().request(1)
        assert harness.failure is None


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3)])
def test_every_exception_of_an_async_call_reaches_its_handler(error):
    """The handler of `call_async` gets every exception, also one that is no `Exception`. A periodic call continues."""
    found = []

    def fail():
        raise error

    with CoordinatorHarness(stagecrew.Coordinator) as harness:
        harness.coordinator.context.call_async(fail, lambda *outcome: found.append(outcome), period=1.0)
        harness.advance(2.5)
        assert found == [(None, error)] * 3
        assert harness.failure is None


def test_an_exception_in_close_is_only_logged(caplog):
    """An exception in `close` is only logged and does not fail the topology, whose work is done."""

    class Raising(stagecrew.Coordinator):
        def close(self):
            raise ZeroDivisionError("in close")

    with CoordinatorHarness(Raising) as harness:
        pass
    assert harness.failure is None
    assert "the coordinator of operator 'operator' failed while closing" in caplog.text


def test_only_the_first_failure_counts(caplog):
    """However many threads call `fail`, only the first error is the cause, and it is logged once."""
    with CoordinatorHarness(stagecrew.Coordinator) as harness:
        context = harness.coordinator.context
        context.fail(KeyError("the first"))
        threads = [threading.Thread(target=context.fail, args=(KeyError(n),)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert harness.failure.args == ("the first",)
    assert caplog.text.count("failed; the topology is cancelled") == 1


def test_a_failure_while_the_topology_closes_fails_it():
    """Calls that are still enqueued when the topology ends are made, and an exception in them fails the topology."""

    class Late(stagecrew.Coordinator):
        def handle_event(self, evaluation, event):
            raise ZeroDivisionError("late")

    harness = CoordinatorHarness(Late)
    harness.coordinator.context.run_in_coordinator_thread(lambda: harness.coordinator.handle_event(None, 1))
    harness.close()
    with pytest.raises(stagecrew.errors.CoordinatorFailed, match="late"):
        harness.operators.raise_failure()


@pytest.mark.parametrize("method", ["every", "call_async"])
def test_repeated_calls_while_live_have_no_timer_while_no_task_is_live(method):
    """Calls with `while_live` repeat while an evaluation is live, pause while none is, and then continue."""
    called = []

    class Watching(stagecrew.Coordinator):
        def start(self):
            if method == "every":
                self.context.every(1.0, lambda: called.append(1), while_live=True)
            else:
                self.context.call_async(lambda: called.append(1), lambda *_: None, period=1.0, while_live=True)

    with CoordinatorHarness(Watching) as harness:
        harness.advance(10)
        calls_before = len(called)
        assert calls_before <= 1
        assert not harness._timers
        for _ in range(2):
            called.clear()
            task, other = harness.evaluation(subtask=0), harness.evaluation(subtask=1)
            harness.advance(3.5)
            assert len(called) == 3
            task.finish()
            harness.advance(2)
            assert len(called) == 5
            other.fail()
            harness.advance(10)
            assert len(called) <= 6
            assert not harness._timers
