"""The engine with a scripted runner: queue, steps, streams, endings."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine.engine import BatchInferenceEngine
from serve_app.engine.request import FinishReason, SamplingParams, UserRequest
from serve_app.engine.stream import as_they_come
from serve_app.engine.timing import Timing
from serve_app.errors import (
    ContextLengthError,
    EngineUnavailableError,
    GenerationError,
    OutOfMemoryError,
    OverloadedError,
    RequestCancelledError,
    RequestError,
)
from tests.fakes import EOS, FIRST_BYTE, ScriptedRunner, counting, echo, ids


def ask(request_id="r", prompt=(10,), max_tokens=5, **sampling):
    return UserRequest(request_id, tuple(prompt), SamplingParams(max_tokens=max_tokens, **sampling))


def run_all(engine):
    while engine.step():
        engine.check()


def tokens(stream):
    return [output.token for output in stream]


@pytest.fixture
def running():
    """Makes started engines and stops them."""
    engines = []

    def start(runner=None, **options):
        engine = BatchInferenceEngine(runner or ScriptedRunner(), **options)
        engine.start()
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.shutdown()
        engine.check()
        assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_one_inference_call_serves_the_batch_and_each_gets_its_own():
    runner = ScriptedRunner()
    engine = BatchInferenceEngine(runner)
    streams = engine.add_to_queue([ask("a", (10,)), ask("b", (20, 21)), ask("c", (30,))])
    engine.step()
    assert len(runner.plans) == 1
    assert sorted(row.sequence.request.request_id for row in runner.plans[0].rows) == ["a", "b", "c"]
    run_all(engine)
    assert [tokens(stream) for stream in streams] == [[11, 12, 13, 14, 15], [22, 23, 24, 25, 26], [31, 32, 33, 34, 35]]


def test_the_last_output_says_why_it_is_the_last():
    engine = BatchInferenceEngine(ScriptedRunner(echo))
    length, stop = engine.add_to_queue([ask("a", ids("hello"), 3), ask("b", ids("hi"), 9)])
    run_all(engine)
    assert [output.finish_reason for output in length] == [None, None, FinishReason.LENGTH]
    ended = list(stop)
    assert [output.token for output in ended] == [*ids("hi"), EOS]
    assert ended[-1].finish_reason is FinishReason.STOP


def test_end_tokens_stop_ids_ignore_eos_and_min_tokens():
    script = [5, EOS, 7, 8, EOS, 9, 9, 9]
    runner = ScriptedRunner(lambda prompt: script)
    engine = BatchInferenceEngine(runner)
    streams = engine.add_to_queue(
        [
            ask("eos", max_tokens=8),
            ask("ignore", max_tokens=8, ignore_eos=True),
            ask("own", max_tokens=8, ignore_eos=True, stop_token_ids=(8,)),
            ask("min", max_tokens=8, min_tokens=3),
        ]
    )
    run_all(engine)
    assert [len(list(stream)) for stream in streams] == [2, 8, 4, 5]


def test_newcomers_join_running_rows_and_leavers_leave_at_once():
    runner = ScriptedRunner()
    engine = BatchInferenceEngine(runner)
    engine.add_to_queue([ask("long", (10,), 50)])
    engine.step()
    engine.add_to_queue([ask("short", (20,), 2)])
    engine.step()
    engine.step()
    engine.step()
    assert [len(plan.rows) for plan in runner.plans] == [1, 2, 2, 1]


def test_cancelling_frees_the_blocks_within_one_step_wherever_the_row_is():
    engine = BatchInferenceEngine(ScriptedRunner(), max_batch_size=2, max_batched_tokens=8)
    decode, prefill, queued = engine.add_to_queue(
        [ask("decode", (10,), 50), ask("prefill", range(10, 60), 50), ask("queued", (30,), 50)]
    )
    engine.step()
    for stream in (decode, prefill, queued):
        stream.close()
    engine.step()
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert engine.num_unfinished == 0
    engine.check()


def test_a_queued_row_whose_caller_left_is_never_computed():
    runner = ScriptedRunner()
    engine = BatchInferenceEngine(runner, max_batch_size=1)
    first, leaver, last = engine.add_to_queue([ask("first", max_tokens=3), ask("leaver"), ask("last")])
    engine.step()
    leaver.close()
    run_all(engine)
    assert len(tokens(first)) == 3
    assert len(tokens(last)) == 5
    assert "leaver" not in {row.sequence.request.request_id for plan in runner.plans for row in plan.rows}


def test_cancelling_20_of_40_leaves_the_other_20_as_they_are(running):
    alone = {i: list(counting((FIRST_BYTE + i,)))[:40] for i in range(40)}
    engine = running(ScriptedRunner(step_s=0.002), max_batch_size=40)
    streams = engine.add_to_queue([ask(f"r{i}", (FIRST_BYTE + i,), 40) for i in range(40)])
    next(iter(streams[0]))
    for stream in streams[::2]:
        stream.close()
    for i in range(1, 40, 2):
        assert tokens(streams[i]) == alone[i]


def test_a_row_that_fails_harms_no_other():
    runner = ScriptedRunner()
    runner.row_errors["bad"] = GenerationError("no valid logits")
    engine = BatchInferenceEngine(runner)
    good, bad = engine.add_to_queue([ask("good"), ask("bad")])
    run_all(engine)
    assert len(tokens(good)) == 5
    with pytest.raises(GenerationError, match="no valid logits"):
        tokens(bad)


def test_a_step_that_fails_ends_its_rows_with_a_readable_error_and_the_loop_goes_on(running):
    runner = ScriptedRunner()

    def fail_once(plan):
        runner.before_step = None
        raise ValueError("secret details")

    runner.before_step = fail_once
    engine = running(runner)
    [stream] = engine.add_to_queue([ask("a")])
    with pytest.raises(GenerationError) as failure:
        tokens(stream)
    assert "secret" not in str(failure.value)
    [again] = engine.add_to_queue([ask("b")])
    assert len(tokens(again)) == 5
    engine.check_health(60)


def test_a_row_that_breaks_its_step_harms_no_other(running, caplog):
    def fail(plan):
        if any(row.sequence.request.request_id == "bad" for row in plan.rows):
            raise ValueError("secret details")

    runner = ScriptedRunner()
    runner.before_step = fail
    engine = running(runner)
    streams = engine.add_to_queue([ask(f"r{i}", (FIRST_BYTE + i,)) for i in range(11)] + [ask("bad")])
    for i, stream in enumerate(streams[:-1]):
        assert tokens(stream) == list(counting((FIRST_BYTE + i,)))[:5]
    with pytest.raises(GenerationError):
        tokens(streams[-1])
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "request bad failed in its step; it ends, the loop goes on"
    ]


class LittleMemory:
    """Lets a runner's steps have so many tokens at most, and remembers how large those were that had more."""

    def __init__(self, runner, num_tokens):
        self.num_tokens = num_tokens
        self.refused = []
        runner.before_step = self._check

    def _check(self, plan):
        if plan.num_tokens > self.num_tokens:
            self.refused.append(plan.num_tokens)
            raise OutOfMemoryError("too large")


def test_a_step_that_does_not_fit_into_memory_is_done_in_halves():
    runner = ScriptedRunner(num_blocks=512)
    LittleMemory(runner, 20)
    engine = BatchInferenceEngine(runner, max_batched_tokens=256)
    asked = [ask(f"r{i}", [10 + i] * (30 * i + 1), 40, prompt_logprobs=0) for i in range(6)]
    streams = engine.add_to_queue(asked)
    run_all(engine)
    for request, stream in zip(asked, streams, strict=True):
        outputs = list(stream)
        assert [output.token for output in outputs] == list(counting(request.prompt_token_ids))[:40]
        assert len(outputs[0].prompt_logprobs) == len(request.prompt_token_ids) - 1
    assert engine.stats().num_free_blocks == 512


def test_after_a_step_that_did_not_fit_the_next_ones_are_smaller_and_grow_again():
    runner = ScriptedRunner(num_blocks=1024, max_model_len=4096)
    memory = LittleMemory(runner, 100)
    engine = BatchInferenceEngine(runner, max_batched_tokens=256)
    engine.add_to_queue([ask("long", [10] * 2000, 1)])
    run_all(engine)
    # 256 is refused, 128 too; what follows begins at 64 and is tried above 100 once for every 50 steps
    assert memory.refused[:2] == [256, 128]
    assert len(memory.refused) < 6
    memory.num_tokens = 10**6
    engine.add_to_queue([ask("later", [11] * 3000, 200)])
    run_all(engine)
    engine.add_to_queue([ask("last", [12] * 300, 1)])
    engine.step()
    assert runner.plans[-1].num_tokens == 256


def test_only_what_does_not_fit_into_memory_alone_fails():
    runner = ScriptedRunner()

    def refuse(plan):
        if any(row.sequence.request.request_id == "huge" and row.end > 40 for row in plan.rows):
            raise OutOfMemoryError("This request does not fit.")

    runner.before_step = refuse
    engine = BatchInferenceEngine(runner)
    huge, *others = engine.add_to_queue([ask("huge", [10] * 60)] + [ask(f"r{i}", [20 + i] * 30, 10) for i in range(3)])
    run_all(engine)
    with pytest.raises(OutOfMemoryError, match="does not fit"):
        tokens(huge)
    assert [len(tokens(stream)) for stream in others] == [10, 10, 10]
    [next_one] = engine.add_to_queue([ask("next")])
    run_all(engine)
    assert len(tokens(next_one)) == 5


def test_a_lost_device_ends_the_engine(running):
    runner = ScriptedRunner()

    def lose(plan):
        raise EngineUnavailableError("The device of this replica is lost.")

    runner.before_step = lose
    engine = running(runner)
    died = threading.Event()
    engine.when_dead(died.set)
    streams = engine.add_to_queue([ask("a"), ask("b")])
    for stream in streams:
        with pytest.raises(EngineUnavailableError):
            tokens(stream)
    assert died.wait(10)
    with pytest.raises(EngineUnavailableError):
        engine.check_health(60)
    for sequence in list(engine._scheduler.running):
        engine._end(sequence, "cancelled")


def test_an_engine_whose_steps_all_fail_is_not_healthy(running):
    runner = ScriptedRunner()

    def fail(plan):
        time.sleep(0.02)
        raise ValueError("broken")

    runner.before_step = fail
    engine = running(runner, max_batch_size=1)
    streams = engine.add_to_queue([ask(f"r{i}") for i in range(40)])
    with pytest.raises(GenerationError):
        tokens(streams[20])
    with pytest.raises(EngineUnavailableError, match="finished no step"):
        engine.check_health(0.2)
    with pytest.raises(GenerationError):
        tokens(streams[-1])


def test_when_the_loop_dies_every_stream_is_failed_first_and_health_says_so(running, monkeypatch):
    engine = running(ScriptedRunner(step_s=0.005))
    streams = engine.add_to_queue([ask("a", max_tokens=500), ask("b", max_tokens=500)])
    next(iter(streams[0]))
    monkeypatch.setattr(engine._scheduler, "plan", lambda now: 1 / 0)
    for stream in streams:
        with pytest.raises(EngineUnavailableError):
            tokens(stream)
    with pytest.raises(EngineUnavailableError):
        engine.check_health(60)
    [late] = engine.add_to_queue([ask("late")])
    with pytest.raises(EngineUnavailableError):
        tokens(late)
    monkeypatch.undo()
    for sequence in list(engine._scheduler.running):
        engine._end(sequence, "cancelled")


def test_health_is_progress(running):
    runner = ScriptedRunner()
    go_on = threading.Event()
    runner.before_step = lambda plan: go_on.wait(10)
    engine = running(runner)
    time.sleep(0.1)
    engine.check_health(0.05)  # idle is healthy
    [stream] = engine.add_to_queue([ask("a")])
    time.sleep(0.15)
    with pytest.raises(EngineUnavailableError, match="finished no step"):
        engine.check_health(0.05)
    go_on.set()
    tokens(stream)
    engine.check_health(0.5)


def test_a_long_prefill_that_advances_is_healthy(running):
    engine = running(ScriptedRunner(step_s=0.05), max_batched_tokens=8)
    [stream] = engine.add_to_queue([ask("a", range(10, 210), 2)])
    for _ in range(10):
        time.sleep(0.1)
        engine.check_health(0.7)
    tokens(stream)


def test_shutdown_gives_the_unfinished_their_ending():
    engine = BatchInferenceEngine(ScriptedRunner(step_s=0.005))
    engine.start()
    [stream] = engine.add_to_queue([ask("a", max_tokens=400)])
    next(iter(stream))
    engine.shutdown()
    with pytest.raises(EngineUnavailableError):
        tokens(stream)


def test_bad_requests_are_refused_in_their_own_streams():
    runner = ScriptedRunner(max_model_len=32)
    engine = BatchInferenceEngine(runner)
    good, long, unknown, twin = engine.add_to_queue(
        [ask("good"), ask("long", range(30), 3), ask("unknown", (9999,)), ask("good")]
    )
    run_all(engine)
    assert len(tokens(good)) == 5
    for stream, error in ((long, ContextLengthError), (unknown, RequestError), (twin, RequestError)):
        with pytest.raises(error):
            tokens(stream)


def test_overload_is_refused_with_a_computed_retry_after():
    runner = ScriptedRunner()
    engine = BatchInferenceEngine(runner, max_batch_size=1, max_waiting_tokens=300)
    engine.add_to_queue([ask("running", max_tokens=100)])
    engine.step()
    accepted, refused = engine.add_to_queue([ask("a", max_tokens=250), ask("b", max_tokens=250)])
    with pytest.raises(OverloadedError) as refusal:
        tokens(refused)
    assert refusal.value.retry_after_s >= 1
    run_all(engine)
    assert len(tokens(accepted)) == 250
    assert engine.stats().num_waiting_tokens == 0


def test_what_another_engine_has_begun_is_not_refused():
    engine = BatchInferenceEngine(ScriptedRunner(), max_batch_size=1, max_waiting_tokens=300)
    others = engine.add_to_queue([ask("running"), ask("waiting", max_tokens=290)])
    begun = replace(ask("begun", max_tokens=50), output_token_ids=(11, 12), is_continuation=True)
    [stream] = engine.add_to_queue([begun])
    run_all(engine)
    assert len(tokens(stream)) == 48
    assert all(tokens(other) for other in others)


def test_a_request_larger_than_the_budget_is_served_when_nothing_waits():
    engine = BatchInferenceEngine(ScriptedRunner(), max_waiting_tokens=10)
    [stream] = engine.add_to_queue([ask("a", max_tokens=100)])
    run_all(engine)
    assert len(tokens(stream)) == 100


def test_timings_are_told_once_each():
    engine = BatchInferenceEngine(ScriptedRunner(step_s=0.01), max_batch_size=1)
    engine.add_to_queue([ask("first", max_tokens=4), ask("second", max_tokens=4)])
    run_all(engine)
    told = {}
    for kind, value in engine.take_timings():
        told.setdefault(kind, []).append(value)
    assert told[Timing.BATCH_SIZE] == told[Timing.STEP_TOKENS] == [1] * 8
    assert len(told[Timing.STEP]) == 8
    first, second = told[Timing.QUEUE]
    assert first < 0.04 <= second  # it waited for the first's four steps
    assert all(0.01 <= prefill < decode for prefill, decode in zip(told[Timing.PREFILL], told[Timing.DECODE], strict=True))
    assert not list(engine.take_timings())


def test_configure_changes_the_batch_while_rows_run():
    runner = ScriptedRunner()
    engine = BatchInferenceEngine(runner, max_batch_size=1)
    streams = engine.add_to_queue([ask(f"r{i}") for i in range(3)])
    engine.step()
    engine.configure(max_batch_size=3, batch_wait_timeout_s=0.0)
    engine.step()
    assert [len(plan.rows) for plan in runner.plans] == [1, 3]
    run_all(engine)
    assert all(len(tokens(stream)) == 5 for stream in streams)


def flooded(engine, num_tokens=60):
    """An engine at work on four requests of one tenant, for long enough that a step may be given up."""
    streams = engine.add_to_queue([replace(ask(f"flood-{i}", max_tokens=num_tokens), tenant="flood") for i in range(4)])
    while engine.stats().num_steps < 10:
        time.sleep(0.005)
    return streams


def num_given_up(plans):
    """Plans that were not computed: a later one computes the same tokens of a row."""
    work = [{(row.sequence.request.request_id, row.start, row.end) for row in plan.rows} for plan in plans]
    seen, count = set(), 0
    for rows in reversed(work):
        count += bool(rows & seen)
        seen |= rows
    return count


def test_a_step_is_given_up_for_a_tenant_who_has_no_part_in_it(running):
    runner = ScriptedRunner(step_s=0.02)
    engine = running(runner)
    floods = flooded(engine)
    runner.step_s = 0.2
    time.sleep(0.05)
    [quiet] = engine.add_to_queue([replace(ask("quiet"), tenant="quiet")])
    assert len(tokens(quiet)) == 5
    runner.step_s = 0.0
    assert all(len(tokens(stream)) == 60 for stream in floods)
    assert num_given_up(runner.plans) == 1


def test_no_step_is_given_up_for_a_tenant_who_has_a_part_in_it(running):
    runner = ScriptedRunner(step_s=0.02)
    engine = running(runner)
    floods = flooded(engine)
    more = [engine.add_to_queue([replace(ask(f"more-{i}"), tenant="flood")])[0] for i in range(10)]
    assert all(len(tokens(stream)) for stream in (*floods, *more))
    assert not num_given_up(runner.plans)


def test_the_time_in_steps_that_are_given_up_is_bounded(running):
    """New tenants come all the time; those who run go on nevertheless."""
    runner = ScriptedRunner(step_s=0.01)
    engine = running(runner, max_batch_size=8)
    floods = flooded(engine, num_tokens=150)
    others = []
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(lambda: [len(tokens(stream)) for stream in floods])
        while not answers.done():
            others += engine.add_to_queue([replace(ask(f"other-{len(others)}"), tenant=str(len(others)))])
            time.sleep(0.02)
    assert answers.result() == [150] * 4
    runner.step_s = 0.0
    assert all(len(tokens(stream)) == 5 for stream in others)
    lost = num_given_up(runner.plans)
    assert 0 < lost < len(runner.plans) // 4


def test_threads_see_tokens_as_they_come(running):
    engine = running(ScriptedRunner(step_s=0.05))
    streams = engine.add_to_queue([ask("a", (10,), 6), ask("b", (20,), 2)])
    seen = [(output.request_id, output.token) for output in as_they_come(streams)]
    assert [token for request_id, token in seen if request_id == "a"] == list(range(11, 17))
    assert [token for request_id, token in seen if request_id == "b"] == [21, 22]
    assert seen.index(("b", 22)) < seen.index(("a", 16))


async def test_one_crossing_per_step_whatever_the_batch(running):
    engine = running(ScriptedRunner(step_s=0.001), max_batch_size=32)
    loop = asyncio.get_running_loop()
    crossings = []
    original = loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda callback, *args: (crossings.append(callback), original(callback, *args))
    try:
        streams = engine.add_to_queue([ask(f"r{i}", max_tokens=10) for i in range(32)])
        results = await asyncio.gather(*(collect(stream) for stream in streams))
    finally:
        loop.call_soon_threadsafe = original
    assert [len(result) for result in results] == [10] * 32
    assert len(crossings) == 10


async def collect(stream):
    return [output.token async for output in stream]


async def test_a_reader_who_lags_gets_what_has_come_in_one_piece(running):
    engine = running(ScriptedRunner())
    [stream] = engine.add_to_queue([ask("a", max_tokens=10)])
    await asyncio.sleep(0.2)
    sizes = [len(batch) async for batch in stream.batches()]
    assert sizes == [10]


async def test_cancelling_raises_in_an_asynchronous_reader(running):
    engine = running(ScriptedRunner(step_s=0.002))
    [stream] = engine.add_to_queue([ask("a", max_tokens=400)])
    engine.cancel("a")
    with pytest.raises(RequestCancelledError):
        await collect(stream)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 40), st.integers(1, 20), st.integers(0, 15), st.integers(0, 25), st.sampled_from(("", "a", "b"))
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 6),
    st.integers(4, 40),
    st.integers(24, 60),
)
def test_any_mix_of_arrivals_and_departures_ends_each_once_and_balances(jobs, batch, budget, num_blocks):
    """jobs: (prompt length, tokens asked, step of arrival, step of departure or after it all, tenant)."""
    runner = ScriptedRunner(num_blocks=num_blocks, max_model_len=96)
    engine = BatchInferenceEngine(runner, max_batch_size=batch, max_batched_tokens=budget)
    streams = {}
    for now in range(3000):
        for index, (length, asked, arrival, departure, tenant) in enumerate(jobs):
            if arrival == now:
                prompt = [FIRST_BYTE + (index * 7 + i) % 200 for i in range(length)]
                [streams[index]] = engine.add_to_queue([replace(ask(str(index), prompt, asked), tenant=tenant)])
            if index in streams and departure == now and departure > arrival:
                engine.cancel(str(index))
        did_something = engine.step()
        engine.check()
        if not did_something and now > 30:
            break
    for index, (length, asked, *_) in enumerate(jobs):
        expected = list(counting((FIRST_BYTE + (index * 7 + length - 1) % 200,)))[:asked]
        got = []
        try:
            for output in streams[index]:
                got.append(output.token)
        except RequestCancelledError:
            assert got == expected[: len(got)]
        else:
            assert got == expected
    assert engine.stats().num_free_blocks == num_blocks
    assert engine.stats().num_waiting_tokens == 0
    assert engine.num_unfinished == 0
