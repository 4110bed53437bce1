"""The progress of the tasks that read splits: counts, the slowest split, and uneven tasks. Pure: no Spark, no clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Final

from stagecrew.coordination.evaluation import Evaluation, where_it_runs

__all__ = ["SplitProgress", "uneven"]

#: A split is slow if its task has been reading it for this many seconds.
_SLOW: Final = 1.0
#: Tasks are uneven if at most this share of them has read most of the splits.
_FEW: Final = 0.1
_MOST: Final = 0.8
_ENOUGH_TASKS: Final = 10


class SplitProgress:
    """Records which evaluations are reading a split, and how many splits each subtask has finished."""

    def __init__(self, subtasks: int | None) -> None:
        self._subtasks = subtasks
        self._done_counts: dict[int, int] = {}
        #: The evaluations that are reading, by id, each with the time when it got its split. The oldest is first.
        self._reading: dict[int, tuple[Evaluation, float]] = {}

    def asks(self, evaluation: Evaluation, index: int) -> None:
        """An evaluation has finished this many splits, and asks for the next one."""
        assert evaluation.subtask is not None
        self._reading.pop(evaluation.id, None)
        if index > self._done_counts.get(evaluation.subtask, 0):
            self._done_counts[evaluation.subtask] = index

    def reads(self, evaluation: Evaluation, now: float) -> None:
        """An evaluation has got a split."""
        self._reading[evaluation.id] = (evaluation, now)

    def ended(self, evaluation: Evaluation) -> None:
        """An evaluation has ended."""
        self._reading.pop(evaluation.id, None)

    def values(self, assigned: int, left: int | None, now: float) -> dict[str, Any]:
        """The values to show. The number of splits left, the slowest split and uneven tasks are included if known."""
        done = sum(self._done_counts.values())
        optional = {
            "splits left": left,
            "slowest split": self._slowest(now),
            "uneven": uneven(self._done_counts.values(), self._subtasks),
        }
        found = {"splits done": done, "splits in progress": assigned - done}
        return found | {name: value for name, value in optional.items() if value is not None}

    def _slowest(self, now: float) -> str | None:
        evaluation, since = next(iter(self._reading.values()), (None, now))
        if evaluation is None or now - since < _SLOW:
            return None
        return f"{where_it_runs(evaluation)}, for {now - since:.0f} s"


def uneven(done: Iterable[int], subtasks: int | None) -> str | None:
    """Returns a sentence if a few of the subtasks have read most of the splits, else None.

    >>> uneven([40, 40, *[1] * 14], 64)
    '2 of 64 tasks have read 80 % of the splits'
    """
    counts = sorted(done, reverse=True)
    total, tasks = sum(counts), max(len(counts), subtasks or 0)
    if tasks < _ENOUGH_TASKS or total < tasks:
        return None
    few = next(number for number, sum_ in enumerate(itertools.accumulate(counts), 1) if sum_ >= _MOST * total)
    return f"{few} of {tasks} tasks have read {100 * _MOST:.0f} % of the splits" if few <= _FEW * tasks else None
