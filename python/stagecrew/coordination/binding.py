"""One use of an operator on one dataset, and the coordinator that serves it: a new instance after each reset."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from stagecrew.coordination.context import CoordinatorContext
from stagecrew.coordination.coordinator import NO_CHECKPOINT, Coordinator, Evaluation
from stagecrew.coordination.gateway import Gateway
from stagecrew.coordination.loop import CallsInOrder, Loop

__all__ = ["Binding", "Instance", "Live", "MakeLoop"]

_log = logging.getLogger("stagecrew")


#: Name, who hears of what a call raises, and what is called when there is nothing to do.
MakeLoop = Callable[[str, Callable[[BaseException], None], Callable[[], None]], CallsInOrder]


class Live:
    """One evaluation that is live. `expected` and `replies` are the host's, `handled` and `told` the coordinator's thread's."""

    def __init__(self, evaluation: Evaluation, gateway: Gateway) -> None:
        self.evaluation, self.gateway = evaluation, gateway
        self.expected = 1
        self.handled = self.told = 0
        self.replies: dict[int, tuple[str, bytes] | None] = {}


class Instance:
    """One coordinator with its context and its thread."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self.context = CoordinatorContext(binding.operator, binding.topology, binding.store)
        self.coordinator: Coordinator | None = None
        self.loop = binding.make_loop(binding.operator, self._failed, binding.idle)

    def make(self) -> None:
        """Calls the factory, on whatever thread this is."""
        self.coordinator = self._binding.factory(self.context)

    def begin(self) -> None:
        """The session runs: the coordinator starts."""
        self.context.initialise(self.loop, self._fail)
        self.call("start")

    def call(self, method: str, *args: Any) -> None:
        """Enqueues a call of one of the coordinator's methods."""
        self.loop.call(self._call, method, args)

    def retire(self) -> None:
        """Nothing that it does has an effect any more; what is enqueued is dropped, and it is closed."""
        self.context.close()
        self.loop.call(self._close)

    def finish(self) -> None:
        """The last call on its thread: what was enqueued before has been handled."""
        self.context.close()
        self._close()

    def take_over(self, from_: Instance, checkpoint_id: int, state: bytes | None, seconds: float) -> None:
        """Begins when the one before has closed, as of a checkpoint. The first call of this one's thread."""
        if not from_.loop.end(seconds):
            _log.warning("the coordinator of operator %r has not closed within %g s", self._binding.operator, seconds)
        if self.context.state == "closed":
            return  # it was reset again before it began
        self.make()
        assert self.coordinator is not None
        if checkpoint_id != NO_CHECKPOINT:
            self.coordinator.reset_to_checkpoint(checkpoint_id, state)
        self.context.initialise(self.loop, self._fail)
        self.coordinator.start()

    def _call(self, method: str, args: tuple[Any, ...]) -> None:
        if self.context.state != "closed" and self.coordinator is not None:
            getattr(self.coordinator, method)(*args)

    def _close(self) -> None:
        if self.coordinator is not None:
            self.coordinator.close()

    def _fail(self, cause: BaseException) -> None:
        self._binding.fail(cause)

    def _failed(self, error: BaseException) -> None:
        if self.context.state == "closed":  # errors while it closes fail nothing
            _log.warning(
                "the coordinator of operator %r failed while it closed", self._binding.operator, exc_info=error
            )
        else:
            self._binding.fail(error)


class Binding:
    """Knows its current instance and its live evaluations; guarded by the host's lock."""

    def __init__(
        self,
        identity: str,
        operator: str,
        topology: str,
        factory: Callable[[CoordinatorContext], Coordinator],
        store: dict[str, Any],
        fail: Callable[[BaseException], None],
        idle: Callable[[], None],
        make_loop: MakeLoop = Loop,
    ) -> None:
        self.id, self.operator, self.topology = identity, operator, topology
        self.factory, self.store, self.fail, self.idle, self.make_loop = factory, store, fail, idle, make_loop
        self.live: dict[int, Live] = {}
        #: Subtasks of which there has been an evaluation.
        self.seen: set[int] = set()
        self.instance = Instance(self)
        try:
            self.instance.make()
        except BaseException:
            self.instance.loop.end(0)
            raise
        self.instance.begin()

    def reset(self, checkpoint_id: int, state: bytes | None, seconds: float) -> None:
        """Puts a new instance in the place of the current one, which is closed first."""
        old, self.instance = self.instance, Instance(self)
        old.retire()
        self.instance.loop.call(self.instance.take_over, old, checkpoint_id, state, seconds)

    def close(self, seconds: float) -> bool:
        """Handles what has come, and closes the coordinator; answers whether that ended in time. Off its own thread."""
        instance = self.instance
        instance.loop.call(instance.finish)
        return instance.loop.end(seconds)
