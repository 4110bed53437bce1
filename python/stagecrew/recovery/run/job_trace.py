"""The trace of a stored job, which all its runs share. Every run computes the same ids."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stagecrew import operating_system
from stagecrew.errors import ConfigurationError
from stagecrew.observability.spans import EndedSpan
from stagecrew.observability.traceparent import TraceIds, traceparent_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from stagecrew.recovery.jobs.record import JobRecord, Run
    from stagecrew.session.tracing import Tracing

__all__ = ["JobTrace", "job_traceparent"]


def job_traceparent(job: str, submitted: float) -> str:
    """The context of a job's span, from the job's id and the time of its submission.

    >>> job_traceparent("nightly", 1.0) == job_traceparent("nightly", 1.0)
    True
    """
    digest = hashlib.sha256(f"{submitted!r} {job}".encode()).digest()
    trace, span = int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big")
    return traceparent_of(TraceIds(trace or 1, span or 1, True))


class JobTrace:
    """The span of a job, in the process of one of its runs.

    The run that ends the job exports the span, from the submission to the end. A run that takes over the job also
    exports a span `failover`, from the start of its process until it calls the job's code.
    """

    def __init__(self, tracing: Tracing, run: Run, record: JobRecord) -> None:
        self._tracing, self._run = tracing, run
        traceparent = job_traceparent(run.job, record.submitted)
        attributes = {"stagecrew.job": run.job}
        self._span: Span = tracing.begin_root(f"job {run.job}", traceparent, int(record.submitted * 1e9), attributes)
        if run.number > 1 and self._span.is_recording():
            now = time.time_ns()
            process = operating_system.figures(operating_system.find_process(os.getpid()))
            started = now if process is None else int(process.started * 1e9)
            more = attributes | {"stagecrew.run": run.number}
            tracing.add(EndedSpan("failover", traceparent, started, now, "ok", attributes=more))

    @classmethod
    def begin(cls, conf: Mapping[str, str], run: Run, record: JobRecord) -> JobTrace | None:
        """Starts tracing if the job's configuration asks for it. Call it before the job's code.

        Returns None if OpenTelemetry's SDK is not installed: the job's session then raises the error.
        """
        if conf.get("spark.stagecrew.tracing", "false").lower() != "true":
            return None
        from stagecrew.session import tracing

        try:
            return cls(tracing.start(run.job), run, record)
        except ConfigurationError:
            return None

    def end(self, outcome: str, reason: str) -> None:
        """Exports the span of the job, which has ended, and stops. Takes at most 10 s."""
        self._span.set_attribute("stagecrew.run", self._run.number)
        self._tracing.end_root(self._span, outcome, reason)
        self._tracing.stop()

    def lose(self) -> None:
        """Exports everything but the span of the job: this run is lost, and a later run ends the job."""
        self._tracing.stop()
