"""What Prometheus would read, from the endpoint that Ray opens for it."""

import json
import socket
import time
from collections import Counter
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray.serve.context import _get_global_client

from serve_app.metrics import NUM_ROWS, NUM_TOKENS
from tests.api.server import ask
from tests.serve.conftest import TINY, deployment_of, wait_for_replicas

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, while it runs in this process


def scrape():
    """All samples of the tiny application that there are now."""
    samples = []
    for node in ray.nodes():
        if node["Alive"]:
            text = httpx.get(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics", trust_env=False, timeout=30).text
            samples += [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return [sample for sample in samples if sample.labels.get("application") == TINY]


def engine_replica():
    """The id of the one that there is."""
    deployments = _get_global_client().get_serve_details()["applications"][TINY]["deployments"]
    [replica] = deployments["Engine"]["replicas"]
    return replica["replica_id"]


def totals(name, tag):
    """A counter's values by a tag, over all replicas that ever were."""
    sums = Counter()
    for sample in scrape():
        if sample.name == f"ray_{name}_total":
            sums[sample.labels[tag]] += sample.value
    return sums


def wait_until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def send(deployed, body):
    """A call whose answer is not read; closing the socket is leaving."""
    url = urlsplit(deployed.url)
    connection = socket.create_connection((url.hostname, url.port))
    data = json.dumps(body).encode()
    head = f"POST /{TINY}/v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


LONG = {"prompt": "x", "max_tokens": 3500, "temperature": 0, "ignore_eos": True}


def test_br_125_gauges_return_to_zero_when_the_waiting_leave(deployed):
    def one_at_a_time(config):
        deployment_of(config, "Engine")["user_config"]["max_batch_size"] = 1

    def gauges():
        """Those of the replica that there is (Ray reports for a while those that are gone), and of Serve's own queues."""
        replica, found = engine_replica(), Counter()
        for sample in scrape():
            is_ours = sample.name in ("ray_serve_app_num_requests_waiting", "ray_serve_app_num_requests_running")
            if (is_ours and sample.labels["replica"] == replica) or sample.name == "ray_serve_deployment_queued_queries":
                assert sample.value >= 0
                found[sample.name] += sample.value
        return found

    deployed.deploy(one_at_a_time)
    wait_for_replicas("Engine", 1)
    try:
        with ExitStack() as callers:
            for _ in range(21):
                callers.enter_context(send(deployed, LONG))
            wait_until(lambda: gauges()["ray_serve_app_num_requests_waiting"] == 20)
            assert gauges()["ray_serve_app_num_requests_running"] == 1
        deployed.wait_until_idle()
        wait_until(lambda: not any(gauges().values()))
    finally:
        deployed.deploy()


def test_br_127_every_call_is_counted_once_by_its_ending_and_tokens_are_the_sums_of_usage(deployed):
    def counted():
        endings = totals("serve_app_calls", "ending")
        tokens = [sum(totals(f"serve_app_{kind}_tokens", "application").values()) for kind in ("prompt", "generation")]
        return endings, tokens

    def post(**fields):
        return ask(deployed.http, f"/{TINY}/v1/completions", {"prompt": "count me", "temperature": 0, **fields})

    endings_before, tokens_before = counted()
    text = post(max_tokens=40, ignore_eos=True).text
    usages = []
    for index in range(5):
        stopped = post(max_tokens=40, ignore_eos=True, stop=text[3])
        assert stopped.finish_reason == "stop"
        usages.append(stopped.usage)
        usages.append(post(max_tokens=3 + index, ignore_eos=True).usage)
        assert post(max_tokens=-1).status == 400
        caller = send(deployed, LONG | {"stream": True})
        assert caller.recv(15) == b"HTTP/1.1 200 OK"
        caller.close()
    for _ in range(2):
        late = deployed.http.post(f"/{TINY}/v1/completions", json=LONG, headers={"X-Request-Timeout-Seconds": "0.3"})
        assert late.status_code == 504
    expected = {"stop": 5, "length": 6, "invalid_request_error": 5, "disconnected": 5, "deadline": 2}
    wait_until(lambda: sum((counted()[0] - endings_before).values()) >= sum(expected.values()))
    endings, tokens = counted()
    assert endings - endings_before == expected
    usages.append({"prompt_tokens": 8, "completion_tokens": 40})
    done = [sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens")]
    grown = [now - before for now, before in zip(tokens, tokens_before, strict=True)]
    # of those who left and those whose time was over: their prompts, and what they were given
    assert grown[0] == done[0] + 7 * 1
    assert grown[1] > done[1]


def test_histograms_have_what_happened(deployed):
    """Each call once where calls are counted, each token where tokens are; the engine's own by its health check."""

    def values(suffix):
        """Of the engine replica that there is, and of all ingress replicas."""
        replica, found = engine_replica(), Counter()
        for sample in scrape():
            is_ours = sample.name.startswith("ray_serve_app_") and sample.name.endswith(suffix)
            if is_ours and (sample.labels["deployment"] == "Ingress" or sample.labels["replica"] == replica):
                found[sample.name.removeprefix("ray_serve_app_").removesuffix(suffix)] += sample.value
        return found

    wait_for_replicas("Engine", 1)
    time.sleep(3)  # what ended before has been told
    before, buckets_before = values("_count"), values("_bucket")
    for _ in range(3):
        assert ask(deployed.http, f"/{TINY}/v1/completions", {"prompt": "x", "max_tokens": 20, "ignore_eos": True}).text
    names = ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds")
    names += ("time_to_first_token_seconds", "e2e_request_latency_seconds")
    wait_until(lambda: all((values("_count") - before)[name] == 3 for name in names))
    grown, in_buckets = values("_count") - before, values("_bucket") - buckets_before
    assert grown["step_time_seconds"] == grown["step_batch_size"] == grown["iteration_tokens"] == 60
    # a row of one token is in every bucket
    assert in_buckets["step_batch_size"] == 60 * (len(NUM_ROWS) + 1)
    assert in_buckets["iteration_tokens"] == 60 * (len(NUM_TOKENS) + 1)
    assert 0 < grown["inter_token_latency_seconds"] <= 57
