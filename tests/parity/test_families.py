"""Greedy output equals `model.generate` in fp32: every family, alone and in any company."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from serve_app.engine.engine import BatchInferenceEngine
from serve_app.engine.model_runner import ModelRunner
from serve_app.engine.request import SamplingParams, UserRequest
from serve_app.errors import UnsupportedModelError
from tests.families import FAMILIES, REFUSED, VOCAB_SIZE, generate_alone, tiny_model

NUM_TOKENS = 12


def make_engine(model, *, num_blocks_tokens=512, max_batched_tokens=16, max_batch_size=8, native_kernels=True):
    runner = ModelRunner(
        copy.deepcopy(model),
        end_token_ids=frozenset({2}),
        max_model_len=256,
        block_size=4,
        kv_cache_tokens=max(num_blocks_tokens, 256),
        native_kernels=native_kernels,
    )
    return BatchInferenceEngine(runner, max_batch_size=max_batch_size, max_batched_tokens=max_batched_tokens)


def run(engine, prompts, num_tokens=NUM_TOKENS, **sampling):
    """All prompts at once, stepped by hand; returns each one's tokens."""
    params = SamplingParams(max_tokens=num_tokens, **{"temperature": 0.0, "ignore_eos": True, **sampling})
    streams = engine.add_to_queue([UserRequest(f"r{i}-{id(prompts)}", p, params) for i, p in enumerate(prompts)])
    while engine.step():
        engine.check()
    return [[output.token for output in stream] for stream in streams]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """A model, prompts shorter and longer than a chunk and a window, and what `generate` says to each alone."""
    model = tiny_model(FAMILIES[request.param]())
    rng = random.Random(request.param)
    prompts = [tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in (1, 3, 9, 21, 50)]
    expected = [generate_alone(model, prompt, NUM_TOKENS) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) > 1, "a degenerate model proves nothing"
    return model, prompts, expected


def test_alone(family):
    model, prompts, expected = family
    engine = make_engine(model, max_batched_tokens=64)
    assert [run(engine, [prompt])[0] for prompt in prompts] == expected


@pytest.mark.parametrize("native_kernels", [True, False], ids=["native", "torch"])
def test_mixed_batch_with_prompts_longer_than_the_chunk(family, native_kernels):
    model, prompts, expected = family
    assert run(make_engine(model, native_kernels=native_kernels), prompts) == expected


def test_prefix_hits(family):
    model, prompts, expected = family
    engine = make_engine(model)
    assert run(engine, prompts) == expected
    assert run(engine, list(reversed(prompts))) == list(reversed(expected))
    assert engine.stats().num_prefix_hit_tokens >= 40


def test_forced_preemption(family):
    model, prompts, expected = family
    engine = make_engine(model)
    ledger = engine._scheduler.ledger
    hostages = ledger.allocate(ledger.num_blocks - 29)  # 29 blocks of 4 tokens for rows that come to want 39
    ledger.check()
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    streams = engine.add_to_queue([UserRequest(str(i), p, params) for i, p in enumerate(prompts)])
    while engine.step():
        pass
    assert [[output.token for output in stream] for stream in streams] == expected
    assert engine.stats().num_preemptions > 0
    ledger.release(hostages)
    engine.check()


def test_steps_that_do_not_fit_into_memory(family, monkeypatch):
    """Torch's own allocator refuses here what has more than three tokens."""
    model, prompts, expected = family
    engine = make_engine(model)
    forward = engine.runner._forward
    refused = []

    def forward_of_three(rows, wanted):
        if sum(len(tokens) for tokens, _ in rows) > 3:
            refused.append(len(rows))
            torch.empty(10**15)
        return forward(rows, wanted)

    monkeypatch.setattr(engine.runner, "_forward", forward_of_three)
    assert run(engine, prompts) == expected
    assert refused


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_follow_the_interface_is_refused_by_name(name):
    model = tiny_model(REFUSED[name]())
    with pytest.raises(UnsupportedModelError, match=type(model).__name__) as refusal:
        make_engine(model)
    assert "AttentionInterface" in str(refusal.value) or "packed inputs" in str(refusal.value)
    print(refusal.value)


def test_prompt_logprobs_in_chunks_and_through_preemption(family):
    model, prompts, _ = family
    engine = make_engine(model)
    ledger = engine._scheduler.ledger
    ledger.allocate(ledger.num_blocks - 29)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, prompt_logprobs=2)
    streams = engine.add_to_queue([UserRequest(str(i), p, params) for i, p in enumerate(prompts)])
    while engine.step():
        pass
    for prompt, stream in zip(prompts, streams, strict=True):
        first, *rest = list(stream)
        assert all(output.prompt_logprobs is None for output in rest)
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), -1)
        assert len(first.prompt_logprobs) == len(prompt) - 1
        for position, scored in enumerate(first.prompt_logprobs):
            assert scored.chosen == pytest.approx(float(logprobs[position, prompt[position + 1]]), abs=1e-4)
            assert [value for _, value in scored.top] == pytest.approx(logprobs[position].topk(2).values.tolist(), abs=1e-4)
