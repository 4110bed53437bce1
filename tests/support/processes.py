"""Helpers for processes and ports of this host."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark import cloudpickle

from support.waiting import eventually

# Executors cannot import the tests, so the definitions of this module are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def terminate(process: subprocess.Popen[Any], seconds: float = 10) -> None:
    """Terminates a process that a test started. Kills the process if it does not end in time."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_alive(pid: int) -> bool:
    """Returns whether a process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the process ended before or during the read
        return False


def kill(pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Sends a signal to a process that a test's Spark application started. Does nothing if the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal_number)


def stop(pid: int) -> None:
    """Stops a process by SIGSTOP, and returns when all of its threads have stopped.

    Threads may run for a few milliseconds after the signal was sent: long enough to handle a message.
    """
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: set(_thread_states(pid)) == {"T"}, 10, f"all threads of process {pid} have stopped")


def _thread_states(pid: int) -> Iterator[str]:
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield stat.read_text().rsplit(")", 1)[1].split()[0]
