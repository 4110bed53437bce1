"""The states of coordinators at the end of a step: stored with its result, and restored when a later run skips it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from stagecrew.coordination.program_path import Place, current_place
from stagecrew.errors import JobError
from stagecrew.recovery.jobs.stored_step import read_checkpoint
from stagecrew.session.application import APPLICATION

if TYPE_CHECKING:
    from stagecrew.coordination.operators import Operators
    from stagecrew.session.active_topologies import ActiveTopologies

__all__ = ["CoordinatorStates", "current_path", "current_query", "forget_uses", "path_key", "possible_query_paths"]

#: How long the checkpoint of the coordinators of a topology may take, in seconds.
_CHECKPOINT_TIMEOUT: Final = 30.0


class CoordinatorStates:
    """The states of the coordinators in the topologies around a step.

    A state belongs to one position in the program. So if a topology has coordinators, no two of its steps may run at
    the same time, unless one is inside the other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The steps that are running, each with the operators that were open when it started.
        self._running: dict[str, list[Operators]] = {}

    def start(self, place: Place) -> None:
        """Records that a step is running."""
        with self._lock:
            self._running[path_key(place)] = _open_operators()

    def end(self, place: Place) -> None:
        """Records that a step has ended."""
        with self._lock:
            del self._running[path_key(place)]

    def checkpoint(self, place: Place) -> dict[str, bytes]:
        """Returns the states of the coordinators in all topologies around this thread, by the key of the topology."""
        found: dict[str, bytes] = {}
        for topology, operators in _by_key(_open_operators()).items():
            checkpoint = operators.checkpoint(None, _CHECKPOINT_TIMEOUT)
            if checkpoint.states:
                self._require_alone(place, operators)
                found[topology] = checkpoint.to_bytes()
        return found

    def restore(self, key: str, place: Place, checkpoints: Mapping[str, bytes]) -> None:
        """Restores the states that the coordinators around a step had at the end of the step."""
        open_ = _by_key(_open_operators())
        for topology, data in checkpoints.items():
            if topology not in open_:
                raise JobError(
                    f"an earlier run executed step {key!r} inside {topology}, which is not open here, because the "
                    "program has changed: submit it as another job"
                )
            self._require_alone(place, open_[topology])
            open_[topology].reset(read_checkpoint(data))

    def _require_alone(self, place: Place, operators: Operators) -> None:
        """Raises `JobError` if another step or another thread is using this topology at the same time."""
        key = path_key(place)
        with self._lock:
            others = [
                other
                for other, around in self._running.items()
                if operators in around and other != key and not key.startswith(f"{other}/")
            ]
        if others:
            raise JobError(
                f"steps {key!r} and {others[0]!r} run at the same time in topology {operators.name!r}, so the states "
                "of its coordinators would belong to both: run one after the other, or each in its own topology. If "
                "one is inside the other, start its thread with topology.wrap"
            )
        if (operator := operators.used_by_another_thread(place)) is not None:
            raise JobError(
                f"another thread uses operator {operator!r} of topology {operators.name!r} during step {key!r}, so "
                "the state of its coordinator belongs to no definite position: wait for the thread before the step, "
                "or give it its own topology"
            )


def path_key(place: Place) -> str:
    """Returns the name under which a step is stored: the names of the steps and batches that lead to it."""
    return "/".join(place.steps)


def current_path() -> Place | None:
    """Returns this thread's place in the program; None outside of steps and topologies if no session is running yet."""
    topologies = _topologies()
    return current_place() if topologies is None else topologies.place


def current_query() -> str | None:
    """Returns the id of the streaming query that called this thread, or None. It is the same after a restart."""
    from stagecrew.session.builder import running_crew

    crew = running_crew()
    return None if crew is None else crew.connection.streaming_query_id


def possible_query_paths() -> list[Place | None]:
    """Returns the places where the batches of a query that was started here can run.

    They run in this thread's place if the query's function was wrapped with `topology.wrap`. Otherwise, they run in the
    innermost topology, outside of any step, or outside of any topology.
    """
    topologies = _topologies()
    topology = None if topologies is None else topologies.innermost
    return [current_path(), *([] if topology is None else [topology.place]), None]


def forget_uses(place: Place) -> None:
    """Ends the uses of operators in a step or batch, because it starts again or will never run again."""
    for operators in _open_operators():
        operators.forget(place)


def _by_key(operators: list[Operators]) -> dict[str, Operators]:
    """Returns the open operators, outermost first, by the key of their topology.

    The topologies around a thread are inside each other, so those of one name are numbered from the outermost. The
    number is the same in every run.
    """
    counts: dict[str, int] = {}
    found: dict[str, Operators] = {}
    for one in reversed(operators):
        if one.id == APPLICATION:
            found["the application"] = one
            continue
        counts[one.name] = number = counts.get(one.name, 0) + 1
        found[f"topology {one.name!r}" + (f" (number {number})" if number > 1 else "")] = one
    return found


def _open_operators() -> list[Operators]:
    """Returns the operators of the topologies around this thread, innermost first, and those of the application."""
    from stagecrew.session.builder import running_crew

    crew = running_crew()
    found: list[Operators] = []
    if crew is not None:
        topology = crew.topologies.innermost
        while topology is not None:
            found.append(topology.operators)
            topology = topology.parent
        found.append(crew.application.operators)
    return found


def _topologies() -> ActiveTopologies | None:
    from stagecrew.session.builder import running_crew

    crew = running_crew()
    return None if crew is None else crew.topologies
