"""The prefix router."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter

from serve_app.engine.request import SamplingParams, UserRequest
from serve_app.routing import ANSWER, CHUNK, PrefixMemory, PrefixRouter, affinity

LONG = tuple(range(10 * CHUNK))
REPLICAS = [SimpleNamespace(replica_id=f"replica-{i}") for i in range(4)]


@pytest.fixture
def router(monkeypatch):
    """A router of which Serve's own choice is always the last replica; what it knows of queue lengths is a dict."""

    async def last(self, candidates, pending_request=None):
        return [[candidates[-1]]]

    monkeypatch.setattr(PowerOfTwoChoicesRequestRouter, "choose_replicas", last)
    monkeypatch.setattr(PowerOfTwoChoicesRequestRouter, "update_replicas", lambda self, replicas: None)
    return _made()


def _made():
    made = object.__new__(PrefixRouter)
    made.initialize_state(prefix_tokens=4, prefix_weight=2.0)
    made._replica_queue_len_cache = {}
    return made


def pending(prompt, name="a", max_tokens=1):
    request = UserRequest(name, tuple(prompt), SamplingParams(max_tokens=max_tokens))
    return SimpleNamespace(args=[request], metadata=SimpleNamespace(internal_request_id=name))


def first_choice(router, prompt):
    ranks = asyncio.run(router.choose_replicas(REPLICAS, pending(prompt)))
    assert ranks[-1] == [REPLICAS[-1]]  # Serve's own choice behind it
    return ranks[0][0].replica_id


def other_than(replica_id):
    return next(replica.replica_id for replica in REPLICAS if replica.replica_id != replica_id)


def test_a_conversation_goes_on_where_it_was(router):
    elsewhere = other_than(first_choice(router, LONG))
    router.on_request_routed(pending(LONG), elsewhere, None)
    router.on_request_completed(elsewhere, "a")
    assert first_choice(router, LONG) == elsewhere
    assert first_choice(router, (*LONG, 7, 8, 9)) == elsewhere
    assert first_choice(router, (*LONG[: 5 * CHUNK], 7, 8, 9)) == elsewhere
    assert first_choice(router, [-1, *LONG]) == first_choice(_made(), [-1, *LONG])  # another beginning


def test_two_ingress_replicas_look_for_it_at_the_same_place(router):
    for start in range(20):
        assert first_choice(router, (start, 2, 3, 4, 5)) == first_choice(_made(), (start, 2, 3, 4, 99, 98))


def test_the_holder_may_have_so_much_more_to_do_and_no_more(router):
    """Two tokens of lead for each that need not be computed; what the others do does not matter then."""
    home = other_than(first_choice(router, LONG))
    router.on_request_routed(pending(LONG), home, None)
    router.on_request_completed(home, "a")
    worth = 2 * (len(LONG) - 4)  # the favourite is believed to hold four tokens
    for number in range(worth // ANSWER + 1):
        assert first_choice(router, LONG) == home
        router.on_request_routed(pending([number], f"busy-{number}", max_tokens=9999), home, None)
    assert first_choice(router, LONG) != home
    router.on_request_completed(home, "busy-0")
    assert first_choice(router, LONG) == home


def test_work_is_counted_in_tokens_not_requests(router):
    prompt = [5, 6, 7]
    for place in range(1, len(REPLICAS)):
        long = range(place * 1000, place * 1000 + 900)
        router.on_request_routed(pending(long, f"long-{place}"), REPLICAS[place].replica_id, None)
    for number in range(20):
        router.on_request_routed(pending([number], f"tiny-{number}"), "replica-0", None)
    assert first_choice(router, prompt) == "replica-0"


def test_requests_of_other_ingress_replicas_count_as_the_mean_of_ones_own(router):
    home = first_choice(router, [1])
    router.on_request_routed(pending([1], max_tokens=99), home, None)
    router.on_request_completed(home, "a")
    router._replica_queue_len_cache = dict.fromkeys((replica.replica_id for replica in REPLICAS), 3)
    assert first_choice(router, [1]) == home
    router._replica_queue_len_cache[other_than(home)] = 0
    assert first_choice(router, [1]) == other_than(home)


def test_what_the_replica_no_longer_counts_is_over(router):
    """A request may be over before it is known to have been accepted: its tokens must not stay for ever."""
    home = first_choice(router, [1])
    router.on_request_completed(home, "a")
    router.on_request_routed(pending([1], max_tokens=99), home, None)
    router._replica_queue_len_cache = dict.fromkeys((replica.replica_id for replica in REPLICAS), 0)
    assert first_choice(router, [1]) == home
    router.update_replicas(REPLICAS[:1])
    assert set(router._running) <= {"replica-0"}


def test_other_calls_and_single_replicas_are_serves_business(router):
    for call in (SimpleNamespace(args=[]), None):
        assert asyncio.run(router.choose_replicas(REPLICAS, call)) == [[REPLICAS[-1]]]
    router.on_request_routed(SimpleNamespace(args=["stats"]), "replica-0", None)
    assert asyncio.run(router.choose_replicas(REPLICAS[:1], pending([1]))) == [[REPLICAS[0]]]


def test_the_memory_is_bounded_and_forgets_what_was_not_used():
    memory = PrefixMemory(4 * CHUNK)
    one, two, three = (range(start, start + 2 * CHUNK) for start in (0, 10_000, 20_000))
    for prompt, holder in ((one, "x"), (two, "y"), (one, "z"), (three, "x")):
        memory.add(prompt, holder)
    assert memory.held(one) == {"x": 2 * CHUNK, "z": 2 * CHUNK}
    assert memory.held(two) == {}
    assert memory.held(three) == {"x": 2 * CHUNK}
    assert memory.held([*three][: CHUNK + 1]) == {"x": CHUNK}


def test_prefixes_spread_evenly_and_few_move_when_a_replica_comes():
    def favourite(prefix, count):
        return max(range(count), key=lambda i: affinity(prefix, f"replica-{i}"))

    prefixes = [(i, i + 1) for i in range(2000)]
    counts = Counter(favourite(prefix, 4) for prefix in prefixes)
    assert min(counts.values()) > 400
    moved = sum(favourite(prefix, 4) != favourite(prefix, 5) for prefix in prefixes)
    assert moved < 2000 * 0.25
