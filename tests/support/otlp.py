"""A receiver of OpenTelemetry spans over HTTP, in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

__all__ = ["Receiver", "Span", "receiver"]


@dataclasses.dataclass(frozen=True)
class Span:
    """A span that arrived. Ids are hexadecimal, and times are in seconds."""

    name: str
    trace: str
    id: str
    parent: str
    started: float
    ended: float
    outcome: str
    error: str
    attributes: dict[str, Any] = dataclasses.field(hash=False)
    service: str = ""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace}-{self.id}-01"


class Receiver:
    """The spans that have arrived, in this order."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.url = ""

    def named(self, name: str, **attributes: Any) -> list[Span]:
        """The spans with this name and these attributes, whose names begin with `stagecrew.`."""
        wanted = {f"stagecrew.{key}": value for key, value in attributes.items()}
        return [span for span in self.spans if span.name == name and wanted.items() <= span.attributes.items()]

    def _add(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = next(
                (one.value.string_value for one in resource.resource.attributes if one.key == "service.name"), ""
            )
            for scope in resource.scope_spans:
                self.spans += [_span(span, service) for span in scope.spans]


def _span(span: Any, service: str) -> Span:
    attributes = {one.key: _value(one.value) for one in span.attributes}
    return Span(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        started=span.start_time_unix_nano / 1e9,
        ended=span.end_time_unix_nano / 1e9,
        outcome=str(attributes.get("stagecrew.outcome", "")),
        error=span.status.message,
        attributes=attributes,
        service=service,
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)


@contextlib.contextmanager
def receiver() -> Iterator[Receiver]:
    """A receiver on a free port of the loopback interface."""
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found._add(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
