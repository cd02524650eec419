"""Traces of calls, as a collector gets them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from serve_app.config import TracingConfig
from serve_app.engine.engine import BatchInferenceEngine
from serve_app.tracing import EngineTracing, open_provider
from tests.api.server import MODEL, serving
from tests.collector import check_trace, collecting
from tests.fakes import ScriptedRunner

PARENT = "00f067aa0ba902b7"


def trace_headers(number, *, is_sampled=True):
    return {"traceparent": f"00-{number:032x}-{PARENT}-0{int(is_sampled)}"}


@contextmanager
def traced(runner, **settings):
    """A server whose two halves report to a collector; all spans are there when the block of the server ends."""
    with collecting() as collector:
        config = TracingConfig(endpoint=collector.endpoint, **settings)
        ingress = open_provider(config, "ingress")
        with serving(runner, tracer=ingress.get_tracer("serve_app")) as server:
            engine = EngineTracing(open_provider(config, "engine"), server.engine.take_traces)

            def flush():
                ingress.force_flush()
                engine.close()
                return collector

            yield server, flush
        ingress.shutdown()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_callers_trace_goes_through_to_the_steps(stream):
    with traced(ScriptedRunner(step_s=0.002)) as (server, flush):

        def ask(number):
            body = {"model": MODEL, "prompt": f"call {number}", "max_tokens": 5, "stream": stream, "temperature": 0}
            return server.http.post("/v1/completions", json=body, headers=trace_headers(number)).status_code

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(ask, range(1, 5))) == [200] * 4
        collector = flush()
        for number in range(1, 5):
            spans = check_trace(collector, f"{number:032x}", PARENT, "POST completions")
            call = spans["POST completions"]
            assert call.attributes["usage.completion_tokens"] == 5
            assert call.attributes["ending"] == "length"
            assert call.attributes["http.response.status_code"] == 200
            assert spans["decode"].attributes["output.tokens"] == 5
            assert len(spans["decode"].links) == 4
            assert not call.is_error
        steps = [span for span in collector.spans if span.name == "step"]
        assert len({span.attributes["step.number"] for span in steps}) == len(steps)  # one span, however many shared it
        assert len(steps) <= server.engine.stats().num_steps
        assert sum(span.attributes["step.tokens"] for span in steps) <= server.engine.stats().num_computed_tokens


def test_every_choice_has_its_own_spans_within_the_call():
    with traced(ScriptedRunner()) as (server, flush):
        body = {"model": MODEL, "prompt": "x", "max_tokens": 3, "n": 3}
        assert server.http.post("/v1/completions", json=body, headers=trace_headers(7)).status_code == 200
        spans = [span for span in flush().spans if span.trace_id == f"{7:032x}"]
        for name in ("wire", "queue", "prefill", "decode"):
            assert sum(span.name == name for span in spans) == 3


def test_what_the_caller_or_the_ratio_decided_holds():
    with traced(ScriptedRunner(), sample_ratio=0.0) as (server, flush):
        body = {"model": MODEL, "prompt": "x", "max_tokens": 3}
        server.http.post("/v1/completions", json=body)
        server.http.post("/v1/completions", json=body, headers=trace_headers(1, is_sampled=False))
        server.http.post("/v1/completions", json=body, headers={"traceparent": "nonsense"})
        server.http.post("/v1/completions", json=body, headers=trace_headers(2))
        assert {span.trace_id for span in flush().spans if span.name != "step"} == {f"{2:032x}"}


def test_refused_and_broken_calls_are_errors_in_their_traces():
    runner = ScriptedRunner()
    with traced(runner) as (server, flush):
        server.http.post("/v1/completions", json={"model": "nope", "prompt": "x"}, headers=trace_headers(1))

        def fail(plan):
            raise RuntimeError("the step is broken")

        runner.before_step = fail
        server.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=trace_headers(2))
        server.http.get("/no/such/path", headers=trace_headers(3))
        server.http.get("/health", headers=trace_headers(4))
        collector = flush()
        by_trace = {n: {s.name: s for s in collector.spans if s.trace_id == f"{n:032x}"} for n in range(1, 5)}
        assert by_trace[1].keys() == {"POST completions"}
        assert by_trace[1]["POST completions"].is_error
        assert by_trace[2].keys() == {"POST completions", "wire", "queue", "prefill"}
        assert by_trace[2]["POST completions"].is_error
        assert all(span.is_error for span in by_trace[3].values())
        assert not by_trace[4]


def test_without_a_trace_the_engine_keeps_nothing():
    with serving(ScriptedRunner()) as server:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 3}
        server.http.post("/v1/completions", json=body, headers=trace_headers(1))
        engine: BatchInferenceEngine = server.engine
        assert list(engine.take_traces()) == []
        assert server.client.requests[0].traceparent is None
