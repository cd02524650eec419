"""Who runs in a step."""

import pytest

from serve_app.engine.kv_cache import BlockLedger
from serve_app.engine.request import SamplingParams, UserRequest
from serve_app.engine.scheduler import Scheduler
from serve_app.engine.sequence import Sequence
from serve_app.engine.status import Status


def make_scheduler(num_blocks=64, block_size=4, **settings):
    settings = {"max_batch_size": 4, "max_batched_tokens": 16, **settings}
    return Scheduler(BlockLedger(num_blocks, block_size), **settings)


def make_sequence(length, max_tokens=8, first_token=10, created_at=0.0):
    prompt = tuple(range(first_token, first_token + length))
    return Sequence(UserRequest("r", prompt, SamplingParams(max_tokens=max_tokens), created_at), frozenset())


def step(scheduler, now=0.0):
    """Plans a step and settles it as if token 99 were drawn everywhere."""
    plan = scheduler.plan(now)
    for row in plan.rows:
        scheduler.settle(row)
        if row.draws and row.sequence.append(99) is not None:
            scheduler.remove(row.sequence, Status.FINISHED)
    scheduler.check()
    return plan


def test_decode_rows_come_first_and_prompts_share_the_rest():
    scheduler = make_scheduler()
    decoding = make_sequence(3)
    scheduler.add(decoding)
    step(scheduler)
    long, short = make_sequence(40, first_token=100), make_sequence(4, first_token=200)
    scheduler.add(long)
    scheduler.add(short)
    plan = step(scheduler)
    assert [(row.sequence, row.num_tokens) for row in plan.rows] == [(decoding, 1), (long, 11), (short, 4)]
    assert plan.num_tokens == 16


def test_a_short_prompt_does_not_wait_for_a_long_one():
    scheduler = make_scheduler()
    long, short = make_sequence(60), make_sequence(8, first_token=200)
    scheduler.add(long)
    scheduler.add(short)
    plan = step(scheduler)
    assert [row.draws for row in plan.rows] == [False, True]


def test_the_oldest_prompt_always_advances_whatever_comes_after_it():
    scheduler = make_scheduler(max_batch_size=2)
    long = make_sequence(60)
    scheduler.add(long)
    for index in range(20):
        scheduler.add(make_sequence(2, max_tokens=1, first_token=200 + 5 * index))
        before = long.num_computed_tokens
        step(scheduler)
        if long.status is not Status.PREFILL:
            break
        assert long.num_computed_tokens >= before + 8
    assert long.status is Status.DECODE


def test_a_full_batch_admits_a_newcomer_as_soon_as_one_leaves():
    scheduler = make_scheduler(max_batch_size=2)
    first, second, third = (make_sequence(2, max_tokens=n, first_token=50 * n) for n in (2, 5, 3))
    for sequence in (first, second, third):
        scheduler.add(sequence)
    step(scheduler)
    assert third.status is Status.WAITING
    step(scheduler)
    assert first.status is Status.FINISHED
    step(scheduler)
    assert third.status is Status.DECODE
    assert second.status is Status.DECODE


def test_partial_batch_waits_when_idle_and_only_then():
    scheduler = make_scheduler(batch_wait_timeout_s=0.05)
    scheduler.add(make_sequence(2, created_at=1.0))
    assert not scheduler.plan(1.04).rows
    assert scheduler.seconds_until_due(1.04) > 0
    scheduler.add(make_sequence(2, first_token=50, created_at=1.045))
    assert len(step(scheduler, 1.051).rows) == 2
    late = make_sequence(2, first_token=90, created_at=1.052)
    scheduler.add(late)
    assert late in [row.sequence for row in step(scheduler, 1.053).rows]  # others run: no wait


def test_a_full_batch_does_not_wait():
    scheduler = make_scheduler(batch_wait_timeout_s=10.0, max_batch_size=2)
    for index in range(3):
        scheduler.add(make_sequence(2, first_token=50 * (index + 1)))
    assert len(scheduler.plan(0.0).rows) == 2


def test_the_youngest_gives_way_and_resumes_where_it_was():
    scheduler = make_scheduler(num_blocks=6, prefix_cache=False)
    old, young = make_sequence(7, max_tokens=9), make_sequence(7, max_tokens=9, first_token=50)
    scheduler.add(old)
    scheduler.add(young)
    seen_waiting = False
    for _ in range(40):
        step(scheduler)
        seen_waiting |= young.status is Status.WAITING and young.num_output_tokens > 0
        assert old.status is not Status.WAITING
    assert seen_waiting
    assert young.num_preemptions > 0
    assert young.num_output_tokens == old.num_output_tokens == 9
    assert scheduler.ledger.num_held == 0


def test_equal_prefixes_share_blocks_but_the_last_token_is_computed():
    scheduler = make_scheduler()
    first = make_sequence(12, max_tokens=1)
    scheduler.add(first)
    step(scheduler)
    twin = make_sequence(12, max_tokens=1)
    scheduler.add(twin)
    plan = step(scheduler)
    assert twin.num_cached_tokens == 8
    assert plan.num_tokens == 4


def test_blocks_that_are_not_full_are_not_shared():
    scheduler = make_scheduler()
    scheduler.add(make_sequence(6, max_tokens=1))
    step(scheduler)
    other = make_sequence(7, max_tokens=1)
    scheduler.add(other)
    step(scheduler)
    assert other.num_cached_tokens == 4


def test_hashes_depend_on_all_tokens_before():
    one, two = make_sequence(8, first_token=10), make_sequence(8, first_token=10)
    other = Sequence(UserRequest("o", (9, *range(11, 18)), SamplingParams(max_tokens=1)), frozenset())
    assert one.block_hashes(4, 2) == two.block_hashes(4, 2)
    assert one.block_hashes(4, 2)[1] != other.block_hashes(4, 2)[1]


def make_request(prompt, *, max_tokens=8, priority=0, salt="", **sampling):
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return Sequence(UserRequest("r", tuple(prompt), params, 0.0, cache_salt=salt, priority=priority), frozenset())


def test_rows_with_the_same_prompt_wait_for_the_first_and_share_its_blocks():
    scheduler = make_scheduler(max_batched_tokens=8)
    rows = [make_request(range(21)) for _ in range(4)]
    other = make_request(range(50, 53))
    for sequence in (*rows, other):
        scheduler.add(sequence)
    assert {row.sequence for row in step(scheduler).rows} == {rows[0], other}  # the other passes those who wait
    while any(row.num_computed_tokens < 21 for row in rows):
        step(scheduler)
    assert [row.num_cached_tokens for row in rows] == [0, 20, 20, 20]


def test_who_waits_to_share_goes_on_alone_when_the_first_leaves():
    scheduler = make_scheduler(max_batched_tokens=8)
    first, second = make_request(range(21)), make_request(range(21))
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    assert second.status is Status.WAITING
    scheduler.remove(first, Status.CANCELLED)
    step(scheduler)
    assert second.status is not Status.WAITING
    assert second.num_cached_tokens == 8


def test_a_salt_keeps_prefixes_apart():
    scheduler = make_scheduler(max_batched_tokens=64)
    for salt, cached in (("", 0), ("a", 0), ("b", 0), ("a", 20), ("", 20)):
        sequence = make_request(range(21), max_tokens=1, salt=salt)
        scheduler.add(sequence)
        step(scheduler)
        assert sequence.num_cached_tokens == cached


def test_lower_priorities_first_into_the_batch_and_last_out_of_it():
    scheduler = make_scheduler(max_batch_size=2, num_blocks=6, prefix_cache=False)
    late, urgent, usual = (make_request(range(i, i + 7), priority=p) for i, p in ((10, 5), (20, -1), (30, 0)))
    for sequence in (late, urgent, usual):
        scheduler.add(sequence)
    step(scheduler)
    assert scheduler.running == [urgent, usual]
    while not scheduler.num_preemptions:
        step(scheduler)
    assert usual in scheduler.waiting
    assert scheduler.running == [urgent]


def test_a_row_that_scores_its_prompt_computes_all_of_it():
    scheduler = make_scheduler(max_batched_tokens=64)
    for _ in range(2):
        sequence = make_request(range(21), max_tokens=1, prompt_logprobs=0)
        scheduler.add(sequence)
        [row] = step(scheduler).rows
        assert (row.start, row.end) == (0, 21)
        assert sequence.num_cached_tokens == 0


def from_tenant(tenant, length=4, max_tokens=8, weight=1.0, priority=0, first_token=10):
    prompt = tuple(range(first_token, first_token + length))
    params = SamplingParams(max_tokens=max_tokens)
    request = UserRequest("r", prompt, params, 0.0, tenant=tenant, weight=weight, priority=priority)
    return Sequence(request, frozenset())


def tokens_given(scheduler, sequences):
    """Tokens computed so far, by tenant."""
    given = {}
    for sequence in sequences:
        num_tokens = max(sequence.num_computed_tokens, sequence.num_tokens - 1 if sequence.num_output_tokens else 0)
        given[sequence.request.tenant] = given.get(sequence.request.tenant, 0) + num_tokens
    return given


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tenants_share_by_weight_whatever_each_asks_for(weight):
    scheduler = make_scheduler(num_blocks=256)
    flood = [from_tenant("flood", first_token=1000 + 10 * i) for i in range(200)]
    other = [from_tenant("other", weight=weight, first_token=9000 + 10 * i) for i in range(100)]
    for sequence in (*flood, *other):
        scheduler.add(sequence)
    for _ in range(120):
        step(scheduler)
    given = tokens_given(scheduler, (*flood, *other))
    assert given["other"] / given["flood"] == pytest.approx(weight, rel=0.15)


def flooded(num_calls):
    """A scheduler on which a tenant's long calls have been running for ten steps, and the calls."""
    scheduler = make_scheduler(num_blocks=256)
    flood = [from_tenant("flood", max_tokens=200, first_token=1000 + 10 * i) for i in range(num_calls)]
    for sequence in flood:
        scheduler.add(sequence)
    for _ in range(10):
        step(scheduler)
    return scheduler, flood


def test_a_newcomer_of_another_tenant_starts_at_once_though_a_flood_has_every_place():
    scheduler, flood = flooded(50)
    newcomer = from_tenant("other")
    scheduler.add(newcomer)
    step(scheduler)
    assert newcomer.num_output_tokens == 1
    assert sum(sequence.num_preemptions for sequence in flood) == 1
    for _ in range(20):
        step(scheduler)
    assert newcomer.status is Status.FINISHED
    assert sum(sequence.num_preemptions for sequence in flood) == 1  # once, not at every step


def test_rows_of_a_flood_wait_for_one_step_while_the_prompt_of_another_tenant_ends():
    scheduler, _ = flooded(3)
    scheduler.add(from_tenant("other", length=8))
    assert [row.sequence.request.tenant for row in step(scheduler).rows] == ["other"]
    assert sorted(row.sequence.request.tenant for row in step(scheduler).rows) == ["flood"] * 3 + ["other"]
    scheduler.add(from_tenant("third", length=40, first_token=5000))  # in chunks: they do not wait for all of them
    tenants = [[row.sequence.request.tenant for row in step(scheduler).rows] for _ in range(4)]
    assert sum("flood" not in step_tenants for step_tenants in tenants) <= 1


def test_a_newcomer_of_another_tenant_gets_its_share_of_the_blocks():
    scheduler = make_scheduler(num_blocks=32)
    flood = [from_tenant("flood", length=28, max_tokens=4, first_token=1000 + 100 * i) for i in range(10)]
    for sequence in flood:
        scheduler.add(sequence)
    for _ in range(7):  # their prompts take 7 blocks each, all that there are
        step(scheduler)
    newcomer = from_tenant("other", length=12)
    scheduler.add(newcomer)
    step(scheduler)
    assert newcomer.status is Status.DECODE
    while scheduler.has_work:
        step(scheduler)
    assert all(sequence.status is Status.FINISHED for sequence in (*flood, newcomer))


def test_priority_counts_within_a_tenant_and_not_between_tenants():
    scheduler = make_scheduler(max_batch_size=1)
    pushy = [from_tenant("pushy", max_tokens=1, priority=-10, first_token=100 * (i + 1)) for i in range(3)]
    modest = [from_tenant("modest", max_tokens=1, priority=p, first_token=1000 * (i + 1)) for i, p in enumerate((5, 4))]
    for sequence in (*modest, *pushy):
        scheduler.add(sequence)
    ended = []
    while scheduler.has_work:
        step(scheduler)
        ended += [s for s in (*modest, *pushy) if s.status is Status.FINISHED and s not in ended]
    assert [s.request.tenant for s in ended[:4]].count("modest") == 2
    assert ended.index(modest[1]) < ended.index(modest[0])


def test_time_of_idling_is_not_saved_up():
    scheduler = make_scheduler(num_blocks=256, max_batch_size=1)
    busy = [from_tenant("busy", max_tokens=4, first_token=1000 + 10 * i) for i in range(60)]
    for sequence in busy:
        scheduler.add(sequence)
    for _ in range(100):
        step(scheduler)
    late = [from_tenant("late", max_tokens=4, first_token=9000 + 10 * i) for i in range(30)]
    for sequence in late:
        scheduler.add(sequence)
    before = tokens_given(scheduler, busy)["busy"]
    for _ in range(60):
        step(scheduler)
    gained = tokens_given(scheduler, busy)["busy"] - before
    assert gained == pytest.approx(tokens_given(scheduler, late)["late"], rel=0.25)
