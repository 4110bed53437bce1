"""An evaluation that is live, with its gateway and its counters."""

from __future__ import annotations

from stagecrew.coordination.evaluation import Evaluation
from stagecrew.coordination.gateway import Gateway

__all__ = ["Live"]


class Live:
    """One evaluation that is live. `expected` and `replies` are the host's, what is handled and told the coordinator's thread's."""

    def __init__(self, evaluation: Evaluation, gateway: Gateway, now: float) -> None:
        self.evaluation, self.gateway = evaluation, gateway
        self.expected = 1
        self.told_at = now
        self.handled = self.told = self.untold_bytes = 0
        self.replies: dict[int, tuple[str, bytes] | None] = {}
        self.large = 0  # the last request with a large reply
