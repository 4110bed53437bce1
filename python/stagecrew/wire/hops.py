"""Records when requests and replies pass each hop between a task and its coordinator, for `make bench`.

Off by default: `passed` is None unless the environment variable STAGECREW_HOPS names a folder. Each process then writes
a file there. A line has the name of the hop, the evaluation, the number of the request, and the time in nanoseconds.
Linux has one monotonic clock for all processes of a host, so the times of different processes can be compared.
`Hops.scala` writes the same for the JVMs.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from typing import Final

from stagecrew.wire.frames import KINDS

__all__ = ["HOPS", "all_passed", "flush", "passed"]

#: The hops of a request and its reply, in order, each with the process that it is in.
HOPS: Final = (
    ("task-sends", "task"),
    ("executor-reads", "executor's JVM"),
    ("executor-sent", "executor's JVM"),
    ("driver-receives", "driver's JVM"),
    ("driver-written", "driver's JVM"),
    ("host-receives", "driver's Python"),
    ("coordinator-called", "driver's Python"),
    ("coordinator-replied", "driver's Python"),
    ("host-sends", "driver's Python"),
    ("driver-reads", "driver's JVM"),
    ("driver-sent", "driver's JVM"),
    ("executor-receives", "executor's JVM"),
    ("executor-written", "executor's JVM"),
    ("task-receives", "task"),
)

_REPLY: Final = KINDS["REPLY"][0]
_IDS: Final = struct.Struct(">IBqq")
_LINES: Final = 10_000

_folder: Final = os.environ.get("STAGECREW_HOPS")
_lines: list[str] = []


def _passed(hop: str, evaluation: int, sequence: int) -> None:
    _lines.append(f"{hop} {evaluation} {sequence} {time.monotonic_ns()}\n")
    if len(_lines) >= _LINES:
        flush()


def all_passed(hop: str, frames: list[bytes]) -> None:
    """Records the replies among these encoded frames."""
    for frame in frames:
        if frame[4] == _REPLY:
            _, _, evaluation, sequence = _IDS.unpack_from(frame)
            _passed(hop, evaluation, sequence)


def flush() -> None:
    """Writes the recorded lines to the file of this process."""
    global _lines
    if _folder is not None and _lines:
        lines, _lines = _lines, []
        with open(os.path.join(_folder, f"python-{os.getpid()}"), "a", encoding="ascii") as file:
            file.writelines(lines)


#: Records that a request or reply has passed a hop: `passed(hop, evaluation, sequence)`. None if this is off.
passed: Callable[[str, int, int], None] | None = None if _folder is None else _passed
