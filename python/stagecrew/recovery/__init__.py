"""Recovery: jobs and coordinator state that survive the driver, under one leader at a time.

Each name of this module is imported when it is first used, because some of them need PySpark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stagecrew.recovery.jobs.job import Job, current_job
    from stagecrew.recovery.jobs.record import JobRecord, JobState
    from stagecrew.recovery.jobs.result import Result
    from stagecrew.recovery.jobs.spec import JobSpec
    from stagecrew.recovery.jobs.store import Jobs, open_jobs

__all__ = ["Job", "JobRecord", "JobSpec", "JobState", "Jobs", "Result", "current_job", "open_jobs"]

_LAZY = {
    **dict.fromkeys(("Job", "current_job"), "stagecrew.recovery.jobs.job"),
    **dict.fromkeys(("JobRecord", "JobState"), "stagecrew.recovery.jobs.record"),
    "Result": "stagecrew.recovery.jobs.result",
    "JobSpec": "stagecrew.recovery.jobs.spec",
    **dict.fromkeys(("Jobs", "open_jobs"), "stagecrew.recovery.jobs.store"),
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used."""
    if name not in _LAZY:
        raise AttributeError(f"module 'stagecrew.recovery' has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name in ("pyspark", "py4j"):
            raise ModuleNotFoundError(
                f"stagecrew.recovery.{name} needs PySpark: `pip install 'stagecrew[spark]'`, or add the one in "
                "SPARK_HOME to PYTHONPATH",
                name=error.name,
            ) from error
        raise


def __dir__() -> list[str]:
    return sorted(__all__)
