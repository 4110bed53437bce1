"""Separates a child that user code forks from its parent (multiprocessing forks by default up to Python 3.13).

The channel belongs to the parent: if a child kept it open, the executor would not notice that the parent is gone. The
signal handlers and the listeners also belong to the parent, which closes them.
"""

from __future__ import annotations

# `signal.signal` calls this module, and its enums would cost more than the rest.
import _signal  # type: ignore[import-not-found]
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

__all__ = ["default_signals", "forget_in_children"]


class Forgets(Protocol):
    """An object that belongs to one process."""

    def forked(self) -> None:
        """Releases the parent's resources in a forked child."""


_held: Final[weakref.WeakSet[Forgets]] = weakref.WeakSet()
_registered = False


def forget_in_children(holder: Forgets) -> None:
    """Calls `holder.forked()` in each child that this process forks from now on.

    Call it in the process that `holder` belongs to. Do not call it in the daemon, which forks Spark's workers.
    """
    global _registered
    _held.add(holder)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_forked)


def default_signals(numbers: Iterable[int], ours: Callable[..., Any]) -> None:
    """Resets the signals that `ours` handles to their defaults. Keeps the user's handlers."""
    for number in numbers:
        if _signal.getsignal(number) == ours:
            _signal.signal(number, _signal.SIG_DFL)


def _forked() -> None:
    for holder in list(_held):
        _held.discard(holder)
        holder.forked()
