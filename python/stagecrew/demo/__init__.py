"""The demo: it enriches real flights from a real database, with and without stagecrew.

Workers import this package. Therefore the modules that only the driver needs are imported when they are first used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from stagecrew.demo.driver import Comparison

__all__ = ["run"]


def run(database: str | None, output: Path, flights: int | None, master: str, console: Console) -> Comparison:
    """Runs the demo, prints the comparison, and returns it. `stagecrew demo --help` describes the options."""
    from stagecrew.demo.driver import Demo

    return Demo(database, output, flights, master, console).run()
