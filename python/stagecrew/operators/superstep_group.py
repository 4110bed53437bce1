"""Who has come to a superstep: a pure state machine, without Spark, threads or a clock."""

from __future__ import annotations

from typing import Any

from stagecrew.errors import SuperstepsFailed
from stagecrew.operators.reducers import Described

__all__ = ["Gathering"]


class Gathering:
    """The subtasks of one attempt at a stage, which go from step to step together.

    Each step takes one value of every subtask, with the same reducer; when the last has come, the values are answered in the
    order of subtasks, and the next step begins. Steps count from 0. Sets of subtasks, never counters.

    Whatever cannot come to an end is an error at once, with the names of those that differ: a subtask that ends while others
    wait, or comes to a step behind the end of another; another reducer; another step.
    """

    def __init__(self, name: str, subtasks: int) -> None:
        #: For messages.
        self.name = name
        self.subtasks = subtasks
        self.step = 0
        self._values: dict[int, Any] = {}
        self._reducer: tuple[Described, int] = (Described(""), 0)  # and whose it was first
        self._ended: dict[int, int] = {}  # subtask -> how many steps it took part in

    def add(self, subtask: int, step: int, reducer: Described, value: Any) -> list[Any] | None:
        """A subtask has come to a step. Answers all values when it was the last, else None. Raises `SuperstepsFailed`."""
        if subtask in self._values:
            raise SuperstepsFailed(f"{self.name}: subtask {subtask} came to step {step} twice")
        if step != self.step:
            raise SuperstepsFailed(
                f"{self.name}: subtask {subtask} is at step {step}, the others are at step {self.step}: each has to call "
                f"reduce() as often as the others"
            )
        if self._values and not reducer.is_like(self._reducer[0]):
            other, whose = self._reducer
            difference = (
                f"by {reducer.name!r}, but subtask {whose} by {other.name!r}"
                if reducer.name != other.name
                else f"by another function than subtask {whose}: both are called {reducer.name!r}, but their code, or a value "
                f"that they hold, is not the same"
            )
            raise SuperstepsFailed(f"{self.name}: in step {step} subtask {subtask} reduces {difference}")
        if not self._values:
            self._reducer = (reducer, subtask)
        self._values[subtask] = value
        self._compare()
        if len(self._values) < self.subtasks:
            return None
        values = [self._values[one] for one in sorted(self._values)]
        self._values.clear()
        self.step += 1
        return values

    def end(self, subtask: int) -> bool:
        """A subtask has come to its end. Answers whether all have. Raises `SuperstepsFailed` when others wait for it."""
        self._ended[subtask] = self.step
        self._compare()
        return len(self._ended) >= self.subtasks

    @property
    def missing(self) -> list[int]:
        """The subtasks that others wait for."""
        return [one for one in range(self.subtasks) if one not in self._values] if self._values else []

    def _compare(self) -> None:
        if self._values and self._ended:
            ended, steps = next(iter(self._ended.items()))
            waiting = min(self._values)
            raise SuperstepsFailed(
                f"{self.name}: subtask {ended} ended after {steps} steps, but subtask {waiting} waits in step {self.step}: each has "
                f"to call reduce() as often as the others"
            )
