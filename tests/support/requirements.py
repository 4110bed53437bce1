"""The script `bootstrap` as a module, so that tests use the same programs as it finds."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path

__all__ = ["SCRIPT", "bootstrap"]

SCRIPT = Path(__file__).parents[2] / "bootstrap"

_loader = importlib.machinery.SourceFileLoader("bootstrap", str(SCRIPT))
_spec = importlib.util.spec_from_loader("bootstrap", _loader)
assert _spec is not None
bootstrap = importlib.util.module_from_spec(_spec)
_loader.exec_module(bootstrap)
