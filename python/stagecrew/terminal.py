"""What the commands share: a Spark that starts without filling the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["quietly"]


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
