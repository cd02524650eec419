"""Streams that survive their replica: what a replica began another goes on with.

A token depends on its logits, its parameters, the seed and its position alone. So a request that is submitted again with
the tokens that its caller has already got goes on as if nothing had happened: same text, nothing twice, nothing lost.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from serve_app.engine.request import MAX_SEED, Delivery, RequestFailure, TokenOutput, UserRequest
from serve_app.errors import DeadlineError, EngineUnavailableError
from serve_app.ingress.engine_client import WrappingClient

logger = logging.getLogger(__name__)

MAX_CONTINUATIONS = 3
"""So many replicas may die under one request."""
PAUSE_S = 0.2
"""Before the second attempt, twice as long before each further one: time for Serve to notice that the replica is gone."""


class ContinuingClient(WrappingClient):
    """An `EngineClient` that goes on elsewhere when the replica of a request is gone.

    Args:
        client: makes one attempt; raises or delivers `EngineUnavailableError` when its replica is gone.
    """

    async def generate(self, request: UserRequest) -> AsyncGenerator[list[Delivery], None]:
        """See `EngineClient.generate`. Raises `EngineUnavailableError` after the last attempt."""
        began_at = asyncio.get_running_loop().time()
        request = _with_seed(request)
        tokens: list[int] = []
        for attempt in range(1 + MAX_CONTINUATIONS):
            trial = _continued(request, tokens, attempt, asyncio.get_running_loop().time() - began_at)
            try:
                async with aclosing(self._client.generate(trial)) as batches:
                    async for deliveries in batches:
                        last = deliveries[-1]
                        if isinstance(last, RequestFailure) and isinstance(last.error, EngineUnavailableError):
                            deliveries, gone = deliveries[:-1], last.error
                        else:
                            gone = None
                        tokens += [delivery.token for delivery in deliveries if isinstance(delivery, TokenOutput)]
                        if deliveries:
                            yield deliveries
                        if gone is not None:
                            raise gone
                return
            except EngineUnavailableError as error:
                if attempt == MAX_CONTINUATIONS:
                    raise
                logger.warning("request %s goes on elsewhere after %d tokens: %s", request.request_id, len(tokens), error)
            await asyncio.sleep(PAUSE_S * 2**attempt)


def _with_seed(request: UserRequest) -> UserRequest:
    """A seed that does not depend on the replica, also where the caller leaves it to the server."""
    if request.sampling.is_greedy or request.sampling.seed is not None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=secrets.randbelow(MAX_SEED)))


def _continued(request: UserRequest, tokens: list[int], attempt: int, elapsed_s: float) -> UserRequest:
    """What is left of a request; under an id of its own, so that a replica that only seemed gone is not listened to."""
    if not attempt:
        return request
    sampling = replace(request.sampling, prompt_logprobs=None) if tokens else request.sampling  # the first token told them
    timeout_s = None
    if request.timeout_s is not None:
        timeout_s = request.timeout_s - elapsed_s
        if timeout_s <= 0:
            raise DeadlineError("The call was not done in the time that it had.")
    return replace(
        request,
        request_id=f"{request.request_id}~{attempt}",
        output_token_ids=tuple(tokens),
        is_continuation=True,
        sampling=sampling,
        timeout_s=timeout_s,
    )
