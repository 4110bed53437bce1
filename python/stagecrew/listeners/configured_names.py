"""The names of listeners in `spark.stagecrew.listeners`. Such a name identifies a listener in every process.

Every Python worker imports this module, so it uses only the standard library and starts no thread.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from typing import Any, Final

from stagecrew.listeners.identity import Identity

__all__ = ["note_names"]


def note_names(listener: object, identity: Identity) -> None:
    """Adds the listener's names in `spark.stagecrew.listeners` to its identity.

    Called on the driver before the listener is pickled.
    """
    for target in _configured():
        module, _, path = target.partition(":")
        found: Any = sys.modules.get(module)
        with contextlib.suppress(
            Exception
        ):  # reading an attribute may run code that raises, such as a module's `__getattr__`
            for part in path.split("."):
                found = getattr(found, part, None)
        if found is listener:
            identity.add_name(target)


#: SparkContext -> the names in its `spark.stagecrew.listeners`.
_names: Final[weakref.WeakKeyDictionary[Any, tuple[str, ...]]] = weakref.WeakKeyDictionary()


def _configured() -> tuple[str, ...]:
    """The names in `spark.stagecrew.listeners` of this process's session. A worker has none."""
    context = getattr(getattr(sys.modules.get("pyspark"), "SparkContext", None), "_active_spark_context", None)
    if context is None:
        return ()
    names = _names.get(context)
    if names is None:
        names = ()
        with contextlib.suppress(Exception):  # the JVM may have ended
            value = context._conf.get("spark.stagecrew.listeners", "")
            names = tuple(name.strip() for name in value.split(",") if name.strip())
            _names[context] = names
    return names
