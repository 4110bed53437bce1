"""The demo: four capabilities on real flights, each without and with stagecrew.

Workers import this package. Therefore the modules that only the driver needs are imported when they are first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console

    from stagecrew.demo.part import Part

__all__ = ["PARTS", "run"]

#: The parts of the demo, in their order.
PARTS: Final = ("connections", "skew", "disk", "driver")


def run(
    database: str | None,
    output: Path,
    flights: int | None,
    master: str,
    console: Console,
    parts: Sequence[str] = (),
    wait: bool = False,
) -> dict[str, Part]:
    """Runs some parts of the demo (default: all), and prints their table. `stagecrew demo --help` describes them."""
    from stagecrew.demo.driver import Demo

    return Demo(database, output, flights, master, console, parts or PARTS, wait).run()
