"""The way from the ingress to the engine: a protocol, what wraps one, and the one that goes through a Serve handle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.channel import Inbox, StepReceiver
from serve_app.engine.request import Delivery, EngineLoad, UserRequest
from serve_app.errors import EngineUnavailableError, OverloadedError, ServeAppError

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 5.0


class EngineClient(Protocol):
    """What the ingress needs of an engine."""

    def generate(self, request: UserRequest) -> AsyncGenerator[list[Delivery], None]:
        """The request's tokens as they come; a failure is the last delivery. Closing the generator cancels the request.

        Raises:
            EngineUnavailableError, OverloadedError: the engine could not take the request, or is gone.
        """

    async def cancel_call(self, call_id: str, tenant: str | None) -> int:
        """Cancels the requests of a call on all replicas, if a tenant is given only that tenant's. Returns how many ran."""

    async def loads(self) -> list[EngineLoad]:
        """What waits at each replica that answers."""

    async def has_replica(self) -> bool:
        """Whether there is any replica, well or not."""

    async def wait_for_replica(self) -> None:
        """Returns when a replica answers; while none is there, that has one started."""

    async def check_ready(self) -> None:
        """Raises `EngineUnavailableError` when no replica can serve."""


class WrappingClient:
    """What clients around another one share: they change how calls are generated, all else goes through.

    Args:
        client: the one within.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def generate(self, request: UserRequest) -> AsyncGenerator[list[Delivery], None]:
        """See `EngineClient.generate`."""
        return self._client.generate(request)

    async def cancel_call(self, call_id: str, tenant: str | None) -> int:
        """See `EngineClient.cancel_call`."""
        return await self._client.cancel_call(call_id, tenant)

    async def loads(self) -> list[EngineLoad]:
        """See `EngineClient.loads`."""
        return await self._client.loads()

    async def has_replica(self) -> bool:
        """See `EngineClient.has_replica`."""
        return await self._client.has_replica()

    async def wait_for_replica(self) -> None:
        """See `EngineClient.wait_for_replica`."""
        await self._client.wait_for_replica()

    async def check_ready(self) -> None:
        """See `EngineClient.check_ready`."""
        await self._client.check_ready()


class ServeEngineClient:
    """Calls the engine deployment through its Serve handle, by value: small messages need no object store.

    Args:
        handle: of the engine deployment.
        uses_channel: asked at each call: whether its tokens may come through the step channel (see `serve_app.channel`).
    """

    def __init__(self, handle: DeploymentHandle[Any], uses_channel: Callable[[], bool] = lambda: True) -> None:
        self._handle = handle
        self._generate = handle.options(method_name="generate", stream=True, _by_reference=False)
        self._ready = handle.options(method_name="ready", _by_reference=False)
        self._load = handle.options(method_name="load", _by_reference=False)
        self._uses_channel = uses_channel
        self._receiver = StepReceiver()
        self._calls: set[asyncio.Task[None]] = set()

    async def generate(self, request: UserRequest) -> AsyncGenerator[list[Delivery], None]:
        """See `EngineClient.generate`."""
        await self._receiver.start()
        inbox = self._receiver.open(request.request_id)
        response: Any = self._generate.remote(request, self._receiver.address if self._uses_channel() else None)
        call = asyncio.create_task(_read(response, request.request_id, inbox))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            async with aclosing(inbox.batches()) as batches:
                async for deliveries in batches:
                    yield deliveries
        finally:
            self._receiver.close(request.request_id)
            if not inbox.has_ended:  # else the final word is on its way
                call.cancel()
                response.cancel()

    async def cancel_call(self, call_id: str, tenant: str | None) -> int:
        """See `EngineClient.cancel_call`. A replica that is gone has nothing to cancel."""
        counts = await self._ask_all("cancel_call", call_id, tenant)
        return sum(count for count in counts if isinstance(count, int))

    async def loads(self) -> list[EngineLoad]:
        """See `EngineClient.loads`."""
        return [load for load in await self._ask_all("load") if isinstance(load, EngineLoad)]

    async def has_replica(self) -> bool:
        """See `EngineClient.has_replica`."""
        return bool(await self._ask_all("load"))

    async def wait_for_replica(self) -> None:
        """See `EngineClient.wait_for_replica`. Serve starts a replica for a call that waits."""
        await self._load.remote()

    async def _ask_all(self, method: str, *args: Any) -> list[Any]:
        """What each replica answers, or an exception: one for all when some do not answer. Nothing when there is none."""
        try:
            response = self._handle.broadcast(method, *args)
            return list(await response.results_async(timeout_s=READY_TIMEOUT_S, return_exceptions=True))
        except DeploymentUnavailableError:  # what Serve says when it knows of no replica
            return []
        except (TimeoutError, RayError, RayServeException) as error:
            return [error]

    async def check_ready(self) -> None:
        """See `EngineClient.check_ready`. Asks one replica, and the others only when that one is not ready."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._ready.remote()
        except (TimeoutError, RayError, RayServeException) as error:
            if None not in await self._ask_all("ready"):
                raise EngineUnavailableError("No model replica is ready.") from error


async def _read(response: Any, request_id: str, inbox: Inbox) -> None:
    """Puts what a call yields into an inbox; a failure of the call too."""
    failure: ServeAppError | None = None
    try:
        async for portion in response:
            inbox.add(portion)
    except BackPressureError:
        failure = OverloadedError("All model replicas have as many requests as they may.")
    except (RayError, RayServeException):
        if not inbox.has_ended:
            logger.exception("request %s: the engine call failed", request_id)
        failure = EngineUnavailableError("The model replica serving this request is gone.")
    finally:
        inbox.close(failure)
