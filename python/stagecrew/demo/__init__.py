"""The demo: real flights enriched from a real database, with and without stagecrew.

Workers import this package to enrich: what the driver alone needs is imported when it is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from stagecrew.demo.driver import Comparison

__all__ = ["run"]


def run(database: str | None, output: Path, flights: int | None, master: str, console: Console) -> Comparison:
    """Runs the demo, prints what it found, and answers it. `stagecrew demo --help` says more."""
    from stagecrew.demo.driver import Demo

    return Demo(database, output, flights, master, console).run()
