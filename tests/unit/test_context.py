"""What a coordinator's context does in each of its states, and what an exception of each callback does: by the harness."""

from __future__ import annotations

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
def test_before_it_is_initialised(write):
    """Reads work; a write raises, and says where it may be done."""
    seen = []

    class Early(stagecrew.Coordinator):
        def __init__(self, context):
            super().__init__(context)
            seen.append(reads(context))
            with pytest.raises(stagecrew.NotInitialised, match=rf"called context.{write} before .* call it in start"):
                WRITES[write](context)

    with CoordinatorHarness(Early) as harness:
        assert seen == [("operator", "test", {}, "uninitialised")]
        assert harness.failure is None


@pytest.mark.parametrize("write", WRITES)
def test_after_it_is_closed(write):
    """Reads work; a write does nothing."""
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
    """What one instance stores its successor finds."""
    with CoordinatorHarness(stagecrew.Coordinator) as harness:
        harness.coordinator.context.store["x"] = 1
        harness.reset()
        assert harness.coordinator.context.store == {"x": 1}


def test_calls_from_threads():
    """What any thread enqueues is called once, in the order of that thread, on the coordinator's."""
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
        assert [i for who, i in called if who == n] == list(range(100))


def leads_to(callback, harness):
    """Has the coordinator called so."""
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
        with pytest.raises(stagecrew.CheckpointFailed):
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
def test_a_callback_that_raises(callback):
    """In whichever callback: the topology fails by that exception, once, and what comes later is called all the same."""

    class Raising(stagecrew.Coordinator):
        def raises(self, *_):
            raise ZeroDivisionError(callback)

    def ready(self, _evaluation, gateway):
        harness.gateway = gateway

    Raising.ready = ready
    if callback not in ("call_async", "every"):
        setattr(Raising, callback, Raising.raises)
    harness = CoordinatorHarness(Raising)
    leads_to(callback, harness)
    assert isinstance(harness.failure, ZeroDivisionError)
    assert str(harness.failure) == callback
    assert harness.failure.__traceback__ is not None
    with pytest.raises(stagecrew.CoordinatorFailed, match=callback) as caught:
        harness.operators.raise_failure()
    assert caught.value.__cause__ is harness.failure
    harness.close()


def test_a_close_that_raises(caplog):
    """It is said in the log, and fails nothing: the topology has done what it should."""

    class Raising(stagecrew.Coordinator):
        def close(self):
            raise ZeroDivisionError("in close")

    with CoordinatorHarness(Raising) as harness:
        pass
    assert harness.failure is None
    assert "the coordinator of operator 'operator' failed while it closed" in caplog.text


def test_the_first_failure_counts(caplog):
    """However often and from however many threads: one cause, said once."""
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


def test_a_failure_while_it_closes():
    """What was sent before the end is handled at the end, and what raises there fails the topology too."""

    class Late(stagecrew.Coordinator):
        def handle_event(self, evaluation, event):
            raise ZeroDivisionError("late")

    harness = CoordinatorHarness(Late)
    harness.coordinator.context.run_in_coordinator_thread(lambda: harness.coordinator.handle_event(None, 1))
    harness.close()
    with pytest.raises(stagecrew.CoordinatorFailed, match="late"):
        harness.operators.raise_failure()


@pytest.mark.parametrize("where", ["every", "call_async"])
def test_what_is_repeated_while_a_task_is_live_has_no_timer_while_none_is(where):
    """It is called at intervals while an evaluation is live, pauses while none is, and goes on with the next."""
    called = []

    class Watching(stagecrew.Coordinator):
        def start(self):
            if where == "every":
                self.context.every(1.0, lambda: called.append(1), while_live=True)
            else:
                self.context.call_async(lambda: called.append(1), lambda *_: None, period=1.0, while_live=True)

    with CoordinatorHarness(Watching) as harness:
        harness.advance(10)
        at_rest = len(called)
        assert at_rest <= 1
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
