"""Gracefully shuts down workers that Spark no longer needs, so that their listeners close.

Spark's daemon sends SIGKILL to idle workers beyond `spark.python.factory.idleWorkerMaxPoolSize`, and to a worker that
still runs a task after Spark has killed this task. With this module, the daemon first sends SIGTERM to a worker that
catches it, as workers with open listeners do. It sends SIGKILL if the worker is still running after `SECONDS`. A worker
that is idle or closing registers how long its listeners may take to close. If that is longer than `SECONDS`, the daemon
waits that long instead. A worker that does not catch SIGTERM gets SIGKILL at once, as without stagecrew. So does every
worker if the operating system does not report which signals a process catches.

The daemon forks, so it must have only one thread. Therefore it sends SIGKILL in the handler of a signal
timer, not in a thread. Nothing else in the daemon uses a timer.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import signal
import time
import types
from types import FrameType
from typing import Final

from stagecrew import operating_system

__all__ = ["SECONDS", "install", "reset_in_worker", "set_seconds_to_end"]

#: The shortest time from SIGTERM to SIGKILL, in seconds.
SECONDS: Final = 5.0
#: How often the daemon checks for workers that are due, after the first `SECONDS`.
_INTERVAL: Final = 0.5

#: The workers that got SIGTERM: the time, the pid, and the start time of the process, because pids are reused.
_asked: list[tuple[float, int, str]] = []
#: By pid: how many seconds a worker needs to close its listeners. The daemon shares this memory with its workers. Only
#: pages with written entries take memory.
_needed: memoryview | None = None


def install() -> None:
    """Makes Spark's daemon kill its workers with `_kill`. Called in the daemon, before its loop.

    `pyspark.daemon` gets a copy of the module `os` with another `kill`. Other modules keep the real one.
    """
    global _needed
    import pyspark.daemon

    _needed = _shared_table()
    names = {name: value for name, value in vars(os).items() if not name.startswith("__")}
    pyspark.daemon.os = types.SimpleNamespace(**{**names, "kill": _kill})  # type: ignore[assignment, attr-defined]


def reset_in_worker() -> None:
    """Called in a forked worker before each task.

    Discards the daemon's list of workers that were asked to end, and its signal handler, which the fork copied.
    The worker gets `SECONDS` to end, until it sets another time.
    """
    set_seconds_to_end(0)
    if _asked or signal.getsignal(signal.SIGALRM) is _kill_overdue:
        _asked.clear()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def set_seconds_to_end(seconds: float) -> None:
    """Called in a forked worker. Sets the time that it needs to end after SIGTERM."""
    pid = os.getpid()
    if _needed is not None and pid < len(_needed):
        _needed[pid] = min(math.ceil(seconds), 0xFFFF)


def _shared_table() -> memoryview | None:
    pids = operating_system.max_pid()
    try:
        return None if pids is None else memoryview(mmap.mmap(-1, 2 * pids)).cast("B").cast("H")
    except (OSError, ValueError):
        return None


def _kill(pid: int, number: int) -> None:
    # A blocked SIGTERM counts too: a worker with listeners blocks it only while Spark resets the handlers, and handles
    # it afterwards.
    takes_sigterm = number == signal.SIGKILL and operating_system.takes_signal(pid, signal.SIGTERM)
    started = operating_system.start_time(pid) if takes_sigterm else None
    if started is None:
        os.kill(pid, number)
        return
    os.kill(pid, signal.SIGTERM)
    if all(entry[1:] != (pid, started) for entry in _asked):
        _asked.append((time.monotonic(), pid, started))
    # A running timer is not restarted. Otherwise a series of kills could postpone it forever.
    if signal.getsignal(signal.SIGALRM) is not _kill_overdue or signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0):
        signal.signal(signal.SIGALRM, _kill_overdue)
        signal.setitimer(signal.ITIMER_REAL, SECONDS, _INTERVAL)


def _kill_overdue(_number: int, _frame: FrameType | None) -> None:
    now = time.monotonic()
    for entry in list(_asked):
        asked, pid, started = entry
        if operating_system.start_time(pid) != started:
            _asked.remove(entry)
        elif asked + _grace(pid) <= now:
            _asked.remove(entry)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    if not _asked:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _grace(pid: int) -> float:
    return max(SECONDS, _needed[pid] if _needed is not None and pid < len(_needed) else 0)
