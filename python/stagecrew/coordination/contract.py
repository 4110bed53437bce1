"""The interface of a coordinator: the methods that a subclass may define."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.evaluation import Evaluation
    from stagecrew.coordination.gateway import Gateway

__all__ = ["NO_CHECKPOINT", "Coordinator"]

#: The checkpoint id of a reset to the beginning, without a checkpoint.
NO_CHECKPOINT: Final = -1


class Coordinator:
    """Serves one binding of an operator, on the driver. Its methods are called one at a time, in order.

    A subclass defines the methods that it needs. Pass it, or a factory that creates it, to `Topology.coordinate`.

    Coordinators share a pool of threads, so two calls may run on two threads. No lock is needed, but an object that
    belongs to one thread (such as a `sqlite3` connection without `check_same_thread=False`) cannot be kept.

    For each subtask, the order of calls is: `ready`; then `failed`, `finished` or `abandoned` for every evaluation that
    was ready; then `subtask_reset`; then `ready` of the next evaluation. Several evaluations of a subtask may be live
    at the same time (speculation). Events and requests arrive only from live evaluations. An evaluation's messages
    arrive in the order in which it sent them. If a method other than `handle_request` raises an error, the topology
    fails.

    Args:
        context: The coordinator's context. A subclass that defines `__init__` passes it on.

    Examples:
        >>> import stagecrew
        >>> from stagecrew.testing import CoordinatorHarness
        >>> class Budget(stagecrew.Coordinator):
        ...     left = 5
        ...     def handle_request(self, evaluation, wanted):
        ...         granted = min(wanted, self.left)
        ...         self.left -= granted
        ...         return granted
        >>> with CoordinatorHarness(Budget) as harness:
        ...     task = harness.evaluation(subtask=0)
        ...     task.request(3), task.request(3)
        (3, 2)

    Not promised: that a finished evaluation is part of the result, because its task may fail afterwards; and that every
    evaluation is reported, because an interrupted evaluation may send nothing.

    Source: Flink's OperatorCoordinator (FLINK-15099, FLINK-18071).
    """

    #: The name of this kind of coordinator in the UI and the reports.
    kind = "coordinator"
    #: Why the topology fails if this coordinator is reset while evaluations are live. Empty if it does not.
    _live_reset_problem = ""

    def __init__(self, context: CoordinatorContext) -> None:
        self.context = context

    def start(self) -> None:
        """Called once, before all other methods but `reset_to_checkpoint`."""

    def ready(self, evaluation: Evaluation, gateway: Gateway) -> None:
        """Called when an evaluation has begun.

        Args:
            evaluation: The evaluation.
            gateway: Sends events to this evaluation, and to no other.
        """

    def failed(self, evaluation: Evaluation, reason: str) -> None:
        """Called when an evaluation failed, was killed, or lost its process.

        Args:
            evaluation: The evaluation.
            reason: A description of the failure.
        """

    def finished(self, evaluation: Evaluation) -> None:
        """Called when an evaluation's function has returned, and every message that it sent has been handled.

        Args:
            evaluation: The evaluation.
        """

    def abandoned(self, evaluation: Evaluation) -> None:
        """Called when Spark stopped reading an evaluation early, as `limit` does. Some of its messages may be missing.

        Args:
            evaluation: The evaluation.
        """

    def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        """Called when a subtask begins again: none of its evaluations is live, and another one is about to begin.

        Args:
            subtask: The subtask.
            checkpoint_id: Always -1, because a subtask is always reset to its beginning.
        """

    def handle_event(self, evaluation: Evaluation, event: Any) -> None:
        """Called for each event that a task sends with `gateway.send`.

        Args:
            evaluation: The evaluation that sent the event.
            event: The event.
        """
        raise NotImplementedError(
            f"{type(self).__qualname__} received an event, but handles none; define handle_event(evaluation, event)"
        )

    def handle_request(self, evaluation: Evaluation, request: Any) -> Any:
        """Called for each request that a task sends with `gateway.request`.

        An exception does not fail the topology. It becomes the cause of a `RequestFailed` in the task that sent the
        request.

        Args:
            evaluation: The evaluation that sent the request.
            request: The request.

        Returns:
            The reply, or a `concurrent.futures.Future` of it.
        """
        raise NotImplementedError(
            f"{type(self).__qualname__} received a request, but handles none; "
            f"define handle_request(evaluation, request)"
        )

    def checkpoint(self, checkpoint_id: int) -> bytes | Future[bytes | None] | None:
        """Called to get the coordinator's state for a checkpoint.

        The cut is the moment when this method returns, or when the future that it returned completes. When the
        checkpoint is complete, every event that was sent before the cut is in its task's mailbox, unless the evaluation
        has ended. Events that are sent after the cut are held back until the checkpoint ends. A future that fails
        declines the checkpoint; an exception fails the topology.

        If a coordinator has no live evaluation and was not called since the last checkpoint, this method is not called,
        and the last state is used again. So your own threads must change the state only with
        `context.run_in_coordinator_thread`.

        Args:
            checkpoint_id: The checkpoint's id.

        Returns:
            The state, a `concurrent.futures.Future` of it, or None if there is nothing to store.
        """

    def checkpoint_complete(self, checkpoint_id: int) -> None:
        """Called when the states of all coordinators of the topology were taken. This call may be omitted.

        Args:
            checkpoint_id: The checkpoint's id.
        """

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Called when a checkpoint was aborted: another coordinator declined it, or it was not complete in time.

        Args:
            checkpoint_id: The checkpoint's id.
        """

    def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        """Called before `start`, on an instance that is restored from a checkpoint.

        Args:
            checkpoint_id: The checkpoint's id.
            state: The state that `checkpoint` returned, or None if there was none.
        """

    def waits_for(self) -> str:
        """Describes the coordinator's current wait, for the UI and the reports.

        This method and `progress` are called about once a second while anything happens. If one of them raises an
        exception, only the first exception is logged, and nothing fails.

        Returns:
            A short text, or an empty text if the coordinator is not waiting.
        """
        return ""

    def progress(self) -> Mapping[str, Any]:
        """Describes the coordinator's progress, for the UI and the reports.

        Returns:
            Numbers or texts by name. They are shown together with the values passed to `context.report`.
        """
        return {}

    def close(self) -> None:
        """Called last: when the topology or this use of the operator ends, or when a reset replaces this instance."""
