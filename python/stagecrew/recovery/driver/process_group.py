"""The process group of a run: the process that the driver started, and all processes that this process started."""

from __future__ import annotations

import contextlib
import os

import psutil

__all__ = ["ProcessGroup"]


class ProcessGroup:
    """A process group, known by the process id and the start time of its leader.

    The operating system may give the process id of an ended leader to another process, but only after the whole group
    has ended. Such a process is not in the group, and never gets its signals.
    """

    def __init__(self, pid: int) -> None:
        """Creates the group that the process with this id leads. Call this before `wait` is called for the process."""
        self._pid = pid
        self._leader = psutil.Process(pid)

    def signal(self, number: int) -> None:
        """Sends a signal to all processes of the group, also after its leader has ended."""
        if self._is_reused():
            return
        # macOS raises PermissionError for a group whose processes have ended but were not waited for.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)

    def _is_reused(self) -> bool:
        """Returns whether another process has the id now. Processes are compared with their start times."""
        try:
            return bool(psutil.Process(self._pid) != self._leader)
        except psutil.NoSuchProcess:
            return False
