"""Where a program is: the path of the step that runs, by which a coordinator of one place is told from that of another."""

from __future__ import annotations

import contextvars
from typing import Final

__all__ = ["POSITION", "keyed"]

#: The names of the steps that run in this thread, the outermost first; empty outside of a job's steps.
POSITION: Final[contextvars.ContextVar[tuple[str, ...]]] = contextvars.ContextVar("stagecrew_position", default=())


def keyed(operator: str) -> str:
    """An operator's name with the place where it is used."""
    return ":".join(("/".join(POSITION.get()), operator)) if POSITION.get() else operator
