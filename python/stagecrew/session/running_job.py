"""The stored job that this process is running, as the session sees it.

The recovery package sets it, so that the session need not import that package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from stagecrew.operators.commit_log import CommitLog
    from stagecrew.operators.committer import Committer

__all__ = ["RunningJob", "running_job", "set_running_job"]

_running: RunningJob | None = None


class RunningJob(Protocol):
    """A run of a stored job. It provides the ids of the program's commits, and their commit log."""

    id: str
    attempt: int

    def commit_id(self, name: str) -> str:
        """The id of a commit at this place in the program. It is the same in every run."""

    def commit_log(self, sink: Committer) -> CommitLog:
        """The log of this sink's commits, in the job's store."""

    def show(self) -> None:
        """Shows the job's progress in the UI of the running session, if there is one."""


def running_job() -> RunningJob | None:
    """The job that this process is running, or None."""
    return _running


def set_running_job(job: RunningJob | None) -> None:
    """Sets the job that this process is running, or None."""
    global _running
    _running = job
