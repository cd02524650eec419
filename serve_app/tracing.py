"""OpenTelemetry traces: what a call spent its time on, and with which steps of the engine. Off unless configured.

A call is a span of the ingress, a child of the caller's own where it sends a `traceparent`. Within it `wire` is the call of
an engine replica, and within that the replica's own `queue`, `prefill` and `decode`: what they leave of it is transport.
The replica's `step` spans are traces of their own, because many requests share them; prefill and decode link to them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, SpanContext, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serve_app.config import TracingConfig
from serve_app.engine.timing import RequestTrace, StepTrace

Attributes = dict[str, str | int]

PROPAGATOR = TraceContextTextMapPropagator()
EXPORT_PERIOD_S = 1.0
MAX_KNOWN_STEPS = 4096
"""Steps whose spans requests that end later may still link to; older ones get a second span."""

logger = logging.getLogger(__name__)


def open_provider(config: TracingConfig, role: str, exporter: SpanExporter | None = None) -> TracerProvider:
    """A provider of tracers whose spans go to the configured collector.

    Args:
        role: `ingress` or `engine`.
        exporter: instead of the collector's.
    """
    # what a caller's trace decided holds; others are sampled by the ratio
    sampler = ParentBased(TraceIdRatioBased(config.sample_ratio if role == "ingress" else 1.0))
    provider = TracerProvider(resource=Resource.create({"service.name": f"serve_app.{role}"}), sampler=sampler)
    provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=config.endpoint)))
    return provider


class EngineTracing:
    """Makes spans of what an engine noted, in a thread of its own.

    Args:
        provider: see `open_provider`; shut down by `close`.
        take: gives what ended since it was called before (`BatchInferenceEngine.take_traces`).
    """

    def __init__(self, provider: TracerProvider, take: Callable[[], Iterable[RequestTrace]]) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("serve_app")
        self._take = take
        self._steps: OrderedDict[int, SpanContext] = OrderedDict()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Exports what is left, and stops."""
        self._is_closed.set()
        self._thread.join()
        self._provider.shutdown()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closed.wait(EXPORT_PERIOD_S)
            try:
                self._export(self._take())
            except Exception:  # traces are lost, and nothing else
                logger.exception("traces were not exported")

    def _export(self, traces: Iterable[RequestTrace]) -> None:
        offset_s = time.time() - time.monotonic()

        def span(name: str, parent: Context, start: float, end: float, links: list[Link], attributes: Attributes) -> None:
            made = self._tracer.start_span(
                name, parent, links=links, attributes=attributes, start_time=int((start + offset_s) * 1e9)
            )
            made.end(int((end + offset_s) * 1e9))

        for trace in traces:
            parent = PROPAGATOR.extract({"traceparent": trace.traceparent})
            links = [(step, Link(self._step(step, offset_s))) for step in trace.steps]
            first = trace.first_token_at or trace.ended_at
            prefill = [link for step, link in links if step.started_at < first]
            decode = [link for step, link in links if step.started_at >= first]
            request: Attributes = {"request.id": trace.request_id}
            span("queue", parent, trace.arrived_at, trace.started_at or trace.ended_at, [], request)
            if trace.started_at:
                tokens: Attributes = {
                    "prompt.tokens": trace.num_prompt_tokens,
                    "prompt.cached_tokens": trace.num_cached_tokens,
                }
                span("prefill", parent, trace.started_at, first, prefill, request | tokens)
            if trace.first_token_at:
                ending: Attributes = {"output.tokens": trace.num_output_tokens, "ending": trace.ending}
                span("decode", parent, trace.first_token_at, trace.ended_at, decode, request | ending)

    def _step(self, step: StepTrace, offset_s: float) -> SpanContext:
        """The context of a step's span, which the first request that took part in it makes."""
        if step.number not in self._steps:
            attributes = {"step.number": step.number, "step.rows": step.num_rows, "step.tokens": step.num_tokens}
            started_at, ended_at = (int((at + offset_s) * 1e9) for at in (step.started_at, step.ended_at))
            span = self._tracer.start_span("step", Context(), attributes=attributes, start_time=started_at)
            span.end(ended_at)
            self._steps[step.number] = span.get_span_context()
            if len(self._steps) > MAX_KNOWN_STEPS:
                self._steps.popitem(last=False)
        return self._steps[step.number]
