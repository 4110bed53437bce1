"""One use of an operator on one dataset. A coordinator serves it; each reset installs a new instance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from stagecrew.coordination.checkpoints import PendingCheckpoint
from stagecrew.coordination.context import CoordinatorContext
from stagecrew.coordination.contract import NO_CHECKPOINT, Coordinator
from stagecrew.coordination.instance import Instance
from stagecrew.coordination.live import LiveEvaluation
from stagecrew.coordination.statistics import Statistics
from stagecrew.coordination.threads import Owner, Threads

__all__ = ["Binding", "BindingOwner"]


class BindingOwner(Owner, Protocol):
    """The operators of a topology, as its bindings see them."""

    #: The bindings whose coordinators were called since their last checkpoint.
    changed: dict[Binding, None]


class Binding:
    """Knows its current instance and its live evaluations. The host's lock guards it.

    `key` is its position in the program, as in a `Checkpoint`. The coordinator is made at once, on the caller's thread,
    and restored from `state` if there is a checkpoint. It starts with `begin`.
    """

    __slots__ = (
        "factory", "held", "id", "instance", "key", "live", "operator", "owner", "pending", "seen", "statistics",
        "threads", "unreported",
    )  # fmt: skip

    def __init__(
        self,
        identity: str,
        key: str,
        operator: str,
        factory: Callable[[CoordinatorContext], Coordinator],
        owner: BindingOwner,
        threads: Threads,
        checkpoint_id: int = NO_CHECKPOINT,
        state: bytes | None = None,
        subtasks: int = 0,
    ) -> None:
        self.id, self.key, self.operator = identity, key, operator
        self.factory, self.owner, self.threads = factory, owner, threads
        self.live: dict[int, LiveEvaluation] = {}
        #: The subtasks that have had an evaluation, one bit each.
        self.seen = subtasks
        #: The checkpoint that is being taken.
        self.pending: PendingCheckpoint | None = None
        #: Whether that checkpoint's cut was made, so that events are held back.
        self.held = False
        self.statistics = Statistics()
        #: The host's bindings with statistics to report. The binding adds itself when something may have changed.
        self.unreported: dict[Binding, None] | None = None
        self.instance = Instance(self)
        try:
            self.instance.make(checkpoint_id, state)
        except BaseException:
            self.instance.loop.end(0)
            raise

    def begin(self) -> None:
        """Starts the coordinator: the session runs."""
        self.instance.begin()

    def mark_changed(self) -> None:
        """Notes that the coordinator was called, or reported something."""
        self.owner.changed[self] = None
        if (unreported := self.unreported) is not None:
            unreported[self] = None

    def reset(self, checkpoint_id: int, state: bytes | None, seconds: float) -> None:
        """Closes the current instance, waits at most this many seconds for it, and begins a new one."""
        self.held = False
        self.statistics.resets += 1
        old, self.instance = self.instance, Instance(self)
        old.retire()
        self.instance.enqueue(self.instance.take_over, old, checkpoint_id, state, seconds)

    def finish(self) -> None:
        """Closes the coordinator after the messages that are already enqueued."""
        self.instance.loop.call(self.instance.finish)

    def await_closed(self, seconds: float) -> bool:
        """Enqueues no more calls. Returns whether the coordinator closed within this time."""
        return self.instance.loop.end(seconds)
