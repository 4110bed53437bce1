"""Public fakes, for testing functions that use listeners, and coordinators, without Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagecrew.lazy import lazy_names
from stagecrew.testing.resources import opened

if TYPE_CHECKING:
    from stagecrew.testing.evaluation import ScriptedEvaluation
    from stagecrew.testing.harness import CoordinatorHarness

__all__ = ["CoordinatorHarness", "ScriptedEvaluation", "opened"]


#: `opened` does not need PySpark, but these names need its cloudpickle.
if not TYPE_CHECKING:  # a type checker knows these names, and reports others
    __getattr__ = lazy_names(__name__, {"CoordinatorHarness": "harness", "ScriptedEvaluation": "evaluation"})
