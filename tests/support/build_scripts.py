"""Imports the scripts of the folder `build`, which are not part of the package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

__all__ = ["ROOT", "load_build_script"]

ROOT = Path(__file__).parents[2]


def load_build_script(name: str) -> ModuleType:
    """Returns a new module from `build/NAME.py`."""
    spec = importlib.util.spec_from_file_location(f"build_{name}", ROOT / "build" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
