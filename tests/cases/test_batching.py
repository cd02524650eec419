"""Cases of the kinds seed, batch-invariance, batch-poisoning, head-of-line, batch-timing, cancel-others, cross-talk and
event-loop-block."""

import asyncio
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from serve_app.config import IngressLimits
from serve_app.engine.engine import BatchInferenceEngine
from serve_app.engine.request import SamplingParams, UserRequest
from tests.api.server import ask, serving
from tests.cases.tiny_server import serving_tiny_model
from tests.fakes import ScriptedRunner, counting, echo


@pytest.fixture(scope="module")
def tiny():
    with serving_tiny_model() as server:
        yield server


def together(server, calls):
    """Sends all calls at once; returns the answers in order."""
    barrier = threading.Barrier(len(calls))

    def send(call):
        barrier.wait()
        return server.ask(**call)

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(send, calls))


SEEDED = {"prompt": "once upon", "seed": 42, "temperature": 0.8, "max_tokens": 16, "ignore_eos": True}


def test_br_047_a_seed_gives_the_same_text_in_any_company(tiny):
    alone = tiny.both(**SEEDED).text
    unseeded = {**SEEDED, "seed": None}
    for neighbours in ([unseeded] * 5, [{**SEEDED, "seed": i} for i in range(5)], [{**SEEDED, "prompt": "x" * 50}] * 3):
        for stream in (False, True):
            answers = together(tiny, [*neighbours, {**SEEDED, "stream": stream}])
            assert answers[-1].text == alone
    texts = {tiny.ask(**unseeded).text for _ in range(5)}
    assert len(texts) > 1


def test_same_seed_alone_and_in_a_batch_of_16(tiny):
    calls = [
        {
            "prompt": "p" * (1 + 3 * i),
            "seed": i,
            "temperature": [0.5, 1.0, 1.5][i % 3],
            "top_p": [1.0, 0.9][i % 2],
            "top_k": [0, 20][i % 2],
            "max_tokens": 20,
            "ignore_eos": True,
        }
        for i in range(16)
    ]
    alone = [tiny.ask(**call).text for call in calls]
    assert [answer.text for answer in together(tiny, calls)] == alone
    assert tiny.engine.stats().last_batch_size >= 1


def test_br_049_greedy_text_does_not_depend_on_the_neighbours(tiny):
    lengths = [1, 200, 3, 50, 17, 120, 8, 90]
    calls = [{"prompt": chr(97 + i) * length, "max_tokens": 16, "ignore_eos": True} for i, length in enumerate(lengths)]
    alone = [tiny.ask(**call).text for call in calls]
    for seed in range(3):
        order = random.Random(seed).sample(range(8), 8)
        answers = together(tiny, [calls[i] for i in order])
        assert [answer.text for answer in answers] == [alone[i] for i in order]


def test_br_051_equal_greedy_requests_get_one_text(tiny):
    for _ in range(5):
        answers = together(tiny, [{"prompt": "the same", "max_tokens": 16, "ignore_eos": True}] * 8)
        assert len({answer.text for answer in answers}) == 1


def test_br_097_one_bad_request_among_good_ones_fails_alone():
    with serving(ScriptedRunner(echo)) as server:
        calls = [{"prompt": "ok"}, {"prompt": None}, {"prompt": [99999]}, {"prompt": "ok"}]
        answers = together(server, calls)
        assert [answer.status for answer in answers] == [200, 400, 400, 200]
        assert server.ask("ok").text == "ok"


def test_br_099_a_mixed_batch_gives_each_row_what_it_has_alone(tiny):
    calls = [
        {"temperature": 0, "max_tokens": 40},
        {"temperature": 0.7, "seed": 1, "max_tokens": 3, "top_p": 0.5},
        {"temperature": 1.5, "seed": 2, "max_tokens": 64, "top_k": 3},
        {"temperature": 0, "max_tokens": 1},
        {"temperature": 0.7, "seed": 3, "max_tokens": 20, "min_p": 0.2, "stream": True},
        {"temperature": 0, "max_tokens": 30, "stop": ["a"], "stream": True},
        {"temperature": 1.5, "seed": 4, "max_tokens": 10, "min_tokens": 10},
        {"temperature": 0, "max_tokens": 25, "stop_token_ids": [50, 51, 52, 53]},
    ]
    calls = [{"prompt": f"prompt {i}", **call} for i, call in enumerate(calls)]
    alone = [tiny.ask(**call).same for call in calls]
    assert [answer.same for answer in together(tiny, calls)] == alone


def test_br_101_a_long_prompt_does_not_stop_running_streams():
    runner = ScriptedRunner(counting, num_blocks=2048, max_model_len=4096, step_s=0.002)
    with serving(runner, max_batched_tokens=64) as server:
        with ThreadPoolExecutor(5) as pool:
            streams = [pool.submit(server.ask, "s", stream=True, max_tokens=150) for _ in range(4)]
            while server.engine.stats().num_running < 4:
                time.sleep(0.002)
            long = pool.submit(server.ask, "x" * 3000, max_tokens=2)
            assert all(stream.result().usage["completion_tokens"] == 150 for stream in streams)
            assert long.result().status == 200
        mixed = [plan for plan in runner.plans if any(row.num_tokens > 1 for row in plan.rows) and len(plan.rows) >= 4]
        assert len(mixed) > 30  # the prompt took many steps, and the streams had their token in each
        assert all(plan.num_tokens <= 64 for plan in runner.plans)
        assert all(sum(row.num_tokens == 1 for row in plan.rows) >= 3 for plan in mixed)


def test_a_short_request_sent_after_a_long_one_finishes_first():
    ended = []
    with serving(ScriptedRunner(step_s=0.005)) as server:

        def send(name, **call):
            server.ask(**call)
            ended.append(name)

        long = threading.Thread(target=send, args=("long",), kwargs={"prompt": "x" * 300, "max_tokens": 150})
        long.start()
        server.wait_until_running()
        send("short", prompt="y", max_tokens=3)
        long.join()
    assert ended == ["short", "long"]


def idle_engine(wait_s):
    engine = BatchInferenceEngine(ScriptedRunner(), batch_wait_timeout_s=wait_s)
    engine.start()
    return engine


def one_token(name):
    return UserRequest(name, (10,), SamplingParams(max_tokens=1))


@pytest.mark.parametrize("wait_s", [0.2, 0.0])
def test_br_103_the_wait_counts_from_the_first_arrival(wait_s):
    engine = idle_engine(wait_s)
    try:
        time.sleep(0.1)
        [first] = engine.add_to_queue([one_token("first")])
        if wait_s:
            time.sleep(0.005)
            [second] = engine.add_to_queue([one_token("second")])
            assert len(list(second)) == 1
        assert len(list(first)) == 1
        assert [len(plan.rows) for plan in engine.runner.plans] == [2 if wait_s else 1]
        started_at = time.monotonic()
        [lonely] = engine.add_to_queue([one_token("lonely")])
        assert len(list(lonely)) == 1
        assert time.monotonic() - started_at >= wait_s
        assert len(engine.runner.plans[-1].rows) == 1
    finally:
        engine.shutdown()


def test_br_105_an_idle_engine_starts_whenever_work_comes():
    with serving(ScriptedRunner(echo)) as server:
        time.sleep(1.0)
        assert server.ask("first").text == "first"
        time.sleep(1.0)
        assert server.ask("second").text == "second"


def test_br_107_half_a_body_harms_nobody():
    with serving(ScriptedRunner(echo), limits=IngressLimits(body_timeout_s=5)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        for i in range(20):
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"prompt": "ha')
            if i % 4 == 0:
                assert server.ask(f"good {i}").text == f"good {i}"
        server.wait_until_idle()
        assert len(server.client.requests) == 5


def test_br_113_64_streams_never_mix():
    with serving(ScriptedRunner(echo, num_blocks=4096), max_batch_size=64) as server:

        def send(i):
            prompt = f"Repeat only: {i}-{i}"
            if i % 8 == 3:  # leaves after the first chunk
                with server.http.stream("POST", "/v1/completions", json={"prompt": prompt, "stream": True}) as response:
                    next(response.iter_raw())
                return
            answer = server.ask(prompt, stream=True)
            assert answer.text == prompt
            assert len({event["id"] for event in answer.events}) == 1

        for _ in range(5):
            with ThreadPoolExecutor(64) as pool:
                list(pool.map(send, range(64)))
        server.wait_until_idle()


async def health_latency(url, while_running):
    """The longest that /health took while a coroutine ran."""
    longest = 0.0
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
        task = asyncio.ensure_future(while_running(http))
        while not task.done():
            started_at = time.perf_counter()
            assert (await http.get("/health")).status_code == 200
            longest = max(longest, time.perf_counter() - started_at)
            await asyncio.sleep(0.02)
        await task
    return longest


@pytest.mark.parametrize("size", [5_000_000, 3_000_000])
async def test_br_109_a_huge_prompt_does_not_block_the_loop(size):
    """Larger than the body limit, and below it: refused either way, and the loop goes on."""
    with serving(ScriptedRunner(echo)) as server:

        async def huge(http):
            response = await http.post("/v1/completions", json={"prompt": "word " * (size // 5)})
            assert response.status_code in (400, 413)
            chat = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x" * size}]})
            assert chat.status_code in (400, 413)

        assert await health_latency(server.url, huge) < 1.0


async def test_br_111_a_thousand_connections_at_once():
    with serving(ScriptedRunner(echo, num_blocks=4096, max_model_len=2048), max_batch_size=64) as server:

        async def burst(http):
            limits = httpx.Limits(max_connections=1000)
            async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits, trust_env=False) as many:
                bodies = [{"prompt": f"{i:04}" + "x" * 1000, "max_tokens": 4} for i in range(1000)]
                responses = await asyncio.gather(*(many.post("/v1/completions", json=body) for body in bodies))
            assert all(response.status_code in (200, 429, 503) for response in responses)
            texts = {r.json()["choices"][0]["text"] for r in responses if r.status_code == 200}
            assert len(texts) > 900

        await health_latency(server.url, burst)
        server.engine.check_health(10)
        assert ask(server.http, "/v1/completions", {"prompt": "after"}).text == "after"
