"""A listener that only records its calls. In a compat run, `spark.stagecrew.listeners` names it.

It ensures that workers have an open listener while PySpark's own tests run on them.
"""

import contextlib
import os

import stagecrew

#: The environment variable with the file to which each call appends a letter. Workers inherit it through the JVM.
CALLS = "STAGECREW_COMPAT_CALLS"


def _called(letter: str) -> None:
    with open(os.environ[CALLS], "a", encoding="ascii") as calls:
        calls.write(letter)


class Quiet(stagecrew.Listener):
    """Opens, decorates and closes, and does not affect the task."""

    def open(self, context):
        """See `Listener`."""
        _called("o")

    def close(self, context):
        """See `Listener`."""
        _called("c")

    @contextlib.contextmanager
    def decorate(self, task):
        """See `Listener`."""
        _called("d")
        yield
