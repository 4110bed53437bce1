"""Runs tests as if the operating system had no /proc: the option `--hide-proc`. See `hide_proc/sitecustomize.py`."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Final

__all__ = ["hide_proc", "is_proc_hidden", "python_path"]

_FOLDER: Final = Path(__file__).with_name("hide_proc")


def hide_proc() -> None:
    """Hides /proc from stagecrew in this process, and in all Python processes that it starts."""
    if not is_proc_hidden():  # a process of pytest-xdist has inherited it
        runpy.run_path(str(_FOLDER / "sitecustomize.py"))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])


def is_proc_hidden() -> bool:
    """Returns whether /proc is hidden from stagecrew in this process."""
    return str(_FOLDER) in os.environ.get("PYTHONPATH", "").split(os.pathsep)


def python_path(*folders: str) -> str:
    """Returns a PYTHONPATH for another process, from which /proc is hidden if it is hidden here."""
    return os.pathsep.join([*([str(_FOLDER)] if is_proc_hidden() else []), *folders])
