"""The engine deployment: a door of `@serve.batch`, and behind it the engine's own thread.

The batched method only puts requests into the engine's queue and returns their token streams at once. It never awaits
the model, so batches at the door never freeze into groups that run together to the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve

from serve_app.config import EngineConfig, EngineLimits, ModelConfig, parse_section
from serve_app.engine.engine import EngineStats
from serve_app.engine.request import Delivery, RequestFailure, UserRequest
from serve_app.engine.stream import TokenStream
from serve_app.errors import ServeAppError
from serve_app.loading import load_engine
from serve_app.metrics import ReplicaMetrics

DRAIN_POLL_S = 0.1
DOOR_CONCURRENCY = 1024
"""Batches that may be inside the door at once. It returns immediately, so this is never the limit."""


class EngineReplica:
    """One model replica."""

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        self._config = engine
        self._engine = load_engine(model=model, engine=engine)
        self._metrics = ReplicaMetrics()
        self.reconfigure(None)  # Serve calls it again if the YAML has a user_config

    def reconfigure(self, user_config: dict[str, Any] | None) -> None:
        """Applies changed limits to the door and the engine; running streams go on."""
        limits = parse_section(EngineLimits, user_config, "Engine.user_config")
        door: Any = self._enter  # the decorator adds the two setters
        door.set_max_batch_size(limits.max_batch_size)
        door.set_batch_wait_timeout_s(limits.batch_wait_timeout_s)
        # calls have waited for each other at the door; the engine does not let them wait again
        self._engine.configure(
            max_batch_size=limits.max_batch_size,
            batch_wait_timeout_s=0.0,
            max_waiting_tokens=limits.max_waiting_tokens,
        )

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.002, max_concurrent_batches=DOOR_CONCURRENCY)
    async def _enter(self, requests: list[UserRequest]) -> list[TokenStream]:
        """The door: calls that arrive together enter the engine together. A refused one gets a stream that says so."""
        return self._engine.add_to_queue(requests)

    async def generate(self, request: UserRequest) -> AsyncGenerator[list[Delivery], None]:
        """One request's tokens, as they are drawn: a list per engine step, longer when the reader lags.

        A failure is the last delivery, as a value. When the caller leaves, the request is cancelled.
        """
        entering = asyncio.ensure_future(self._enter(request))
        try:
            stream = await asyncio.shield(entering)
        except asyncio.CancelledError:  # left at the door: the stream that is to come is not wanted
            entering.add_done_callback(_close_stream)
            raise
        ending, num_tokens = "cancelled", 0
        try:
            async for outputs in stream.batches():
                num_tokens += len(outputs)
                ending = outputs[-1].finish_reason or ending
                yield list(outputs)
        except ServeAppError as error:
            ending = error.type
            yield [RequestFailure(request.request_id, error)]
        finally:
            stream.close()
            self._metrics.request_ended(ending, len(request.prompt_token_ids), num_tokens)

    async def stats(self) -> EngineStats:
        """Numbers of this moment."""
        return self._engine.stats()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve for the autoscaling policy."""
        stats = self._engine.stats()
        return {"backlog_tokens": float(stats.num_backlog_tokens), "tokens_per_s": stats.tokens_per_s}

    async def ready(self) -> None:
        """Raises `EngineUnavailableError` when the engine makes no progress."""
        self.check_health()

    def check_health(self) -> None:
        """Called by Serve every few seconds: a replica that makes no progress is replaced."""
        self._metrics.observe(self._engine.stats())
        self._engine.check_health(self._config.stall_timeout_s)

    async def __del__(self) -> None:
        """Called by Serve once the replica has drained, or its time is over: lets what runs end, then stops."""
        while self._engine.num_unfinished:  # noqa: ASYNC110 - the engine's thread has no event to await, and this is rare
            await asyncio.sleep(DRAIN_POLL_S)
        await asyncio.to_thread(self._engine.shutdown)


def _close_stream(entering: asyncio.Future[TokenStream]) -> None:
    if not entering.cancelled() and entering.exception() is None:
        entering.result().close()
