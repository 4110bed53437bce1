"""One evaluation of a bound function, as coordinators see it."""

from __future__ import annotations

import dataclasses

__all__ = ["Evaluation"]


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """One call of a bound function in one Python process: what a coordinator talks to.

    `subtask` is the partition of the bound dataset that it works on, None where the binding has no identity (`bind`, and an
    empty partition). It is never `TaskContext.partitionId`, which is `partition`. Spark may evaluate one subtask many times:
    several evaluations of it may be live at once.
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
    #: How many partitions its stage has.
    partitions: int
