"""A worker process with listeners: its tasks, its idle time, its signals, and the children that user code forks."""

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

from stagecrew import Listener
from stagecrew.errors import ChannelError, ResourceNotOpen, TaskKilled
from stagecrew.wire.channel import Channel
from stagecrew.wire.frames import Decoder, encode
from stagecrew.worker import daemon, graceful_shutdown
from stagecrew.worker import process as worker_process

#: The default method of pytest's timeout sets a timer, which the hooks would take for the user's timer.
pytestmark = [
    pytest.mark.timeout(60, method="thread"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # the tests use fork on purpose
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
    """A worker, and the executor's end of its channel and of Spark's stream."""
    worker_end, executor_end = socket.socketpair()
    channel = Channel(worker_end, 1 << 20, 10.0)
    channel.welcome = WELCOME
    monkeypatch.setattr(worker_process.Channel, "connect", lambda address_file, role: channel)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    decoder = Decoder(1 << 20)

    def receive(kind: str, seconds: float = 10.0) -> Any:
        """Waits for a frame of this kind from the worker, and returns it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for frame in list(frames):
                frames.remove(frame)
                if frame.kind == kind:
                    return frame
            if select.select([executor_end], [], [], 0.1)[0]:
                frames.extend(decoder.feed(executor_end.recv(1 << 16)))
        raise AssertionError(f"no {kind} arrived")

    frames: list[Any] = []
    spark, results = socket.socketpair()

    def ended() -> bool:
        """Returns whether the executor sees the end of the channel."""
        return bool(select.select([executor_end], [], [], 10)[0]) and executor_end.recv(1) == b""

    with spark, results, os.fdopen(os.dup(results.fileno()), "wb") as output:
        yield SimpleNamespace(
            worker=worker_process.WorkerProcess("address_file"), send=executor_end.sendall, receive=receive,
            end=executor_end.close, ended=ended, spark=spark, output=output,
        )  # fmt: skip
    signal.pthread_sigmask(signal.SIG_UNBLOCK, worker_process._END_SIGNALS)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    channel.close()
    executor_end.close()


def description(topology: str, target: str = "stagecrew:LoggingContext") -> bytes:
    """The description of a topology with one listener that is imported by name."""
    body = (
        f'{{"name": "{topology}", "listeners": [{{"index": 0, "kind": "name", "name": null, "target": "{target}"}}]}}'
    )
    return encode("TOPOLOGY", topology=topology, body=body, blobs=[], opened="", values=[])


def task(attempt: int = 5, **properties: str) -> Any:
    """A fake of PySpark's TaskContext with these local properties."""
    return SimpleNamespace(
        taskAttemptId=lambda: attempt,
        stageId=lambda: 1,
        partitionId=lambda: 2,
        attemptNumber=lambda: 0,
        getLocalProperty=lambda key: properties.get(key.rsplit(".", 1)[1]),
    )


TASK = task()


class Journal(Listener):
    """Records its closes and tasks in a file that other processes can read."""

    def __init__(self, address_file: str) -> None:
        self.address_file = address_file
        self.tasks: list[Any] = []

    def record(self, what: str) -> None:
        with open(self.address_file, "a") as file:
            file.write(f"{what} {os.getpid()}\n")

    def close(self, context):
        self.record("closed")

    @contextlib.contextmanager
    def decorate(self, task):
        self.tasks.append(task)
        try:
            yield
        finally:
            self.record("left")


@pytest.fixture
def journal(tmp_path, monkeypatch):
    """The listener that `journal_description` names. `read` returns its records."""
    module = ModuleType("of_this_test")
    module.journal = Journal(str(tmp_path / "journal"))
    monkeypatch.setitem(sys.modules, "of_this_test", module)
    (tmp_path / "journal").touch()
    module.journal.read = lambda: (tmp_path / "journal").read_text().splitlines()
    return module.journal


def journal_description(topology: str) -> bytes:
    """The description of a topology with the listener `journal`."""
    return description(topology, "of_this_test:journal")


@pytest.fixture
def fork_process():
    """Forks a process that calls a function and exits with its result."""
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
    """Waits for a child, and returns its exit code. A negative number is a signal, as in `subprocess`."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    raise AssertionError("the child is still running")


def test_a_close_that_arrives_with_a_description(executor):
    """A worker that reads a CLOSE while it waits for a description confirms it as soon as the task has ended."""
    executor.send(description("a"))
    executor.worker.begin(TASK, ["a"], executor.output)
    executor.worker.end(None)
    executor.send(encode("CLOSE", topology="a") + description("b"))
    executor.worker.begin(TASK, ["b"], executor.output)
    executor.worker.end(None)
    worker_end, executor_end = socket.socketpair()
    with worker_end, executor_end:
        waits = threading.Timer(20, executor_end.sendall, [b"in vain"])
        waits.start()
        executor_end.sendall(b"the next task")
        executor.worker.wait_for_task(worker_end)
        waits.cancel()
        waits.join()
    assert executor.receive("CLOSED")["topology"] == "a"
    assert executor.worker.anything_open
    executor.worker.leave("the test ends")
    assert executor.receive("GOODBYE")["reason"] == "the test ends"


def test_a_lost_executor_closes_everything(executor):
    """An idle worker whose channel breaks closes its listeners, and continues as a plain worker."""
    executor.send(description("a"))
    executor.worker.begin(TASK, ["a"], executor.output)
    executor.worker.end(None)
    assert executor.worker.anything_open
    executor.end()
    worker_end, executor_end = socket.socketpair()
    with worker_end, executor_end:
        executor.worker.wait_for_task(worker_end)
    assert not executor.worker.anything_open


def test_a_worker_that_is_no_longer_needed_closes_everything(executor):
    """An idle worker whose Spark stream ends closes its listeners, and sends the reason to the executor."""
    executor.send(description("a"))
    executor.worker.begin(TASK, ["a"], executor.output)
    executor.worker.end(None)
    worker_end, executor_end = socket.socketpair()
    with worker_end:
        executor_end.close()
        executor.worker.wait_for_task(worker_end)
    assert not executor.worker.anything_open
    assert executor.receive("GOODBYE")["reason"] == "the worker is no longer needed"


def test_a_kill_during_a_task_is_raised_once(executor):
    """SIGTERM raises `TaskKilled` in the task's code. A second signal, or a signal after the task, raises nothing."""
    executor.send(description("a"))
    executor.worker.begin(TASK, ["a"], executor.output)
    with pytest.raises(TaskKilled, match="SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    executor.worker.end(TaskKilled("SIGTERM"))
    os.kill(os.getpid(), signal.SIGTERM)
    executor.worker.leave("the worker ends")
    assert executor.receive("END")["attempt"] == 5


def test_a_kill_ends_the_output_stream(executor):
    """After SIGTERM, Spark reads the output that was flushed before it and, once the task has ended, the end of the
    stream. Later output is discarded."""
    executor.send(description("a"))
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


def test_a_kill_without_a_free_file_descriptor(executor, monkeypatch):
    """A task is killed even if no file descriptor is free with which to end Spark's stream."""
    executor.send(description("a"))
    executor.worker.begin(TASK, ["a"], executor.output)
    monkeypatch.setattr(os, "dup", lambda _: (_ for _ in ()).throw(OSError(24, "Too many open files")))
    with pytest.raises(TaskKilled):
        os.kill(os.getpid(), signal.SIGTERM)
    executor.worker.end(TaskKilled("SIGTERM"))
    executor.output.write(b"still Spark's")
    executor.output.flush()
    assert executor.spark.recv(100) == b"still Spark's"


def test_the_executor_refuses_a_topology(executor):
    """If the executor refuses a topology, its reason is raised in the task, which ends like any other."""
    executor.send(encode("REFUSED", reason="this topology is closed"))
    with pytest.raises(ChannelError, match="the executor refused this process: this topology is closed"):
        executor.worker.begin(TASK, ["a"], executor.output)
    executor.worker.end(None)
    assert executor.receive("END")["attempt"] == 5
    with pytest.raises(ResourceNotOpen):
        Listener().get()


# -- a task without listeners


def as_in_daemon(monkeypatch, executor: Any, body: Any) -> Any:
    """Returns a function that runs a task with this body in PySpark's `main`, wrapped as in the daemon."""

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


def test_a_kill_of_a_task_without_listeners_closes_open_ones(executor, journal, fork_process, monkeypatch, tmp_path):
    """SIGTERM raises `TaskKilled` in a task without listeners if the process has open listeners.

    The task ends, and the open listeners close.
    """
    executor.send(journal_description("a"))
    running, killed = tmp_path / "running", tmp_path / "killed"
    worker = executor.worker
    monkeypatch.setattr(worker, "wait_for_task", lambda _: None)  # the signal has arrived

    def body() -> None:
        try:
            running.touch()
            time.sleep(60)
        except TaskKilled:
            killed.touch()
            raise

    def child() -> int:
        run = as_in_daemon(monkeypatch, executor, body)
        worker.begin(TASK, ["a"], executor.output)
        worker.end(None)
        try:
            return run()
        except SystemExit:
            return 7

    monkeypatch.setattr(worker_process.fork_safety, "_held", set())  # here, the child is the worker
    pid = fork_process(child)
    wait_until(running.exists)
    os.kill(pid, signal.SIGTERM)
    assert exit_code(pid) == 7
    assert killed.exists()
    assert journal.read() == [f"left {pid}", f"closed {pid}"]


def wait_until(condition: Any) -> None:
    """Waits until the condition is true."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_kill_while_a_task_without_listeners_is_read(executor, journal):
    """A kill that arrives while Spark's worker reads a task is raised once, when the task begins. After a task, a
    signal is only recorded."""
    executor.send(journal_description("a"))
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
    """In a process without open listeners, the signal handlers stay Spark's, so SIGTERM terminates the process."""
    before = signal.getsignal(signal.SIGTERM)
    executor.worker.begin_without_listeners(executor.output)
    executor.worker.end(None)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_task_without_listeners_in_a_process_whose_topologies_have_nothing_to_close(executor):
    """The executor learns that the worker is busy, also if the agent has all listeners of the worker's topologies."""
    executor.send(
        encode("TOPOLOGY", topology="a", body='{"name": "a", "listeners": []}', blobs=[], opened="", values=[])
    )
    executor.worker.begin(TASK, ["a"], executor.output)
    executor.worker.end(None)
    assert executor.receive("END")["attempt"] == TASK.taskAttemptId()
    before = signal.getsignal(signal.SIGTERM)
    executor.worker.begin_without_listeners(executor.output)
    assert executor.receive("BEGIN")["attempt"] == worker_process.NO_ATTEMPT
    executor.worker.end(None)
    assert executor.receive("END")["attempt"] == worker_process.NO_ATTEMPT
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_kill_during_the_close_after_a_failed_open(executor, monkeypatch):
    """A kill does not interrupt the close after a failed open. It is raised after the close, and the task does not
    continue."""

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
    executor.send(journal_description("a"))
    with pytest.raises(TaskKilled):
        executor.worker.begin(TASK, ["a"], executor.output)
    assert closed == [1]
    executor.worker.end(None)


# -- the task's properties


@pytest.mark.parametrize(("properties", "attempt"), [({"stageAttempt": "3"}, 3), ({}, 0)])
def test_the_stage_attempt(executor, journal, properties, attempt):
    """The stage attempt, which PySpark's TaskContext lacks, is read from a local property. Without the property it is
    0."""
    executor.send(journal_description("a"))
    executor.worker.begin(task(**properties), ["a"], executor.output)
    executor.worker.end(None)
    (properties_of_task,) = journal.tasks
    assert (properties_of_task.stage, properties_of_task.stage_attempt, properties_of_task.attempt) == (1, attempt, 5)


# -- how long the daemon waits for the worker


def test_an_idle_worker_reports_the_timeout_of_its_closes(executor, journal, monkeypatch):
    """An idle worker reports the sum of its open listeners' close timeouts. `forget` resets the sum."""
    monkeypatch.setattr(graceful_shutdown, "_needed", graceful_shutdown._shared_table())
    close_timeout = lambda: graceful_shutdown._needed[os.getpid()]  # noqa: E731
    executor.send(journal_description("a") + description("b"))
    executor.worker.begin(TASK, ["a", "b"], executor.output)
    executor.worker.end(None)
    worker_end, executor_end = socket.socketpair()
    with worker_end, executor_end:
        executor_end.sendall(b"the next task")
        executor.worker.wait_for_task(worker_end)
    assert close_timeout() == 42  # two of 20.5 s, and one second to end
    graceful_shutdown.reset_in_worker()
    assert close_timeout() == 0
    executor.worker.leave("the worker ends")
    assert close_timeout() == 42


# -- child processes


@pytest.mark.parametrize("how", ["fork", "multiprocessing"])
def test_a_child_forked_by_a_task(executor, journal, fork_process, how):
    """A forked child can get open listeners, and SIGTERM terminates it. It calls no hook, and does not keep the
    worker's channel open."""
    executor.send(journal_description("a"))
    executor.worker.begin(TASK, ["a"], executor.output)
    ready, ready_writer = os.pipe()

    def child() -> int:
        assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        assert journal.get() is journal
        executor.worker.end(None)
        executor.worker.leave("not mine")
        assert not executor.worker.anything_open
        os.write(ready_writer, b"x")
        time.sleep(60)
        return 3

    if how == "fork":
        pid = fork_process(child)
    else:
        one = multiprocessing.get_context("fork").Process(target=child)
        one.start()
        pid = one.pid
    assert select.select([ready], [], [], 20)[0], "the child has failed"
    assert journal.read() == []
    executor.worker.end(None)
    executor.worker.leave("the worker ends")
    assert journal.read() == [f"left {os.getpid()}", f"closed {os.getpid()}"]
    assert executor.receive("GOODBYE")["reason"] == "the worker ends"
    assert executor.ended()
    os.kill(pid, signal.SIGTERM)
    if how == "fork":
        assert exit_code(pid) == -signal.SIGTERM
    else:
        one.join(20)
        assert one.exitcode == -signal.SIGTERM


def test_a_child_forked_by_a_hook_has_no_timer_handler(executor, monkeypatch, fork_process):
    """A child that a hook forks does not inherit the timer handler of the hook's timeout, but it inherits the user's
    own handlers."""

    def my_handler(_number, _frame):
        pass

    class Forks(Listener):
        def open(self, context):
            pids.append(fork_process(lambda: 4 if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL else 5))
            signal.signal(signal.SIGHUP, my_handler)
            pids.append(fork_process(lambda: 6 if signal.getsignal(signal.SIGHUP) is my_handler else 7))

    pids: list[int] = []
    module = ModuleType("of_this_test")
    module.journal = Forks()
    monkeypatch.setitem(sys.modules, "of_this_test", module)
    executor.send(journal_description("a"))
    executor.worker.begin(TASK, ["a"], executor.output)
    executor.worker.end(None)
    assert [exit_code(pid) for pid in pids] == [4, 6]
