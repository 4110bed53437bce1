"""Console output of the commands: tables, the useful line of a Spark error, and Spark's stderr in a file."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stagecrew.observability.logs import harmless

__all__ = ["harmless", "redirect_stderr", "spark_error_line", "table", "wide_console"]

#: The width of tables that are not shown in a terminal, in characters.
_WIDE: Final = 10_000


@contextlib.contextmanager
def redirect_stderr(log: Path) -> Iterator[None]:
    """Redirects the standard error of a JVM that is started inside, and of its Python workers, to this file.

    It redirects the file descriptor, which the JVM inherits. So the file also contains messages from before the JVM
    has configured its log. It has **no** effect on a JVM that is already running.
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


def wide_console() -> Console:
    """A console for stdout. In a pipe or a file, it is wide enough for every table."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDE)


def spark_error_line(error: BaseException) -> str:
    """The line of a Spark error that is most useful to a user, without the stack traces of two languages."""
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
    # py4j puts the Java exception on the second line.
    return lines[1].removeprefix(": ") if len(lines) > 1 and lines[1].startswith(": ") else lines[0]


def table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    """A table with right-aligned integers. Cells are not parsed as markup, because they may contain users' texts."""
    made = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        made.add_row(*(Text(harmless(str(cell)), justify="right" if isinstance(cell, int) else None) for cell in row))
    return made
