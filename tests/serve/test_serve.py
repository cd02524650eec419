"""The whole: real Ray Serve, real HTTP, the real YAML."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import ray
from ray import serve
from ray.serve.context import _get_global_client

from tests.api.server import ask, read_events
from tests.serve.conftest import TINY, application_of, deployment_of

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, while it runs in this process
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def tiny(deployed, prompt, begun=None, **fields):
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
    return ask(deployed.http, f"/{TINY}/v1/completions", body, begun)


def test_the_question_of_the_readme_is_answered(deployed):
    body = {"model": "smollm2-135m-instruct", "messages": QUESTION, "stream": True}
    assert "Paris" in ask(deployed.http, "/v1/chat/completions", body).text


def test_openai_client(deployed):
    client = openai.OpenAI(base_url=f"{deployed.url}/v1", api_key="none", max_retries=0)
    with client:
        stream = client.chat.completions.create(
            model="smollm2-135m-instruct", messages=QUESTION, temperature=0, max_tokens=16, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        whole = client.chat.completions.create(
            model="smollm2-135m-instruct", messages=QUESTION, temperature=0, max_tokens=16
        )
        assert text == whole.choices[0].message.content == "The capital of France is Paris."
        assert whole.choices[0].finish_reason == "stop"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="nope", messages=QUESTION)
        with pytest.raises(openai.BadRequestError) as long:
            client.completions.create(model="smollm2-135m-instruct", prompt=[5] * 9000)
        assert long.value.code == "context_length_exceeded"


def test_a_deadline_ends_a_call_with_an_answer(deployed):
    """Serve knows that header too, and would cut the connection."""
    body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}
    headers = {"X-Request-Timeout-Seconds": "0.5", "X-Request-Disconnect-Disabled": "?1"}
    whole = deployed.http.post(f"/{TINY}/v1/completions", json=body, headers=headers)
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline_exceeded")
    streamed = deployed.http.post(f"/{TINY}/v1/completions", json={**body, "stream": True}, headers=headers)
    assert streamed.status_code == 200
    assert read_events(streamed.text)[-1]["error"]["code"] == "deadline_exceeded"
    wrong = deployed.http.post(f"/{TINY}/v1/completions", json=body, headers={"X-Request-Timeout-Seconds": "soon"})
    assert wrong.json()["error"]["param"] == "X-Request-Timeout-Seconds"
    deployed.wait_until_idle()


def test_health_ready_and_models(deployed):
    assert deployed.http.get("/health").status_code == 200
    assert deployed.http.get("/ready").status_code == 200
    assert [m["id"] for m in deployed.http.get("/v1/models").json()["data"]] == ["smollm2-135m-instruct"]
    assert deployed.http.get(f"/{TINY}/v1/models").json()["data"][0]["id"] == "tiny-llama"


def mixed_calls(count):
    calls = []
    for i in range(count):
        call = {
            "prompt": f"call {i}: " + chr(97 + i % 26) * (i * 7 % 60),
            "max_tokens": 4 + i * 5 % 40,
            "stream": i % 2 == 0,
        }
        if i % 3 == 1:
            call |= {"temperature": 0.9, "seed": i}
        if call["stream"]:
            call["stream_options"] = {"include_usage": True}
        calls.append(call)
    return calls


def test_64_concurrent_mixed_requests_get_what_each_gets_alone(deployed):
    calls = mixed_calls(64)
    alone = [tiny(deployed, **call).same for call in calls]
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda call: tiny(deployed, **call).same, calls))
    assert together == alone
    deployed.wait_until_idle()


def test_the_step_channel_and_the_call_itself_give_the_same_streams(deployed):
    calls = [*mixed_calls(24), {"prompt": "scored", "max_tokens": 8, "logprobs": 3, "stream": True}]

    def streams():
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(lambda call: tiny(deployed, **call).same, calls))

    by_channel = streams()
    deployed.deploy(lambda config: deployment_of(config, "Ingress")["user_config"].update(step_channel=False))
    try:
        assert streams() == by_channel
    finally:
        deployed.deploy()
    deployed.wait_until_idle()


def test_calls_that_arrive_together_share_steps(deployed):
    before = deployed.stats()
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda i: tiny(deployed, f"{i:02}", max_tokens=60), range(32)))
    after = deployed.stats()
    steps, drawn = after.num_steps - before.num_steps, after.num_drawn_tokens - before.num_drawn_tokens
    assert drawn == 32 * 60
    assert steps < drawn / 4


def test_disconnecting_20_of_40_frees_their_blocks_and_leaves_the_others(deployed):
    calls = [{"prompt": f"row {i}", "max_tokens": 150} for i in range(40)]
    alone = [tiny(deployed, **call).text for call in calls[1::2]]
    host, port = deployed.url.removeprefix("http://").split(":")
    before = deployed.stats()
    leavers = []
    with ThreadPoolExecutor(20) as pool:
        stayers = [pool.submit(tiny, deployed, **call, stream=True) for call in calls[1::2]]
        for i, call in enumerate(calls[::2]):
            fields = {**call, "max_tokens": 3000, "ignore_eos": True, "stream": i % 2 == 0, "temperature": 0}
            body = json.dumps(fields).encode()
            connection = socket.create_connection((host, int(port)), timeout=10)
            connection.sendall(
                b"POST /tiny/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            leavers.append(connection)
        deployed.wait_for(lambda stats: stats.num_running + stats.num_waiting >= 30)
        for connection in leavers:
            connection.close()
        assert [stayer.result().text for stayer in stayers] == alone
    deployed.wait_until_idle()
    drawn = deployed.stats().num_drawn_tokens - before.num_drawn_tokens
    assert drawn < 20 * 150 + 20 * 3000 * 0.9  # the leavers were not computed to their end


def test_a_queued_caller_who_leaves_is_never_computed(deployed):
    def limit(config, size):
        deployment_of(config, "Engine")["user_config"]["max_batch_size"] = size

    deployed.deploy(lambda config: limit(config, 1))
    try:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(tiny, deployed, "first", max_tokens=3000)
            deployed.wait_for(lambda stats: stats.num_running == 1)
            host, port = deployed.url.removeprefix("http://").split(":")
            body = b'{"prompt": "queued", "max_tokens": 300}'
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(
                    b"POST /tiny/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
                )
                deployed.wait_for(lambda stats: stats.num_waiting == 1)
            deployed.wait_for(lambda stats: stats.num_waiting == 0 and stats.num_running == 1)
            assert first.result().usage["completion_tokens"] == 3000
    finally:
        deployed.deploy()
    deployed.wait_until_idle()


def test_user_config_changes_without_dropping_a_stream(deployed):
    replicas = serve.status().applications[TINY].deployments["Engine"].replica_states
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(tiny, deployed, f"s{i}", max_tokens=3000, stream=True) for i in range(8)]
        deployed.wait_for(lambda stats: stats.num_running == 8)
        deployed.deploy(lambda config: deployment_of(config, "Engine")["user_config"].update(max_batch_size=48))
        assert deployed.stats().max_batch_size == 48
        assert all(stream.result().finish_reason == "length" for stream in streams)
    assert serve.status().applications[TINY].deployments["Engine"].replica_states == replicas
    deployed.deploy()


@pytest.fixture
def narrow(deployed):
    """The tiny engine with one place at work and one in the queue."""

    def change(config):
        deployment_of(config, "Engine").update(max_ongoing_requests=1, max_queued_requests=1)

    deployed.deploy(change)
    yield
    deployed.deploy()


def test_br_093_br_095_the_queue_is_as_long_as_the_yaml_says_and_one_more_is_429_at_once(deployed, narrow):
    """The engine deployment's own bounds, beside the budget of tokens: Serve's BackPressureError is an answer."""
    details = _get_global_client().get_serve_details()["applications"][TINY]["deployments"]["Engine"]
    assert details["deployment_config"]["max_queued_requests"] == 1
    begun = threading.Event()
    with ThreadPoolExecutor(10) as pool:
        running = pool.submit(tiny, deployed, "runs", begun, max_tokens=3500, stream=True)
        assert begun.wait(30)
        queued = pool.submit(tiny, deployed, "waits", max_tokens=3)
        time.sleep(0.5)
        assert not running.done()
        for stream in (False, True):
            body = {"prompt": "one more", "max_tokens": 3, "stream": stream}
            calls = [pool.submit(deployed.http.post, f"/{TINY}/v1/completions", json=body) for _ in range(8)]
            for answer in [call.result() for call in calls]:
                assert answer.status_code == 429
                assert answer.json()["error"]["code"] == "overloaded"
                assert int(answer.headers["retry-after"]) >= 1
        assert not running.done()
        assert running.result().status == queued.result().status == 200
    assert tiny(deployed, "after", max_tokens=3).status == 200


def test_br_095_a_misplaced_key_fails_at_deploy_time(deployed):
    """In our own sections, of which tests/test_config.py has all; in Serve's, see tests/test_serve_file.py."""
    with pytest.raises(AssertionError, match=r"args\.engine\.max_queued_requests: unknown key"):
        deployed.deploy(lambda config: application_of(config)["args"]["engine"].update(max_queued_requests=5))
    with pytest.raises(AssertionError, match=r"Engine\.user_config\.max_queued_requests: unknown key"):
        deployed.deploy(lambda config: deployment_of(config, "Engine")["user_config"].update(max_queued_requests=5))
    deployed.deploy()
    assert tiny(deployed, "after", max_tokens=3).status == 200


def test_one_ray_is_all_there_is(deployed):
    assert len([node for node in ray.nodes() if node["Alive"]]) == 1
