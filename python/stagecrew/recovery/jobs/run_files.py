"""The layout of a run's folder, which contains the files of the job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

__all__ = ["FILES", "SCRIPT", "add_to_path"]

#: The subfolder with the files that are added to Python's path.
FILES: Final = "files"
#: The subfolder with the script of the job.
SCRIPT: Final = "script"


def add_to_path(folder: Path) -> None:
    """Adds a folder with a job's files, and the archives in this folder, to the front of `sys.path`."""
    for path in [folder, *sorted(folder.glob("*.zip")), *sorted(folder.glob("*.egg"))]:
        sys.path.insert(0, str(path))
