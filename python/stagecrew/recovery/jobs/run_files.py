"""The files of a job in the folder of a run."""

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
    """Adds a folder with files of a job, and the archives in it, to the front of Python's path."""
    for path in [folder, *sorted(folder.glob("*.zip")), *sorted(folder.glob("*.egg"))]:
        sys.path.insert(0, str(path))
