"""The ingress's part of a trace: a span for the call, and one for each engine call that it makes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from opentelemetry.trace import SpanKind, StatusCode, Tracer, set_span_in_context
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.engine.request import Delivery, FinishReason, UserRequest
from serve_app.ingress.call_log import record_of
from serve_app.ingress.engine_client import EngineClient, WrappingClient
from serve_app.tracing import PROPAGATOR

PROBES = ("/health", "/ready")
FINE = (*FinishReason, "ok")


class TraceCalls:
    """Middleware, outside the call log: a span per call, from its first byte to its end.

    Args:
        app: what is behind it.
        tracer: makes the spans.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the call."""
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        parent = PROPAGATOR.extract(dict(Headers(scope=scope)))
        with self._tracer.start_as_current_span("call", parent, SpanKind.SERVER, record_exception=False) as span:
            try:
                await self._app(scope, receive, send)
            finally:
                record = record_of(Request(scope))
                if "endpoint" in scope:  # a path that is not ours would be one more name for everybody who tries one
                    span.update_name(f"{record.method} {scope['endpoint'].__name__}")
                told = {
                    "url.path": record.path,
                    "http.request.method": record.method,
                    "http.response.status_code": record.status,
                    "request.id": record.request_id,
                    "key": record.key,
                    "model": record.model,
                    "stream": record.stream,
                    "ending": record.ending,
                    "usage.prompt_tokens": record.prompt_tokens,
                    "usage.completion_tokens": record.completion_tokens,
                }
                span.set_attributes({name: value for name, value in told.items() if value is not None})
                if record.ending not in FINE:
                    span.set_status(StatusCode.ERROR, record.ending)


class TracedClient(WrappingClient):
    """An engine client whose calls are spans, and say so to the engine.

    Args:
        client: makes the calls.
        tracer: makes the spans, within the call's.
    """

    def __init__(self, client: EngineClient, tracer: Tracer) -> None:
        super().__init__(client)
        self._tracer = tracer

    async def generate(self, request: UserRequest) -> AsyncGenerator[list[Delivery], None]:
        """See `EngineClient.generate`."""
        span = self._tracer.start_span("wire", kind=SpanKind.CLIENT, attributes={"request.id": request.request_id})
        if span.is_recording():
            carrier: dict[str, str] = {}
            PROPAGATOR.inject(carrier, set_span_in_context(span))
            request = replace(request, traceparent=carrier["traceparent"])
        try:
            async with aclosing(self._client.generate(request)) as batches:
                async for deliveries in batches:
                    yield deliveries
        finally:
            span.end()
