"""The process group of a run: the process that the driver started, and all processes that this process started."""

from __future__ import annotations

import contextlib
import os

from stagecrew.operating_system import find_process

__all__ = ["ProcessGroup"]


class ProcessGroup:
    """A process group, identified by the process id and the start time of its leader.

    Once the whole group has exited, the operating system can give the leader's id to another process. That process is
    never sent a signal.
    """

    def __init__(self, pid: int) -> None:
        """Identifies the group that the process with this id leads. Call this before anything waits for the process."""
        self._pid = pid
        self._leader = find_process(pid)

    def signal(self, number: int) -> None:
        """Sends a signal to all processes of the group, even after its leader has exited."""
        if self._is_reused():
            return
        # macOS raises PermissionError for a group whose processes have all exited but were not waited for.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)

    def _is_reused(self) -> bool:
        """Returns whether another process now has the id."""
        process = find_process(self._pid)
        return process is not None and bool(process != self._leader)
