"""Copies the checkout, for tests that build or install from it."""

from __future__ import annotations

import fnmatch
import shutil
from pathlib import Path
from typing import Final

__all__ = ["ROOT", "copy_checkout"]

ROOT: Final = Path(__file__).parents[2]


def copy_checkout(target: Path) -> None:
    """Copies the checkout without what git ignores, such as the jars. It reads only .gitignore, because git may be absent.

    Args:
        target: The new folder. It must not exist.
    """
    patterns = [".git", *(line.strip("/") for line in (ROOT / ".gitignore").read_text().split())]

    def ignored(folder: str, names: list[str]) -> set[str]:
        inside = Path(folder).relative_to(ROOT)
        return {
            name for name in names for one in patterns
            if fnmatch.fnmatch(name, one) or fnmatch.fnmatch(str(inside / name), one)
        }  # fmt: skip

    shutil.copytree(ROOT, target, ignore=ignored)
