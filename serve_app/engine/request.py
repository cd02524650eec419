"""What is asked of the engine (`UserRequest`) and what it tells (`TokenOutput`, `RequestFailure`). All frozen."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from serve_app.errors import RequestError, ServeAppError

MAX_SEED = 2**63 - 1
MAX_TOP_LOGPROBS = 20
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_BIAS = 100.0


class FinishReason(StrEnum):
    """Why a request ended well. Endings that are not good are errors (`RequestFailure`)."""

    STOP = "stop"
    """An end-of-sequence or stop token was drawn (that token is in the output)."""
    LENGTH = "length"
    """`max_tokens` were drawn."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one row's tokens are drawn. Each row has its own; nothing of it is shared by a batch.

    Order: repetition, frequency and presence penalty, logit_bias, min_tokens; then, after Hugging Face `generate`,
    temperature, top_k, top_p, min_p.

    Raises:
        RequestError: a value is out of range; `param` names it.
    """

    max_tokens: int
    """Tokens to draw at most, >= 1."""
    temperature: float = 1.0
    """0 is greedy: the most probable token."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose mass reaches p."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as probable as the most probable one."""
    seed: int | None = None
    """The draw at a position depends on (seed, position, token id) alone. None: a fresh random seed."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the request, besides those that the model declares."""
    min_tokens: int = 0
    """No end or stop token is drawn before this many tokens."""
    ignore_eos: bool = False
    """The model's own end tokens do not end the request."""
    logprobs: int | None = None
    """Report each token's log-probability and those of this many most probable ones; None reports none."""
    presence_penalty: float = 0.0
    """Taken once from the logit of every token that was drawn before (the prompt does not count)."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit as many times as it was drawn before."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of all tokens seen before, prompt included (Keskar 2019)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, number added to its logit)."""
    prompt_logprobs: int | None = None
    """Report the prompt tokens' log-probabilities too, with this many most probable ones; the prefix cache is not used."""

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, 1, None)
        _check("temperature", self.temperature, 0.0, None)
        _check("top_k", self.top_k, 0, None)
        _check("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be greater than 0.", "top_p")
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.seed is not None:
            _check("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), 0, MAX_TOP_LOGPROBS)
        _check("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, None)
        for _, bias in self.logit_bias:
            _check("logit_bias", bias, -MAX_BIAS, MAX_BIAS)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken without a draw."""
        return self.temperature == 0.0

    @property
    def looks_back(self) -> bool:
        """Whether the draw depends on the tokens before it beyond their logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _check(name: str, value: float, low: float, high: float | None) -> None:
    if not math.isfinite(value) or value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {bounds}, got {value}.", name)


@dataclass(frozen=True, slots=True)
class UserRequest:
    """One prompt to be continued.

    Raises:
        RequestError: the prompt is empty, or `output_token_ids` leaves nothing to draw.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    created_at: float = field(default_factory=time.monotonic)
    """Seconds of the monotonic clock; decides when a partial batch has waited long enough."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes."""
    priority: int = 0
    """Among a tenant's requests lower goes first, both into the batch and when blocks run out; equal ones by arrival."""
    tenant: str = ""
    """Whose request it is. Tenants share the engine by weight, whatever each of them asks for."""
    weight: float = 1.0
    """A tenant of weight 2 gets twice the tokens of one of weight 1 when both want more than there is. Above 0."""
    output_token_ids: tuple[int, ...] = ()
    """Tokens that were drawn for it before, by another engine: it goes on behind them. `max_tokens` counts them too."""
    is_continuation: bool = False
    """Whether another engine began it. It was admitted there, and is not refused for what waits here."""
    call_id: str = ""
    """The caller's name of the call that it is a part of; several requests, of several tenants, may have the same."""
    timeout_s: float | None = None
    """So long after its arrival in the engine it ends with `DeadlineError`, done or not; waiting, it is never computed."""

    traceparent: str | None = None
    """The span that it belongs to, as W3C's trace context has it; with one, the engine keeps what its trace needs."""

    @property
    def num_tokens_at_most(self) -> int:
        """Prompt and all tokens that may be drawn: the work that it may become."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise RequestError("The prompt is empty: it must have at least one token.", "prompt")
        if len(self.output_token_ids) >= self.sampling.max_tokens:
            raise RequestError("All tokens that were asked for are drawn already.", "output_token_ids")


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What waits at an engine.

    Attributes:
        num_waiting_tokens: prompts and requested tokens of all requests that have not started.
        max_waiting_tokens: how many may; None sets no limit.
        tokens_per_s: the measured speed of its steps; 0 before the first.
    """

    num_waiting_tokens: int
    max_waiting_tokens: int | None
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, of the model's own distribution (before temperature and filters)."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), most probable first."""


def as_call(value: Any) -> tuple[type, tuple[object, ...]]:
    """How a dataclass with slots is pickled fast, one per token: as a call with its fields, in their order."""
    return type(value), tuple([getattr(value, name) for name in value.__slots__])


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One token given to the request it belongs to."""

    request_id: str
    token: int
    finish_reason: FinishReason | None = None
    """Set on the request's last token, and on no other."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """On the first token of a request that asked for them: of the prompt's tokens from the second on."""
    num_cached_tokens: int = 0
    """On the first token: how many of the prompt's were found in the prefix cache."""

    @property
    def is_last(self) -> bool:
        """Whether the request ends with it."""
        return self.finish_reason is not None

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return as_call(self)


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """The ending of a request that ended without its last token: cancelled, or an error that its caller can read."""

    request_id: str
    error: ServeAppError

    @property
    def is_last(self) -> bool:
        """Always: a failure is an ending."""
        return True


Delivery = TokenOutput | RequestFailure
"""What a step tells: to each request in it a token, or its failure."""
