"""The process of a run, and all processes that it has started."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stagecrew.recovery.driver.process_group import ProcessGroup

if TYPE_CHECKING:
    from stagecrew.recovery.jobs.record import Run

__all__ = ["TERMINATE_TIMEOUT", "RunProcess"]

#: How long a process may take to exit after SIGTERM, in seconds.
TERMINATE_TIMEOUT: Final = 10.0


class RunProcess:
    """A process that was started for a run. It leads a process group, which contains all processes that it started."""

    def __init__(self, run: Run, popen: subprocess.Popen[bytes], folder: Path, finishing: bool) -> None:
        self.run, self.finishing = run, finishing
        self._popen, self._folder = popen, folder
        self._group = ProcessGroup(popen.pid)

    @property
    def pid(self) -> int:
        """The id of the process group and of its first process: spark-submit, or Python if the run only finishes."""
        return self._popen.pid

    def exit_code(self) -> int | None:
        """Returns the exit code, or None while the process is running."""
        return self._popen.poll()

    def terminate(self) -> None:
        """Sends SIGTERM to the group."""
        self._group.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the group, waits for the process, and deletes its files."""
        self._group.signal(signal.SIGKILL)
        self._popen.wait(TERMINATE_TIMEOUT)
        shutil.rmtree(self._folder, ignore_errors=True)

    def wait(self, seconds: float) -> None:
        """Waits until the process exits, for at most this many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(max(0.0, seconds))
