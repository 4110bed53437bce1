"""Recovery: jobs and coordinator state that survive the driver, under one leader at a time.

Each name of this module is imported when it is first used, because some of them need PySpark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagecrew.lazy import lazy_names

if TYPE_CHECKING:
    from stagecrew.recovery.jobs.job import Job, current_job
    from stagecrew.recovery.jobs.record import JobRecord, JobState
    from stagecrew.recovery.jobs.result import Result
    from stagecrew.recovery.jobs.spec import JobSpec
    from stagecrew.recovery.jobs.store import Jobs, open_jobs

__all__ = ["Job", "JobRecord", "JobSpec", "JobState", "Jobs", "Result", "current_job", "open_jobs"]

_LAZY = {
    **dict.fromkeys(("Job", "current_job"), "jobs.job"),
    **dict.fromkeys(("JobRecord", "JobState"), "jobs.record"),
    "Result": "jobs.result",
    "JobSpec": "jobs.spec",
    **dict.fromkeys(("Jobs", "open_jobs"), "jobs.store"),
}

if not TYPE_CHECKING:  # a type checker knows these names, and reports others
    __getattr__ = lazy_names(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted(__all__)
