"""No replica: calls wait for the first, or are told when to come back."""

import asyncio

import pytest

from serve_app.config import IngressLimits
from serve_app.errors import ColdStartError, EngineUnavailableError
from serve_app.ingress.cold_start import FRESH_S, GUESS_S, ColdStart
from tests.api.server import serving
from tests.fakes import ScriptedRunner


class Engine:
    """No replica, until `come` is called. `starts` counts how often one was asked for."""

    def __init__(self):
        self.clock = self.looks = self.starts = 0
        self.there = asyncio.Event()

    def now(self):
        return self.clock

    async def has_replica(self):
        self.looks += 1
        return self.there.is_set()

    async def wait_for_replica(self):
        self.starts += 1
        await self.there.wait()

    async def come(self, after_s):
        self.clock += after_s
        self.there.set()
        await asyncio.sleep(0.01)


async def seconds_told(cold_start):
    with pytest.raises(ColdStartError) as refusal:
        await cold_start.check()
    await asyncio.sleep(0)  # the start begins
    assert isinstance(refusal.value, EngineUnavailableError)
    assert (refusal.value.status, refusal.value.code) == (503, "cold_start")
    return refusal.value.retry_after_s


async def test_who_may_wait_waits_and_one_replica_is_asked_for():
    engine = Engine()
    cold_start = ColdStart(engine, lambda: GUESS_S, engine.now)
    await asyncio.gather(*(cold_start.check() for _ in range(20)))
    await asyncio.sleep(0)
    assert engine.starts == 1


async def test_retry_after_is_the_measured_start():
    engine = Engine()
    cold_start = ColdStart(engine, lambda: 0, engine.now)
    assert await seconds_told(cold_start) == GUESS_S  # nothing is measured yet
    await engine.come(after_s=7)
    await cold_start.check()
    engine.there.clear()  # it goes, after an idle time
    engine.clock += FRESH_S
    assert await seconds_told(cold_start) == 7
    engine.clock += 3
    assert await seconds_told(cold_start) == 4
    engine.clock += 17  # longer than expected
    assert await seconds_told(cold_start) == 10
    assert engine.starts == 2


async def test_nobody_asks_while_there_is_life():
    engine = Engine()
    await engine.come(0)
    cold_start = ColdStart(engine, lambda: 0, engine.now)
    for _ in range(5):
        await cold_start.check()
    assert engine.looks == 1
    engine.clock += FRESH_S - 1
    cold_start.saw_life()
    engine.clock += FRESH_S - 1
    await cold_start.check()
    assert engine.looks == 1
    engine.clock += 1
    await cold_start.check()
    assert engine.looks == 2


async def test_when_nothing_can_be_started_the_next_call_tries_again(caplog):
    engine = Engine()
    cold_start = ColdStart(engine, lambda: 0, engine.now)

    async def fail():
        raise RuntimeError("no room")

    engine.wait_for_replica, works = fail, engine.wait_for_replica
    await seconds_told(cold_start)
    await asyncio.sleep(0.01)
    assert "no room" in caplog.text
    engine.wait_for_replica = works
    await seconds_told(cold_start)
    await engine.come(after_s=2)
    await cold_start.check()
    assert engine.starts == 1


@pytest.mark.parametrize("stream", [False, True])
def test_over_http_it_is_503_with_retry_after(stream):
    with serving(ScriptedRunner()) as server:

        async def nobody():
            return False

        async def soon():
            await asyncio.sleep(3600)

        server.client.has_replica, server.client.wait_for_replica = nobody, soon
        server.api.limits = IngressLimits(cold_start_wait_s=5)
        body = {"prompt": "x", "stream": stream}
        answer = server.http.post("/v1/completions", json=body)
        assert answer.status_code == 503
        assert answer.headers["Retry-After"] == str(int(GUESS_S))
        assert answer.json()["error"]["code"] == "cold_start"
        server.api.limits = IngressLimits()
        assert server.http.post("/v1/completions", json=body).status_code == 200
