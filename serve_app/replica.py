"""The engine deployment: a door of `@serve.batch`, and behind it the engine's own thread.

The batched method only puts requests into the engine's queue and returns their token streams at once. It never awaits
the model, so batches at the door never freeze into groups that run together to the end.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from ray import serve

from serve_app.channel import Portion, StepSender, StepSenders
from serve_app.config import EngineConfig, EngineLimits, ModelConfig, TracingConfig, parse_section
from serve_app.engine.engine import EngineStats
from serve_app.engine.request import Delivery, EngineLoad, RequestFailure, UserRequest
from serve_app.engine.stream import TokenStream
from serve_app.errors import EngineUnavailableError, ServeAppError
from serve_app.metrics import ReplicaMetrics
from serve_app.tracing import EngineTracing, open_provider

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.1
DOOR_CONCURRENCY = 1024
"""Batches that may be inside the door at once. It returns immediately, so this is never the limit."""


class EngineReplica:
    """One model replica."""

    def __init__(self, model: ModelConfig, engine: EngineConfig, tracing: TracingConfig) -> None:
        # here: torch and transformers take seconds to import, and building the application needs this class alone
        from serve_app.loading import load_engine

        self._config = engine
        self._engine = load_engine(model=model, engine=engine)
        self._engine.when_dead(_leave)  # at once: an idle corpse would draw all calls to itself
        self._metrics = ReplicaMetrics()
        self._senders = StepSenders()
        self._tracing = None
        if tracing.endpoint is not None:
            self._tracing = EngineTracing(open_provider(tracing, "engine"), self._engine.take_traces)
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

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.0, max_concurrent_batches=DOOR_CONCURRENCY)
    async def _enter(self, requests: list[UserRequest]) -> list[TokenStream]:
        """The door: calls that arrive together enter the engine together. A refused one gets a stream that says so."""
        return self._engine.add_to_queue(requests)

    async def generate(self, request: UserRequest, channel: str | None = None) -> AsyncGenerator[Portion, None]:
        """One request's tokens, as they are drawn, and a failure as the last delivery, as a value.

        When the caller leaves, the request is cancelled.

        Args:
            request: what is asked.
            channel: the address of the caller's `StepReceiver`. Where it can be reached the tokens go there, and what is
                yielded is the final word alone; else they are yielded, a portion per step, longer when the reader lags.
        """
        entering = asyncio.ensure_future(self._enter(request))
        try:
            stream = await asyncio.shield(entering)
        except asyncio.CancelledError:  # left at the door: the stream that is to come is not wanted
            entering.add_done_callback(_close_stream)
            raise
        told: list[Delivery] = []
        try:
            sender = await self._senders.to(channel)
            if sender is not None:
                await stream.forward(partial(_send, sender, request.request_id, told))
                yield Portion(len(told), []) if sender.is_open else Portion(0, list(told))
            async for outputs in stream.batches():
                told += outputs
                yield Portion(len(told) - len(outputs), list(outputs))
        except ServeAppError as error:
            told.append(RequestFailure(request.request_id, error))
            yield Portion(len(told) - 1, told[-1:])
        finally:
            stream.close()

    async def cancel_call(self, call_id: str, tenant: str | None) -> int:
        """Cancels a call's requests, if a tenant is given only that tenant's; how many were here."""
        return self._engine.cancel_call(call_id, tenant)

    async def load(self) -> EngineLoad:
        """What waits here, for the admission of the ingress replicas."""
        return self._engine.load()

    async def stats(self) -> EngineStats:
        """Numbers of this moment."""
        return self._engine.stats()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve for the autoscaling policy."""
        stats = self._engine.stats()
        return {
            "backlog_tokens": float(stats.num_backlog_tokens),
            "waiting_tokens": float(stats.num_waiting_tokens),
            "num_requests": float(stats.num_running + stats.num_waiting),
            "tokens_per_s": stats.tokens_per_s,
        }

    async def ready(self) -> None:
        """Raises `EngineUnavailableError` when the engine makes no progress."""
        self._engine.check_health(self._config.stall_timeout_s)

    async def check_health(self) -> None:
        """Called by Serve every few seconds. A replica that makes no progress ends itself, and Serve replaces it.

        Told that it is ill, Serve would let it drain first: calls that wait for a step that never ends would hang for all
        of `graceful_shutdown_timeout_s`. When the process is gone they go on elsewhere at once.
        """
        try:
            # in a thread: some thousand values may have come since
            await asyncio.to_thread(self._metrics.observe, self._engine.stats(), self._engine.take_timings())
        except Exception:  # a fault in the counting is no illness
            logger.exception("the gauges were not set")
        try:
            self._engine.check_health(self._config.stall_timeout_s)
        except EngineUnavailableError:
            logger.exception("this replica ends itself")
            _leave()

    async def __del__(self) -> None:
        """Called by Serve once the replica has drained, or its time is over: lets what runs end, then stops."""
        while self._engine.num_unfinished:  # noqa: ASYNC110 - the engine's thread has no event to await, and this is rare
            await asyncio.sleep(DRAIN_POLL_S)
        await self._senders.close()
        await asyncio.to_thread(self._engine.shutdown)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


def _leave() -> None:
    os._exit(1)


def _send(sender: StepSender, request_id: str, told: list[Delivery], delivery: Delivery) -> bool:
    """Sends a request's next delivery, and notes that it was told."""
    if not sender.send(request_id, len(told), delivery):
        return False
    told.append(delivery)
    return True


def _close_stream(entering: asyncio.Future[TokenStream]) -> None:
    if not entering.cancelled() and entering.exception() is None:
        entering.result().close()
