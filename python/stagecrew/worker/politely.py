"""How the daemon ends a worker that Spark does not need any more, so that its listeners close.

Spark's daemon kills with SIGKILL: an idle worker beyond `spark.python.factory.idleWorkerMaxPoolSize`, and one whose task was
killed and did not end. A worker that has listeners catches SIGTERM; it gets that first, and SIGKILL when it is still there
after `SECONDS`. Any other gets SIGKILL at once, as without stagecrew.

The daemon has one thread and must have no other before it forks: the second signal is sent by a timer's handler.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import types
from types import FrameType
from typing import Final

import pyspark.daemon

__all__ = ["SECONDS", "forget", "install"]

#: How long a worker that was asked has to close its listeners.
SECONDS: Final = 5.0

#: Of each worker that was asked: when it is killed, its pid, and when that process started (a pid may be used again).
_asked: list[tuple[float, int, str]] = []


def install() -> None:
    """Lets Spark's daemon end its workers by `_kill`. In the daemon only, before its loop."""
    names = {name: value for name, value in vars(os).items() if not name.startswith("__")}
    pyspark.daemon.os = types.SimpleNamespace(**{**names, "kill": _kill})  # type: ignore[assignment, attr-defined]


def forget() -> None:
    """In a forked worker: the daemon's timer and its handler are not the worker's."""
    if _asked or signal.getsignal(signal.SIGALRM) is _later:
        _asked.clear()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _kill(pid: int, number: int) -> None:
    started = _started(pid) if number == signal.SIGKILL and _catches_sigterm(pid) else None
    if started is None:
        os.kill(pid, number)
        return
    os.kill(pid, signal.SIGTERM)
    _asked.append((time.monotonic() + SECONDS, pid, started))
    signal.signal(signal.SIGALRM, _later)
    signal.setitimer(signal.ITIMER_REAL, SECONDS, 0.5)


def _later(_number: int, _frame: FrameType | None) -> None:
    now = time.monotonic()
    for entry in [entry for entry in _asked if entry[0] <= now]:
        _asked.remove(entry)
        if _started(entry[1]) == entry[2]:
            with contextlib.suppress(OSError):
                os.kill(entry[1], signal.SIGKILL)
    if not _asked:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _catches_sigterm(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            caught = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt:"))
    except (OSError, StopIteration, ValueError):
        return False
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def _started(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return None
