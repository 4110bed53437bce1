"""Coordination for Apache Spark, from Python: listeners, topologies, operators and jobs that survive the driver.

This module exports the names that most users need. Errors are in `stagecrew.errors`, ready-made operators and their
sinks in `stagecrew.operators`, jobs in `stagecrew.recovery`, and fakes for tests in `stagecrew.testing`.

`import stagecrew` loads neither PySpark nor anything that starts a thread, because Spark's Python daemon also imports
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagecrew._version import __version__
from stagecrew.errors import StagecrewError
from stagecrew.lazy import lazy_names as _lazy_names
from stagecrew.listeners.listener import Lifetime, Listener, ListenerContext, Scope, Task
from stagecrew.listeners.logging_context import LoggingContext
from stagecrew.listeners.resource import Resource, resource
from stagecrew.observability.logs import StructuredFormatter

if TYPE_CHECKING:
    from stagecrew import operators as operators
    from stagecrew import recovery as recovery
    from stagecrew import testing as testing
    from stagecrew.coordination.checkpoints import Checkpoint
    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.contract import Coordinator
    from stagecrew.coordination.evaluation import Evaluation
    from stagecrew.coordination.gateway import Gateway
    from stagecrew.coordination.operator import Operator
    from stagecrew.jar import jar_path, spark_conf
    from stagecrew.listeners.trace_context import TraceContext
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
    "TraceContext",
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
    "Checkpoint": "coordination.checkpoints",
    "Coordinator": "coordination.contract",
    "CoordinatorContext": "coordination.context",
    "Crew": "session.crew",
    "Evaluation": "coordination.evaluation",
    "Gateway": "coordination.gateway",
    "LatencySummary": "session.reports",
    "ListenerReport": "session.reports",
    "Operator": "coordination.operator",
    "OperatorReport": "session.reports",
    "PartitionReport": "partitions.report",
    "Release": "partitions.report",
    "TaskGateway": "worker.task_gateway",
    "Topology": "session.topology",
    "TopologyReport": "session.reports",
    "TraceContext": "listeners.trace_context",
    "configure": "session.builder",
    "crew": "session.builder",
    "current_job": "recovery",
    "is_active": "session.builder",
    "jar_path": "jar",
    "read_committed": "operators",
    "spark_conf": "jar",
}
if not TYPE_CHECKING:  # a type checker knows these names, and reports others
    __getattr__ = _lazy_names(__name__, _LAZY, modules=("operators", "recovery", "testing"))


def __dir__() -> list[str]:
    return sorted(__all__)
