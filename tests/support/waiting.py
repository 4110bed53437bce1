"""Waits for a condition, with a deadline."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from pyspark import cloudpickle

# Executors cannot import the tests, so the definitions of this module are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def eventually(condition: Callable[[], Any], seconds: float = 20, what: str = "") -> Any:
    """Waits until the condition is true, and returns its value. After `seconds`, raises AssertionError with `what`."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what or condition}")
        threading.Event().wait(0.02)
