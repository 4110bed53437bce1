"""Coordination for Apache Spark, from Python: lifecycle listeners, and what comes with topologies.

`import stagecrew` loads neither PySpark nor anything that starts a thread: Spark's Python daemons import it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stagecrew._version import __version__
from stagecrew.errors import (
    AlignmentFailed,
    ChannelClosed,
    ChannelError,
    CheckpointCorrupt,
    CheckpointFailed,
    CheckpointTimeout,
    CommitConflict,
    CommitFailed,
    CommitPending,
    CommitSuperseded,
    CommitUnknown,
    CommitUnreadable,
    ConfigurationError,
    CoordinationError,
    CoordinatorFailed,
    EvaluationEnded,
    EventLogUnreadable,
    EventNotPicklable,
    EventTimeout,
    EventTooLarge,
    FrameError,
    HandleError,
    HandleExists,
    HandleLocked,
    HandleMissing,
    HookTimeout,
    JarMissing,
    JobError,
    JobExists,
    JobFailed,
    JobStepReused,
    JobUnknown,
    JobUnreadable,
    LeadershipLost,
    ListenerError,
    ListenerNotImportable,
    ListenerNotPicklable,
    NotActive,
    NotInitialised,
    OperatorMisused,
    PossiblyInconsistentError,
    RecoveryError,
    RecoveryMisused,
    RequestFailed,
    RequestTimeout,
    ResourceNotOpen,
    SessionLost,
    SplitsFailed,
    StagecrewError,
    StateCorrupt,
    StateStorageError,
    StoreConflict,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    StoreUnsupported,
    SuperstepsFailed,
    TaskKilled,
    TopologyClosed,
    TopologyError,
    UnsupportedSession,
    UnsupportedSpark,
    VersionMismatch,
)
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
    from stagecrew.operators import (
        Aligner,
        Alignment,
        CommitLog,
        CommitReport,
        Committer,
        EventTimeSplits,
        FileCommitLog,
        MemoryCommitLog,
        Staging,
        SuperstepContext,
        WatermarkGroup,
        read_committed,
    )
    from stagecrew.partitions.report import PartitionReport, Release
    from stagecrew.recovery import Job, JobRecord, Jobs, JobSpec, JobState, Result, current_job, open_jobs
    from stagecrew.session.builder import configure, crew, is_active
    from stagecrew.session.crew import Crew
    from stagecrew.session.reports import LatencySummary, ListenerReport, OperatorReport, TopologyReport
    from stagecrew.session.topology import Topology
    from stagecrew.worker.evaluations import TaskGateway

__all__ = [
    "Aligner",
    "Alignment",
    "AlignmentFailed",
    "ChannelClosed",
    "ChannelError",
    "Checkpoint",
    "CheckpointCorrupt",
    "CheckpointFailed",
    "CheckpointTimeout",
    "CommitConflict",
    "CommitFailed",
    "CommitLog",
    "CommitPending",
    "CommitReport",
    "CommitSuperseded",
    "CommitUnknown",
    "CommitUnreadable",
    "Committer",
    "ConfigurationError",
    "CoordinationError",
    "Coordinator",
    "CoordinatorContext",
    "CoordinatorFailed",
    "Crew",
    "Evaluation",
    "EvaluationEnded",
    "EventLogUnreadable",
    "EventNotPicklable",
    "EventTimeSplits",
    "EventTimeout",
    "EventTooLarge",
    "FileCommitLog",
    "FrameError",
    "Gateway",
    "HandleError",
    "HandleExists",
    "HandleLocked",
    "HandleMissing",
    "HookTimeout",
    "JarMissing",
    "Job",
    "JobError",
    "JobExists",
    "JobFailed",
    "JobRecord",
    "JobSpec",
    "JobState",
    "JobStepReused",
    "JobUnknown",
    "JobUnreadable",
    "Jobs",
    "LatencySummary",
    "LeadershipLost",
    "Lifetime",
    "Listener",
    "ListenerContext",
    "ListenerError",
    "ListenerNotImportable",
    "ListenerNotPicklable",
    "ListenerReport",
    "LoggingContext",
    "MemoryCommitLog",
    "NotActive",
    "NotInitialised",
    "Operator",
    "OperatorMisused",
    "OperatorReport",
    "PartitionReport",
    "PossiblyInconsistentError",
    "RecoveryError",
    "RecoveryMisused",
    "Release",
    "RequestFailed",
    "RequestTimeout",
    "Resource",
    "ResourceNotOpen",
    "Result",
    "Scope",
    "SessionLost",
    "SplitsFailed",
    "StagecrewError",
    "Staging",
    "StateCorrupt",
    "StateStorageError",
    "StoreConflict",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
    "StoreUnsupported",
    "StructuredFormatter",
    "SuperstepContext",
    "SuperstepsFailed",
    "Task",
    "TaskGateway",
    "TaskKilled",
    "Topology",
    "TopologyClosed",
    "TopologyError",
    "TopologyReport",
    "UnsupportedSession",
    "UnsupportedSpark",
    "VersionMismatch",
    "WatermarkGroup",
    "__version__",
    "configure",
    "crew",
    "current_job",
    "is_active",
    "jar_path",
    "open_jobs",
    "read_committed",
    "resource",
    "spark_conf",
]

_LAZY = {
    "Crew": "stagecrew.session.crew",
    "Checkpoint": "stagecrew.coordination.checkpoints",
    "CoordinatorContext": "stagecrew.coordination.context",
    "Coordinator": "stagecrew.coordination.contract",
    "Evaluation": "stagecrew.coordination.evaluation",
    "Gateway": "stagecrew.coordination.gateway",
    "Operator": "stagecrew.coordination.operator",
    **dict.fromkeys(
        (
            "Aligner",
            "Alignment",
            "CommitLog",
            "CommitReport",
            "Committer",
            "EventTimeSplits",
            "FileCommitLog",
            "MemoryCommitLog",
            "Staging",
            "SuperstepContext",
            "WatermarkGroup",
            "read_committed",
        ),
        "stagecrew.operators",
    ),
    "TaskGateway": "stagecrew.worker.evaluations",
    **dict.fromkeys(("jar_path", "spark_conf"), "stagecrew.jar"),
    **dict.fromkeys(
        ("Job", "JobRecord", "JobSpec", "JobState", "Jobs", "Result", "current_job", "open_jobs"), "stagecrew.recovery"
    ),
    **dict.fromkeys(
        ("ListenerReport", "OperatorReport", "LatencySummary", "TopologyReport"), "stagecrew.session.reports"
    ),
    **dict.fromkeys(("PartitionReport", "Release"), "stagecrew.partitions.report"),
    **dict.fromkeys(("configure", "crew", "is_active"), "stagecrew.session.builder"),
    "Topology": "stagecrew.session.topology",
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
