"""A live evaluation, with its gateway and its counters."""

from __future__ import annotations

from typing import Final

from stagecrew.bounded import Bounded
from stagecrew.coordination.evaluation import Evaluation
from stagecrew.coordination.gateway import Gateway

__all__ = ["LiveEvaluation"]

#: The number of replies to keep for each evaluation, so that a request that arrives twice gets the first reply.
_MAX_REPLIES: Final = 64


class LiveEvaluation:
    """One live evaluation.

    The thread that reads frames owns `expected` and `replies`. The coordinator's thread owns the other counters.
    """

    def __init__(self, evaluation: Evaluation, gateway: Gateway, now: float) -> None:
        self.evaluation, self.gateway = evaluation, gateway
        #: The sequence number of the next message.
        self.expected = 1
        #: The replies to the last requests by sequence number; None while the coordinator handles the request.
        self.replies: Bounded[int, tuple[str, bytes] | None] = Bounded(_MAX_REPLIES)
        #: The sequence number of the last request with a large reply.
        self.large_reply = 0
        #: The number of messages that were handled, and the number of which the task was notified.
        self.handled = self.reported = 0
        self.unreported_bytes = 0
        self.reported_at = now
