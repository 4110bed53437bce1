"""Checks of arguments that several operators share."""

from __future__ import annotations

import numbers
from typing import Any

from stagecrew.errors import OperatorMisused

__all__ = ["check_seconds"]


def check_seconds(name: str, value: Any) -> None:
    """Raises `OperatorMisused` unless the value is a positive number of seconds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) > 0:
        raise OperatorMisused(f"{name} must be a positive number of seconds, not {value!r}")
