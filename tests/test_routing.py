"""The prefix router."""

from collections import Counter
from types import SimpleNamespace

import pytest
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter

from serve_app.engine.request import SamplingParams, UserRequest
from serve_app.routing import PrefixRouter, affinity


def replicas(count):
    return [SimpleNamespace(replica_id=f"replica-{i}") for i in range(count)]


@pytest.fixture
def router(monkeypatch):
    """A router whose base choice is always the last replica, with queue lengths from a dict."""

    async def last(self, candidates, pending_request=None):
        return [[candidates[-1]]]

    monkeypatch.setattr(PowerOfTwoChoicesRequestRouter, "choose_replicas", last)
    made = object.__new__(PrefixRouter)
    made.initialize_state(prefix_tokens=4, max_lead=2)
    made._replica_queue_len_cache = {}
    return made


def pending(*prompt):
    return SimpleNamespace(args=[UserRequest("r", prompt, SamplingParams(max_tokens=1))])


async def test_equal_beginnings_go_to_the_same_replica(router):
    candidates = replicas(4)
    first = await router.choose_replicas(candidates, pending(1, 2, 3, 4, 5))
    again = await router.choose_replicas(candidates[::-1], pending(1, 2, 3, 4, 99, 98))
    assert first[0] == again[0]
    assert len(first) == 2  # and Serve's own choice behind it


async def test_a_favourite_that_is_too_busy_is_passed_over(router):
    candidates = replicas(4)
    [favourite], _ = await router.choose_replicas(candidates, pending(1, 2, 3))
    router._replica_queue_len_cache = {favourite.replica_id: 2}
    assert len(await router.choose_replicas(candidates, pending(1, 2, 3))) == 2
    router._replica_queue_len_cache = {favourite.replica_id: 3}
    assert await router.choose_replicas(candidates, pending(1, 2, 3)) == [[candidates[-1]]]


async def test_other_calls_and_single_replicas_are_serves_business(router):
    candidates = replicas(3)
    assert await router.choose_replicas(candidates, SimpleNamespace(args=[])) == [[candidates[-1]]]
    assert await router.choose_replicas(candidates, None) == [[candidates[-1]]]
    assert await router.choose_replicas(candidates[:1], pending(1)) == [[candidates[0]]]


def test_prefixes_spread_evenly_and_few_move_when_a_replica_comes():
    def favourite(prefix, count):
        return max(range(count), key=lambda i: affinity(prefix, f"replica-{i}"))

    prefixes = [(i, i + 1) for i in range(2000)]
    counts = Counter(favourite(prefix, 4) for prefix in prefixes)
    assert min(counts.values()) > 400
    moved = sum(favourite(prefix, 4) != favourite(prefix, 5) for prefix in prefixes)
    assert moved < 2000 * 0.25
