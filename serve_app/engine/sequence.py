"""What the engine tracks about a request while it lives. Mutable, and private to the engine's thread."""

from __future__ import annotations

import hashlib
import itertools
import secrets
import time
from array import array

from serve_app.engine.request import MAX_SEED, FinishReason, TokenLogprobs, UserRequest
from serve_app.engine.status import MOVES, Status, move
from serve_app.engine.timing import StepTrace

_arrivals = itertools.count()


class Sequence:
    """A request's tokens, the part of them that is computed, and the blocks that hold it.

    Attributes:
        token_ids: prompt followed by drawn tokens.
        num_computed_tokens: the first so many of `token_ids` have keys and values in the cache.
        block_ids: the cache blocks, in order; block i holds tokens [i * block_size, (i + 1) * block_size).
        num_cached_tokens: how many of them were found in the prefix cache when the sequence was last admitted.
        expires_at: when its deadline is, on the monotonic clock; None without one.
        end_token_ids: the ids that end this request.
        num_charged_tokens: of `token_ids`, those that count as given to the tenant.
        is_queued: no step has computed anything for it yet.
        arrived_at, started_at, first_token_at: on the monotonic clock; 0 before its first step, and its first token.
        steps: those that it took part in, when it is traced; the first `MAX_STEPS`.
        prompt_logprobs: of the prompt's tokens from the second on, as far as they are known, when asked for.
    """

    def __init__(self, request: UserRequest, model_end_token_ids: frozenset[int]) -> None:
        self.request = request
        self.arrival = next(_arrivals)
        self.status = Status.WAITING
        self.token_ids = array("q", request.prompt_token_ids + request.output_token_ids)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_charged_tokens = 0
        self.is_queued = True
        self.arrived_at = time.monotonic()
        self.started_at = 0.0
        self.first_token_at = 0.0
        self.steps: list[StepTrace] = []
        self.expires_at = None if request.timeout_s is None else self.arrived_at + request.timeout_s
        self.block_ids: list[int] = []
        self.num_registered_blocks = 0
        self.seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbelow(MAX_SEED)
        own = frozenset(request.sampling.stop_token_ids)
        self.end_token_ids = own if request.sampling.ignore_eos else own | model_end_token_ids
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._salt = request.cache_salt.encode()
        self._block_hashes: list[bytes] = []

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request.request_id} {self.status} {self.num_computed_tokens}/{self.num_tokens} computed, "
            f"{self.num_output_tokens} drawn, {len(self.block_ids)} blocks>"
        )

    @property
    def has_ended(self) -> bool:
        return not MOVES[self.status]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def rank(self) -> tuple[int, int]:
        """Orders sequences: who comes first is admitted first and preempted last."""
        return self.request.priority, self.arrival

    @property
    def num_unscored_tokens(self) -> int:
        """Prompt tokens whose log-probabilities are wanted and not yet known."""
        if self.request.sampling.prompt_logprobs is None:
            return 0
        return self.num_prompt_tokens - 1 - len(self.prompt_logprobs)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose keys and values are still to be computed; 1 in decode."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_tokens_left(self) -> int:
        """Tokens that may still be computed for it."""
        return self.request.num_tokens_at_most - self.num_computed_tokens

    @property
    def may_end(self) -> bool:
        """Whether the next token may be an end token (`min_tokens` are drawn)."""
        return self.num_output_tokens >= self.request.sampling.min_tokens

    def move(self, to: Status) -> None:
        """Changes the status along the table of legal moves."""
        self.status = move(self.status, to)

    def append(self, token: int) -> FinishReason | None:
        """Adds a drawn token and says whether it was the last."""
        self.token_ids.append(token)
        if token in self.end_token_ids and self.num_output_tokens > self.request.sampling.min_tokens:
            return FinishReason.STOP
        if self.num_output_tokens >= self.request.sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def block_hashes(self, block_size: int, num_blocks: int) -> list[bytes]:
        """Identities of the first `num_blocks` full blocks: digests of their tokens, of all before them, and the salt."""
        hashes = self._block_hashes
        while len(hashes) < num_blocks:
            start = len(hashes) * block_size
            tokens = self.token_ids[start : start + block_size].tobytes()
            parent = hashes[-1] if hashes else self._salt
            hashes.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())
        return hashes[:num_blocks]
