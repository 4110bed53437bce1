"""Records the requests of an evaluation as spans, if its topology is traced."""

from __future__ import annotations

from typing import Any

from stagecrew.coordination.evaluation import Evaluation
from stagecrew.observability.spans import EndedSpan, SlowestSpans, topology_traceparent
from stagecrew.observability.traceparent import task_traceparent

__all__ = ["request_spans"]


def request_spans(topology: str, evaluation: Evaluation) -> SlowestSpans | None:
    """Returns the spans of an evaluation's requests, or None if the topology with this id is not traced.

    A span begins when its request arrives on the driver, and ends with the reply. Its key is the sequence number of the
    request. Its parent is the span of the task.
    """
    traceparent = topology_traceparent(topology)
    if traceparent is None:
        return None
    parent = task_traceparent(traceparent, evaluation.attempt)
    attributes: dict[str, Any] = {
        "stagecrew.operator": evaluation.operator,
        "stagecrew.executor": evaluation.executor,
        "stagecrew.attempt": evaluation.attempt,
    }
    if evaluation.subtask is not None:
        attributes["stagecrew.subtask"] = evaluation.subtask

    def make(_sequence: int, started: int, ended: int, outcome: str) -> EndedSpan:
        error = "its evaluation ended before the reply" if outcome == "lost" else ""
        return EndedSpan(f"request {evaluation.operator}", parent, started, ended, outcome, error, attributes)

    return SlowestSpans(make)
