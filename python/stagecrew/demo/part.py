"""What each part of the demo returns."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Part"]


class Part(Protocol):
    """The figures of one part: the same work without and with stagecrew."""

    @property
    def ok(self) -> bool:
        """Whether the results are as they must be: both runs have the same rows, or every row exists once."""

    def rows(self) -> list[tuple[str, str, str]]:
        """The lines of the table: a label, and the values without and with stagecrew."""

    def notes(self) -> list[str]:
        """Sentences below the table."""

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON."""
