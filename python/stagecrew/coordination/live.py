"""A live evaluation, with its gateway and its counters."""

from __future__ import annotations

import threading
from typing import Final

from stagecrew.bounded import Bounded
from stagecrew.coordination.evaluation import Evaluation
from stagecrew.coordination.gateway import Gateway
from stagecrew.observability.spans import SlowestSpans

__all__ = ["LiveEvaluation"]

#: How many replies are kept for each evaluation, so that a request that arrives twice gets its first reply again.
_MAX_REPLIES: Final = 64


class LiveEvaluation:
    """One live evaluation.

    Only the thread that reads frames changes `expected`. That thread adds requests to `replies`. The coordinator's
    thread, or any thread that completes a future, adds the replies. So `replies_lock` guards `replies` and
    `large_reply`. Only the coordinator's thread changes the other counters.
    """

    def __init__(
        self, evaluation: Evaluation, gateway: Gateway, now: float, request_spans: SlowestSpans | None = None
    ) -> None:
        self.evaluation, self.gateway = evaluation, gateway
        #: None if the topology is not traced.
        self.request_spans = request_spans
        #: The sequence number of the next message from the task.
        self.expected = 1
        self.replies_lock = threading.Lock()
        #: The replies to the last requests, by sequence number. While the coordinator is handling the request, this is
        #: the time when it arrived.
        self.replies: Bounded[int, tuple[str, bytes] | float] = Bounded(_MAX_REPLIES)
        #: The sequence number of the last request with a large reply.
        self.large_reply = 0
        #: The number of messages that were handled, and the number that the task was last notified of.
        self.handled = self.reported = 0
        self.unreported_bytes = 0
        self.reported_at = now

    @property
    def oldest_request(self) -> float | None:
        """When the oldest of the requests that wait for a reply arrived. None if none waits."""
        return min((time for time in list(self.replies.values()) if not isinstance(time, tuple)), default=None)

    def close(self, reason: str) -> None:
        """Ends the gateway: the evaluation has ended for this reason."""
        self.gateway.end(reason)
        if self.request_spans is not None:
            self.request_spans.close()
