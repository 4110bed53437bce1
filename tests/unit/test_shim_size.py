"""The shim stays thin, and its lines fit a screen."""

from __future__ import annotations

import re
from pathlib import Path

MAIN = Path(__file__).parents[2] / "jvm-shim" / "src" / "main"

#: The maximum number of the shim's lines of Scala and Java, without blank lines and comments. It must never be raised.
#: The goal is 4,000. A new feature of the shim adds a line to `ADDED`, with a reason.
MOST = 4_844
ADDED = {
    "Unix sockets, mutual proof, and a budget for strangers; only the JVM can listen before Python exists": 149,
    "a connection survives failed writes until its last frame is read, and the server a lack of threads": 3,
    "the times at which a request passes each hop": 28,
    "the direct route between an executor and the driver's Python": 78,
    "the question whether an evaluation is live, because the frames of two executors arrive in any order": 3,
    "the check that the jar is for this Spark and is the only one, in Java because Scala 2.12 must run it": 53,
    "what differs between Spark 4.0, 4.1, 4.2 and 4.3": 80,
    "private fields that a Spark may lack: keep raises then, or keeps everything": 14,
    "hints on the pages, which the History Server shows too": 66,
    "pages that update themselves, running tasks, and tables without columns of zeros": 93,
    "running hooks, which only executors know, on the pages": 51,
    "on the pages: links to jobs, stages and SQL queries, bars of splits, the tasks of processes, and more tooltips": 64,
    "ended hooks and tasks, for the spans that the driver's Python exports": 67,
}
WIDEST = 120

COMMENT = re.compile(r"\s*(//|\*|/\*|$)")


def sources() -> list[Path]:
    found = [path for path in MAIN.rglob("*") if path.suffix in (".scala", ".java")]
    assert len(found) > 40
    return found


def test_the_shim_is_thin() -> None:
    """The shim has a limited number of lines, because logic belongs in Python."""
    lines = [line for path in sources() for line in path.read_text().splitlines() if not COMMENT.match(line)]
    assert len(lines) <= MOST + sum(ADDED.values())


def test_its_lines_are_not_long() -> None:
    """A line of the shim has at most 120 characters."""
    long = {
        f"{path.name}:{number}"
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > WIDEST
    }
    assert long == set()
