"""A binding: one use of an operator on one dataset. Each reset gives it a new instance of its coordinator."""

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

    #: The bindings whose coordinators were called, or reported something, since their last checkpoint.
    changed: dict[Binding, None]


class Binding:
    """Holds the current instance of the coordinator, and the live evaluations. The host's lock guards the binding.

    `key` is the position of the use in the program, and identifies its state in a `Checkpoint`. The constructor creates
    the coordinator on the caller's thread, and restores it from `state` if a `checkpoint_id` is given. `begin` starts
    the coordinator.
    """

    __slots__ = (
        "factory", "holds_events", "id", "instance", "key", "live", "operator", "owner", "pending", "seen",
        "statistics", "threads", "unreported",
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
        #: Whether the cut of the pending checkpoint was made. If so, events are held back until the checkpoint ends.
        self.holds_events = False
        self.statistics = Statistics()
        #: The host's set of bindings with changed statistics. The binding adds itself when something may have changed.
        self.unreported: dict[Binding, None] | None = None
        self.instance = Instance(self)
        try:
            self.instance.make(checkpoint_id, state)
        except BaseException:
            self.instance.loop.end(0)
            raise

    def begin(self) -> None:
        """Starts the coordinator. Called once the session is running."""
        self.instance.begin()

    def mark_changed(self) -> None:
        """Records that the coordinator was called or reported something."""
        self.owner.changed[self] = None
        if (unreported := self.unreported) is not None:
            unreported[self] = None

    def reset(self, checkpoint_id: int, state: bytes | None, seconds: float) -> None:
        """Replaces the current instance with a new one, which waits at most `seconds` until the old one has closed."""
        self.holds_events = False
        self.statistics.resets += 1
        old, self.instance = self.instance, Instance(self)
        old.retire()
        self.instance.enqueue(self.instance.take_over, old, checkpoint_id, state, seconds)

    def finish(self) -> None:
        """Closes the coordinator after the messages that are already enqueued."""
        self.instance.loop.call(self.instance.finish)

    def await_closed(self, seconds: float) -> bool:
        """Stops accepting calls, and waits. Returns whether the coordinator has closed within this time."""
        return self.instance.loop.end(seconds)
