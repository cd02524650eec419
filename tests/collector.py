"""A collector of OpenTelemetry traces on loopback: what it is sent over HTTP, it decodes and keeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """A span as it was sent. Times in seconds since the epoch."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: float
    end: float
    attributes: dict[str, object]
    links: list[str]
    is_error: bool


class Collector:
    """What came, and where to send it."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}/v1/traces"
        self.spans: list[Span] = []

    def take(self, message: ExportTraceServiceRequest) -> None:
        for resource in message.resource_spans:
            service = {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Span(
                            service,
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano / 1e9,
                            span.end_time_unix_nano / 1e9,
                            {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes},
                            [link.span_id.hex() for link in span.links],
                            span.status.code == 2,
                        )
                    )

    def wait_for(self, trace_id: str, *names: str, timeout_s: float = 30) -> dict[str, Span]:
        """The spans of a trace by name, once all `names` are there."""
        deadline = time.monotonic() + timeout_s
        while not set(names) <= (found := {s.name: s for s in self.spans if s.trace_id == trace_id}).keys():
            assert time.monotonic() < deadline, (names, found.keys(), {s.name for s in self.spans})
            time.sleep(0.05)
        return found


@contextmanager
def collecting() -> Iterator[Collector]:
    """Runs a collector until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def check_trace(collector: Collector, trace_id: str, parent_id: str, path: str) -> dict[str, Span]:
    """Checks the spans of one call that gave tokens: who is within whom, in which order, linked to which steps."""
    spans = collector.wait_for(trace_id, path, "wire", "queue", "prefill", "decode")
    call, wire = spans[path], spans["wire"]
    assert call.parent_id == parent_id
    assert wire.parent_id == call.span_id
    parts = [spans[name] for name in ("queue", "prefill", "decode")]
    assert [part.parent_id for part in parts] == [wire.span_id] * 3
    assert {part.service for part in parts} == {"serve_app.engine"}
    times = [call.start, wire.start, parts[0].start, parts[1].start, parts[2].start, parts[2].end]
    assert times == sorted(times)
    assert call.end >= parts[2].start
    assert (parts[0].end, parts[1].end) == (parts[1].start, parts[2].start)
    steps = {span.span_id: span for span in collector.spans if span.name == "step"}
    assert spans["prefill"].links
    assert spans["decode"].links
    linked = [steps[link] for name in ("prefill", "decode") for link in spans[name].links]
    numbers = [int(str(step.attributes["step.number"])) for step in linked]
    assert numbers == sorted(set(numbers))
    assert all(step.trace_id != trace_id for step in linked)
    return spans
