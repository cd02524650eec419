"""Sampling: the right distribution, per row, and a function of (logits, parameters, seed, position) alone."""

import itertools
import math
from collections import Counter

import pytest
import torch

from serve_app.engine.request import SamplingParams
from serve_app.engine.sampler import RowSampling, Sampler
from serve_app.errors import GenerationError, RequestError

CPU = torch.device("cpu")


def row(position=0, seed=1, forbidden=(), **params):
    return RowSampling(SamplingParams(max_tokens=1, **params), seed, position, forbidden)


def draw(logits, rows):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    if logits.dim() == 1:
        logits = logits.expand(len(rows), -1).clone()
    return [d.token for d in Sampler(logits.shape[1], CPU).sample(logits, rows)]


def chi_square(counts, expected):
    return sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected) if e > 0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])
    count = 20_000
    drawn = Counter()
    for block in range(count // 200):
        drawn.update(draw(logits, [row(position=i, seed=block, temperature=temperature) for i in range(200)]))
    expected = (torch.softmax(logits / temperature, -1) * count).tolist()
    assert chi_square(drawn, expected) < 25  # 5 degrees of freedom: p = 0.0001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_largest_and_of_equal_ones_the_first(dtype):
    torch.manual_seed(0)
    logits = torch.randn(33, 1001).to(dtype)
    logits[:, 700] = logits[:, 300] = logits.max() + 1
    greedy = [row(temperature=0.0) for _ in range(33)]
    assert [d.token for d in Sampler(1001, CPU).sample(logits, greedy)] == [300] * 33


def test_a_rare_token_is_drawn_as_rarely_as_it_should_be():
    logits = torch.zeros(1000)
    logits[0] = math.log(999 * 99)  # 99 %
    count = 10_000
    rare = sum(t != 0 for b in range(50) for t in draw(logits, [row(position=i, seed=b) for i in range(count // 50)]))
    assert abs(rare - 100) < 45


def test_seeds_and_positions_are_independent():
    logits = torch.zeros(64)
    tokens = draw(logits, [row(position=p, seed=s) for s in range(32) for p in range(32)])
    neighbours = sum(a == b for a, b in itertools.pairwise(tokens)) / len(tokens)
    assert abs(neighbours - 1 / 64) < 0.02


def test_a_row_draws_the_same_alone_and_in_any_company():
    torch.manual_seed(0)
    logits = torch.randn(16, 500)
    rows = [
        row(
            position=i,
            seed=100 + i,
            temperature=[0.0, 0.7, 1.0, 1.5][i % 4],
            top_k=[0, 5, 50][i % 3],
            top_p=[1.0, 0.9][i % 2],
        )
        for i in range(16)
    ]
    together = draw(logits, rows)
    assert [draw(logits[i : i + 1], [rows[i]])[0] for i in range(16)] == together
    order = list(reversed(range(16)))
    assert draw(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_greedy_takes_the_most_probable():
    assert draw([0.0, 3.0, 1.0], [row(temperature=0.0)]) == [1]


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.95}, {0, 1, 2}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 0.7}, {0}),
        ({"top_k": 3, "top_p": 0.5}, {0}),
        ({"top_k": 2, "min_p": 0.1}, {0, 1}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_filters_keep_what_they_should(params, allowed):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    drawn = set()
    for block in range(20):
        drawn |= set(draw(logits, [row(position=i, seed=block, **params) for i in range(40)]))
    assert drawn == allowed


def test_a_wide_nucleus_is_sorted_whole():
    logits = torch.zeros(5000)
    drawn = set()
    for block in range(10):
        drawn |= set(
            draw(logits + torch.linspace(0.01, 0, 5000), [row(position=i, seed=block, top_p=0.5) for i in range(100)])
        )
    assert 1100 < max(drawn) < 2520


def test_equal_logits_are_kept_or_dropped_together():
    logits = torch.tensor([1.0, 1.0, 1.0, 0.0])
    drawn = Counter(t for b in range(10) for t in draw(logits, [row(position=i, seed=b, top_k=1) for i in range(60)]))
    assert set(drawn) == {0, 1, 2}


def test_forbidden_tokens_are_not_drawn_greedy_or_not():
    logits = [0.0, 9.0, 1.0]
    assert draw(logits, [row(temperature=0.0, forbidden=(1,))]) == [2]
    assert 1 not in draw(logits, [row(position=i, forbidden=(1,)) for i in range(50)])


def test_a_row_with_invalid_logits_fails_alone():
    logits = torch.zeros(3, 8)
    logits[1] = float("nan")
    good, bad, also_good = Sampler(8, CPU).sample(logits, [row(temperature=0.0), row(), row()])
    assert isinstance(bad, GenerationError)
    assert not isinstance(good, GenerationError) and not isinstance(also_good, GenerationError)


def test_logprobs_are_those_of_the_models_own_distribution():
    torch.manual_seed(1)
    logits = torch.randn(3, 100)
    rows = [row(logprobs=5, temperature=0.5), row(logprobs=0, temperature=0.0), row()]
    first, second, third = Sampler(100, CPU).sample(logits, rows)
    expected = torch.log_softmax(logits, -1)
    assert first.logprobs.chosen == pytest.approx(float(expected[0, first.token]), abs=1e-5)
    values, ids = expected[0].topk(5)
    assert [token for token, _ in first.logprobs.top] == ids.tolist()
    assert [value for _, value in first.logprobs.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert second.logprobs.top == ()
    assert third.logprobs is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", 2.0),
        ("max_tokens", 0),
        ("min_tokens", 6),
        ("seed", 2**64),
        ("logprobs", 21),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{"max_tokens": 5, name: value})
    assert refusal.value.param == name


def adjusted(history, num_prompt_tokens, **params):
    """Which of 6 tokens is taken, greedily, from logits 3, 2.9, 2.8, -1, -1.1, -1.2."""
    sampling = SamplingParams(max_tokens=1, temperature=0, **params)
    row = RowSampling(sampling, 0, len(history), (), history, num_prompt_tokens)
    return draw([3.0, 2.9, 2.8, -1.0, -1.1, -1.2], [row])[0]


def test_presence_and_frequency_penalties_count_drawn_tokens_only():
    assert adjusted([0, 0, 0], 3, presence_penalty=2, frequency_penalty=2) == 0
    assert adjusted([0, 1], 1, presence_penalty=0.05) == 0
    assert adjusted([1, 0], 1, presence_penalty=0.15) == 1
    assert adjusted([5, 0, 0], 1, frequency_penalty=0.06) == 1
    assert adjusted([5, 0, 1], 1, frequency_penalty=0.06) == 0
    assert adjusted([5, 2], 1, presence_penalty=-2) == 2


def test_repetition_penalty_counts_the_prompt_too_and_is_that_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    assert adjusted([0], 1, repetition_penalty=1.1) == 1
    torch.manual_seed(0)
    logits, history = torch.randn(50), [3, 3, 7, 20]
    for penalty in (0.5, 1.3):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]), logits[None].clone())[0]
        params = SamplingParams(max_tokens=1, temperature=0, repetition_penalty=penalty)
        assert draw(logits, [RowSampling(params, 0, 4, (), history, 2)]) == [int(expected.argmax())]


def test_logit_bias_forces_and_forbids_and_leaves_the_logprobs_of_the_model_alone():
    assert adjusted([], 0, logit_bias=((4, 100.0),)) == 4
    assert adjusted([], 0, logit_bias=((0, -100.0),)) == 1
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=1, logit_bias=((1, 100.0),))
    [drawn] = Sampler(3, CPU).sample(torch.zeros(1, 3), [RowSampling(params, 0, 0)])
    assert drawn.token == 1
    assert drawn.logprobs.chosen == pytest.approx(-math.log(3))


def test_adjusted_rows_leave_their_neighbours_alone():
    logits = torch.tensor([3.0, 2.0, 1.0]).expand(3, -1).clone()
    biased = RowSampling(SamplingParams(max_tokens=1, temperature=0, logit_bias=((2, 50.0),)), 0, 0)
    assert draw(logits, [row(temperature=0), biased, row(temperature=0)]) == [0, 2, 0]
    assert torch.equal(logits[1], torch.tensor([3.0, 2.0, 1.0]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"repetition_penalty": 0},
        {"repetition_penalty": math.inf},
        {"logit_bias": ((1, 101.0),)},
        {"logit_bias": ((1, math.nan),)},
        {"prompt_logprobs": 21},
    ],
)
def test_impossible_adjustments_are_refused_by_name(wrong):
    with pytest.raises(RequestError) as error:
        SamplingParams(max_tokens=1, **wrong)
    assert error.value.param == next(iter(wrong))
