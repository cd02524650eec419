"""A replica dies; its streams go on elsewhere, and nobody can tell by the text."""

import asyncio
import contextlib

import pytest

from serve_app.engine.engine import BatchInferenceEngine
from serve_app.engine.model_runner import ModelRunner
from serve_app.engine.request import RequestFailure, SamplingParams, UserRequest
from serve_app.errors import DeadlineError, EngineUnavailableError
from serve_app.ingress import continuation
from serve_app.ingress.continuation import MAX_CONTINUATIONS, ContinuingClient
from tests.api.server import LocalEngineClient
from tests.cases.tiny_server import new_tiny_model
from tests.fakes import EOS, ids


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(continuation, "PAUSE_S", 0.0)


@pytest.fixture
def new_engine():
    """Makes engines on the same tiny model, each with its own cache."""
    with contextlib.ExitStack() as stack:

        def make():
            runner = ModelRunner(
                new_tiny_model(), end_token_ids=frozenset({EOS}), max_model_len=512, block_size=8, kv_cache_tokens=4096
            )
            engine = BatchInferenceEngine(runner, max_batch_size=8, max_batched_tokens=64)
            engine.start()
            stack.callback(engine.shutdown)
            return engine

        yield make


class DyingReplicas:
    """An `EngineClient` whose replica dies after so many tokens: the call breaks, or its last word says so."""

    def __init__(self, engines, deaths, *, by_value):
        self.clients = [LocalEngineClient(engine) for engine in engines]
        self.deaths, self.by_value = list(deaths), by_value
        self.requests = []

    async def generate(self, request):
        client = self.clients[len(self.requests) % len(self.clients)]
        lives = self.deaths.pop(0) if self.deaths else None
        self.requests.append(request)
        count = 0
        async with contextlib.aclosing(client.generate(request)) as batches:
            async for deliveries in batches:
                for delivery in deliveries:
                    if count == lives:
                        gone = EngineUnavailableError("The model replica serving this request is gone.")
                        if not self.by_value:
                            raise gone
                        yield [RequestFailure(request.request_id, gone)]
                        return
                    count += 1
                    yield [delivery]


async def outputs_of(client, request):
    return [delivery async for batch in client.generate(request) for delivery in batch]


SAMPLINGS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "penalties": {
        "temperature": 0.9,
        "seed": 3,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
    },
    "filters": {"temperature": 1.3, "seed": 11, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "min_tokens": 30},
    "logprobs": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
}


@pytest.mark.parametrize("by_value", [False, True], ids=["the call breaks", "the engine says so"])
@pytest.mark.parametrize("deaths", [[0], [1], [17], [5, 0, 9]], ids=str)
@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_a_stream_goes_on_elsewhere_as_if_nothing_had_happened(new_engine, sampling, deaths, by_value):
    params = SamplingParams(max_tokens=40, ignore_eos=True, **SAMPLINGS[sampling])
    request = UserRequest("r", ids("once upon a time"), params)
    engines = [new_engine(), new_engine()]
    alone = await outputs_of(LocalEngineClient(engines[0]), request)
    replicas = DyingReplicas(engines, deaths, by_value=by_value)
    got = await outputs_of(ContinuingClient(replicas), request)
    assert [output.token for output in got] == [output.token for output in alone]
    assert [output.finish_reason for output in got] == [output.finish_reason for output in alone]
    assert len(replicas.requests) == 1 + len(deaths)
    assert len({request.request_id for request in replicas.requests}) == 1 + len(deaths)
    for one, other in zip(got, alone, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None:
            assert one.logprobs.chosen == pytest.approx(other.logprobs.chosen, abs=1e-4)
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)


async def test_a_seed_that_the_server_chooses_is_the_same_everywhere(new_engine):
    request = UserRequest("r", ids("once"), SamplingParams(max_tokens=30, temperature=1.0, ignore_eos=True))
    engines = [new_engine(), new_engine()]
    replicas = DyingReplicas(engines, [10], by_value=False)
    got = await outputs_of(ContinuingClient(replicas), request)
    seeds = {request.sampling.seed for request in replicas.requests}
    assert len(seeds) == 1
    [first, _] = replicas.requests
    alone = await outputs_of(LocalEngineClient(engines[1]), first)
    assert [output.token for output in got] == [output.token for output in alone]


async def test_after_a_bounded_number_of_deaths_there_is_an_honest_error(new_engine):
    replicas = DyingReplicas([new_engine()], [2] * 10, by_value=False)
    request = UserRequest("r", ids("once"), SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    got = []

    async def read():
        async for batch in ContinuingClient(replicas).generate(request):
            got.extend(batch)

    with pytest.raises(EngineUnavailableError):
        await read()
    assert len(replicas.requests) == 1 + MAX_CONTINUATIONS
    assert len(got) == 2 * (1 + MAX_CONTINUATIONS)


async def test_a_deadline_goes_on_from_where_it_was(new_engine):
    replicas = DyingReplicas([new_engine()], [2, 2], by_value=False)
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    await outputs_of(ContinuingClient(replicas), UserRequest("r", ids("once"), params, timeout_s=60.0))
    left = [request.timeout_s for request in replicas.requests]
    assert left[0] == 60.0 > left[1] > left[2] > 30.0

    class Slow(DyingReplicas):
        async def generate(self, request):
            await asyncio.sleep(0.05)
            async for batch in super().generate(request):
                yield batch

    slow = Slow([new_engine()], [0, 0], by_value=False)
    with pytest.raises(DeadlineError):
        await outputs_of(ContinuingClient(slow), UserRequest("r", ids("once"), params, timeout_s=0.04))


async def test_other_errors_are_not_tried_again(new_engine):
    replicas = DyingReplicas([new_engine()], [], by_value=False)
    params = SamplingParams(max_tokens=600, temperature=0)
    [failure] = await outputs_of(ContinuingClient(replicas), UserRequest("r", ids("once"), params))
    assert isinstance(failure, RequestFailure)
    assert len(replicas.requests) == 1
