"""Coordination for Apache Spark, from Python: listeners, topologies, operators and jobs that survive the driver.

This module exports the names that most users need. Errors are in `stagecrew.errors`, ready-made operators and their
sinks in `stagecrew.operators`, jobs in `stagecrew.recovery`, and fakes for tests in `stagecrew.testing`.

`import stagecrew` loads neither PySpark nor anything that starts a thread, because Spark's Python daemon also imports
it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stagecrew._version import __version__
from stagecrew.errors import StagecrewError
from stagecrew.listeners.listener import Lifetime, Listener, ListenerContext, Scope, Task
from stagecrew.listeners.logging_context import LoggingContext
from stagecrew.listeners.resource import Resource, resource
from stagecrew.observability.logs import StructuredFormatter

if TYPE_CHECKING:
    from stagecrew.coordination.checkpoints import Checkpoint
    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.contract import Coordinator
    from stagecrew.coordination.evaluation import Evaluation
    from stagecrew.coordination.gateway import Gateway
    from stagecrew.coordination.operator import Operator
    from stagecrew.jar import jar_path, spark_conf
    from stagecrew.operators import read_committed
    from stagecrew.partitions.report import PartitionReport, Release
    from stagecrew.recovery import current_job
    from stagecrew.session.builder import configure, crew, is_active
    from stagecrew.session.crew import Crew
    from stagecrew.session.reports import LatencySummary, ListenerReport, OperatorReport, TopologyReport
    from stagecrew.session.topology import Topology
    from stagecrew.worker.task_gateway import TaskGateway

__all__ = [
    "Checkpoint",
    "Coordinator",
    "CoordinatorContext",
    "Crew",
    "Evaluation",
    "Gateway",
    "LatencySummary",
    "Lifetime",
    "Listener",
    "ListenerContext",
    "ListenerReport",
    "LoggingContext",
    "Operator",
    "OperatorReport",
    "PartitionReport",
    "Release",
    "Resource",
    "Scope",
    "StagecrewError",
    "StructuredFormatter",
    "Task",
    "TaskGateway",
    "Topology",
    "TopologyReport",
    "__version__",
    "configure",
    "crew",
    "current_job",
    "is_active",
    "jar_path",
    "read_committed",
    "resource",
    "spark_conf",
]

_LAZY = {
    "Checkpoint": "stagecrew.coordination.checkpoints",
    "Coordinator": "stagecrew.coordination.contract",
    "CoordinatorContext": "stagecrew.coordination.context",
    "Crew": "stagecrew.session.crew",
    "Evaluation": "stagecrew.coordination.evaluation",
    "Gateway": "stagecrew.coordination.gateway",
    "LatencySummary": "stagecrew.session.reports",
    "ListenerReport": "stagecrew.session.reports",
    "Operator": "stagecrew.coordination.operator",
    "OperatorReport": "stagecrew.session.reports",
    "PartitionReport": "stagecrew.partitions.report",
    "Release": "stagecrew.partitions.report",
    "TaskGateway": "stagecrew.worker.task_gateway",
    "Topology": "stagecrew.session.topology",
    "TopologyReport": "stagecrew.session.reports",
    "configure": "stagecrew.session.builder",
    "crew": "stagecrew.session.builder",
    "current_job": "stagecrew.recovery",
    "is_active": "stagecrew.session.builder",
    "jar_path": "stagecrew.jar",
    "read_committed": "stagecrew.operators",
    "spark_conf": "stagecrew.jar",
}
#: Public modules. `stagecrew.<module>` imports the module when it is first used.
_MODULES = ("operators", "recovery", "testing")


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used, because some names need PySpark."""
    if name in _MODULES:
        return importlib.import_module(f"stagecrew.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'stagecrew' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name in ("pyspark", "py4j"):
            raise ModuleNotFoundError(
                f"stagecrew.{name} needs PySpark: `pip install 'stagecrew[spark]'`, or add the PySpark in SPARK_HOME "
                "to PYTHONPATH",
                name=error.name,
            ) from error
        raise


def __dir__() -> list[str]:
    return sorted(__all__)
