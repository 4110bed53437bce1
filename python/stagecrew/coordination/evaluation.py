"""One evaluation of a bound function, as coordinators see it."""

from __future__ import annotations

import dataclasses

__all__ = ["Evaluation", "where_it_runs"]


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """One call of a bound function in one Python process. It tells a coordinator which task a message belongs to.

    Evaluations are immutable and hashable, so they can be dictionary keys. Spark may evaluate a subtask many times, and
    several evaluations of one subtask may be live at the same time.

    Args:
        id: Identifies the evaluation in the application.
        operator: The operator's name.
        subtask: The partition of the bound dataset that the evaluation works on. None if the binding has no subtasks
            (`Operator.bind`), and for an empty partition. It may differ from `TaskContext.partitionId`.
        attempt: Spark's `taskAttemptId`.
        attempt_number: The number of earlier attempts at the task in its stage attempt.
        stage: The id of the task's stage.
        partition: `TaskContext.partitionId` of the task.
        executor: The id of the task's executor.
        stage_attempt: The number of earlier attempts at the stage.
        partitions: The number of partitions of the stage.

    Examples:
        >>> from stagecrew.testing import CoordinatorHarness
        >>> import stagecrew
        >>> class Subtasks(stagecrew.Coordinator):
        ...     def ready(self, evaluation, gateway):
        ...         self.last = evaluation
        >>> with CoordinatorHarness(Subtasks) as harness:
        ...     _ = harness.evaluation(subtask=3, executor="7")
        ...     harness.coordinator.last.subtask, harness.coordinator.last.executor
        (3, '7')

    Not promised: that evaluations with the same `subtask` run one after another, or on one executor.
    """

    id: int
    operator: str
    subtask: int | None
    attempt: int
    attempt_number: int
    stage: int
    partition: int
    executor: str
    stage_attempt: int
    partitions: int


def where_it_runs(evaluation: Evaluation) -> str:
    """The subtask, the executor and the attempt of an evaluation, for pages and reports."""
    task = f"partition {evaluation.partition}" if evaluation.subtask is None else f"subtask {evaluation.subtask}"
    return f"{task} on executor {evaluation.executor} (attempt {evaluation.attempt})"
