"""What a child that user code forks does not inherit (multiprocessing forks by default up to Python 3.13).

The channel is its parent's: while a child held it too, the executor would not see that the parent is gone. So are the
signal handlers and the listeners, which the parent closes.
"""

from __future__ import annotations

# What `signal.signal` calls: its enums would cost more than all the rest.
import _signal  # type: ignore[import-not-found]
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

__all__ = ["default_signals", "forget_in_children"]


class Forgets(Protocol):
    """Something of this process alone."""

    def forked(self) -> None:
        """In a child that was forked: lets go of what is the parent's."""


_held: Final[weakref.WeakSet[Forgets]] = weakref.WeakSet()
_registered = False


def forget_in_children(holder: Forgets) -> None:
    """Calls `holder.forked()` in each child that this process forks from now on.

    Not before the process is forked itself that `holder` belongs to: the daemon's own forks are Spark's.
    """
    global _registered
    _held.add(holder)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_forked)


def default_signals(numbers: Iterable[int], ours: Callable[..., Any]) -> None:
    """Those that `ours` handles are as in any process; handlers of the user stay."""
    for number in numbers:
        if _signal.getsignal(number) == ours:
            _signal.signal(number, _signal.SIG_DFL)


def _forked() -> None:
    for holder in list(_held):
        _held.discard(holder)
        holder.forked()
