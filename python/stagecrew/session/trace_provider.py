"""OpenTelemetry's objects for `tracing`: a provider that exports over OTLP, and ids that are known before a span."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Final

from stagecrew.observability.traceparent import TraceIds

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["chosen_ids", "context_of_environment", "otlp_provider"]

#: The maximum number of spans that wait for their export.
_MAX_QUEUED: Final = 20000


def otlp_provider(service: str) -> TracerProvider:
    """A provider that exports over OTLP. The environment variables `OTEL_*` configure it."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(
        resource=Resource.create({} if named else {"service.name": service}), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), max_queue_size=_MAX_QUEUED))
    return provider


def context_of_environment(empty: Context) -> Context:
    """The context in the environment variable `TRACEPARENT`, if it is set and valid."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {key.lower(): os.environ[key] for key in ("TRACEPARENT", "TRACESTATE") if key in os.environ}
    return TraceContextTextMapPropagator().extract(carrier, empty)


def chosen_ids() -> Any:
    """A generator of random ids, except for the ids that the calling thread has chosen."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class ChosenIds(RandomIdGenerator):
        def __init__(self) -> None:
            self._thread = threading.local()

        def choose(self, ids: TraceIds | None) -> None:
            self._thread.ids = ids

        def generate_span_id(self) -> int:
            ids: TraceIds | None = getattr(self._thread, "ids", None)
            return super().generate_span_id() if ids is None else ids.span

        def generate_trace_id(self) -> int:
            ids: TraceIds | None = getattr(self._thread, "ids", None)
            return super().generate_trace_id() if ids is None else ids.trace

    return ChosenIds()
