"""A ready-made listener that continues the trace of a topology in its tasks.

Every Python worker imports this module, so it uses only the standard library, and OpenTelemetry's API if it is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from stagecrew.listeners.listener import Listener, Task
from stagecrew.observability.traceparent import ids_of

__all__ = ["TraceContext"]


class TraceContext(Listener):
    """Makes the span of a task OpenTelemetry's current span while the task runs.

    Instrumented libraries then continue the trace. For example, a call of an instrumented HTTP client sends the header
    `traceparent`. This needs `opentelemetry-api` on the executors, and `spark.stagecrew.tracing=true`. Without one of
    them, the listener does nothing.

    Examples:
        with crew.topology("enrich", listeners=[stagecrew.TraceContext()]):
            flights.mapInArrow(enrich, schema).write.parquet(path)

    Not promised: that spans which the task itself creates are exported. That needs an exporter on the executors.
    """

    @contextlib.contextmanager
    def decorate(self, task: Task) -> Iterator[None]:
        """Sets OpenTelemetry's current span while the task runs.

        Args:
            task: The task, with its `traceparent`.

        Yields:
            Nothing.
        """
        if task.traceparent is None:
            yield
            return
        try:
            from opentelemetry import context, trace
        except ImportError:
            yield
            return
        ids = ids_of(task.traceparent)
        flags = trace.TraceFlags(int(ids.is_sampled))
        span = trace.NonRecordingSpan(trace.SpanContext(ids.trace, ids.span, is_remote=True, trace_flags=flags))
        token = context.attach(trace.set_span_in_context(span))
        try:
            yield
        finally:
            context.detach(token)
