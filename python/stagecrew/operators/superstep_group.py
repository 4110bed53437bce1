"""The subtasks of one superstep group: a pure state machine, without Spark, threads or a clock."""

from __future__ import annotations

from typing import Any

from stagecrew.errors import OperatorFailed
from stagecrew.operators.reducers import ReducerCall

__all__ = ["SuperstepGroup"]


class SuperstepGroup:
    """The subtasks of one stage attempt, which execute the steps together.

    A step takes one value from every subtask, and all subtasks use the same reducer. When the last value arrives, `add`
    returns all values in the order of subtasks, and the next step begins. Steps are numbered from 0. The group keeps
    sets of subtasks, never counters.

    If the group can no longer finish a step, it immediately raises an error that names the subtasks that differ. This
    happens if a subtask ended while others wait, if a subtask entered a step after another subtask ended, or if the
    subtasks use different reducers or are at different steps.
    """

    def __init__(self, name: str, subtasks: int) -> None:
        #: The name of the group in messages.
        self.name = name
        self.subtasks = subtasks
        self.step = 0
        self._values: dict[int, Any] = {}
        #: The reducer of this step, and the first subtask that named it.
        self._reducer: tuple[ReducerCall, int] = (ReducerCall(""), 0)
        #: For each subtask that has ended, the number of steps in which it took part.
        self._ended: dict[int, int] = {}

    def add(self, subtask: int, step: int, reducer: ReducerCall, value: Any) -> list[Any] | None:
        """Adds a subtask's value to a step.

        After the last subtask's value, returns all values. Otherwise returns None. Raises `OperatorFailed` if the group
        can no longer finish the step.
        """
        if subtask in self._values:
            raise OperatorFailed(f"{self.name}: subtask {subtask} called reduce() twice in step {step}")
        if step != self.step:
            raise OperatorFailed(
                f"{self.name}: subtask {subtask} is at step {step}, but the others are at step {self.step}: {_AS_OFTEN}"
            )
        if self._values and reducer.name != self._reducer[0].name:
            first, first_subtask = self._reducer
            raise OperatorFailed(
                f"{self.name}: in step {step} subtask {subtask} reduces with {reducer.name!r}, but subtask "
                f"{first_subtask} with {first.name!r}: all must call reduce() with the same reducer"
            )
        if not self._values:
            self._reducer = (reducer, subtask)
        self._values[subtask] = value
        self._require_progress()
        if len(self._values) < self.subtasks:
            return None
        values = [self._values[each] for each in sorted(self._values)]
        self._values.clear()
        self.step += 1
        return values

    def end(self, subtask: int) -> bool:
        """Ends a subtask. Returns whether all have ended. Raises `OperatorFailed` if others wait for it."""
        self._ended[subtask] = self.step
        self._require_progress()
        return len(self._ended) >= self.subtasks

    @property
    def missing(self) -> list[int]:
        """The subtasks for which others are waiting."""
        return [subtask for subtask in range(self.subtasks) if subtask not in self._values] if self._values else []

    def _require_progress(self) -> None:
        if self._values and self._ended:
            ended, steps = next(iter(self._ended.items()))
            waiting = min(self._values)
            raise OperatorFailed(
                f"{self.name}: subtask {ended} ended after {steps} steps, but subtask {waiting} waits in step "
                f"{self.step}: {_AS_OFTEN}"
            )


_AS_OFTEN = "each must call reduce() as often as the others"
