"""How user code is called in a worker and in the agent: bounded in time, counted, told to the executor."""

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
from stagecrew import ChannelClosed, HookTimeout, Listener, Scope, TaskKilled, resource
from stagecrew.observability.error_summary import error_line
from stagecrew.wire.frames import encode
from stagecrew.worker.hooks import ERROR_LENGTH, CalledHooks
from stagecrew.worker.lifecycle import Described, Lifecycle, Registered

#: Else pytest's own time limit is the timer of the user here.
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
    """Keeps what is sent; every frame must be one that can be encoded."""

    def __init__(self, gone: bool = False, **welcome: Any) -> None:
        self.welcome = {**WELCOME, **welcome}
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.gone = gone

    def send(self, kind: str, **fields: Any) -> None:
        encode(kind, **fields)
        if self.gone:
            raise ChannelClosed("the executor no longer reads")
        self.sent.append((kind, fields))


class Calls(Listener):
    """Calls what it is given."""

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


def raises(error: BaseException):
    """A hook that raises it."""

    def hook(_):
        raise error

    return hook


def hangs(_: Any) -> None:
    """A hook that hangs in Python code, for longer than a test may take."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass


def setting(listener: Listener, channel: FakeChannel | None = None, required: bool = True):
    """Hooks, their channel, a topology and its one listener."""
    channel = channel or FakeChannel()
    registered = Registered(3, "orders", listener._stagecrew, required, listener)
    return CalledHooks(channel), channel, Described("enrich-1", "enrich", (registered,)), registered


@pytest.fixture(autouse=True)
def _timer_is_left_alone():
    """After each test the handler of SIGALRM is what it was, and no timer runs."""
    before = signal.getsignal(signal.SIGALRM)
    yield
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_open_is_told_where_it_is():
    """The context has the names of application, topology, executor and host, the scope and the configuration."""
    seen = []
    listener = Calls(open=seen.append, close=seen.append)
    listener.scope = Scope.EXECUTOR
    hooks, _, topology, registered = setting(listener)
    hooks.open(topology, registered)
    hooks.close(topology, registered)
    assert seen[0] == seen[1]
    context = seen[0]
    assert (context.application, context.topology, context.topology_id) == ("app-1", "enrich", "enrich-1")
    assert (context.executor, context.host, context.scope) == ("7", "localhost", Scope.EXECUTOR)
    assert context.configuration == {"spark.app.name": "tests"}


@pytest.mark.parametrize(("hook", "milliseconds"), [("open", 200), ("close", 300)])
def test_the_executor_is_told_before_and_after(hook, milliseconds):
    """HOOK comes before the user's code runs, with the timeout; HOOK_DONE after it, with the time it took."""
    channel = FakeChannel()
    before = []

    def call(_):
        before.extend(channel.sent)
        time.sleep(0.01)

    hooks, _, topology, registered = setting(Calls(**{hook: call}), channel)
    getattr(hooks, hook)(topology, registered)
    told = ("HOOK", {"topology": "enrich-1", "listener": 3, "hook": hook, "timeout": milliseconds})
    assert before == [told]
    kind, fields = channel.sent[1]
    assert channel.sent == [told, (kind, fields)]
    assert kind == "HOOK_DONE"
    assert 10_000 <= fields.pop("micros") < 10_000_000
    assert fields == {"topology": "enrich-1", "listener": 3, "hook": hook, "outcome": "ok", "error": "", "line": ""}


def test_an_open_that_raises():
    """The exception is the user's own, with a note that names the hook; the executor gets it with its traceback."""
    error = ZeroDivisionError("no database")
    hooks, channel, topology, registered = setting(Calls(open=raises(error)))
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


def test_tracebacks_of_an_open_have_the_frames_of_the_user():
    """Not those of this package: of the exception, of what caused it, and where it was interrupted."""

    @resource
    def pool(context):
        try:
            fails("the cause")
        except ValueError as error:
            raise KeyError("the error") from error
        yield

    for listener, seen in ((pool(), ["pool", "fails", "pool"]), (Calls(open=hangs), ["open", "hangs"])):
        hooks, channel, topology, registered = setting(listener)
        with pytest.raises((KeyError, HookTimeout)):
            hooks.open(topology, registered)
        text = channel.sent[-1][1]["error"]
        assert PACKAGE not in text
        assert os.sep + "contextlib.py" not in text
        assert re.findall(r'File ".*", line \d+, in (\w+)', text) == seen


def fails(message: str) -> None:
    """Raises in a frame of its own."""
    raise ValueError(message)


@pytest.mark.parametrize("required", [True, False])
def test_only_an_open_that_is_not_required_is_logged(required, caplog):
    """A required one fails its task, which shows the exception; else a warning names the listener."""
    hooks, _, topology, registered = setting(Calls(open=raises(OSError("no database"))), required=required)
    with pytest.raises(OSError, match="no database"):
        hooks.open(topology, registered)
    if required:
        assert caplog.records == []
    else:
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert record.getMessage().startswith("listener 'orders' is switched off here, as it is not required: open of")
        assert record.exc_info[1].args == ("no database",)


def test_a_kill_during_an_open_is_no_failure_of_the_listener(caplog):
    """It goes through, and no warning says that the listener was switched off."""
    hooks, channel, topology, registered = setting(Calls(open=raises(TaskKilled("SIGTERM"))), required=False)
    with pytest.raises(TaskKilled):
        hooks.open(topology, registered)
    assert caplog.records == []
    assert channel.sent[-1][1]["outcome"] == "failed"


def test_an_open_that_hangs_is_interrupted():
    """`HookTimeout` is raised in it after its timeout, and names listener, topology, executor and host."""
    hooks, channel, topology, registered = setting(Calls(open=hangs))
    started = time.monotonic()
    with pytest.raises(HookTimeout) as raised:
        hooks.open(topology, registered)
    assert 0.2 <= time.monotonic() - started < 30
    assert str(raised.value) == (
        "open of listener 'orders' (topology 'enrich', executor 7, host localhost) took longer than 0.2 s and was interrupted"
    )
    assert "in hangs" in "".join(traceback.format_exception(raised.value))
    assert channel.sent[-1][1]["outcome"] == "timeout"
    assert "HookTimeout" in channel.sent[-1][1]["error"]


def test_an_open_that_sleeps_is_interrupted():
    """Also in a system call that Python begins again after a signal."""
    hooks, _, topology, registered = setting(Calls(open=lambda _: time.sleep(60)))
    with pytest.raises(HookTimeout):
        hooks.open(topology, registered)


def test_a_generator_that_hangs_is_ended():
    """The `finally` of a resource that is interrupted before its `yield` runs; close then has nothing to do."""
    ended = []

    @resource
    def slow(context):
        try:
            hangs(None)
            yield 1
        finally:
            ended.append(1)

    hooks, channel, topology, registered = setting(slow())
    with pytest.raises(HookTimeout):
        hooks.open(topology, registered)
    hooks.close(topology, registered)
    assert ended == [1]
    assert [fields["outcome"] for kind, fields in channel.sent if kind == "HOOK_DONE"] == ["timeout", "ok"]


@pytest.mark.parametrize(
    "call",
    [hangs, raises(ZeroDivisionError("broken")), raises(TaskKilled("SIGTERM")), raises(SystemExit(3))],
    ids=["hangs", "raises", "killed", "exits"],
)
def test_a_close_that_fails_is_logged_and_told_and_never_raises(call, caplog):
    """Whatever it raises, or when it hangs: a warning that names it, a failure for the executor."""
    hooks, channel, topology, registered = setting(Calls(close=call))
    assert hooks.close(topology, registered) is None
    (record,) = caplog.records
    assert record.getMessage() == "close of listener 'orders' (topology 'enrich', executor 7, host localhost) failed"
    assert record.exc_info[1] is not None
    assert channel.sent[-1][1]["outcome"] == ("timeout" if call is hangs else "failed")


@pytest.mark.parametrize("call", [lambda _: None, raises(OSError("x")), hangs], ids=["ok", "raises", "hangs"])
def test_the_handler_of_the_user_is_restored(call):
    """Whatever the hook does, SIGALRM is the user's again behind it."""

    def mine(_signal, _frame):
        raise AssertionError("nothing rings here")

    before = signal.signal(signal.SIGALRM, mine)
    try:
        hooks, _, topology, registered = setting(Calls(open=call))
        with contextlib.suppress(OSError):
            hooks.open(topology, registered)
        assert signal.getsignal(signal.SIGALRM) is mine
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_the_timer_of_the_user_goes_on():
    """It rings as often as before, and not in the hook, whose time counts."""
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    try:
        in_hook = []
        rests = [0.1, 0.5]
        listener = Calls(open=lambda _: (time.sleep(rests.pop(0)), in_hook.extend(rung)))
        hooks, _, topology, registered = setting(listener, FakeChannel(openTimeout=20.0))
        signal.setitimer(signal.ITIMER_REAL, 30, 7)
        hooks.open(topology, registered)
        remaining, interval = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < remaining <= 29.95
        assert interval == 7
        # One that ought to have rung during the hook rings right behind it.
        signal.setitimer(signal.ITIMER_REAL, 0.4)
        hooks.open(topology, registered)
        deadline = time.monotonic() + 20
        while not rung and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(rung) == 1
        assert in_hook == []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_decoration_that_cannot_be_entered():
    """The user's exception, with a note, fails the task; the executor counts a failure of `decorate`."""
    hooks, channel, topology, registered = setting(Calls(enter=raises(OSError("no context"))))
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
def test_a_decoration_sees_the_end_of_its_task(error, caplog):
    """It gets the very exception of the task; that it lets it pass is no failure of its own."""
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

    hooks, channel, topology, registered = setting(Sees())
    leave = hooks.enter(topology, registered, "task")
    assert leave(error) is None
    assert seen == ["task", error]
    assert channel.sent == []
    assert caplog.records == []


@pytest.mark.parametrize("task_error", [None, OSError("task")])
def test_a_decoration_that_fails_at_its_end_is_logged_and_told(task_error, caplog):
    """What it raises itself goes no further: the task's result, or its exception, stands."""
    hooks, channel, topology, registered = setting(Calls(leave=raises(ZeroDivisionError("broken"))))
    leave = hooks.enter(topology, registered, "task")
    assert leave(task_error) is None
    (record,) = caplog.records
    assert record.getMessage() == (
        "decorate of listener 'orders' (topology 'enrich', executor 7, host localhost) failed at its end"
    )
    ((kind, fields),) = channel.sent
    assert (kind, fields["hook"], fields["outcome"]) == ("HOOK_DONE", "decorate", "failed")
    assert "ZeroDivisionError: broken" in fields["error"]


def test_a_context_manager_that_raises_the_task_error_itself_is_no_failure(caplog):
    """A class whose `__exit__` raises what it was given."""

    class Raises(Listener):
        def decorate(self, task):
            class Manager:
                def __enter__(self):
                    return self

                def __exit__(self, type_, error, trace):
                    raise error

            return Manager()

    hooks, channel, topology, registered = setting(Raises())
    hooks.enter(topology, registered, "task")(OSError("task"))
    assert channel.sent == []
    assert caplog.records == []


def test_a_decorate_that_answers_no_context_manager():
    """The error says so and names the listener."""

    class Wrong(Listener):
        def decorate(self, task):
            return 7

    hooks, channel, topology, registered = setting(Wrong())
    with pytest.raises((TypeError, AttributeError)) as raised:
        hooks.enter(topology, registered, "task")
    assert "listener 'orders'" in raised.value.__notes__[0]
    assert channel.sent[0][1]["outcome"] == "failed"


def test_an_executor_that_is_gone_keeps_nothing_from_closing():
    """The hooks are called though nobody hears of them."""
    called = []
    hooks, _, topology, registered = setting(Calls(open=called.append, close=called.append), FakeChannel(gone=True))
    hooks.open(topology, registered)
    hooks.close(topology, registered)
    assert len(called) == 2


def test_a_long_error_is_cut_from_its_front():
    """The end of a traceback says most; text that is not UTF-8 is told all the same."""
    hooks, channel, topology, registered = setting(Calls(open=raises(OSError("x" * 3 * ERROR_LENGTH + "\ud800 end"))))
    with pytest.raises(OSError, match="end"):
        hooks.open(topology, registered)
    text = channel.sent[-1][1]["error"]
    assert len(text) == ERROR_LENGTH
    assert "? end" in text


def test_of_a_long_message_its_first_line_is_told_too():
    """The executor gets the end, and with it the line that says what happened."""
    error = OSError("refused\n" + "SELECT\n" * ERROR_LENGTH + "(see there)")
    hooks, channel, topology, registered = setting(Calls(open=raises(error)))
    with pytest.raises(OSError, match="refused"):
        hooks.open(topology, registered)
    text = channel.sent[-1][1]["error"]
    assert len(text) == ERROR_LENGTH
    assert error_line(text) == "OSError: refused"
    assert text.endswith("(see there)\n")


def test_lifecycle_and_hooks_together(caplog):
    """With real hooks: one open hangs and is switched off, one close raises, and all the others are called."""
    events: list[str] = []
    slow = Calls(open=hangs, close=lambda _: events.append("slow closed"))
    broken = Calls(open=lambda _: events.append("broken opened"), close=raises(OSError("broken")))
    good = Calls(open=lambda _: events.append("good opened"), close=lambda _: events.append("good closed"))
    topology = Described(
        "t",
        "t",
        tuple(
            Registered(i, name, one._stagecrew, name != "slow", one)
            for i, (name, one) in enumerate({"good": good, "slow": slow, "broken": broken}.items())
        ),
    )
    lifecycle = Lifecycle(CalledHooks(FakeChannel()))
    lifecycle.describe(topology)
    lifecycle.begin(["t"], "task")
    lifecycle.end(None)
    assert lifecycle.close("t") == ["t"]
    assert events == ["good opened", "slow closed", "broken opened", "good closed"]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


@pytest.mark.parametrize("kind", ["class", "generator"])
def test_a_signal_at_any_moment_leaves_no_decoration_entered(kind):
    """Wherever a kill hits the begin of a task: what was entered is left, once, and before the task has ended."""
    inside = [0]
    armed: list[bool] = []
    managers: list[Any] = []

    class Manager:
        def __enter__(self):
            inside[0] += 1  # no call behind it, so no signal before it has answered

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
            managers.append(Manager() if kind == "class" else generator())  # kept: none is left by being dropped
            return managers[-1]

    def kill(_number, _frame):
        if armed:
            armed.clear()
            raise TaskKilled("SIGTERM")

    one = Decorates()
    hooks = CalledHooks(FakeChannel())
    topology = Described("t", "t", (Registered(0, "one", one._stagecrew, True, one),))
    lifecycle = Lifecycle(hooks)
    lifecycle.describe(topology)
    lifecycle.begin(["t"], "task")
    lifecycle.end(None)
    killed = 0
    before = signal.signal(signal.SIGALRM, kill)
    try:
        for at in range(6000):
            managers.clear()
            armed.append(True)
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + at % 60))
                lifecycle.begin(["t"], "task")
            except TaskKilled:
                killed += 1
            armed.clear()
            signal.setitimer(signal.ITIMER_REAL, 0)
            lifecycle.end(None)
            assert inside == [0], f"after {at} tasks"
    finally:
        armed.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert killed


def test_a_signal_right_behind_the_entry_of_c_code_is_left():
    """A lock's `__enter__` has returned, and the signal that came in it is raised before anything else runs."""
    left: list[Any] = []

    class Manager:
        _as_parameter_ = int(signal.SIGALRM)
        __enter__ = ctypes.CDLL(None)["raise"]

        def __exit__(self, _type, error, _trace):
            left.append(error)

    class Decorates(Listener):
        def decorate(self, task):
            return Manager()

    def kill(_number, _frame):
        raise TaskKilled("SIGTERM")

    hooks, _, topology, registered = setting(Decorates())
    before = signal.signal(signal.SIGALRM, kill)
    try:
        with pytest.raises(TaskKilled) as raised:
            hooks.enter(topology, registered, "task")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert left == [raised.value]


def test_a_kill_as_a_hook_begins_leaves_no_timer(monkeypatch):
    """The signal may come right behind the call that starts the timer."""
    before = signal.getsignal(signal.SIGALRM)
    real = signal.setitimer

    def set_and_killed(*arguments):
        real(*arguments)
        if arguments[1]:
            raise TaskKilled("SIGTERM")
        return (0.0, 0.0)

    monkeypatch.setattr(signal, "setitimer", set_and_killed)
    hooks, _, topology, registered = setting(Calls())
    with pytest.raises(TaskKilled):
        hooks.open(topology, registered)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before
