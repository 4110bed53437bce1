"""One use of an operator on one dataset, and the coordinator that serves it: a new instance after each reset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from stagecrew.coordination.checkpoints import Pending
from stagecrew.coordination.context import CoordinatorContext
from stagecrew.coordination.contract import NO_CHECKPOINT, Coordinator
from stagecrew.coordination.instance import Instance, Owner, Threads
from stagecrew.coordination.live import Live
from stagecrew.coordination.statistics import Statistics

__all__ = ["Binding", "BindingOwner"]


class BindingOwner(Owner, Protocol):
    """The operators of a topology, as its bindings see them."""

    #: The bindings whose coordinators were called since their states were taken.
    changed: dict[Binding, None]


class Binding:
    """Knows its current instance and its live evaluations; guarded by the host's lock.

    `key` is the operator and its how-manieth use, as in a `Checkpoint`. The coordinator is made at once, in the caller's
    thread, and restored from `state` when there is a checkpoint; it starts with `begin`.
    """

    __slots__ = (
        "factory", "held", "id", "instance", "key", "live", "news", "operator", "owner", "pending", "seen", "statistics", "threads",
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
        self.live: dict[int, Live] = {}
        #: Subtasks of which there has been an evaluation: a bit for each.
        self.seen = subtasks
        #: The checkpoint that is being taken, and whether it was cut: events are kept back.
        self.pending: Pending | None = None
        self.held = False
        self.statistics = Statistics()
        #: The bindings of which something may be new to those who look on; of the host that serves it.
        self.news: dict[Binding, None] | None = None
        self.instance = Instance(self)
        try:
            self.instance.make(checkpoint_id, state)
        except BaseException:
            self.instance.loop.end(0)
            raise

    def begin(self) -> None:
        """The session runs."""
        self.instance.begin()

    def touch(self) -> None:
        """Its coordinator was called, or reported something."""
        self.owner.changed[self] = None
        if (news := self.news) is not None:
            news[self] = None

    def reset(self, checkpoint_id: int, state: bytes | None, seconds: float) -> None:
        """Puts a new instance in the place of the current one, which is closed first."""
        self.held = False
        self.statistics.resets += 1
        old, self.instance = self.instance, Instance(self)
        old.retire()
        self.instance.enqueue(self.instance.take_over, old, checkpoint_id, state, seconds)

    def finish(self) -> None:
        """Has what came handled, and the coordinator closed behind it."""
        self.instance.loop.call(self.instance.finish)

    def await_closed(self, seconds: float) -> bool:
        """Takes nothing more; answers whether the coordinator closed in time. Off its own thread."""
        return self.instance.loop.end(seconds)
