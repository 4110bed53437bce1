"""The `stagecrew` command as a user runs it: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import stagecrew

__all__ = ["command"]

_ROOT = str(Path(stagecrew.__file__).parent.parent)


def command(
    *arguments: str, cwd: Path | None = None, timeout: float = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `stagecrew ARGUMENTS` with every Python warning an error.

    The package is put on the path of this process alone, not into PYTHONPATH, so that workers have what the jar brings.
    """
    start = f"import sys; sys.path.insert(0, {_ROOT!r}); from stagecrew.cli import main; main(prog_name='stagecrew')"
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYSPARK_PYTHON")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", start, *arguments],
        cwd=cwd, timeout=timeout, env={**inherited, "COLUMNS": "100", **environment}, capture_output=True, text=True,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
