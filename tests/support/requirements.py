"""The script `bootstrap` as a module, so that tests use the same programs as it finds."""

from __future__ import annotations

from support.build_scripts import load_script
from support.checkout import ROOT

__all__ = ["SCRIPT", "bootstrap"]

SCRIPT = ROOT / "bootstrap"
bootstrap = load_script(SCRIPT)
