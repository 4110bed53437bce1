"""Traces without Spark: the ids of spans, the choice of spans, and the export through a provider of the user."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

import stagecrew
from stagecrew.observability import spans
from stagecrew.observability.spans import FIRST, SLOWEST, EndedSpan, SlowestSpans
from stagecrew.observability.traceparent import TraceIds, derived, ids_of, task_traceparent, traceparent_of
from stagecrew.session import tracing
from stagecrew.session.tracing import Tracing

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Jvm:
    """Ended spans, as the driver's JVM has them."""

    def __init__(self, *ended: dict[str, Any]) -> None:
        self.ended, self.dropped = list(ended), 0

    def take_spans(self, most: int) -> dict[str, Any]:
        taken, self.ended = self.ended[:most], self.ended[most:]
        return {"spans": taken, "dropped": self.dropped}


def ended_in_jvm(topology: str, kind: str, name: str = "", outcome: str = "ok", attempt: int = -1) -> dict[str, Any]:
    return {
        "topology": topology, "executor": "1", "kind": kind, "name": name, "started": 1000, "ended": 2000,
        "outcome": outcome, "error": "", "attempt": attempt, "stage": 3, "stageAttempt": 0, "partition": 5,
    }  # fmt: skip


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Tracing with a provider of the user, whose spans stay in this process."""
    yield from traced(monkeypatch, TracerProvider(shutdown_on_exit=False))


def traced(monkeypatch: pytest.MonkeyPatch, provider: TracerProvider) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    tracing.start("service")
    try:
        yield exporter
    finally:
        if (current := tracing.current()) is not None:
            current.stop()
    assert spans.exporter is None


def started() -> Tracing:
    current = tracing.current()
    assert current is not None
    return current


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


# -- Ids


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_a_context_is_unchanged_as_text(trace_id: int, span_id: int, is_sampled: bool) -> None:
    """A context is the same after it was written as text and read."""
    ids = TraceIds(trace_id, span_id, is_sampled)
    text = traceparent_of(ids)
    assert len(text) == 55
    assert ids_of(text) == ids


def test_each_attempt_has_an_id_that_every_process_computes() -> None:
    """The ids of attempts differ, belong to the trace of the topology, and do not depend on the process."""
    ids = {task_traceparent(CALLER, attempt) for attempt in range(1000)}
    assert len(ids) == 1000
    assert {ids_of(one).trace for one in ids} == {ids_of(CALLER).trace}
    assert task_traceparent(CALLER, 7) == "00-0af7651916cd43dd8448eb211c80319c-1575eb8234adde9f-01"
    other = traceparent_of(ids_of(CALLER)._replace(span=1))
    assert derived(CALLER, "x") == traceparent_of(ids_of(derived(other, "x")))  # nested topologies share a trace


# -- The choice of spans


@given(st.lists(st.integers(0, 1000), max_size=400))
def test_the_first_and_the_slowest_spans_are_exported(durations: list[int]) -> None:
    """The first 100 spans are exported, and the 100 slowest of the others; the running ones are lost."""
    added: list[EndedSpan] = []
    now = 0
    chosen = SlowestSpans(
        lambda key, started, ended, outcome: EndedSpan(str(key), CALLER, started, ended, outcome), lambda: now
    )
    before, spans.exporter = spans.exporter, type("", (), {"add": staticmethod(added.append)})()
    try:
        for key, duration in enumerate(durations):
            chosen.begin(key)
            now += duration
            chosen.end(key, "ok")
            chosen.end(key, "ok")  # a second end changes nothing
        assert [span.name for span in added] == [str(key) for key in range(min(FIRST, len(durations)))]
        chosen.begin(1000)
        now += 2000
        chosen.close()
        chosen.close()
    finally:
        spans.exporter = before
    found = sorted(span.ended - span.started for span in added)
    expected = [*durations, 2000]
    assert found == sorted(expected[:FIRST] + sorted(expected[FIRST:])[-SLOWEST:])
    assert [span.name for span in added if span.outcome == "lost"] == ["1000"]


def test_without_an_exporter_nothing_happens() -> None:
    """`span` does nothing, and topologies have no context, while tracing is off."""
    assert spans.exporter is None
    with spans.span("step load", {}):
        assert spans.topology_traceparent("a") is None


# -- The export


def test_spans_nest_as_topologies_do(exported: InMemorySpanExporter) -> None:
    """A topology belongs to the caller's span, or to the outer topology; the application has no parent."""
    current = started()
    current.connect(Jvm())
    current.begin("a", "outer", None)
    current.begin("b", "inner", "a")
    caller = trace.NonRecordingSpan(trace.SpanContext(5, 6, False, trace.TraceFlags(1)))
    with trace.use_span(caller):
        assert ids_of(current.begin("c", "called", None)).trace == 5
    token = current.enter("a")
    with spans.span("commit", {"stagecrew.commit_id": "day-1"}, "b"):
        pass
    current.leave(token)
    with spans.span("commit elsewhere", {}, "b"):
        pass
    current.end("b")
    current.end("b")
    current.end("a", ValueError("no rows"))
    current.stop()
    found = by_name(exported)
    assert parent_of(found["application"]) is None
    assert parent_of(found["topology outer"]) == id_of(found["application"])
    assert parent_of(found["topology inner"]) == id_of(found["topology outer"])
    assert parent_of(found["topology called"]) == 6
    assert parent_of(found["commit"]) == id_of(found["topology outer"])  # the current span of the thread
    assert parent_of(found["commit elsewhere"]) == id_of(found["topology inner"])
    assert found["topology outer"].status.description == "ValueError: no rows"
    assert len(exported.get_finished_spans()) == 6


def test_spans_of_the_jvm_get_their_topology_as_parent(exported: InMemorySpanExporter) -> None:
    """Tasks have computed ids. A topology that has ended is still known; an unknown one is the application."""
    current = started()
    jvm = Jvm()
    current.connect(jvm)
    traceparent = current.begin("a", "load", None)
    current.end("a")
    jvm.ended = [
        ended_in_jvm("a", "task", attempt=7),
        ended_in_jvm("a", "open", "pool", "lost"),
        ended_in_jvm("execution-1", "close", "pool"),
    ]
    current.collect()
    current.stop()
    found = by_name(exported)
    assert id_of(found["task"]) == ids_of(task_traceparent(traceparent, 7)).span
    assert parent_of(found["task"]) == parent_of(found["open pool"]) == ids_of(traceparent).span
    assert (found["task"].start_time, found["task"].end_time) == (1_000_000_000, 2_000_000_000)
    assert found["open pool"].attributes is not None
    assert found["open pool"].attributes["stagecrew.outcome"] == "lost"
    assert found["open pool"].status.description == "its process or its executor was lost"
    assert parent_of(found["close pool"]) == id_of(found["application"])


def test_a_trace_that_is_not_sampled_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the sampler drops the trace, tasks get no context, and nothing is exported."""
    for exporter in traced(monkeypatch, TracerProvider(sampler=ParentBased(ALWAYS_OFF), shutdown_on_exit=False)):
        current = started()
        current.connect(Jvm(ended_in_jvm("a", "task", attempt=7), ended_in_jvm("x", "task", attempt=8)))
        assert current.begin("a", "load", None) == ""
        assert spans.topology_traceparent("a") is None
        current.collect()
        current.stop()
        assert exporter.get_finished_spans() == ()


def test_a_jvm_that_has_ended_is_harmless(exported: InMemorySpanExporter) -> None:
    """If the JVM is gone, the spans that Python knows are still exported."""

    class Gone:
        def take_spans(self, most: int) -> dict[str, Any]:
            raise ConnectionError

    current = started()
    current.connect(Gone())
    current.stop()
    assert list(by_name(exported)) == ["application"]


def test_too_many_waiting_spans_are_dropped_and_counted(
    exported: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The number of waiting spans is bounded. A warning names how many were dropped."""
    current = started()
    jvm = Jvm()
    jvm.dropped = 3
    for number in range(10_002):
        current.add(EndedSpan("x", CALLER, number, number, "ok"))
    current.connect(jvm)
    current.stop()
    assert len(exported.get_finished_spans()) == 10_001
    assert "5 spans were not exported" in caplog.text


def test_nothing_is_left_after_the_end(exported: InMemorySpanExporter) -> None:
    """The thread ends, and a second end has no effect."""
    current = started()
    current.connect(Jvm())
    current.stop()
    current.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "stagecrew-tracing"]
    assert tracing.current() is None


# -- In tasks


def task(traceparent: str | None) -> stagecrew.Task:
    return stagecrew.Task("app", "a", "a-1", "1", 3, 0, 5, 41, 0, traceparent)


def test_the_span_of_a_task_is_current_while_it_runs() -> None:
    """`TraceContext` makes the task's span the current one, so that instrumented libraries continue the trace."""
    with stagecrew.TraceContext().decorate(task(CALLER)):
        context = trace.get_current_span().get_span_context()
        assert (context.trace_id, context.span_id) == ids_of(CALLER)[:2]
        assert context.is_remote
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_task_without_a_trace_or_without_the_package_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`TraceContext` does nothing if tracing is off, or if OpenTelemetry is not installed on the executor."""
    with stagecrew.TraceContext().decorate(task(None)):
        assert not trace.get_current_span().get_span_context().is_valid
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with stagecrew.TraceContext().decorate(task(CALLER)):
        pass
