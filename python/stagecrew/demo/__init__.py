"""The demo: real flights enriched from a real database, with and without stagecrew.

Workers import this package to enrich: what the driver alone needs is imported when it is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["run"]


def run(database: str | None, output: Path, flights: int | None, master: str, console: Console) -> bool:
    """Runs the demo and prints what it found; False when both ways gave different rows. `stagecrew demo --help` says more."""
    from stagecrew.demo.driver import Demo

    return Demo(database, output, flights, master, console).run()
