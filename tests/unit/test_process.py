"""One worker with listeners: its tasks, its idle time, the signals it gets, and the children that user code forks."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pyspark.worker
import pytest
from pyspark import TaskContext

from stagecrew import ChannelError, Listener, ResourceNotOpen, TaskKilled
from stagecrew.wire.channel import Channel
from stagecrew.wire.frames import Decoder, encode
from stagecrew.worker import daemon, graceful_shutdown
from stagecrew.worker import process as worker_process

#: Else pytest's own time limit is the timer of the user here.
pytestmark = [
    pytest.mark.timeout(60, method="thread"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # that is what is tested
]

WELCOME = {
    "application": "app-1",
    "executor": "7",
    "host": "localhost",
    "configuration": {"spark.app.name": "tests"},
    "openTimeout": 10.0,
    "closeTimeout": 20.5,
}


@pytest.fixture
def executor(monkeypatch):
    """The executor's end of a worker's channel, with the worker."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours, 1 << 20, 10.0)
    channel.welcome = WELCOME
    monkeypatch.setattr(worker_process.Channel, "connect", lambda place, role: channel)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    decoder = Decoder(1 << 20)

    def heard(kind: str, seconds: float = 10.0) -> Any:
        """The next frame of this kind that the worker sent."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for frame in list(arrived):
                arrived.remove(frame)
                if frame.kind == kind:
                    return frame
            if select.select([theirs], [], [], 0.1)[0]:
                arrived.extend(decoder.feed(theirs.recv(1 << 16)))
        raise AssertionError(f"no {kind} came")

    arrived: list[Any] = []
    spark, results = socket.socketpair()

    def ended() -> bool:
        """Whether the executor sees the end of the stream."""
        return bool(select.select([theirs], [], [], 10)[0]) and theirs.recv(1) == b""

    with spark, results, os.fdopen(os.dup(results.fileno()), "wb") as output:
        yield SimpleNamespace(
            worker=worker_process.WorkerProcess("place"), say=theirs.sendall, heard=heard, end=theirs.close, ended=ended,
            spark=spark, output=output,
        )  # fmt: skip
    signal.pthread_sigmask(signal.SIG_UNBLOCK, worker_process._ENDING)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    channel.close()
    theirs.close()


def description(topology: str, target: str = "stagecrew:LoggingContext") -> bytes:
    """Of a topology with one listener that is imported by its name."""
    body = (
        f'{{"name": "{topology}", "listeners": [{{"index": 0, "kind": "name", "name": null, "target": "{target}"}}]}}'
    )
    return encode("TOPOLOGY", topology=topology, body=body, blobs=[], opened="", values=[])


def task(attempt: int = 5, **properties: str) -> Any:
    """What PySpark's TaskContext tells of a task with these local properties."""
    return SimpleNamespace(
        taskAttemptId=lambda: attempt,
        stageId=lambda: 1,
        partitionId=lambda: 2,
        attemptNumber=lambda: 0,
        getLocalProperty=lambda key: properties.get(key.rsplit(".", 1)[1]),
    )


TASK = task()


class Journal(Listener):
    """Notes its closes, and what it is told of tasks, where also another process can read it."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.tasks: list[Any] = []

    def note(self, what: str) -> None:
        with open(self.place, "a") as file:
            file.write(f"{what} {os.getpid()}\n")

    def close(self, context):
        self.note("closed")

    @contextlib.contextmanager
    def decorate(self, task):
        self.tasks.append(task)
        try:
            yield
        finally:
            self.note("left")


@pytest.fixture
def journal(tmp_path, monkeypatch):
    """A listener with the name that `journaled` describes; `read` is what it noted."""
    module = ModuleType("of_this_test")
    module.journal = Journal(str(tmp_path / "journal"))
    monkeypatch.setitem(sys.modules, "of_this_test", module)
    (tmp_path / "journal").touch()
    module.journal.read = lambda: (tmp_path / "journal").read_text().splitlines()
    return module.journal


def journaled(topology: str) -> bytes:
    """The description of a topology with that listener."""
    return description(topology, "of_this_test:journal")


@pytest.fixture
def forked():
    """Forks a process that calls a function and exits with what that answers."""
    started: list[int] = []

    def fork(function) -> int:
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = function() or 0
            finally:
                os._exit(code)
        started.append(pid)
        return pid

    yield fork
    for pid in started:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def exit_code(pid: int) -> int:
    """Of a child; a negative number is a signal, as subprocess has it."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    raise AssertionError("the child goes on")


def test_a_close_that_came_with_a_description_is_obeyed(executor):
    """A CLOSE that the worker read while it waited for a description is answered as soon as the task is over."""
    executor.say(description("a"))
    executor.worker.begin(TASK, ["a"], executor.output)
    executor.worker.end(None)
    executor.say(encode("CLOSE", topology="a") + description("b"))
    executor.worker.begin(TASK, ["b"], executor.output)
    executor.worker.end(None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        waits = threading.Timer(20, theirs.sendall, [b"in vain"])
        waits.start()
        theirs.sendall(b"the next task")
        executor.worker.wait_for_task(ours)
        waits.cancel()
        waits.join()
    assert executor.heard("CLOSED")["topology"] == "a"
    assert executor.worker.anything_open
    executor.worker.leave("the test ends")
    assert executor.heard("GOODBYE")["reason"] == "the test ends"


def test_an_executor_that_is_gone_closes_everything(executor):
    """An idle worker whose channel breaks closes its listeners and goes on as a plain worker."""
    executor.say(description("a"))
    executor.worker.begin(TASK, ["a"], executor.output)
    executor.worker.end(None)
    assert executor.worker.anything_open
    executor.end()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        executor.worker.wait_for_task(ours)
    assert not executor.worker.anything_open


def test_a_worker_that_is_not_needed_closes_everything(executor):
    """The end of Spark's stream, with signals held; then the executor hears the reason."""
    executor.say(description("a"))
    executor.worker.begin(TASK, ["a"], executor.output)
    executor.worker.end(None)
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        executor.worker.wait_for_task(ours)
    assert not executor.worker.anything_open
    assert executor.heard("GOODBYE")["reason"] == "the worker is not needed any more"


def test_a_kill_during_a_task_is_raised_once(executor):
    """SIGTERM raises `TaskKilled` in the task's own code; a second one has nothing to add, nor one behind the task."""
    executor.say(description("a"))
    executor.worker.begin(TASK, ["a"], executor.output)
    with pytest.raises(TaskKilled, match="SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    executor.worker.end(TaskKilled("SIGTERM"))
    os.kill(os.getpid(), signal.SIGTERM)
    executor.worker.leave("the worker ends")
    assert executor.heard("END")["attempt"] == 5


def test_a_kill_ends_what_spark_reads(executor):
    """After SIGTERM Spark reads what was flushed before, and the end when the task has left: what is written meanwhile goes nowhere."""
    executor.say(description("a"))
    executor.worker.begin(TASK, ["a"], executor.output)
    executor.output.write(b"flushed")
    executor.output.flush()
    executor.output.write(b"held back")
    with pytest.raises(TaskKilled):
        os.kill(os.getpid(), signal.SIGTERM)
    executor.output.write(b"an exception of the function")
    executor.output.flush()
    assert executor.spark.recv(100) == b"flushed"
    assert not select.select([executor.spark], [], [], 0)[0]
    executor.worker.end(TaskKilled("SIGTERM"))
    assert executor.spark.recv(100) == b""


def test_a_kill_without_a_free_descriptor(executor, monkeypatch):
    """Where Spark's stream cannot be ended for want of a descriptor, the task is killed all the same."""
    executor.say(description("a"))
    executor.worker.begin(TASK, ["a"], executor.output)
    monkeypatch.setattr(os, "dup", lambda _: (_ for _ in ()).throw(OSError(24, "Too many open files")))
    with pytest.raises(TaskKilled):
        os.kill(os.getpid(), signal.SIGTERM)
    executor.worker.end(TaskKilled("SIGTERM"))
    executor.output.write(b"still Spark's")
    executor.output.flush()
    assert executor.spark.recv(100) == b"still Spark's"


def test_a_topology_that_the_executor_refuses(executor):
    """The reason of the executor reaches the task, which ends like any other."""
    executor.say(encode("REFUSED", reason="this topology is closed"))
    with pytest.raises(ChannelError, match="the executor refuses this process: this topology is closed"):
        executor.worker.begin(TASK, ["a"], executor.output)
    executor.worker.end(None)
    assert executor.heard("END")["attempt"] == 5
    with pytest.raises(ResourceNotOpen):
        Listener().get()


# -- a task without listeners


def in_daemon(monkeypatch, executor: Any, body: Any) -> Any:
    """PySpark's `main` as the daemon wraps it, with this body of a task."""

    def main(infile: Any, outfile: Any) -> None:
        try:
            pyspark.worker.setup_broadcasts([], None, None)
            body()
        except BaseException:
            sys.exit(-1)

    monkeypatch.setattr(pyspark.worker, "main", main)
    monkeypatch.setattr(pyspark.worker, "setup_broadcasts", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["daemon", "pyspark.worker"])
    monkeypatch.setattr(daemon, "_hooked", False)
    monkeypatch.setattr(daemon, "_process", executor.worker)
    monkeypatch.setattr(TaskContext, "_taskContext", task())
    monkeypatch.setattr(daemon, "_original_worker", lambda *_: pyspark.worker.main(None, executor.output) or 0)
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    return functools.partial(daemon.worker, None, True)


def test_a_kill_of_a_task_without_listeners_closes_those_of_others(executor, journal, forked, monkeypatch, tmp_path):
    """SIGTERM raises in a task that has no topology of ours, in a process that has one open: it ends, and that closes."""
    executor.say(journaled("a"))
    running, killed = tmp_path / "running", tmp_path / "killed"
    worker = executor.worker
    monkeypatch.setattr(worker, "wait_for_task", lambda _: None)  # it has arrived

    def body() -> None:
        try:
            running.touch()
            time.sleep(60)
        except TaskKilled:
            killed.touch()
            raise

    def child() -> int:
        run = in_daemon(monkeypatch, executor, body)
        worker.begin(TASK, ["a"], executor.output)
        worker.end(None)
        try:
            return run()
        except SystemExit:
            return 7

    monkeypatch.setattr(worker_process.fork_safety, "_held", set())  # this child stands for the worker itself
    pid = forked(child)
    wait_until(running.exists)
    os.kill(pid, signal.SIGTERM)
    assert exit_code(pid) == 7
    assert killed.exists()
    assert journal.read() == [f"left {pid}", f"closed {pid}"]


def wait_until(condition: Any) -> None:
    """Until it is true."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_kill_that_came_while_a_task_without_listeners_was_read(executor, journal):
    """It is raised as soon as the task begins, once; behind the task a signal is noted only."""
    executor.say(journaled("a"))
    executor.worker.begin(TASK, ["a"], executor.output)
    executor.worker.end(None)
    executor.worker.resumed()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(TaskKilled, match="SIGTERM"):
        executor.worker.begin_without_listeners(executor.output)
    os.kill(os.getpid(), signal.SIGTERM)
    executor.worker.end(None)
    executor.worker._noted = None
    executor.worker.begin_without_listeners(executor.output)
    executor.worker.end(None)
    os.kill(os.getpid(), signal.SIGTERM)
    executor.worker.leave("the test ends")


def test_a_task_without_listeners_in_a_process_without_any(executor):
    """The signals are Spark's then: SIGTERM ends the process, as it does without stagecrew."""
    before = signal.getsignal(signal.SIGTERM)
    executor.worker.begin_without_listeners(executor.output)
    executor.worker.end(None)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_kill_while_a_listener_closes_whose_open_failed(executor, monkeypatch):
    """It does not interrupt the close, and is raised behind it: the task does not go on."""

    class Broken(Listener):
        required = False

        def open(self, context):
            raise OSError("no database")

        def close(self, context):
            os.kill(os.getpid(), signal.SIGTERM)
            closed.append(1)

    closed: list[int] = []
    module = ModuleType("of_this_test")
    module.journal = Broken()
    monkeypatch.setitem(sys.modules, "of_this_test", module)
    executor.say(journaled("a"))
    with pytest.raises(TaskKilled):
        executor.worker.begin(TASK, ["a"], executor.output)
    assert closed == [1]
    executor.worker.end(None)


# -- what a task is told


@pytest.mark.parametrize(("properties", "attempt"), [({"stageAttempt": "3"}, 3), ({}, 0)])
def test_the_attempt_of_the_stage(executor, journal, properties, attempt):
    """It comes by a local property, as PySpark's TaskContext does not have it; 0 when that is missing."""
    executor.say(journaled("a"))
    executor.worker.begin(task(**properties), ["a"], executor.output)
    executor.worker.end(None)
    (told,) = journal.tasks
    assert (told.stage, told.stage_attempt, told.attempt) == (1, attempt, 5)


# -- how long the daemon waits for it


def test_an_idle_worker_says_how_long_its_closes_may_take(executor, journal, monkeypatch):
    """The close timeout of each that is open; a task has what every worker has."""
    monkeypatch.setattr(graceful_shutdown, "_needed", graceful_shutdown._shared_table())
    said = lambda: graceful_shutdown._needed[os.getpid()]  # noqa: E731
    executor.say(journaled("a") + description("b"))
    executor.worker.begin(TASK, ["a", "b"], executor.output)
    executor.worker.end(None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"the next task")
        executor.worker.wait_for_task(ours)
    assert said() == 42  # two of 20.5 s, and one to end
    graceful_shutdown.forget()
    assert said() == 0
    executor.worker.leave("the worker ends")
    assert said() == 42


# -- children


@pytest.mark.parametrize("how", ["fork", "multiprocessing"])
def test_a_child_that_a_task_forks(executor, journal, forked, how):
    """It reads what was open, dies by SIGTERM, calls no hook and does not keep the channel open."""
    executor.say(journaled("a"))
    executor.worker.begin(TASK, ["a"], executor.output)
    ready, told = os.pipe()

    def child() -> int:
        assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        assert journal.get() is journal
        executor.worker.end(None)
        executor.worker.leave("not mine")
        assert not executor.worker.anything_open
        os.write(told, b"x")
        time.sleep(60)
        return 3

    if how == "fork":
        pid = forked(child)
    else:
        one = multiprocessing.get_context("fork").Process(target=child)
        one.start()
        pid = one.pid
    assert select.select([ready], [], [], 20)[0], "the child has failed"
    assert journal.read() == []
    executor.worker.end(None)
    executor.worker.leave("the worker ends")
    assert journal.read() == [f"left {os.getpid()}", f"closed {os.getpid()}"]
    assert executor.heard("GOODBYE")["reason"] == "the worker ends"
    assert executor.ended()
    os.kill(pid, signal.SIGTERM)
    if how == "fork":
        assert exit_code(pid) == -signal.SIGTERM
    else:
        one.join(20)
        assert one.exitcode == -signal.SIGTERM


def test_a_child_that_a_hook_forks_has_no_handler_of_its_timer(executor, monkeypatch, forked):
    """And handlers of the user stay."""

    def mine(_number, _frame):
        pass

    class Forks(Listener):
        def open(self, context):
            pids.append(forked(lambda: 4 if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL else 5))
            signal.signal(signal.SIGHUP, mine)
            pids.append(forked(lambda: 6 if signal.getsignal(signal.SIGHUP) is mine else 7))

    pids: list[int] = []
    module = ModuleType("of_this_test")
    module.journal = Forks()
    monkeypatch.setitem(sys.modules, "of_this_test", module)
    executor.say(journaled("a"))
    executor.worker.begin(TASK, ["a"], executor.output)
    executor.worker.end(None)
    assert [exit_code(pid) for pid in pids] == [4, 6]
