"""Traces over real replicas, in two processes, as a collector gets them."""

import httpx
import pytest

from tests.api.server import ask
from tests.collector import check_trace

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, while it runs in this process

TRACE, PARENT = f"{0xABC:032x}", "00f067aa0ba902b7"


def test_a_trace_leads_from_the_caller_through_both_replicas(deployed, collector):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with httpx.Client(base_url=deployed.url, timeout=60, trust_env=False, headers=headers) as http:
        body = {"model": "tiny-llama", "prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, "stream": True}
        assert ask(http, "/tiny/v1/completions", body).finish_reason == "length"
    spans = check_trace(collector, TRACE, PARENT, "POST completions")
    assert spans["POST completions"].attributes["usage.completion_tokens"] == 6
    assert {span.service for span in collector.spans} == {"serve_app.ingress", "serve_app.engine"}
