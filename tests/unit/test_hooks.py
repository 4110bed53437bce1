"""Calls of user code in workers and the agent: `open` and `close` have a timeout, and the executor gets reports."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import signal
import time
import traceback
from typing import Any

import pytest

import stagecrew
from stagecrew import Listener, Scope, resource
from stagecrew.errors import ChannelClosed, HookTimeout, TaskKilled
from stagecrew.observability.error_summary import error_line
from stagecrew.wire.frames import encode
from stagecrew.worker.hooks import ERROR_LENGTH, CalledHooks
from stagecrew.worker.lifecycle import Lifecycle, RegisteredListener, TopologyDescription

#: The default timeout method of pytest uses the same timer (SIGALRM) as these tests.
pytestmark = pytest.mark.timeout(60, method="thread")

PACKAGE = os.path.dirname(stagecrew.__file__) + os.sep

WELCOME = {
    "application": "app-1",
    "executor": "7",
    "host": "localhost",
    "configuration": {"spark.app.name": "tests"},
    "openTimeout": 0.2,
    "closeTimeout": 0.3,
}


class FakeChannel:
    """A channel that records sent frames, and checks that each frame can be encoded."""

    def __init__(self, closed: bool = False, **welcome: Any) -> None:
        self.welcome = {**WELCOME, **welcome}
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.closed = closed

    def send(self, kind: str, **fields: Any) -> None:
        encode(kind, **fields)
        if self.closed:
            raise ChannelClosed("the executor no longer reads")
        self.sent.append((kind, fields))


class Calls(Listener):
    """A listener whose hooks are the given functions."""

    def __init__(self, **hooks: Any) -> None:
        self.hooks = hooks

    def open(self, context):
        return self.hooks.get("open", lambda context: None)(context)

    def close(self, context):
        return self.hooks.get("close", lambda context: None)(context)

    @contextlib.contextmanager
    def decorate(self, task):
        self.hooks.get("enter", lambda task: None)(task)
        try:
            yield
        finally:
            self.hooks.get("leave", lambda task: None)(task)


def raising(error: BaseException):
    """Returns a hook that raises this error."""

    def hook(_):
        raise error

    return hook


def hang(_: Any) -> None:
    """A hook that runs Python code for a minute, which is longer than any timeout in these tests."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass


def create_hooks(listener: Listener, channel: FakeChannel | None = None, required: bool = True):
    """Returns hooks, their channel, a topology, and its only listener."""
    channel = channel or FakeChannel()
    registered = RegisteredListener(3, "orders", listener._stagecrew, required, listener)
    return CalledHooks(channel), channel, TopologyDescription("enrich-1", "enrich", (registered,)), registered


@pytest.fixture(autouse=True)
def _timer_is_restored():
    """Asserts that, after each test, SIGALRM has its previous handler and no timer is running."""
    before = signal.getsignal(signal.SIGALRM)
    yield
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_open_and_close_get_a_context():
    """The context has the names of application, topology, executor and host, the scope and the configuration."""
    seen = []
    listener = Calls(open=seen.append, close=seen.append)
    listener.scope = Scope.EXECUTOR
    hooks, _, topology, registered = create_hooks(listener)
    hooks.open(topology, registered)
    hooks.close(topology, registered)
    assert seen[0] == seen[1]
    context = seen[0]
    assert (context.application, context.topology, context.topology_id) == ("app-1", "enrich", "enrich-1")
    assert (context.executor, context.host, context.scope) == ("7", "localhost", Scope.EXECUTOR)
    assert context.configuration == {"spark.app.name": "tests"}


@pytest.mark.parametrize(("hook", "milliseconds"), [("open", 200), ("close", 300)])
def test_the_executor_is_notified_before_and_after_a_hook(hook, milliseconds):
    """Before the user's code runs, HOOK is sent with the timeout. Afterwards, HOOK_DONE is sent with the duration."""
    channel = FakeChannel()
    before = []

    def call(_):
        before.extend(channel.sent)
        time.sleep(0.01)

    hooks, _, topology, registered = create_hooks(Calls(**{hook: call}), channel)
    getattr(hooks, hook)(topology, registered)
    started = ("HOOK", {"topology": "enrich-1", "listener": 3, "hook": hook, "timeout": milliseconds})
    assert before == [started]
    kind, fields = channel.sent[1]
    assert channel.sent == [started, (kind, fields)]
    assert kind == "HOOK_DONE"
    assert 10_000 <= fields.pop("micros") < 10_000_000
    assert fields == {"topology": "enrich-1", "listener": 3, "hook": hook, "outcome": "ok", "error": "", "line": ""}


def test_an_exception_in_open_is_raised_and_reported():
    """The user's own exception is raised, with a note that names the hook. The executor gets its traceback."""
    error = ZeroDivisionError("no database")
    hooks, channel, topology, registered = create_hooks(Calls(open=raising(error)))
    with pytest.raises(ZeroDivisionError) as raised:
        hooks.open(topology, registered)
    assert raised.value is error
    assert error.__notes__ == ["raised by open of listener 'orders' (topology 'enrich', executor 7, host localhost)"]
    assert "in hook" in "".join(traceback.format_exception(error))
    _, fields = channel.sent[-1]
    assert fields["outcome"] == "failed"
    assert "in hook" in fields["error"]
    assert "ZeroDivisionError: no database" in fields["error"]
    assert PACKAGE not in fields["error"]


def test_reported_tracebacks_have_only_frames_of_user_code():
    """Reported tracebacks omit this package's frames in the exception, in its cause, and after an interrupted hook."""

    @resource
    def pool(context):
        try:
            fail("the cause")
        except ValueError as error:
            raise KeyError("the error") from error
        yield

    for listener, frames in ((pool(), ["pool", "fail", "pool"]), (Calls(open=hang), ["open", "hang"])):
        hooks, channel, topology, registered = create_hooks(listener)
        with pytest.raises((KeyError, HookTimeout)):
            hooks.open(topology, registered)
        text = channel.sent[-1][1]["error"]
        assert PACKAGE not in text
        assert os.sep + "contextlib.py" not in text
        assert re.findall(r'File ".*", line \d+, in (\w+)', text) == frames


def fail(message: str) -> None:
    """Raises a ValueError, in a frame of its own."""
    raise ValueError(message)


@pytest.mark.parametrize("required", [True, False])
def test_only_a_failed_open_that_is_not_required_is_logged(required, caplog):
    """A failed `open` is logged only if the listener is not required. Otherwise, the failed task shows the error."""
    hooks, _, topology, registered = create_hooks(Calls(open=raising(OSError("no database"))), required=required)
    with pytest.raises(OSError, match="no database"):
        hooks.open(topology, registered)
    if required:
        assert caplog.records == []
    else:
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert record.getMessage().startswith(
            "listener 'orders' is switched off in this process, because its open failed and it is not required: open of"
        )
        assert record.exc_info[1].args == ("no database",)


def test_a_kill_during_open_is_not_a_failure_of_the_listener(caplog):
    """A TaskKilled during `open` is raised, and no warning says that the listener is switched off."""
    hooks, channel, topology, registered = create_hooks(Calls(open=raising(TaskKilled("SIGTERM"))), required=False)
    with pytest.raises(TaskKilled):
        hooks.open(topology, registered)
    assert caplog.records == []
    assert channel.sent[-1][1]["outcome"] == "failed"


def test_an_open_that_hangs_is_interrupted():
    """An `open` that hangs is interrupted by a HookTimeout, which names listener, topology, executor and host."""
    hooks, channel, topology, registered = create_hooks(Calls(open=hang))
    started = time.monotonic()
    with pytest.raises(HookTimeout) as raised:
        hooks.open(topology, registered)
    assert 0.2 <= time.monotonic() - started < 30
    assert str(raised.value) == (
        "open of listener 'orders' (topology 'enrich', executor 7, host localhost) "
        "took longer than 0.2 s (spark.stagecrew.open.timeout) and was interrupted"
    )
    assert "in hang" in "".join(traceback.format_exception(raised.value))
    assert channel.sent[-1][1]["outcome"] == "timeout"
    assert "HookTimeout" in channel.sent[-1][1]["error"]


def test_an_open_that_sleeps_is_interrupted():
    """An `open` is interrupted even in a system call that Python resumes after a signal."""
    hooks, _, topology, registered = create_hooks(Calls(open=lambda _: time.sleep(60)))
    with pytest.raises(HookTimeout):
        hooks.open(topology, registered)


def test_an_interrupted_resource_runs_its_finally():
    """A resource that is interrupted before its `yield` runs its `finally`. A later close has nothing to do."""
    ended = []

    @resource
    def slow(context):
        try:
            hang(None)
            yield 1
        finally:
            ended.append(1)

    hooks, channel, topology, registered = create_hooks(slow())
    with pytest.raises(HookTimeout):
        hooks.open(topology, registered)
    hooks.close(topology, registered)
    assert ended == [1]
    assert [fields["outcome"] for kind, fields in channel.sent if kind == "HOOK_DONE"] == ["timeout", "ok"]


@pytest.mark.parametrize(
    "call",
    [hang, raising(ZeroDivisionError("broken")), raising(TaskKilled("SIGTERM")), raising(SystemExit(3))],
    ids=["hang", "raises", "killed", "exits"],
)
def test_a_failed_close_is_logged_and_reported_but_not_raised(call, caplog):
    """A `close` that raises anything or hangs is logged with its listener's name and reported, but does not raise."""
    hooks, channel, topology, registered = create_hooks(Calls(close=call))
    assert hooks.close(topology, registered) is None
    (record,) = caplog.records
    assert record.getMessage() == "close of listener 'orders' (topology 'enrich', executor 7, host localhost) failed"
    assert record.exc_info[1] is not None
    assert channel.sent[-1][1]["outcome"] == ("timeout" if call is hang else "failed")


@pytest.mark.parametrize("call", [lambda _: None, raising(OSError("x")), hang], ids=["ok", "raises", "hang"])
def test_the_users_signal_handler_is_restored(call):
    """After a hook, however it ended, SIGALRM has the user's handler again."""

    def user_handler(_signal, _frame):
        raise AssertionError("the user's timer must not fire")

    before = signal.signal(signal.SIGALRM, user_handler)
    try:
        hooks, _, topology, registered = create_hooks(Calls(open=call))
        with contextlib.suppress(OSError):
            hooks.open(topology, registered)
        assert signal.getsignal(signal.SIGALRM) is user_handler
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_the_users_timer_continues():
    """A user's timer does not fire during a hook, but the hook's duration counts, and its interval stays the same."""
    fired = []
    before = signal.signal(signal.SIGALRM, lambda *_: fired.append(time.monotonic()))
    try:
        fired_in_hook = []
        pauses = [0.1, 0.5]
        listener = Calls(open=lambda _: (time.sleep(pauses.pop(0)), fired_in_hook.extend(fired)))
        hooks, _, topology, registered = create_hooks(listener, FakeChannel(openTimeout=20.0))
        signal.setitimer(signal.ITIMER_REAL, 30, 7)
        hooks.open(topology, registered)
        remaining, interval = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < remaining <= 29.95
        assert interval == 7
        # A timer that expires during the hook fires immediately after the hook.
        signal.setitimer(signal.ITIMER_REAL, 0.4)
        hooks.open(topology, registered)
        deadline = time.monotonic() + 20
        while not fired and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(fired) == 1
        assert fired_in_hook == []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_decorator_that_fails_to_enter_fails_the_task():
    """If a decorator fails to enter, the task gets the user's exception with a note. The executor gets a report."""
    hooks, channel, topology, registered = create_hooks(Calls(enter=raising(OSError("no context"))))
    with pytest.raises(OSError, match="no context") as raised:
        hooks.enter(topology, registered, "task")
    assert raised.value.__notes__ == [
        "raised by decorate of listener 'orders' (topology 'enrich', executor 7, host localhost)"
    ]
    ((kind, fields),) = channel.sent
    assert (kind, fields["hook"], fields["outcome"]) == ("HOOK_DONE", "decorate", "failed")
    assert error_line(fields["error"]) == "OSError: no context"
    assert "raised by" not in fields["error"]


@pytest.mark.parametrize("error", [None, OSError("task"), TaskKilled("SIGTERM")])
def test_a_decorator_sees_the_end_of_its_task(error, caplog):
    """A decorator gets the task's own exception, if any. Raising it on is not a failure of the decorator."""
    seen: list[Any] = []

    class Sees(Listener):
        @contextlib.contextmanager
        def decorate(self, task):
            seen.append(task)
            try:
                yield
            except BaseException as raised:
                seen.append(raised)
                raise
            else:
                seen.append(None)

    hooks, channel, topology, registered = create_hooks(Sees())
    leave = hooks.enter(topology, registered, "task")
    assert leave(error) is None
    assert seen == ["task", error]
    assert channel.sent == []
    assert caplog.records == []


@pytest.mark.parametrize("task_error", [None, OSError("task")])
def test_a_decorator_that_fails_on_exit_is_logged_and_reported(task_error, caplog):
    """An exception on a decorator's exit is logged and reported, but the task keeps its result or its own exception."""
    hooks, channel, topology, registered = create_hooks(Calls(leave=raising(ZeroDivisionError("broken"))))
    leave = hooks.enter(topology, registered, "task")
    assert leave(task_error) is None
    (record,) = caplog.records
    assert record.getMessage() == (
        "decorate of listener 'orders' (topology 'enrich', executor 7, host localhost) failed on exit"
    )
    ((kind, fields),) = channel.sent
    assert (kind, fields["hook"], fields["outcome"]) == ("HOOK_DONE", "decorate", "failed")
    assert "ZeroDivisionError: broken" in fields["error"]


def test_a_decorator_that_raises_the_tasks_error_again_is_not_a_failure(caplog):
    """A decorator whose `__exit__` raises the exception that it was given has not failed."""

    class Raises(Listener):
        def decorate(self, task):
            class Manager:
                def __enter__(self):
                    return self

                def __exit__(self, type_, error, trace):
                    raise error

            return Manager()

    hooks, channel, topology, registered = create_hooks(Raises())
    hooks.enter(topology, registered, "task")(OSError("task"))
    assert channel.sent == []
    assert caplog.records == []


def test_a_decorate_that_returns_no_context_manager_is_an_error():
    """If `decorate` does not return a context manager, the error names the listener."""

    class NoManager(Listener):
        def decorate(self, task):
            return 7

    hooks, channel, topology, registered = create_hooks(NoManager())
    with pytest.raises((TypeError, AttributeError)) as raised:
        hooks.enter(topology, registered, "task")
    assert "listener 'orders'" in raised.value.__notes__[0]
    assert channel.sent[0][1]["outcome"] == "failed"


def test_hooks_are_called_even_if_the_executor_is_gone():
    """Hooks are called even if the channel to the executor is closed, so that their frames cannot be sent."""
    called = []
    listener = Calls(open=called.append, close=called.append)
    hooks, _, topology, registered = create_hooks(listener, FakeChannel(closed=True))
    hooks.open(topology, registered)
    hooks.close(topology, registered)
    assert len(called) == 2


def test_a_long_error_keeps_its_end():
    """A long error is cut, but keeps its end. Characters that are not valid in UTF-8 are replaced."""
    error = OSError("x" * 3 * ERROR_LENGTH + "\ud800 end")
    hooks, channel, topology, registered = create_hooks(Calls(open=raising(error)))
    with pytest.raises(OSError, match="end"):
        hooks.open(topology, registered)
    text = channel.sent[-1][1]["error"]
    assert len(text) == ERROR_LENGTH
    assert "? end" in text


def test_a_long_message_keeps_its_first_line():
    """A long error with a long message keeps the first line of the message and the end of the traceback."""
    error = OSError("refused\n" + "SELECT\n" * ERROR_LENGTH + "(see there)")
    hooks, channel, topology, registered = create_hooks(Calls(open=raising(error)))
    with pytest.raises(OSError, match="refused"):
        hooks.open(topology, registered)
    text = channel.sent[-1][1]["error"]
    assert len(text) == ERROR_LENGTH
    assert error_line(text) == "OSError: refused"
    assert text.endswith("(see there)\n")


def test_lifecycle_and_hooks_together(caplog):
    """If one `open` hangs, and so its listener is switched off, and one `close` raises, all other hooks are called."""
    events: list[str] = []
    slow = Calls(open=hang, close=lambda _: events.append("slow closed"))
    broken = Calls(open=lambda _: events.append("broken opened"), close=raising(OSError("broken")))
    good = Calls(open=lambda _: events.append("good opened"), close=lambda _: events.append("good closed"))
    topology = TopologyDescription(
        "t",
        "t",
        tuple(
            RegisteredListener(i, name, listener._stagecrew, name != "slow", listener)
            for i, (name, listener) in enumerate({"good": good, "slow": slow, "broken": broken}.items())
        ),
    )
    lifecycle = Lifecycle(CalledHooks(FakeChannel()))
    lifecycle.add_topology(topology)
    lifecycle.begin(["t"], "task")
    lifecycle.end(None)
    assert lifecycle.close("t") == ["t"]
    assert events == ["good opened", "slow closed", "broken opened", "good closed"]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


@pytest.mark.parametrize("kind", ["class", "generator"])
def test_a_signal_at_any_moment_leaves_no_decorator_entered(kind):
    """Wherever a kill interrupts the start of a task, a context manager that was entered is exited exactly once."""
    inside = [0]
    armed: list[bool] = []
    managers: list[Any] = []

    class Manager:
        def __enter__(self):
            inside[0] += 1  # no call follows, so no signal is handled before this returns

        def __exit__(self, *_):
            inside[0] -= 1

    @contextlib.contextmanager
    def generator():
        inside[0] += 1
        try:
            yield
        finally:
            inside[0] -= 1

    class Decorates(Listener):
        def decorate(self, task):
            managers.append(Manager() if kind == "class" else generator())  # a reference prevents exit by deletion
            return managers[-1]

    def kill(_number, _frame):
        if armed:
            armed.clear()
            raise TaskKilled("SIGTERM")

    listener = Decorates()
    hooks = CalledHooks(FakeChannel())
    topology = TopologyDescription("t", "t", (RegisteredListener(0, "one", listener._stagecrew, True, listener),))
    lifecycle = Lifecycle(hooks)
    lifecycle.add_topology(topology)
    lifecycle.begin(["t"], "task")
    lifecycle.end(None)
    killed = 0
    before = signal.signal(signal.SIGALRM, kill)
    try:
        for number in range(6000):
            managers.clear()
            armed.append(True)
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + number % 60))
                lifecycle.begin(["t"], "task")
            except TaskKilled:
                killed += 1
            armed.clear()
            signal.setitimer(signal.ITIMER_REAL, 0)
            lifecycle.end(None)
            assert inside == [0], f"after {number} tasks"
    finally:
        armed.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert killed


def test_a_manager_in_c_code_is_exited_after_a_signal_in_its_entry():
    """A context manager whose `__enter__` is C code is exited if a signal arrives in `__enter__`."""
    errors: list[Any] = []

    class Manager:
        _as_parameter_ = int(signal.SIGALRM)
        __enter__ = ctypes.CDLL(None)["raise"]

        def __exit__(self, _type, error, _trace):
            errors.append(error)

    class Decorates(Listener):
        def decorate(self, task):
            return Manager()

    def kill(_number, _frame):
        raise TaskKilled("SIGTERM")

    hooks, _, topology, registered = create_hooks(Decorates())
    before = signal.signal(signal.SIGALRM, kill)
    try:
        with pytest.raises(TaskKilled) as raised:
            hooks.enter(topology, registered, "task")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert errors == [raised.value]


def test_a_kill_at_the_start_of_a_hook_leaves_no_timer(monkeypatch):
    """A kill that arrives immediately after the start of a hook's timer leaves no timer running."""
    before = signal.getsignal(signal.SIGALRM)
    real = signal.setitimer

    def set_timer_then_kill(*arguments):
        real(*arguments)
        if arguments[1]:
            raise TaskKilled("SIGTERM")
        return (0.0, 0.0)

    monkeypatch.setattr(signal, "setitimer", set_timer_then_kill)
    hooks, _, topology, registered = create_hooks(Calls())
    with pytest.raises(TaskKilled):
        hooks.open(topology, registered)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before
