"""Which engine replica gets a request: the one that is likely to hold the prompt's beginning, unless it is too busy."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.replica_wrapper import RunningReplica

from serve_app.engine.request import UserRequest


def affinity(prefix: Sequence[int], replica_id: str) -> bytes:
    """Rendezvous hashing (Thaler and Ravishankar 1996): the replica with the greatest value is the prefix's favourite.

    Every ingress replica finds the same favourite without talking to another, and when a replica comes or goes only the
    prefixes that it wins or loses move.
    """
    return hashlib.blake2b(array("q", prefix).tobytes() + replica_id.encode(), digest_size=8).digest()


class PrefixRouter(PowerOfTwoChoicesRequestRouter):
    """Serve's own choice of the less busy of two replicas, behind the favourite of the prompt's beginning.

    Set in `serve_config.yaml` under `request_router_config`.
    """

    def initialize_state(self, *, prefix_tokens: int = 128, max_lead: int = 16, **_: Any) -> None:
        """Called by Serve with `request_router_kwargs`.

        Args:
            prefix_tokens: tokens of the prompt that choose the favourite.
            max_lead: requests that the favourite may have more than the least busy replica.
        """
        self._prefix_tokens = prefix_tokens
        self._max_lead = max_lead

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas in ranks, the most wanted first."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        request = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if not isinstance(request, UserRequest) or len(candidate_replicas) < 2:
            return ranks
        prefix = request.prompt_token_ids[: self._prefix_tokens]
        favourite = max(candidate_replicas, key=lambda replica: affinity(prefix, str(replica.replica_id)))
        lengths = {r.replica_id: self.replica_queue_len_cache.get(r.replica_id) or 0 for r in candidate_replicas}
        if lengths[favourite.replica_id] - min(lengths.values()) > self._max_lead:
            return ranks
        return [[favourite], *ranks]
