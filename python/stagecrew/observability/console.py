"""What the commands share: tables, and a Spark that starts without filling the terminal."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from stagecrew.observability.logs import harmless

__all__ = ["harmless", "quietly", "said", "table"]


@contextlib.contextmanager
def quietly(log: Path) -> Iterator[None]:
    """A JVM that is started inside writes its standard error, and that of its Python workers, to this file.

    By the file descriptor, which the JVM inherits: what it says before it reads a log configuration goes there too. It has
    **no** effect on a JVM that runs already.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def said(error: BaseException) -> str:
    """The one line of an error of Spark that tells a user most, without the stack traces of two languages."""
    text = str(error)
    if match := re.search(r"\[PYTHON_VERSION_MISMATCH\][^\n]*", text):
        return match[0]
    if match := re.search(r"Error from python worker:\s*([^\n]+)", text):
        return match[1].strip()
    if match := re.search(r"Cannot run program [^\n]+", text):
        return match[0]
    if match := re.search(
        r"Traceback \(most recent call last\):\n(?:[ \t]+[^\n]*\n|\n)*([A-Za-z_][\w.]*(?:: [^\n]*)?)", text
    ):
        return match[1].strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    # py4j puts what happened in Java on the second line.
    return lines[1].removeprefix(": ") if len(lines) > 1 and lines[1].startswith(": ") else lines[0]


def table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    """Cells beside each other, whole numbers at the right. Nothing of a cell is markup: users' names and errors stand there."""
    made = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        made.add_row(*(Text(harmless(str(cell)), justify="right" if isinstance(cell, int) else None) for cell in row))
    return made
