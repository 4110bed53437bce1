"""Public fakes, for testing functions that use listeners, and coordinators, without Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stagecrew.testing.resources import opened

if TYPE_CHECKING:
    from stagecrew.testing.evaluation import ScriptedEvaluation
    from stagecrew.testing.harness import CoordinatorHarness

__all__ = ["CoordinatorHarness", "ScriptedEvaluation", "opened"]


def __getattr__(name: str) -> Any:
    """Imports the other names on first use, because they need PySpark's cloudpickle, which `opened` does not need."""
    if name == "CoordinatorHarness":
        from stagecrew.testing.harness import CoordinatorHarness

        return CoordinatorHarness
    if name == "ScriptedEvaluation":
        from stagecrew.testing.evaluation import ScriptedEvaluation

        return ScriptedEvaluation
    raise AttributeError(f"module 'stagecrew.testing' has no attribute {name!r}")
