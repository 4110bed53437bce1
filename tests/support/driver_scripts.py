"""Runs Python scripts as Spark drivers, each in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from support.journal import Journal
from support.processes import terminate

__all__ = ["driver_script", "java_processes"]

TESTS = str(Path(__file__).parents[1])

HEAD = """
import os, sys, threading, time, traceback
sys.path.insert(0, {tests!r})
import stagecrew
from support.script_prelude import *
journal = Journal({journal!r})
"""


def java_processes(pid: int | None = None) -> list[psutil.Process]:
    """Returns the live Java processes among the descendants of a process, by default of the current process."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == "java":
                found.append(process)
    return found


@contextlib.contextmanager
def driver_script(tmp_path: Path, journal: Journal, master: str, script: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a script as a driver. At the end, terminates the driver and kills all processes that it started."""
    path = tmp_path / "driver.py"
    path.write_text(HEAD.format(tests=TESTS, journal=journal.path) + script.replace("{master!r}", repr(master)))
    command = [sys.executable, str(path)]
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    with open(tmp_path / "driver.log", "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL
        )
    try:
        yield process
    except BaseException:
        sys.stderr.write((tmp_path / "driver.log").read_text()[-6000:])
        raise
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        terminate(process)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
