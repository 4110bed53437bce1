"""Serves a coordinator under test, with scripted evaluations and a manual clock. No Spark, no threads, no sockets."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from types import TracebackType
from typing import Any

from stagecrew.coordination.checkpoints import Checkpoint
from stagecrew.coordination.contract import Coordinator
from stagecrew.coordination.host import Host
from stagecrew.coordination.operators import Factory, Operators
from stagecrew.testing.evaluation import MAX_EVENT, ScriptedEvaluation
from stagecrew.testing.inline import InlineThreads, InlineTransport
from stagecrew.wire.frames import Frame

__all__ = ["CoordinatorHarness"]


class CoordinatorHarness:
    """Serves a coordinator as a session does, but on the caller's thread.

    Each call returns when the coordinator has handled it, and everything that followed from it. Time passes only in
    `advance`. The test plays the rest of a session: Spark's retries, and cancelled jobs.

    `failure` is the exception that failed the topology, or None if it has not failed. `now` is the time in seconds. As
    a context manager, the harness closes the coordinator at the end.

    Args:
        factory: A `Coordinator` class, or another callable that takes a `CoordinatorContext` and returns a
            coordinator, as for `Topology.coordinate`.
        ack_timeout: The value of `spark.stagecrew.ack.timeout`, in seconds.

    Raises:
        OperatorMisused: The factory did not return a coordinator.

    Examples:
        >>> import stagecrew
        >>> class Budget(stagecrew.Coordinator):
        ...     left = 5
        ...     def handle_request(self, evaluation, wanted):
        ...         granted = min(wanted, self.left)
        ...         self.left -= granted
        ...         return granted
        >>> with CoordinatorHarness(Budget) as harness:
        ...     task, other = harness.evaluation(subtask=0), harness.evaluation(subtask=1)
        ...     task.request(3), other.request(3)
        (3, 2)

    Not promised: the timing and the interleavings of a cluster. `call_async` runs its function at once.
    """

    name = "test"
    id = "test"

    def __init__(self, factory: Factory, ack_timeout: float = 30.0) -> None:
        self.now = 0.0
        self.failure: BaseException | None = None
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)
        self._evaluations: dict[int, ScriptedEvaluation] = {}
        self._transport = InlineTransport(self._deliver)
        self._host = Host(self._transport, MAX_EVENT, ack_timeout, lambda: self.now)
        self._coordinators: list[Coordinator] = []
        self._running = False

        def make(context: Any) -> Coordinator:
            self._coordinators.append(factory(context))
            return self._coordinators[-1]

        self._threads = InlineThreads(self.run, self._later)
        self.operators = Operators(self, lambda: 1.0, self._threads)
        self.operators.name_operator("operator")
        self._binding = self.operators.add("operator", make, self._host)
        self.run()

    @property
    def coordinator(self) -> Any:
        """The current instance of the coordinator. A reset creates a new instance."""
        return self._coordinators[-1]

    @property
    def is_active(self) -> bool:
        """Whether the topology is active. It is active until it fails."""
        return self.failure is None

    def evaluation(
        self,
        subtask: int | None = None,
        executor: str = "1",
        attempt_number: int = 0,
        stage_attempt: int = 0,
        partitions: int = 1,
    ) -> ScriptedEvaluation:
        """Begins an evaluation of the bound function. The coordinator receives `ready`.

        Args:
            subtask: As in `Evaluation`.
            executor: As in `Evaluation`.
            attempt_number: As in `Evaluation`.
            stage_attempt: As in `Evaluation`.
            partitions: The number of partitions of its stage.

        Returns:
            The evaluation, for the test to continue.
        """
        number = next(self._numbers)
        made = ScriptedEvaluation(self, number, executor)
        self._evaluations[number] = made
        made.send_frame(
            "READY",
            binding=self._binding,
            subtask=-1 if subtask is None else subtask,
            attempt=number,
            number=attempt_number,
            stage=0,
            partition=0 if subtask is None else subtask,
            stage_attempt=stage_attempt,
            partitions=partitions,
        )
        return made

    def lose_executor(self, executor: str, reason: str = "the executor is lost") -> None:
        """Loses an executor, with all evaluations on it.

        Args:
            executor: The executor's id.
            reason: The reason that the coordinator receives.
        """
        self._host.lost(executor, reason)
        self.run()

    def advance(self, seconds: float) -> None:
        """Advances the clock. Makes the calls that become due, and fails attempts whose acknowledgements are late.

        Args:
            seconds: The time to advance by.
        """
        until = self.now + seconds
        while self._timers and self._timers[0][0] <= until:
            self.now, _, call = heapq.heappop(self._timers)
            call()
            self.run()
        self.now = until
        self._host.expire()
        self.run()

    def checkpoint(self, checkpoint_id: int | None = None, meanwhile: Callable[[], Any] = lambda: None) -> Checkpoint:
        """Takes a checkpoint, as `Topology.checkpoint` does, with a timeout of zero.

        Args:
            checkpoint_id: As for `Topology.checkpoint`.
            meanwhile: Called after the coordinator was asked for its state. When it returns, the coordinator must have
                delivered the state.

        Returns:
            The checkpoint.

        Raises:
            CheckpointFailed: The coordinator declined the checkpoint, or the id is not larger than the last one.
            CheckpointTimeout: A state or an acknowledgement is missing when `meanwhile` has returned.
            CoordinatorFailed: The coordinator has failed.
        """
        self._threads.during_wait = meanwhile
        try:
            return self.operators.checkpoint(checkpoint_id, 0)
        finally:
            self.run()

    def reset(self, checkpoint: Checkpoint | None = None) -> None:
        """Replaces the coordinator with a new instance, as `Topology.reset` does.

        Args:
            checkpoint: The checkpoint to restore. By default the new instance has no state.

        Raises:
            CoordinatorFailed: The coordinator has failed.
        """
        self.operators.reset(checkpoint)
        self.run()

    def close(self) -> None:
        """Closes the coordinator, as when the topology ends."""
        self.operators.close("the topology has ended")
        self.run()

    def __enter__(self) -> CoordinatorHarness:
        return self

    def __exit__(
        self, type_: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def run(self) -> None:
        """Makes all enqueued calls, and delivers all frames. Call it after the test's threads used the coordinator."""
        if self._running:
            return  # the outer call makes and delivers them
        self._running = True
        try:
            busy = True
            while busy:
                busy = False
                for loop in self._threads.loops:
                    busy |= loop.run()
                busy |= self._transport.deliver_all()
        finally:
            self._running = False

    # -- The topology and the executors

    def streaming_query(self) -> None:
        """The harness runs no streaming query."""

    def cancel_failed(self, cause: BaseException) -> None:
        """Records the failure of the topology. `Operators` calls this.

        Args:
            cause: The exception of the coordinator.
        """
        self.failure = cause

    def received(self, executor: str, frame: bytes) -> None:
        """Passes a frame of an evaluation to the host. `ScriptedEvaluation` calls this.

        Args:
            executor: The id of the executor.
            frame: The encoded frame.
        """
        self._host.received(executor, frame)
        self.run()

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now + seconds, next(self._numbers), call))

    def _deliver(self, frame: Frame) -> None:
        if (evaluation := self._evaluations.get(frame["evaluation"])) is not None:
            evaluation.receive_frame(frame)
