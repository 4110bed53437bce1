"""Helpers for processes and ports of this host."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
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
    return _state(Path(f"/proc/{pid}/stat")) not in ("Z", "")


def kill(pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Sends a signal to a process that a test's Spark application started. Does nothing if the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal_number)


def stop(pid: int) -> None:
    """Stops a process by SIGSTOP, and returns when all of its threads have stopped.

    Threads may run for a few milliseconds after the signal was sent: long enough to handle a message.
    """
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    eventually(
        lambda: {state for stat in threads.glob("*/stat") if (state := _state(stat))} == {"T"},
        10,
        f"all threads of process {pid} have stopped",
    )


def _state(stat: Path) -> str:
    """Returns the state letter of a process or thread, or "" if it ended before or during the read."""
    try:
        return stat.read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
