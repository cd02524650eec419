"""Faults and changes on real Ray: what runs goes on while replicas die, drain, or are replaced."""

import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial

import aiohttp
import httpx
import psutil
import pytest

from benchmarks.callers import Crowd, catalog, invalid_calls
from benchmarks.chaos import Watch, bring_chaos, engines_at_rest
from serve_app.ingress.cold_start import FRESH_S
from tests.api.server import ask
from tests.serve.conftest import TINY, application_of, deployment_of, replicas, states_of, wait_for_replicas
from tests.serve.faulty import FAULTS

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, while it runs in this process


def with_two(config):
    """Two replicas of the tiny engine, one on each node, that break when told to, and are soon found out."""
    application, engine = application_of(config), deployment_of(config, "Engine")
    application["import_path"] = "tests.serve.faulty:build_app"
    application["args"]["engine"]["stall_timeout_s"] = 3
    engine["health_check_timeout_s"] = 3
    engine["autoscaling_config"]["min_replicas"] = 2
    engine["max_replicas_per_node"] = 1
    deployment_of(config, "Ingress")["ray_actor_options"]["resources"] = {"head": 0.01}  # not lost with the other node


def add_node(deployed):
    return deployed.cluster.add_node(num_cpus=2, object_store_memory=100 * 1024 * 1024)


@pytest.fixture(scope="module")
def second_node(deployed):
    """Of the tests that want two engine replicas; they come last in this module, and share them."""
    node = add_node(deployed)
    deployed.deploy(with_two)
    yield [node]
    deployed.deploy()
    for added in deployed.cluster.worker_nodes.copy():
        deployed.cluster.remove_node(added)
    wait_for_replicas("Engine", 1)


@pytest.fixture
def two_engines(second_node):
    """Waits until both are there."""
    wait_for_replicas("Engine", 2)


def call(deployed, index, max_tokens, begun=None, **fields):
    """One of several different calls: greedy and seeded ones, with penalties and without."""
    body = {
        "prompt": f"call {index} " + "x" * (index * 5 % 40),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    if index % 2:
        body |= {"temperature": 0.9, "seed": index, "presence_penalty": 0.5 * (index % 3)}
    if fields.get("stream"):
        body["stream_options"] = {"include_usage": True}
    return ask(deployed.http, f"/{TINY}/v1/completions", body | fields, begun)


@cache
def text_alone(deployed, index, max_tokens):
    """What such a call says when nothing happens to it."""
    answer = call(deployed, index, max_tokens)
    assert answer.status == 200
    return answer.text


def survive(deployed, kill, count=8, max_tokens=1200):
    """Calls, some streamed, that are running when `kill` is called; all must end as if it had not been."""
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(partial(text_alone, deployed, max_tokens=max_tokens), range(8)))
    expected = [texts[index % 8] for index in range(count)]
    begun = [threading.Event() for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        calls = [
            pool.submit(call, deployed, index % 8, max_tokens, begun[index], stream=index % 4 != 3)
            for index in range(count)
        ]
        assert all(event.wait(60) for index, event in enumerate(begun) if index % 4 != 3)
        kill()
        answers = [running.result() for running in calls]
    for answer, text in zip(answers, expected, strict=True):
        assert (answer.status, answer.text) == (200, text)
        assert answer.usage["completion_tokens"] == max_tokens
        assert answer.finish_reason == "length"
        assert len({event["id"] for event in answer.events}) <= 1


def test_streams_survive_the_death_of_the_only_replica(deployed):
    wait_for_replicas("Engine", 1)
    [process] = replicas("Engine")
    survive(deployed, process.kill)
    deployed.wait_until_idle()


def test_the_death_of_the_ingress_ends_its_calls_and_leaves_nothing_behind(deployed):
    """Its connections break, which every client sees; the engine drops their work, and a new ingress takes over."""
    [process] = replicas("Ingress")
    begun = [threading.Event() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call, deployed, index, 3500, begun[index], stream=True) for index in range(4)]
        assert all(event.wait(60) for event in begun)
        process.kill()
        for running in calls:
            with pytest.raises((httpx.HTTPError, AssertionError)):  # broken off, or without its last event
                running.result(timeout=60)
    deployed.wait_until_idle(30)
    deadline = time.monotonic() + 60
    while True:
        answer = deployed.http.post(f"/{TINY}/v1/completions", json={"prompt": "x", "max_tokens": 2})
        if answer.status_code == 200:
            break
        assert answer.status_code in (404, 502, 503), answer.text  # from the proxy, while nobody is there
        assert time.monotonic() < deadline
        time.sleep(0.5)


@contextmanager
def steady_traffic(deployed):
    """Ten short calls per second, of a tenant of their own, for as long as the block lasts; all must be answered."""
    stop, answers = threading.Event(), []

    def ask_once():
        body = {"prompt": "x", "max_tokens": 2, "user": "traffic"}
        answer = deployed.http.post(f"/{TINY}/v1/completions", json=body)
        answers.append((answer.status_code, "" if answer.status_code == 200 else answer.text))

    def send():
        with ThreadPoolExecutor(32) as pool:
            while not stop.wait(0.1):
                pool.submit(ask_once)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        stop.set()
        sender.join()
    assert answers
    assert set(answers) == {(200, "")}


def test_br_121_an_update_that_fails_leaves_the_old_replicas_at_work(deployed):
    def no_such_model(config):
        application_of(config)["args"]["model"]["source"] = "/nowhere"

    with steady_traffic(deployed):
        with pytest.raises(AssertionError, match="nowhere"):
            deployed.deploy(no_such_model)
        time.sleep(2)
        deployed.deploy()
    assert call(deployed, 0, 5).status == 200


def test_br_123_without_work_there_are_no_replicas_and_the_next_call_starts_one(deployed):
    """The ingress is killed while a call runs; what it had counted must not keep replicas alive.

    The next call waits for a replica, if it may; else it is told for how long one takes that was measured.
    """

    def to_zero(config, cold_start_wait_s=60):
        deployment_of(config, "Engine")["autoscaling_config"].update(
            min_replicas=0, downscale_delay_s=3, look_back_period_s=2
        )
        deployment_of(config, "Ingress")["user_config"]["cold_start_wait_s"] = cold_start_wait_s

    expected = text_alone(deployed, 1, 100)
    deployed.deploy(to_zero)
    try:
        begun = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            broken = pool.submit(call, deployed, 0, 3500, begun, stream=True)
            assert begun.wait(120)
            [ingress] = replicas("Ingress")
            ingress.kill()
            assert broken.exception() is not None
        wait_for_replicas("Ingress", 1)
        wait_for_replicas("Engine", 0)
        for _ in range(30):
            assert states_of("Engine") == {}
            time.sleep(1)
        began_at = time.monotonic()
        assert call(deployed, 1, 100).text == expected
        took_s = time.monotonic() - began_at
        wait_for_replicas("Engine", 0)
        deployed.deploy(partial(to_zero, cold_start_wait_s=0))
        time.sleep(FRESH_S)
        refused = 0
        while (answer := deployed.http.post(f"/{TINY}/v1/completions", json={"prompt": "x"})).status_code == 503:
            refused += 1
            assert answer.json()["error"]["code"] == "cold_start"
            assert 1 <= int(answer.headers["Retry-After"]) <= took_s + 1
            time.sleep(1)
            assert refused < 200
        assert refused
        assert answer.status_code == 200
    finally:
        deployed.deploy()
        wait_for_replicas("Engine", 1)


# ---- with two engine replicas, each on its node


def test_two_replicas_give_what_one_gives(deployed, two_engines):
    alone = [call(deployed, index, 30).text for index in range(8)]
    assert states_of("Engine") == {"RUNNING": 2}
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda index: call(deployed, index % 8, 30).text, range(16)))
    assert together == alone * 2


def test_a_call_is_cancelled_by_its_id_on_whichever_replica_it_runs(deployed, two_engines):
    begun = [threading.Event() for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        calls = [
            pool.submit(call, deployed, index, 3500, begun[index], stream=True, request_id=f"c{index}")
            for index in range(6)
        ]
        assert all(event.wait(60) for event in begun)
        for index in range(6):
            answer = deployed.http.post(f"/{TINY}/v1/cancel/c{index}")
            assert answer.json() == {"id": f"c{index}", "object": "cancellation", "cancelled": 1}
        for running in calls:
            assert running.result(timeout=30).events[-1]["error"]["code"] == "cancelled"
    assert deployed.http.post(f"/{TINY}/v1/cancel/c0").status_code == 404


def test_streams_survive_the_death_of_their_replica(deployed, two_engines):
    before = {process.pid for process in replicas("Engine")}
    assert len(before) == 2
    survive(deployed, lambda: os.kill(min(before), signal.SIGKILL))
    wait_for_replicas("Engine", 2)
    assert min(before) not in {process.pid for process in replicas("Engine")}


@pytest.mark.parametrize("fault", FAULTS)
def test_streams_survive_an_engine_that_makes_no_progress_or_has_died(deployed, two_engines, tiny_folder, fault):
    """The one replica's step never ends: its health check says so. The other's loop dies: its process ends by itself."""
    before = {process.pid for process in replicas("Engine")}
    assert len(before) == 2
    survive(deployed, (tiny_folder / fault).touch)
    assert not (tiny_folder / fault).exists()
    wait_for_replicas("Engine", 2)
    assert len(before & {process.pid for process in replicas("Engine")}) == 1
    assert deployed.http.get(f"/{TINY}/ready").status_code == 200


def test_streams_survive_a_replica_that_is_frozen(deployed, two_engines):
    """Neither its threads nor its event loop run any more, so it cannot end itself: Serve kills it."""
    frozen = replicas("Engine")[0]
    survive(deployed, frozen.suspend)
    wait_for_replicas("Engine", 2)
    frozen.wait(60)  # it is gone
    assert deployed.http.get(f"/{TINY}/ready").status_code == 200


def test_streams_survive_the_loss_of_a_node(deployed, two_engines, second_node):
    """A second raylet is killed, with the engine replica that runs there."""
    survive(deployed, partial(deployed.cluster.remove_node, second_node.pop(), allow_graceful=False))
    second_node.append(add_node(deployed))


def test_chaos_in_small(deployed, two_engines):
    """`make chaos` in half a minute: callers of all kinds, two replicas killed, every answer checked."""

    async def run():
        watch = Watch(lambda: [process.pid for process in psutil.Process().children(recursive=True)], TINY)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            model = deployed.http.get(f"/{TINY}/v1/models").json()["data"][0]["id"]
            url, calls, invalid = f"{deployed.url}/{TINY}", catalog(model, 32), invalid_calls(model)
            crowd = Crowd(session, url, calls, invalid, seed=0, patience_s=0.6)
            await crowd.learn(lambda done: None)
            reports, kills, _ = await bring_chaos(crowd, watch, seconds=36, rate=16, kill_every_s=12, seed=0)
        return reports, kills, await engines_at_rest(TINY)

    reports, kills, held = deployed.run(run(), 300)
    assert len(kills) == 2
    assert all(kill.num_running_calls for kill in kills)
    assert not [fault for report in reports for fault in report.faults]
    assert not held
    endings = Counter(report.ending for report in reports)
    assert endings["complete"] > len(reports) // 3
    assert {"left", "cancelled", "deadline_exceeded", "invalid_request_error"} <= set(endings)


def test_br_119_50_streams_survive_reconfigure_scale_down_and_redeploy(deployed, two_engines):
    def fewer(config):
        with_two(config)
        deployment_of(config, "Engine")["autoscaling_config"]["min_replicas"] = 1
        deployment_of(config, "Engine")["user_config"]["max_batch_size"] = 24

    def smaller_chunks(config):
        fewer(config)
        application_of(config)["args"]["engine"]["max_batched_tokens"] = 64

    def change_everything():
        with steady_traffic(deployed):
            deployed.deploy(fewer)
            wait_for_replicas("Engine", 1)  # the other has let its streams end
            deployed.deploy(smaller_chunks)

    survive(deployed, change_everything, count=50)
    deployed.wait_until_idle()
