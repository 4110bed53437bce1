"""Public fakes: functions that use listeners, and coordinators, are tested without Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stagecrew.testing.resources import opened

if TYPE_CHECKING:
    from stagecrew.testing.harness import CoordinatorHarness, ScriptedEvaluation

__all__ = ["CoordinatorHarness", "ScriptedEvaluation", "opened"]


def __getattr__(name: str) -> Any:
    """The harness needs PySpark's cloudpickle; `opened` does not."""
    if name not in ("CoordinatorHarness", "ScriptedEvaluation"):
        raise AttributeError(f"module 'stagecrew.testing' has no attribute {name!r}")
    from stagecrew.testing import harness

    return getattr(harness, name)
