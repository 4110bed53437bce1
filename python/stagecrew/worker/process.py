"""A Python worker with listeners: it connects the lifecycle, the channel to the executor, and the signals.

Everything happens on the worker's main thread. `daemon.py` hooks it into PySpark.
"""

from __future__ import annotations

# `signal.signal` and `signal.pthread_sigmask` only call this module and convert enums. The conversions would cost 60 us
# per task, half of the overhead of a task with listeners.
import _signal  # type: ignore[import-not-found]
import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, BinaryIO, Final, NoReturn

from stagecrew.errors import ChannelError, TaskKilled
from stagecrew.listeners.listener import Task
from stagecrew.listeners.resolution import resolving
from stagecrew.observability.traceparent import task_traceparent
from stagecrew.wire.channel import Channel
from stagecrew.wire.frames import Frame
from stagecrew.worker import fork_safety, graceful_shutdown
from stagecrew.worker.descriptions import decode_description
from stagecrew.worker.hooks import CalledHooks
from stagecrew.worker.lifecycle import Lifecycle

__all__ = ["ADDRESS_FILE", "CHAIN", "STAGE_ATTEMPT", "WorkerProcess"]

#: Local properties that the executor's shim sets: the topologies of the task (outermost first), the address file (which
#: has the socket's path or the port, and the token of the channel), and the attempt of the stage, which PySpark's
#: TaskContext does not have.
CHAIN: Final = "spark.stagecrew.chain"
ADDRESS_FILE: Final = "spark.stagecrew.addressFile"
STAGE_ATTEMPT: Final = "spark.stagecrew.stageAttempt"

#: The attempt in the frames BEGIN and END of a task without listeners. The executor does not count such a task in any
#: topology.
NO_ATTEMPT: Final = -1

_END_SIGNALS: Final = (int(signal.SIGTERM), int(signal.SIGHUP))


class WorkerProcess:
    """The listeners of this worker. It is created at the first task that has listeners."""

    def __init__(self, address_file: str) -> None:
        self._channel = Channel.connect(address_file, role="worker")
        self._hooks = CalledHooks(self._channel)
        self._lifecycle = Lifecycle(self._hooks)
        self._attempt: int | None = None
        #: The effect of a signal that asks the process to end: "raise" in a task, "leave" while idle, else "note".
        self._on_signal = "note"
        self._noted: int | None = None
        self._output: BinaryIO | None = None
        #: The stream to Spark of a killed task. It is closed when the task has ended.
        self._cut_stream: socket.socket | None = None
        self._resolving = contextlib.ExitStack()
        fork_safety.forget_in_children(self)

    def forked(self) -> None:
        """Called in a child that user code forked. `get()` still returns opened values.

        Everything else belongs to the parent.
        """
        fork_safety.default_signals(_END_SIGNALS, self._signalled)
        self._hooks.forked()
        self._lifecycle.disown()
        self._channel.close()
        self._attempt = None

    @property
    def anything_open(self) -> bool:
        """Whether any listener must still be closed."""
        return self._lifecycle.anything_open

    # -- a task

    def begin(self, context: Any, chain: list[str], output: BinaryIO) -> None:
        """Begins a task: opens and decorates its listeners. Raises the exception of a listener that fails."""
        self._attempt = context.taskAttemptId()
        self._output = output
        self._install_handlers("raise")
        self._resolving.enter_context(resolving(self._lifecycle.find))
        self._channel.send("BEGIN", attempt=self._attempt)
        self._raise_noted()  # a signal that arrived while Spark's worker was reading the task
        for topology in chain:
            if not self._lifecycle.knows(topology):
                self._describe(topology)
        self._lifecycle.begin(chain, self._task(context, chain[-1]))
        self._raise_noted()  # a signal that arrived during the close of a listener whose open failed

    def begin_without_listeners(self, output: BinaryIO) -> None:
        """Begins a task without listeners in a worker that has topologies.

        The exit of a topology does not wait for this worker. If listeners are open, a signal also interrupts the task.
        """
        if not self._lifecycle.has_topologies:
            return
        self._attempt = NO_ATTEMPT
        if self.anything_open:
            # The error that `get()` raises in such a task then names the topologies that have the listener.
            self._resolving.enter_context(resolving(self._lifecycle.find))
            self._output = output
            self._install_handlers("raise")
        with contextlib.suppress(ChannelError):  # without its executor, the task needs no listener
            self._channel.send("BEGIN", attempt=NO_ATTEMPT)
        self._raise_noted()

    def end(self, error: BaseException | None) -> None:
        """Ends the task, with its exception or None. A second call does nothing."""
        self._on_signal = "note"
        self._output = None
        try:
            if self._attempt is not None:
                self._end_attempt(self._attempt, error)
        finally:
            self._resolving.close()
            stream, self._cut_stream = self._cut_stream, None
            if stream is not None:
                with contextlib.suppress(OSError), stream:
                    stream.shutdown(socket.SHUT_WR)

    def _end_attempt(self, attempt: int, error: BaseException | None) -> None:
        try:
            self._lifecycle.end(error)
        finally:
            self._attempt = None
            with contextlib.suppress(ChannelError):
                self._channel.send("END", attempt=attempt)

    def _describe(self, topology: str) -> None:
        self._channel.send("DESCRIBE", topology=topology)
        frame = self._channel.wait_for("TOPOLOGY", topology=topology)
        self._lifecycle.add_topology(decode_description(frame, lambda entry: entry["scope"] == "worker"))

    def _task(self, context: Any, topology: str) -> Task:
        welcome = self._channel.welcome
        traceparent = self._lifecycle.traceparent_of(topology)
        return Task(
            application=welcome["application"],
            topology=self._lifecycle.name_of(topology),
            topology_id=topology,
            executor=welcome["executor"],
            stage=context.stageId(),
            stage_attempt=int(context.getLocalProperty(STAGE_ATTEMPT) or 0),
            partition=context.partitionId(),
            attempt=context.taskAttemptId(),
            attempt_number=context.attemptNumber(),
            traceparent=None if traceparent is None else task_traceparent(traceparent, context.taskAttemptId()),
        )

    # -- between tasks

    def wait_for_task(self, task_socket: socket.socket) -> None:
        """Waits until a task arrives on Spark's socket, and closes topologies that end meanwhile.

        If Spark's stream ends, the worker is no longer needed, and this closes everything before it returns.
        """
        with self._leaving_on_signal():
            graceful_shutdown.set_seconds_to_end(self._time_to_close())
            self._handle_frames()  # poll does not report frames that were read while the task waited for a description
            if not self.anything_open and self._channel.fileno() < 0:
                return
            poller = select.poll()
            poller.register(task_socket, select.POLLIN)
            poller.register(self._channel, select.POLLIN)
            while True:
                ready = {fd for fd, _ in poller.poll()}
                if self._channel.fileno() in ready:
                    self._handle_frames()
                if not self.anything_open and self._channel.fileno() < 0:
                    return
                if task_socket.fileno() in ready:
                    break
            if _ended(task_socket):
                self.leave("the worker is no longer needed")
                return
        # Spark's worker() first resets these signals. They are blocked until our handlers are set again.
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _END_SIGNALS)

    def resumed(self) -> None:
        """Sets the signal handlers again, after Spark's worker() has reset them and before it runs the task."""
        if self.anything_open:
            self._install_handlers("note")
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _END_SIGNALS)

    def leave(self, reason: str) -> None:
        """Closes everything, because the process ends or has lost its executor. A second call does nothing."""
        self._on_signal = "note"
        graceful_shutdown.set_seconds_to_end(self._time_to_close())
        self._lifecycle.close_all()
        with contextlib.suppress(ChannelError):
            self._channel.send("GOODBYE", reason=reason)
        self._channel.close()

    def _time_to_close(self) -> float:
        # Each close takes at most the timeout: the process interrupts it, and otherwise the executor kills the process.
        return float(self._channel.welcome["closeTimeout"]) * self._lifecycle.open_count + 1

    def _handle_frames(self) -> None:
        try:
            for frame in self._channel.take():
                self._handle_frame(frame)
        except ChannelError:
            self.leave("the executor is gone")
        if self._noted is not None:
            self._die(self._noted)

    def _handle_frame(self, frame: Frame) -> None:
        if frame.kind == "CLOSE":
            for topology in self._lifecycle.close(frame["topology"]):
                self._channel.send("CLOSED", topology=topology)

    # -- signals

    def _install_handlers(self, effect: str) -> None:
        for number in _END_SIGNALS:
            _signal.signal(number, self._signalled)
        self._on_signal = effect

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        if self._lifecycle.closing or self._on_signal == "note":
            self._noted = number  # a close is not interrupted; the process ends after it
        elif self._on_signal == "raise":
            self._raise(number)
        else:
            self._die(number)

    def _raise_noted(self) -> None:
        if self._noted is not None:
            self._raise(self._noted)

    def _raise(self, number: int) -> NoReturn:
        self._on_signal = "note"  # a task is interrupted only once
        if self._output is not None:
            self._cut_stream = _cut_off(self._output)
        raise TaskKilled(f"Spark asked the task to end ({signal.Signals(number).name})")

    def _die(self, number: int) -> None:
        self.leave(f"the worker got {signal.Signals(number).name}")
        signal.signal(number, signal.SIG_DFL)
        flush_standard_streams()
        os.kill(os.getpid(), number)

    @contextlib.contextmanager
    def _leaving_on_signal(self) -> Iterator[None]:
        self._install_handlers("leave")
        try:
            yield
        finally:
            self._on_signal = "note"


def _ended(task_socket: socket.socket) -> bool:
    try:
        return task_socket.recv(1, socket.MSG_PEEK) == b""
    except OSError:  # reset: Spark dropped the task without reading all output
        return True


def _cut_off(output: BinaryIO) -> socket.socket | None:
    """Discards further output to Spark. Returns the stream itself, which the caller closes when the task has ended.

    Spark then reads the end of the stream, as if the signal had killed the process. So Spark knows that its own signal
    worked, for example the signal of `spark.sql.execution.pyspark.udf.killOnIdleTimeout` (PythonRunner.scala). If the
    worker sent an exception instead, it would look like one from the user's function.
    """
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        stream = socket.socket(fileno=os.dup(output.fileno()))
        os.dup2(nowhere.fileno(), output.fileno())
        return stream
    return None


def flush_standard_streams() -> None:
    """Flushes the output of listeners, because a worker ends with `os._exit` or a signal, which do not flush it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
