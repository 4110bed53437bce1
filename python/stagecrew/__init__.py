"""Coordination for Apache Spark, from Python: lifecycle listeners, and what comes with topologies.

`import stagecrew` loads neither PySpark nor anything that starts a thread: Spark's Python daemons import it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stagecrew._version import __version__
from stagecrew.errors import (
    ChannelClosed,
    ChannelError,
    ConfigurationError,
    FrameError,
    HookTimeout,
    JarMissing,
    ListenerError,
    ListenerNotImportable,
    ListenerNotPicklable,
    NotActive,
    ResourceNotOpen,
    StagecrewError,
    TaskKilled,
    TopologyClosed,
    TopologyError,
    UnsupportedSession,
    UnsupportedSpark,
    VersionMismatch,
)
from stagecrew.listeners import Lifetime, Listener, ListenerContext, LoggingContext, Resource, Scope, Task, resource

if TYPE_CHECKING:
    from stagecrew.jar import jar_path, spark_conf
    from stagecrew.session import Crew, configure, crew, is_active
    from stagecrew.topology import ListenerReport, Topology, TopologyReport

__all__ = [
    "ChannelClosed",
    "ChannelError",
    "ConfigurationError",
    "Crew",
    "FrameError",
    "HookTimeout",
    "JarMissing",
    "Lifetime",
    "Listener",
    "ListenerContext",
    "ListenerError",
    "ListenerNotImportable",
    "ListenerNotPicklable",
    "ListenerReport",
    "LoggingContext",
    "NotActive",
    "Resource",
    "ResourceNotOpen",
    "Scope",
    "StagecrewError",
    "Task",
    "TaskKilled",
    "Topology",
    "TopologyClosed",
    "TopologyError",
    "TopologyReport",
    "UnsupportedSession",
    "UnsupportedSpark",
    "VersionMismatch",
    "__version__",
    "configure",
    "crew",
    "is_active",
    "jar_path",
    "resource",
    "spark_conf",
]

_LAZY = {
    **dict.fromkeys(("jar_path", "spark_conf"), "stagecrew.jar"),
    **dict.fromkeys(("Crew", "configure", "crew", "is_active"), "stagecrew.session"),
    **dict.fromkeys(("ListenerReport", "Topology", "TopologyReport"), "stagecrew.topology"),
}


def __getattr__(name: str) -> Any:
    """The names that need PySpark are imported when they are first used."""
    if name not in _LAZY:
        raise AttributeError(f"module 'stagecrew' has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name in ("pyspark", "py4j"):
            raise ModuleNotFoundError(
                f"stagecrew.{name} needs PySpark: `pip install 'stagecrew[spark]'`, or put that of your SPARK_HOME on the "
                f"PYTHONPATH",
                name=error.name,
            ) from error
        raise


def __dir__() -> list[str]:
    return sorted(__all__)
