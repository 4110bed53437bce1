"""Runs the `stagecrew` command as a user does, in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import stagecrew
from support.hidden_proc import python_path
from support.spark_versions import LEAKS_SOCKETS

__all__ = ["run_stagecrew"]

_ROOT = str(Path(stagecrew.__file__).parent.parent)

#: Warnings are errors, except those about the sockets that old versions of PySpark do not close.
_WARNINGS: Final = ("-W", "error", *(("-W", "ignore::ResourceWarning") if LEAKS_SOCKETS else ()))


def run_stagecrew(
    *arguments: str, cwd: Path | None = None, timeout: float = 280, installed: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `stagecrew ARGUMENTS`. Python warnings are errors.

    With `installed=False`, only the driver can import the installed package. Executors then use the package in the jar,
    if they have the jar at all.
    """
    start = f"import sys; sys.path.insert(0, {_ROOT!r}); from stagecrew.cli import main; main(prog_name='stagecrew')"
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYSPARK_PYTHON")}
    inherited["PYTHONPATH"] = python_path(*([_ROOT] if installed else []))
    return subprocess.run(
        [sys.executable, *_WARNINGS, "-c", start, *arguments],
        cwd=cwd, timeout=timeout, env={**inherited, **environment}, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
