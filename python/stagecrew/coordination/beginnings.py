"""Evaluations that wait to begin, because an earlier one of their subtask may still be live on another executor.

The frames of an executor arrive in order, but those of two executors do not. So when Spark runs a task again on another
executor, the new evaluation may be announced before the end of the earlier one arrives. Only the earlier executor knows
whether this is speculation or a retry, so the driver asks it. Until then, the frames of the new evaluation are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Final

from stagecrew.coordination.route import Route
from stagecrew.wire.frames import Frame

__all__ = ["Beginnings", "Waiting"]

#: How long an evaluation waits to begin, in seconds. After that, the earlier evaluations count as live.
MAX_WAIT: Final = 2.0


@dataclasses.dataclass
class Waiting:
    """An evaluation that waits, with its frames. The first one is READY."""

    executor: str
    route: Route
    frames: list[Frame]
    #: The ids of the earlier evaluations, without those whose executor has replied that they are live.
    earlier: set[int]
    #: When it begins at the latest, by the host's clock.
    deadline: float


class Beginnings:
    """The evaluations that wait, in the order in which they were announced. Used by the reading thread only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[int, Waiting] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def due(self) -> float | None:
        """When the next evaluation begins at the latest, or None."""
        return min((one.deadline for one in self._waiting.values()), default=None)

    def add(self, executor: str, ready: Frame, route: Route, earlier: set[int]) -> None:
        """Keeps an evaluation until these earlier ones are known to be live, or have ended."""
        self._waiting[ready["evaluation"]] = Waiting(executor, route, [ready], earlier, self._clock() + MAX_WAIT)

    def keep(self, frame: Frame) -> bool:
        """Keeps a frame of an evaluation that waits. Returns False if the evaluation does not wait."""
        if (waiting := self._waiting.get(frame["evaluation"])) is None:
            return False
        waiting.frames.append(frame)
        return True

    def confirm(self, id_: int) -> None:
        """Records that an earlier evaluation is live: its executor said so."""
        for waiting in self._waiting.values():
            waiting.earlier.discard(id_)

    def drop(self, is_lost: Callable[[Waiting], bool]) -> None:
        """Forgets the evaluations that are lost."""
        self._waiting = {id_: one for id_, one in self._waiting.items() if not is_lost(one)}

    def take(self, is_live: Callable[[int], bool]) -> Iterator[Waiting]:
        """Removes and yields the evaluations that may begin now. Each begins before the next one is checked."""
        for id_, waiting in list(self._waiting.items()):
            if self._clock() >= waiting.deadline or not any(is_live(one) for one in waiting.earlier):
                del self._waiting[id_]
                yield waiting
