"""Exports spans with OpenTelemetry's SDK, on the driver, if `spark.stagecrew.tracing` is set.

Executors and workers export nothing, and need no package and no credentials for it. The executors' JVMs report hooks,
Spark's listener bus reports tasks, and the driver's Python knows the rest.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from stagecrew._version import __version__
from stagecrew.bounded import Bounded
from stagecrew.errors import ConfigurationError
from stagecrew.observability.error_summary import error_text
from stagecrew.observability.spans import EndedSpan, set_exporter
from stagecrew.observability.traceparent import TraceIds, ids_of, task_traceparent, traceparent_of
from stagecrew.session.trace_provider import chosen_ids, context_of_environment, otlp_provider

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

__all__ = ["APPLICATION_SPAN", "SpanSource", "Tracing", "current", "start"]

_log = logging.getLogger("stagecrew")

#: The id under which the span of the application is kept, like those of topologies.
APPLICATION_SPAN: Final = "application"
#: How often the driver collects ended spans, in seconds, and how many it takes at a time.
_PERIOD: Final = 1.0
_BATCH: Final = 1000
#: How many ended spans may wait in this process. If there are more, the oldest are dropped.
_MAX_WAITING: Final = 10000
#: How long the last export may take, in seconds.
_STOP_TIMEOUT: Final = 5.0
#: How many ended topologies are remembered. Spans of their tasks may arrive late.
_REMEMBERED: Final = 1000
_MAX_ERROR: Final = 1000
_LOST: Final = "its process or its executor was lost"


class SpanSource(Protocol):
    """The JVM, from which ended spans are collected."""

    def take_spans(self, most: int) -> dict[str, Any]:
        """Removes at most this many ended spans. Returns them, and how many were dropped since the last call."""


class Tracing:
    """The spans of this process: a `SpanExporter`. Thread-safe.

    It uses the global tracer provider of OpenTelemetry if that is the SDK's. Otherwise it creates one that exports over
    OTLP, and that the environment variables `OTEL_*` configure.
    """

    def __init__(self, service: str) -> None:
        self._own_provider: TracerProvider | None = None
        try:
            from opentelemetry import context, trace
            from opentelemetry.sdk.trace import TracerProvider

            provider = trace.get_tracer_provider()
            if not isinstance(provider, TracerProvider):
                provider = self._own_provider = otlp_provider(service)
        except ImportError as error:
            raise ConfigurationError(
                "spark.stagecrew.tracing=true needs OpenTelemetry's SDK on the driver: run pip install "
                f"'stagecrew[otel]', or remove the setting ({error_text(error)})"
            ) from error
        self._context, self._trace = context, trace
        self._ids = chosen_ids()
        self._tracer = provider.get_tracer("stagecrew", __version__)
        self._tracer.id_generator = self._ids  # type: ignore[attr-defined]
        #: Around everything in this process: the span of a stored job, or the context of `TRACEPARENT`.
        self._root: Context = context_of_environment(context.Context())
        #: The spans of active topologies and of the application, and the contexts of ended ones, by id.
        self._lock = threading.Lock()
        self._active: dict[str, Span] = {}
        self._ended: Bounded[str, str] = Bounded(_REMEMBERED)
        self._waiting: deque[EndedSpan] = deque(maxlen=_MAX_WAITING)
        self._dropped = 0
        self._source: SpanSource | None = None
        self._collecting = threading.Lock()
        self._stops = threading.Event()
        self._thread: threading.Thread | None = None

    # -- Beginning and end

    def connect(self, source: SpanSource) -> str:
        """Begins the span of the application, and collects the spans of this JVM. Returns the span's `traceparent`."""
        self._source = source
        traceparent = self.begin(APPLICATION_SPAN, "application", None)
        if self._thread is None:
            self._thread = threading.Thread(target=self._collect_often, name="stagecrew-tracing", daemon=True)
            self._thread.start()
        return traceparent

    def disconnect(self) -> None:
        """Ends the span of the application. Call it before the JVM ends. A second call has no effect."""
        self.collect()
        self._source = None
        for id_ in reversed(list(self._active)):  # inner ones first; the application began before all others
            self.end(id_)

    def stop(self) -> None:
        """Exports the waiting spans, and ends. Takes at most 10 s."""
        global _current
        self.disconnect()
        self._stops.set()
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT)
        set_exporter(None)
        _current = None
        if self._dropped:
            _log.warning("%d spans were not exported, because too many ended at the same time", self._dropped)
        if (provider := self._own_provider) is not None:
            stopping = threading.Thread(target=provider.shutdown, name="stagecrew-tracing-stop", daemon=True)
            stopping.start()
            stopping.join(_STOP_TIMEOUT)
            if stopping.is_alive():
                _log.warning("the last spans could not be exported within %g s", _STOP_TIMEOUT)

    def begin_root(self, name: str, traceparent: str, started: int, attributes: Mapping[str, Any]) -> Span:
        """Begins a root span with these ids, which are known to other processes. It contains all others from now on."""
        span = self._start(name, self._context.Context(), attributes, started, traceparent)
        self._root = self._trace.set_span_in_context(span)
        return span

    def end_root(self, span: Span, outcome: str, error: str) -> None:
        """Ends the span that `begin_root` returned, after all other spans."""
        self.disconnect()
        self._finish(span, outcome, error)

    # -- Topologies

    def begin(self, id_: str, name: str, outer: str | None) -> str:
        """Begins the span of a topology. Returns its `traceparent`, or an empty text if it is not sampled.

        Its parent is the current span of the thread, or without one, the span of the outer topology.
        """
        label = name if id_ == APPLICATION_SPAN else f"topology {name}"
        attributes = {} if id_ == APPLICATION_SPAN else {"stagecrew.topology": id_}
        self._active[id_] = self._start(label, self._parent(outer), attributes)
        return self.topology(id_) or ""

    def end(self, id_: str, error: BaseException | None = None) -> None:
        """Ends the span of a topology. Has no effect if it has none."""
        with self._lock:
            if (span := self._active.get(id_)) is None:
                return
            self._ended[id_] = self.topology(id_) or ""
            del self._active[id_]
        self._finish(span, "ok" if error is None else "failed", "" if error is None else error_text(error))

    def enter(self, id_: str) -> object:
        """Makes the span of a topology the current span of the thread. Returns a token for `leave`."""
        span = self._active.get(id_)
        return None if span is None else self._context.attach(self._trace.set_span_in_context(span))

    def leave(self, token: Any) -> None:
        """Undoes `enter`."""
        if token is not None:
            self._context.detach(token)

    def _parent(self, topology: str | None) -> Context:
        here = self._context.get_current()
        if self._trace.get_current_span(here).get_span_context().is_valid:
            return here
        for id_ in (topology, APPLICATION_SPAN):
            if id_ is not None and (span := self._active.get(id_)) is not None:
                return self._trace.set_span_in_context(span)
        return self._root

    # -- As a `SpanExporter`

    def topology(self, id_: str) -> str | None:
        """See `SpanExporter`."""
        if (span := self._active.get(id_)) is None:
            return self._ended.get(id_) or None
        context = span.get_span_context()
        if not (context.is_valid and context.trace_flags.sampled):
            return None
        return traceparent_of(TraceIds(context.trace_id, context.span_id, True))

    def add(self, ended: EndedSpan) -> None:
        """See `SpanExporter`."""
        self._dropped += len(self._waiting) == _MAX_WAITING
        self._waiting.append(ended)

    @contextlib.contextmanager
    def span(self, name: str, topology: str, attributes: Mapping[str, Any]) -> Iterator[None]:
        """See `SpanExporter`."""
        parent = self._parent(topology)
        span = self._start(name, parent, attributes)
        token = self._context.attach(self._trace.set_span_in_context(span, parent))
        try:
            yield
        except BaseException as error:
            self._finish(span, "failed", error_text(error))
            raise
        else:
            self._finish(span, "ok", "")
        finally:
            self._context.detach(token)

    # -- Ended spans

    def _collect_often(self) -> None:
        while not self._stops.wait(_PERIOD):
            self.collect()

    def collect(self) -> None:
        """Exports the spans that have ended since the last call. Never raises."""
        with self._collecting:
            try:
                while (source := self._source) is not None:
                    taken = source.take_spans(_BATCH)
                    self._dropped += taken["dropped"]
                    for span in taken["spans"]:
                        self._export_jvm_span(span)
                    if len(taken["spans"]) < _BATCH:
                        break
            except Exception as error:  # the JVM may have ended
                _log.debug("the spans of the JVM could not be collected: %s", error)
            while self._waiting:
                ended = self._waiting.popleft()
                self._export(ended)

    def _export_jvm_span(self, span: dict[str, Any]) -> None:
        parent = self.topology(span["topology"])
        if parent is None:
            if span["topology"] in self._active or span["topology"] in self._ended:
                return  # the topology is not sampled
            if (parent := self.topology(APPLICATION_SPAN)) is None:
                return
        attributes: dict[str, Any] = {"stagecrew.executor": span["executor"]}
        name, own = f"{span['kind']} {span['name']}", ""
        if span["kind"] == "task":
            name, own = "task", task_traceparent(parent, span["attempt"])
            attributes |= {
                "stagecrew.attempt": span["attempt"],
                "stagecrew.stage": span["stage"],
                "stagecrew.stage_attempt": span["stageAttempt"],
                "stagecrew.partition": span["partition"],
            }
        started, ended = (span[key] * 1_000_000 for key in ("started", "ended"))
        error = span["error"] or (_LOST if span["outcome"] == "lost" else "")
        self._export(EndedSpan(name, parent, started, ended, span["outcome"], error, attributes, own))

    def _export(self, ended: EndedSpan) -> None:
        ids = ids_of(ended.parent)
        flags = self._trace.TraceFlags(int(ids.is_sampled))
        parent = self._trace.SpanContext(ids.trace, ids.span, is_remote=False, trace_flags=flags)
        context = self._trace.set_span_in_context(self._trace.NonRecordingSpan(parent), self._context.Context())
        span = self._start(ended.name, context, ended.attributes, ended.started, ended.own)
        self._finish(span, ended.outcome, ended.error, ended.ended)

    def _start(
        self, name: str, parent: Context, attributes: Mapping[str, Any], started: int | None = None, own: str = ""
    ) -> Span:
        """Starts a span, now or at a time in nanoseconds. `own` is its `traceparent` if others know it already."""
        self._ids.choose(ids_of(own) if own else None)
        try:
            return self._tracer.start_span(name, parent, attributes=dict(attributes), start_time=started)
        finally:
            self._ids.choose(None)

    def _finish(self, span: Span, outcome: str, error: str, ended: int | None = None) -> None:
        span.set_attribute("stagecrew.outcome", outcome)
        if outcome != "ok":
            span.set_status(self._trace.StatusCode.ERROR, error[:_MAX_ERROR] or None)
        span.end(ended)


#: The tracing of this process, or None.
_current: Tracing | None = None


def current() -> Tracing | None:
    """The tracing of this process, or None if it is off."""
    return _current


def start(service: str) -> Tracing:
    """Starts tracing in this process. `service` is the name of the application, for stagecrew's own provider.

    Raises:
        ConfigurationError: OpenTelemetry's SDK is not installed.
    """
    global _current
    _current = Tracing(service)
    set_exporter(_current)
    return _current
