"""Gracefully shuts down workers that Spark no longer needs, so that their listeners close.

Spark's daemon sends SIGKILL to idle workers beyond `spark.python.factory.idleWorkerMaxPoolSize`, and to a worker whose
task was killed and did not end. A worker with open listeners catches SIGTERM. It gets SIGTERM first, and SIGKILL if it
is still running after `SECONDS`. A worker that is idle or closing has registered the time that its closes need, and
gets at least this time. A worker that does not catch SIGTERM gets SIGKILL at once, as without stagecrew.

The daemon has one thread and must have no other before it forks, so the handler of a timer sends SIGKILL. Nothing else
in the daemon uses a timer.
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

__all__ = ["SECONDS", "forget", "install", "needs"]

#: The time that a worker with a running task gets after SIGTERM, in seconds.
SECONDS: Final = 5.0
#: How often the daemon checks for workers that are due, after the first `SECONDS`.
_INTERVAL: Final = 0.5

#: The workers that got SIGTERM: the time, the pid, and the start time of the process, because pids are reused.
_asked: list[tuple[float, int, str]] = []
#: By pid: how many seconds a worker needs to close its listeners. The daemon shares this memory with its workers. Only
#: pages with written entries take memory.
_needed: memoryview | None = None


def install() -> None:
    """Makes Spark's daemon kill its workers with `_kill`. Called in the daemon, before its loop."""
    global _needed
    import pyspark.daemon

    _needed = _shared_table()
    names = {name: value for name, value in vars(os).items() if not name.startswith("__")}
    pyspark.daemon.os = types.SimpleNamespace(**{**names, "kill": _kill})  # type: ignore[assignment, attr-defined]


def forget() -> None:
    """Called in a forked worker before each task. Removes the daemon's timer, and resets the time to `SECONDS`."""
    needs(0)
    if _asked or signal.getsignal(signal.SIGALRM) is _later:
        _asked.clear()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def needs(seconds: float) -> None:
    """Called in a forked worker. Sets the time that it needs to end after SIGTERM."""
    pid = os.getpid()
    if _needed is not None and pid < len(_needed):
        _needed[pid] = min(math.ceil(seconds), 0xFFFF)


def _shared_table() -> memoryview | None:
    try:
        with open("/proc/sys/kernel/pid_max", encoding="ascii") as file:
            pids = int(file.read())
        return memoryview(mmap.mmap(-1, 2 * pids)).cast("B").cast("H")
    except (OSError, ValueError):
        return None


def _kill(pid: int, number: int) -> None:
    started = _started(pid) if number == signal.SIGKILL and _takes_sigterm(pid) else None
    if started is None:
        os.kill(pid, number)
        return
    os.kill(pid, signal.SIGTERM)
    if all(entry[1:] != (pid, started) for entry in _asked):
        _asked.append((time.monotonic(), pid, started))
    # A running timer is not restarted: it would never fire while workers are killed again and again.
    if signal.getsignal(signal.SIGALRM) is not _later or signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0):
        signal.signal(signal.SIGALRM, _later)
        signal.setitimer(signal.ITIMER_REAL, SECONDS, _INTERVAL)


def _later(_number: int, _frame: FrameType | None) -> None:
    now = time.monotonic()
    for entry in list(_asked):
        asked, pid, started = entry
        if _started(pid) != started:
            _asked.remove(entry)
        elif asked + _grace(pid) <= now:
            _asked.remove(entry)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    if not _asked:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _grace(pid: int) -> float:
    return max(SECONDS, _needed[pid] if _needed is not None and pid < len(_needed) else 0)


def _takes_sigterm(pid: int) -> bool:
    # A blocked SIGTERM counts too: a worker with listeners blocks it only while Spark resets the handlers, and handles
    # it afterwards.
    taken = 0
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith(("SigCgt:", "SigBlk:")):
                    taken |= int(line.split()[1], 16)
    except (OSError, IndexError, ValueError):
        return False
    return bool(taken >> (signal.SIGTERM - 1) & 1)


def _started(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return None
