"""Imports the scripts that are not part of the package: `bootstrap`, and those in the folder `build`."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

from support.checkout import ROOT

__all__ = ["load_build_script", "load_script"]


def load_build_script(name: str) -> ModuleType:
    """Returns a new module from `build/NAME.py`."""
    return load_script(ROOT / "build" / f"{name}.py")


def load_script(path: Path) -> ModuleType:
    """Returns a new module from a script, whose name may have no suffix."""
    loader = importlib.machinery.SourceFileLoader(path.stem, str(path))
    spec = importlib.util.spec_from_loader(path.stem, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
