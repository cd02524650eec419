"""Which engine replica gets a request: the one that holds most of its prompt, unless too much is to be done there."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from ray.serve._private.replica_result import ReplicaResult
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from serve_app.config import PrefixRouting, parse_section
from serve_app.engine.request import UserRequest

CHUNK = 64
"""Tokens of a prompt that are remembered together."""
ANSWER = 256
"""Tokens that an answer is taken for which may be longer: most end sooner than they may."""


class PrefixMemory:
    """Which replicas were sent which beginnings of prompts; the least recently used are forgotten.

    A beginning is known by a chain of hashes, one per `CHUNK` tokens, each over its tokens and the hash before it.

    Args:
        max_tokens: how many tokens are remembered, the beginnings that prompts share counted once.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_chunks = max(1, max_tokens // CHUNK)
        self._holders: OrderedDict[bytes, set[ReplicaID]] = OrderedDict()

    def add(self, prompt: Sequence[int], replica_id: ReplicaID) -> None:
        """The replica was sent this prompt."""
        for digest in _chain(prompt):
            self._holders.setdefault(digest, set()).add(replica_id)
            self._holders.move_to_end(digest)
        while len(self._holders) > self._max_chunks:
            self._holders.popitem(last=False)

    def held(self, prompt: Sequence[int]) -> dict[ReplicaID, int]:
        """How many tokens of its beginning each replica was sent before; without those that had none."""
        found: dict[ReplicaID, int] = {}
        holders: set[ReplicaID] | None = None
        for index, digest in enumerate(_chain(prompt), 1):
            here = self._holders.get(digest, set())
            holders = here if holders is None else holders & here
            if not holders:
                break
            found |= dict.fromkeys(holders, index * CHUNK)
        return found


def _chain(prompt: Sequence[int]) -> Iterator[bytes]:
    tokens, digest = array("q", prompt), b""
    for start in range(0, len(tokens) - CHUNK + 1, CHUNK):
        digest = hashlib.blake2b(digest + tokens[start : start + CHUNK].tobytes(), digest_size=16).digest()
        yield digest


def affinity(prefix: Sequence[int], replica_id: str) -> bytes:
    """Rendezvous hashing (Thaler and Ravishankar 1996): the replica with the greatest value is the prefix's favourite.

    Every ingress replica finds the same favourite without talking to another, and when a replica comes or goes only the
    prefixes that it wins or loses move.
    """
    return hashlib.blake2b(array("q", prefix).tobytes() + replica_id.encode(), digest_size=8).digest()


class PrefixRouter(PowerOfTwoChoicesRequestRouter):
    """The replica where `backlog - prefix_weight * held` is least, and behind it Serve's own choice.

    `held` are the tokens of the prompt's beginning that this ingress replica has sent there before. A prompt that it does
    not know may be known to another ingress replica: all of them look for it at the favourite of its first tokens.
    `backlog` are the tokens of the requests that run or wait there: those of this ingress replica as they are, those of
    others by their number, as large as its own are on average.

    Set in `serve_config.yaml` under `request_router_config`.
    """

    def initialize_state(self, **settings: Any) -> None:
        """Called by Serve with `request_router_kwargs`, the fields of `PrefixRouting`.

        Raises:
            ConfigError: one of them is unknown or wrong.
        """
        self._settings = parse_section(PrefixRouting, settings, "request_router_kwargs")
        self._memory = PrefixMemory(self._settings.memory_tokens)
        self._running: dict[ReplicaID, dict[str, int]] = {}  # tokens by request, oldest first
        self._mean_tokens = 0.0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas in ranks, the most wanted first."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        request = _request_of(pending_request)
        if request is None or len(candidate_replicas) < 2:
            return ranks
        prompt = request.prompt_token_ids
        held = self._memory.held(prompt)
        prefix = prompt[: self._settings.prefix_tokens]
        favourite = max(candidate_replicas, key=lambda replica: affinity(prefix, str(replica.replica_id))).replica_id
        held[favourite] = max(held.get(favourite, 0), len(prefix))

        def cost(replica: RunningReplica) -> float:
            return self._backlog(replica.replica_id) - self._settings.prefix_weight * held.get(replica.replica_id, 0)

        return [[min(candidate_replicas, key=cost)], *ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Called by Serve when a replica has accepted a request."""
        request = _request_of(pending_request)
        if request is None:
            return
        held = self._memory.held(request.prompt_token_ids).get(replica_id, 0)
        tokens = len(request.prompt_token_ids) - held + min(request.sampling.max_tokens, ANSWER)
        self._running.setdefault(replica_id, {})[pending_request.metadata.internal_request_id] = tokens
        self._mean_tokens += (tokens - self._mean_tokens) * (0.05 if self._mean_tokens else 1.0)
        self._memory.add(request.prompt_token_ids, replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Serve, in a thread of Ray's, when a request is over, also one that was refused."""
        self._running.get(replica_id, {}).pop(internal_request_id, None)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve with those that there are now."""
        super().update_replicas(replicas)
        there = {replica.replica_id for replica in replicas}
        self._running = {replica_id: mine for replica_id, mine in self._running.items() if replica_id in there}

    def _backlog(self, replica_id: ReplicaID) -> float:
        mine = self._running.setdefault(replica_id, {})
        count = self.replica_queue_len_cache.get(replica_id)
        if count is None:  # not heard of lately
            return sum(mine.values())
        for request_id in list(mine)[: max(0, len(mine) - count)]:  # ended before they were known to have begun
            mine.pop(request_id, None)
        return sum(mine.values()) + (count - len(mine)) * self._mean_tokens


def _request_of(pending_request: PendingRequest | None) -> UserRequest | None:
    """What is to be generated; None for other calls."""
    argument = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return argument if isinstance(argument, UserRequest) else None
