"""How much waits, and whether who comes back when he is told to gets in."""

import asyncio
import heapq
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from serve_app.engine.request import EngineLoad
from serve_app.errors import OverloadedError
from serve_app.ingress.admission import Admission
from tests.api.server import serving
from tests.fakes import ScriptedRunner, counting

BUDGET, SPEED = 10_000, 1_000.0


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Replicas:
    """The engines, as far as admission asks them."""

    def __init__(self, waiting=0, budget=BUDGET, speed=SPEED):
        self.answers = [EngineLoad(waiting, budget, speed)]

    async def loads(self):
        return self.answers

    async def has_replica(self):
        return True


async def simulate(load, *, patience, seed=0, seen=(40.0, 120.0), until=700.0):
    """A queue that drains at SPEED, and callers that come at `load` times that, and come back when they are told.

    `patience(rng)` says how often a caller comes back at most. Returns for each caller how often he was refused, whether
    he got in, of those who came between the times `seen`; the most that waited; and the tokens computed per second then.
    """
    clock, rng = Clock(), random.Random(seed)
    admission = Admission(Replicas(), lambda: 0, clock)
    queue, told, busy_until, most, work = [], {}, 0.0, 0, 0.0
    events, count = [], 0

    def push(at, kind, value):
        nonlocal count
        count += 1
        heapq.heappush(events, (at, count, kind, value))

    def arrive(at):
        push(at + rng.expovariate(load * SPEED / 400), "fresh", None)

    arrive(0.0)
    while events:
        clock.now, _, kind, value = heapq.heappop(events)
        if clock.now > until:
            break
        if kind == "start":
            value.start()
            continue
        if kind == "fresh":
            arrive(clock.now)
            value = [len(told), rng.randrange(100, 700), clock.now, 0, patience(rng)]
            told[value[0]] = (clock.now, 0, False)
        name, num_tokens, came_at, refusals, left = value
        try:
            ticket = await admission.enter(name, num_tokens)
        except OverloadedError as error:
            told[name] = (came_at, refusals + 1, False)
            if left:
                # as clients do: a little later than told, never earlier
                push(
                    clock.now + error.retry_after_s + rng.random() * 0.3,
                    "again",
                    [name, num_tokens, came_at, refusals + 1, left - 1],
                )
        else:
            told[name] = (came_at, refusals, True)
            takes_s = num_tokens / SPEED * rng.uniform(0.6, 1.0)  # some end early
            busy_until = max(busy_until, clock.now) + takes_s
            work += takes_s * SPEED if seen[0] < busy_until < seen[1] else 0.0
            queue.append((busy_until, num_tokens))
            most = max(most, sum(size for at, size in queue if at > clock.now))
            push(busy_until, "start", ticket)
    return (
        [(refusals, got_in) for at, refusals, got_in in told.values() if seen[0] < at < seen[1]],
        most,
        work / (seen[1] - seen[0]),
    )


@pytest.mark.parametrize("load", [1.5, 2.0, 4.0])
@pytest.mark.parametrize(
    "patience", [lambda rng: 1, lambda rng: rng.choice((0, 1, 3))], ids=["all return once", "some never return"]
)
async def test_who_comes_back_when_he_is_told_to_gets_in(load, patience):
    told, most, _ = await simulate(load, patience=patience)
    returned = [(refusals, got_in) for refusals, got_in in told if refusals > 1 or (refusals == 1 and got_in)]
    assert len(returned) > 30
    first_time = sum(refusals == 1 and got_in for refusals, got_in in returned)
    assert first_time / len(returned) >= 0.9
    assert most <= BUDGET


async def test_without_overload_nobody_is_refused():
    told, *_ = await simulate(0.7, patience=lambda rng: 3)
    assert len(told) > 100
    assert all(outcome == (0, True) for outcome in told)


async def test_what_waits_for_other_ingress_replicas_counts():
    admission = Admission(Replicas(waiting=BUDGET - 100), lambda: 0, Clock())
    await admission.enter("small", 50)
    with pytest.raises(OverloadedError) as refused:
        await admission.enter("large", 1000)
    assert refused.value.retry_after_s == 5  # (9,950 + 1,000 - 6,000) / 1,000, rounded up
    with pytest.raises(OverloadedError):
        await admission.enter("small too", 60)


async def test_while_no_replica_answers_what_was_known_counts():
    clock, replicas = Clock(), Replicas(waiting=BUDGET - 100)
    admission = Admission(replicas, lambda: 0, clock)
    replicas.answers, known = [], replicas.answers
    await admission.enter("before anything is known", 3000)
    replicas.answers = known
    clock.now = 100.0
    await admission.enter("this makes it look", 3000)
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await admission.enter("now it is", 3000)
    replicas.answers = []
    clock.now = 200.0
    for _ in range(2):
        with pytest.raises(OverloadedError):
            await admission.enter("one of them hangs", 3000)
        await asyncio.sleep(0)


async def test_what_waited_for_others_is_forgotten_when_it_is_gone():
    clock, replicas = Clock(), Replicas(waiting=5 * BUDGET)
    admission = Admission(replicas, lambda: 0, clock)
    with pytest.raises(OverloadedError):
        await admission.enter("a", 3000)
    replicas.answers = Replicas().answers
    clock.now = 100.0  # nothing of this ingress replica's own waits: it looks all the same
    with pytest.raises(OverloadedError):
        await admission.enter("b", 3000)
    await asyncio.sleep(0)
    await admission.enter("c", 3000)


async def test_a_flood_of_one_tenant_does_not_lock_others_out():
    admission = Admission(Replicas(), lambda: 0, Clock())
    for name in range(16):
        await admission.enter(f"flood {name}", 500, "flood")
    with pytest.raises(OverloadedError):
        await admission.enter("one more", 500, "flood")
    for name in range(4):
        await admission.enter(f"quiet {name}", 400, "quiet")
    with pytest.raises(OverloadedError):
        await admission.enter("too much", 2000, "quiet")


async def test_an_engine_without_a_limit_refuses_nobody():
    admission = Admission(Replicas(budget=None), lambda: 0, Clock())
    for name in range(1000):
        await admission.enter(name, 10_000)


async def test_a_request_larger_than_the_budget_is_served_when_nothing_waits():
    admission = Admission(Replicas(), lambda: 0, Clock())
    ticket = await admission.enter("large", 5 * BUDGET)
    with pytest.raises(OverloadedError):
        await admission.enter("next", 10)
    ticket.give_up()
    await admission.enter("other", 10)


async def test_promises_lapse_and_who_comes_too_early_is_told_the_rest():
    clock = Clock()
    admission = Admission(Replicas(), lambda: 0, clock)
    running = await admission.enter("first", BUDGET)
    with pytest.raises(OverloadedError) as refused:
        await admission.enter("late", 2_000)
    wait_s = refused.value.retry_after_s
    clock.now = wait_s / 2
    with pytest.raises(OverloadedError) as again:
        await admission.enter("late", 2_000)
    assert again.value.retry_after_s <= wait_s / 2 + 1
    running.start()
    clock.now = 10 * wait_s
    await admission.enter("all of it", BUDGET)  # nobody claimed it


@pytest.mark.parametrize("stream", [False, True])
def test_overload_over_http(stream):
    """Budget for two calls to wait; 24 at once. Those who obey Retry-After all get their answer, and each exactly once."""
    runner = ScriptedRunner(counting, max_model_len=1024, num_blocks=2048, step_s=0.002)
    with serving(runner, max_batch_size=2, max_waiting_tokens=120) as server:

        def call(index):
            refusals = 0
            while True:
                body = {"prompt": f"{index:04d}", "max_tokens": 40, "stream": stream}
                answer = server.http.post("/v1/completions", json=body)
                if answer.status_code == 200:
                    return refusals, answer.text
                assert answer.status_code == 429
                error = answer.json()["error"]
                assert (error["code"], error["type"]) == ("overloaded", "rate_limit_error")
                assert error["retry_after_s"] == int(answer.headers["retry-after"]) >= 1
                refusals += 1
                asyncio.run(asyncio.sleep(error["retry_after_s"]))

        with ThreadPoolExecutor(24) as pool:
            outcomes = list(pool.map(call, range(24)))
        assert max(refusals for refusals, _ in outcomes) >= 1
        assert sum(refusals for refusals, _ in outcomes) < 3 * 24
        server.wait_until_idle()


@pytest.mark.parametrize("load", [1.5, 4.0])
@pytest.mark.parametrize("returning", [0.0, 0.05, 0.5, 1.0])
async def test_the_engine_has_work_all_the_time_whether_or_not_they_come_back(load, returning):
    *_, tokens_per_s = await simulate(load, patience=lambda rng: int(rng.random() < returning), seen=(100.0, 600.0))
    assert tokens_per_s > 0.95 * SPEED
