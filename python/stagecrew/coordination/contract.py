"""The contract of a coordinator: the methods that a subclass defines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.evaluation import Evaluation
    from stagecrew.coordination.gateway import Gateway

__all__ = ["NO_CHECKPOINT", "Coordinator"]

#: The checkpoint to which a subtask is reset that begins anew.
NO_CHECKPOINT: Final = -1


class Coordinator:
    """Serves one binding of an operator, on the driver. Its methods are called one at a time, in order.

    The calls come on threads that all coordinators share, so two calls may come on two threads: no lock is needed, but an object
    that belongs to one thread (such as a `sqlite3` connection without `check_same_thread=False`) cannot be kept.

    Per subtask the order is `ready`, then `failed` or `finished` for every evaluation that was ready, then `subtask_reset`,
    then `ready` of the next. Several may be live at once (speculation). Events and requests come only from evaluations that
    are ready and not over; those of one evaluation in the order in which it sent them. What a method raises fails the
    topology, once, with its traceback.

    Not promised: that an evaluation which finished is part of the result (its task may fail after it), and that each is heard
    of: one that is cut short sends nothing.

    Source: Flink's OperatorCoordinator (FLINK-15099, FLINK-18071).
    """

    #: What people see it called.
    kind = "coordinator"

    def __init__(self, context: CoordinatorContext) -> None:
        self.context = context

    def start(self) -> None:
        """Called once, before every other method."""

    def ready(self, evaluation: Evaluation, gateway: Gateway) -> None:
        """An evaluation has begun; what the gateway sends reaches this one or none."""

    def failed(self, evaluation: Evaluation, reason: str) -> None:
        """It failed, was killed, or its process is gone."""

    def finished(self, evaluation: Evaluation) -> None:
        """Its function came to its end, and all that it sent has been handled."""

    def abandoned(self, evaluation: Evaluation) -> None:
        """Spark needed no more of its rows, as with `limit`. It may have sent less than it would have."""

    def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        """No evaluation of the subtask is live, and another will begin it anew, as of this checkpoint."""

    def handle_event(self, evaluation: Evaluation, event: Any) -> None:
        """What the task's `gateway.send` sent."""
        raise NotImplementedError(f"{type(self).__qualname__} takes no events; define handle_event(evaluation, event)")

    def handle_request(self, evaluation: Evaluation, request: Any) -> Any:
        """What the task's `gateway.request` asks: answers the reply, or a `concurrent.futures.Future` of it.

        What it raises is the task's `RequestFailed`, and does not fail the topology.
        """
        raise NotImplementedError(
            f"{type(self).__qualname__} takes no requests; define handle_request(evaluation, request)"
        )

    def checkpoint(self, checkpoint_id: int) -> bytes | Future[bytes | None] | None:
        """The state of now, or a `concurrent.futures.Future` of it; None when there is nothing to keep.

        The cut is where this returns, or where the future is completed: what was sent to tasks before has reached their
        mailboxes when the checkpoint is complete, and what is sent after is kept back until then. A future that fails
        declines the checkpoint; an exception fails the topology.

        A coordinator without a live evaluation that was not called since the last checkpoint is not asked: that state still holds. So
        a thread of your own changes the state with `context.run_in_coordinator_thread`.
        """

    def checkpoint_complete(self, checkpoint_id: int) -> None:
        """The states of all coordinators of the topology were taken, and belong together. It may be missed."""

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """The checkpoint was given up: another coordinator declined, or somebody was late."""

    def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        """Called before `start` of an instance that begins as of a checkpoint, with what it stored; None when nothing."""

    def waits_for(self) -> str:
        """Whom it waits for, in words, for those who look on; empty while for nobody.

        Asked about once a second while anything happens, as `progress` is. What either raises is logged once, and fails nothing.
        """
        return ""

    def progress(self) -> Mapping[str, Any]:
        """How far it is: names with numbers or texts, for those who look on, beside what was given to `context.report`."""
        return {}

    def close(self) -> None:
        """The last call: the topology ends, or failed."""
