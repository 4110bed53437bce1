"""Reads from the operating system what Linux and macOS offer in different ways, or not at all.

No other module reads /proc, imports psutil, or calls a function that only Linux has. A function returns None if the
operating system does not report the value. Its docstring says what stagecrew does then, and `stagecrew doctor` names
the features that are lost.

macOS has no /proc. psutil works there. None of this was run on macOS: the tests hide what macOS does not have.

Spark's Python daemon and its workers import this module. So it imports only the standard library, and psutil at its
first use.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import socket
import struct
import sys
from typing import Any, Final, NamedTuple, TextIO

__all__ = [
    "Figures",
    "figures",
    "find_process",
    "forget_psutil",
    "fsync_reaches_disk",
    "knows_peer_user",
    "load_psutil",
    "max_pid",
    "mount_points",
    "peer_user",
    "start_time",
    "takes_signal",
]

#: Where Linux has its files about processes. Tests replace it with a folder that does not exist.
PROC: str = "/proc"

#: Whether psutil opens a file while it counts the open files of a process.
_COUNTING_OPENS_A_FILE: Final = sys.platform == "linux"

_psutil_is_ours = False


class Figures(NamedTuple):
    """The resources that a process uses."""

    #: When the process started, in seconds since 1970.
    started: float
    #: The CPU time since then, in seconds.
    cpu: float
    #: The resident memory, in bytes.
    memory: int
    threads: int
    #: The number of open files and sockets.
    files: int


def max_pid() -> int | None:
    """The limit of process ids. Without it, a worker cannot ask the daemon for more time to close."""
    try:
        with _open("sys/kernel/pid_max") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def takes_signal(pid: int, number: int) -> bool | None:
    """Whether a process handles or blocks a signal. If it is unknown, the daemon kills workers immediately."""
    taken = 0
    try:
        with _open(f"{pid}/status") as status:
            for line in status:
                if line.startswith(("SigCgt:", "SigBlk:")):
                    taken |= int(line.split()[1], 16)
    except (OSError, IndexError, ValueError):
        return None
    return bool(taken >> (number - 1) & 1)


def start_time(pid: int) -> str | None:
    """The start time of a process, which differs between processes that had the same id. None if it has ended, too.

    Without it, the daemon kills workers immediately.
    """
    try:
        with _open(f"{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return None


def mount_points() -> list[tuple[str, str]] | None:
    """The mount points of this process's namespace, in their order, each with the name of its file system.

    They include folders that are bind-mounted on their own disk, which `os.path.ismount` does not detect. Without them,
    the SQLite store accepts any file system, and the Parquet sink does not recognize bind mounts.
    """
    try:
        with _open("self/mountinfo") as lines:
            entries = [line.split() for line in lines]
    except OSError:
        return None
    return [
        (re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]), fields[fields.index("-", 6) + 1])
        for fields in entries
    ]


def peer_user(connection: socket.socket) -> int | None:
    """The user of the process at the other end of a Unix socket. Without it, only the token identifies the process."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, option, 12)
    return int(struct.unpack("3i", credentials)[1])


def knows_peer_user() -> bool:
    """Whether `peer_user` returns the user of a Unix socket."""
    return hasattr(socket, "SO_PEERCRED")


def fsync_reaches_disk() -> bool:
    """Whether `os.fsync` also flushes the disk's own cache. On macOS only F_FULLFSYNC does, which is not used."""
    return not hasattr(fcntl, "F_FULLFSYNC")


def load_psutil() -> Any:
    """Imports psutil. Raises the exception of the import, such as ImportError."""
    global _psutil_is_ours
    _psutil_is_ours = _psutil_is_ours or "psutil" not in sys.modules
    return importlib.import_module("psutil")


def forget_psutil() -> None:
    """Removes psutil from `sys.modules` if this module imported it first, so that a forked worker imports its own."""
    if _psutil_is_ours:
        for name in [name for name in sys.modules if name.partition(".")[0] == "psutil"]:
            del sys.modules[name]


def find_process(pid: int) -> Any | None:
    """The process with this id, or None. Compare it with `==`: a later process with the same id is another one."""
    psutil = load_psutil()
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def figures(process: Any) -> Figures | None:
    """Measures a process that `find_process` returned. Returns None if it has ended, or may not be measured."""
    psutil = load_psutil()
    try:
        if not process.is_running():
            return None
        with process.oneshot():
            if process.status() == psutil.STATUS_ZOMBIE:  # it has ended, and its parent has not noticed yet
                return None
            times, memory, threads = process.cpu_times(), process.memory_info().rss, process.num_threads()
            started = process.create_time()
        files = process.num_fds() - (_COUNTING_OPENS_A_FILE and process.pid == os.getpid())
    except psutil.Error:
        return None
    return Figures(started, times.user + times.system, memory, threads, files)


def _open(name: str) -> TextIO:
    return open(f"{PROC}/{name}", encoding="utf-8", errors="surrogateescape")  # noqa: PTH123
