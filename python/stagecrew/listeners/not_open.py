"""The messages of `ResourceNotOpen`, one for each cause. A pure module.

Every Python worker imports it, so it uses only the standard library and starts no thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from stagecrew.listeners.identity import RegisteredTopology

__all__ = ["APPLICATION", "NotRegisteredError", "Task", "explain"]

#: The id of the topology that spans the whole application.
APPLICATION = "application"


class NotRegisteredError(LookupError):
    """The topologies of the current task do not have a listener.

    `inside` contains the names of these topologies, innermost first, and `registered` the names of their listeners.
    `others` contains the names of other topologies that have the listener and are open in this process. `reason` is a
    special cause, or an empty string.
    """

    def __init__(
        self, inside: Sequence[str], registered: Sequence[str], reason: str = "", others: Sequence[str] = ()
    ) -> None:
        super().__init__(inside, registered, reason)
        self.inside, self.registered, self.reason = tuple(inside), tuple(registered), reason
        self.others = tuple(others)


@dataclasses.dataclass(frozen=True)
class Task:
    """The topologies of a task's action.

    `topology` is the id of the topology in which the action ran. `closed` contains the ids of topologies that the
    action's thread had entered and that had already closed.
    """

    topology: str | None = None
    closed: tuple[str, ...] = ()


def explain(
    name: str, registrations: Sequence[RegisteredTopology], task: Task | None, missing: NotRegisteredError | None
) -> str:
    """Returns the message: the cause and the remedy. `task` is None if the process runs no task.

    `missing` is set if the task runs in topologies that have listeners.
    """
    inside = tuple(one for one in missing.inside if one != APPLICATION) if missing is not None else ()
    their_listeners = _list_of(missing.registered) if missing is not None else ""
    latest = registrations[-1] if registrations else None
    if latest is None and missing is not None and missing.others:
        latest = RegisteredTopology(f"topology {missing.others[0]!r}", "")
    if missing is not None and missing.reason:
        cause, remedy = missing.reason, ""
    elif task is None:
        cause = "get() was called outside of a task, and listeners are only open in tasks"
        remedy = (
            f"Call it in a function that a task runs. A function for foreachBatch runs on the driver. In a test, use "
            f"`with stagecrew.testing.opened({name}, value=...)`"
        )
    elif latest is not None and latest.id == APPLICATION:
        cause = "it was registered for the application of another session, not for this application"
        remedy = f"Build this session with `stagecrew.configure(builder, listeners=[{name}])`"
    elif latest is not None and (latest.ended or latest.id in task.closed or latest.id == task.topology):
        cause = f"it was registered for {latest.description}, and the action ran after this topology had closed"
        remedy = f"{_RUN_INSIDE}. {_KEEP}"
    elif inside:
        cause = (
            f"this task runs in topology {' inside '.join(map(repr, inside))}, which does not have it{their_listeners}"
        )
        if latest is not None:
            cause += f"; it was registered for {latest.description}"
        remedy = f"Register it there: `crew.topology({inside[0]!r}, listeners=[{name}])`"
    elif latest is not None:
        cause = f"it was registered for {latest.description}, and the action ran in a thread outside of this topology"
        remedy = "Run `topology.wrap(f)` instead of `f` in the thread, while the topology is open"
    else:
        cause = f"this task belongs to no topology{their_listeners}"
        if task.closed:
            cause += f"; its action's thread was in topology {_name_of(task.closed[-1])!r}, which has closed"
        remedy = (
            f"{_RUN_INSIDE}; in another thread of the driver, run the function as `topology.wrap(f)`. Or register the "
            f"listener for the whole application: `stagecrew.configure(builder, listeners=[{name}])`"
        )
        remedy += f". {_KEEP}" if task.closed else ""
    return f"listener {name!r} is not open here: {cause}." + (f" {remedy}." if remedy else "")


_RUN_INSIDE = "Run the action inside `with crew.topology(..., listeners=[...])`"
_KEEP = (
    "Spark computes a dataset again if its stored partitions were deleted with their topology: "
    "`topology.keep(dataset)` keeps them"
)


def _list_of(names: Sequence[str]) -> str:
    return f" (it has: {', '.join(map(repr, names))})" if names else " (it has no listeners)"


def _name_of(topology: str) -> str:
    """The name of the topology with this id."""
    return topology.rpartition("-")[0] or topology
