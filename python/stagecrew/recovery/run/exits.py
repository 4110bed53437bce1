"""Exits the process of a run, even if the job's code has left threads running."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Final, NoReturn

__all__ = ["EXIT_LOST", "exit_as_lost", "exit_within"]

#: The exit code of a lost run: its job has not ended, and another run takes over.
EXIT_LOST: Final = 75
#: How long the last actions of a lost run, such as closing its session at the store, may take, in seconds.
_LAST_ACTIONS_TIMEOUT: Final = 2.0


def exit_as_lost(*actions: Callable[[], object]) -> NoReturn:
    """Exits as a lost run within `_LAST_ACTIONS_TIMEOUT` seconds, even if an action hangs."""
    try:
        threads = [threading.Thread(target=action, daemon=True) for action in actions]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _LAST_ACTIONS_TIMEOUT
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    finally:
        os._exit(EXIT_LOST)


def exit_within(seconds: float, code: int) -> None:
    """Makes this process exit within this many seconds, even if threads or exit hooks of the job's code do not end."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
