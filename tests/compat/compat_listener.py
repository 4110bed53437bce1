"""A listener that does nothing but say that it was called; `spark.stagecrew.listeners` names it in a compat run.

It makes sure that workers really have something open while PySpark's own tests run on them.
"""

import contextlib
import os

import stagecrew

#: The file that each call adds a letter to. In the environment, so that it reaches the workers through the JVM.
CALLS = "STAGECREW_COMPAT_CALLS"


def _called(letter: str) -> None:
    with open(os.environ[CALLS], "a", encoding="ascii") as calls:
        calls.write(letter)


class Quiet(stagecrew.Listener):
    """Opens, decorates and closes, and leaves no trace in the task."""

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
