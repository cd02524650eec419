"""Draws one token per row. Prepared on the host, drawn on the device; each row has its own parameters.

Sampling is stateless. Noise is counter-based: the draw for a token id at a position is a hash of (seed, position, token
id), so it does not depend on the batch, on preemption, or on the replica. The race is the exponential one (equivalent to
Gumbel-max): with E_i ~ Exp(1), argmax_i(log p_i - log E_i) is distributed as p (Efraimidis and Spirakis 2006; Maddison et
al. 2014), so no normalised distribution is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from serve_app.engine.request import SamplingParams, TokenLogprobs
from serve_app.engine.runner import Draw
from serve_app.errors import GenerationError, ServeAppError

TOP_WINDOW = 1024
"""Most probable tokens sorted to find a nucleus; a row whose mass lies wider is sorted whole."""

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class RowSampling:
    """One drawing row: its parameters and the counter of its noise.

    Attributes:
        params: the request's sampling parameters.
        seed: the request's seed (drawn at random if it gave none).
        position: index in the sequence of the token to be drawn.
        forbidden: token ids that may not be drawn here (end tokens before `min_tokens`).
        history: the sequence's token ids, when `params.looks_back`.
        num_prompt_tokens: how many of them are prompt.
    """

    params: SamplingParams
    seed: int
    position: int
    forbidden: tuple[int, ...] = ()
    history: Sequence[int] = ()
    num_prompt_tokens: int = 0


class Sampler:
    """Holds per-vocabulary constants; otherwise without state."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._token_hash = _mix(torch.arange(vocab_size, dtype=torch.int32, device=device), 0x7FEB352D, 0x1B873593)

    def sample(self, logits: torch.Tensor, rows: Sequence[RowSampling]) -> list[Draw | ServeAppError]:
        """Draws a token for each row of `logits` [rows, vocabulary]; a row with NaN logits gets an error of its own."""
        chosen_from = self._forbid(_adjust(logits, rows), rows)
        tokens = _largest(chosen_from)
        drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
        if drawn:
            index = torch.tensor(drawn, device=logits.device)
            tokens[index] = self._draw(chosen_from[index].float(), [rows[i] for i in drawn])
        is_sound = logits.gather(1, tokens[:, None]).isfinite()[:, 0].tolist()
        logprobs = self._logprobs(logits, tokens, rows)
        return [
            Draw(token, logprobs.get(i)) if sound else GenerationError("The model gave no valid logits for this request.")
            for i, (token, sound) in enumerate(zip(tokens.tolist(), is_sound, strict=True))
        ]

    @staticmethod
    def _forbid(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
        pairs = [(i, token) for i, row in enumerate(rows) for token in row.forbidden]
        if not pairs:
            return logits
        index = torch.tensor(pairs, device=logits.device)
        return logits.index_put((index[:, 0], index[:, 1]), logits.new_tensor(float("-inf")))

    def _draw(self, logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
        """Draws from float32 `logits` [rows, vocabulary] that are this method's own; returns int64 [rows]."""
        device = logits.device
        temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32, device=device)
        logits /= temperature.clamp_min(1e-5)[:, None]
        threshold = _thresholds(logits, [row.params for row in rows])
        scores = logits - self._log_exponentials(rows, device)
        scores.masked_fill_(logits < threshold[:, None], float("-inf"))
        return _largest(scores)

    def _log_exponentials(self, rows: Sequence[RowSampling], device: torch.device) -> torch.Tensor:
        """log E, E ~ Exp(1), float32 [rows, vocabulary], from (seed, position, token id) alone."""
        keys = [_key(row.seed, row.position) for row in rows]
        low = torch.tensor([_signed32(key) for key in keys], dtype=torch.int32, device=device)[:, None]
        multiplier = torch.tensor([_signed32(key >> 32 | 1) for key in keys], dtype=torch.int32, device=device)[:, None]
        bits = _mix(self._token_hash ^ low, multiplier, 0x846CA68B)
        uniform = (bits & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
        return torch.log1p(uniform.neg_()).neg_().log_()

    @staticmethod
    def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, rows: Sequence[RowSampling]) -> dict[int, TokenLogprobs]:
        asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        if not asked:
            return {}
        index = torch.tensor(asked, device=logits.device)
        found = token_logprobs(logits[index], tokens[index], [rows[i].params.logprobs or 0 for i in asked])
        return dict(zip(asked, found, strict=True))


def _largest(scores: torch.Tensor) -> torch.Tensor:
    """Index of each row's largest score, the first of equal ones, int64 [rows]."""
    if scores.device.type == "cpu" and scores.dtype == torch.float32:
        return torch.from_numpy(scores.numpy().argmax(-1))  # torch takes four times as long, a millisecond at 32 rows
    return scores.argmax(-1)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of `tokens` [rows] under `logits` [rows, vocabulary], with each row's `counts` most probable."""
    logprobs = torch.log_softmax(logits.float(), -1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(max(counts), -1)
    return [
        TokenLogprobs(own, tuple(zip(row_ids[:count], row_values[:count], strict=True)))
        for own, count, row_ids, row_values in zip(chosen, counts, ids.tolist(), values.tolist(), strict=True)
    ]


def _adjust(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Penalties and biases, row by row; `logits` itself when no row has any."""
    concerned = [i for i, row in enumerate(rows) if row.params.looks_back or row.params.logit_bias]
    if not concerned:
        return logits
    logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
    for i in concerned:
        _adjust_row(logits[i], rows[i])
    return logits


def _adjust_row(logits: torch.Tensor, row: RowSampling) -> None:
    """In place, on one row's float32 logits [vocabulary]."""
    params = row.params
    if params.looks_back:
        history = torch.tensor(row.history, dtype=torch.int64, device=logits.device)
        if params.repetition_penalty != 1:
            seen = torch.unique(history)
            values = logits[seen]
            logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        drawn, counts = torch.unique(history[row.num_prompt_tokens :], return_counts=True)
        logits[drawn] -= params.frequency_penalty * counts + params.presence_penalty
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        logits[torch.tensor(ids, device=logits.device)] += torch.tensor(biases, device=logits.device)


def _thresholds(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The least logit each row may draw, float32 [rows], for top_k, then top_p, then min_p.

    A threshold, not a list of kept ids, so that tokens of equal logits are kept or dropped together, whatever the sort.
    """
    vocab_size = logits.shape[-1]
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    threshold = logits.new_full((len(params),), float("-inf"))
    narrow = [i for i, p in enumerate(params) if p.top_p < 1.0 or top_k[i] < vocab_size]
    if narrow:
        index = torch.tensor(narrow, device=logits.device)
        rows = [(top_k[i], params[i].top_p) for i in narrow]
        threshold[index] = _nucleus_thresholds(logits[index], rows)
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=logits.device)
    return torch.maximum(threshold, logits.amax(-1) + min_p.log())


def _nucleus_thresholds(logits: torch.Tensor, rows: Sequence[tuple[int, float]]) -> torch.Tensor:
    """Thresholds for rows of (top_k, top_p). Looks at a window of the most probable tokens first."""
    vocab_size = logits.shape[-1]
    top_k = torch.tensor([k for k, _ in rows], device=logits.device)
    top_p = torch.tensor([p for _, p in rows], dtype=torch.float32, device=logits.device)
    window = min(TOP_WINDOW, vocab_size)
    while True:
        values = logits.topk(window, -1).values
        kept = torch.arange(window, device=logits.device) < top_k[:, None]
        # the mass is that of the top_k tokens; without top_k, that of the whole vocabulary
        total = torch.where(top_k <= window, values.masked_fill(~kept, float("-inf")).logsumexp(-1), logits.logsumexp(-1))
        before = (values - total[:, None]).exp().cumsum(-1)
        before = torch.cat([before.new_zeros(len(rows), 1), before[:, :-1]], -1)
        kept &= before < top_p[:, None]  # a token stays while the mass before it is below p; the first always does
        kept[:, 0] = True
        last = kept.sum(-1) - 1
        if window == vocab_size or bool(((last < window - 1) | (top_k <= window)).all()):
            return values.gather(1, last[:, None])[:, 0]
        window = vocab_size


def _mix(bits: torch.Tensor, first: torch.Tensor | int, second: int) -> torch.Tensor:
    """A 32-bit finaliser (xor-shift-multiply, after Murmur3 and its successors) on int32, wrapping."""
    bits = (bits ^ _shift(bits, 16)) * (first if isinstance(first, torch.Tensor) else _signed32(first))
    bits = (bits ^ _shift(bits, 15)) * _signed32(second)
    return bits ^ _shift(bits, 16)


def _shift(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift right of int32."""
    return (bits >> count) & ((1 << (32 - count)) - 1)


def _key(seed: int, position: int) -> int:
    """64 bits from (seed, position): two rounds of splitmix64 (Steele, Lea and Flood 2014)."""
    return _splitmix64(_splitmix64(seed & _MASK64) ^ position)


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK64
    return value ^ value >> 31


def _signed32(value: int) -> Any:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value
