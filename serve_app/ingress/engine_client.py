"""The way from the ingress to the engine: a protocol, and the one that goes through a Serve handle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.engine.request import Delivery, UserRequest
from serve_app.errors import EngineUnavailableError, OverloadedError

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 5.0


class EngineClient(Protocol):
    """What the ingress needs of an engine."""

    def generate(self, request: UserRequest) -> AsyncGenerator[list[Delivery], None]:
        """The request's tokens as they come; a failure is the last delivery. Closing the generator cancels the request.

        Raises:
            EngineUnavailableError, OverloadedError: the engine could not take the request, or is gone.
        """

    async def check_ready(self) -> None:
        """Raises `EngineUnavailableError` when no replica can serve."""


class ServeEngineClient:
    """Calls the engine deployment through its Serve handle, by value: small messages need no object store."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._generate = handle.options(method_name="generate", stream=True, _by_reference=False)
        self._ready = handle.options(method_name="ready", _by_reference=False)

    async def generate(self, request: UserRequest) -> AsyncGenerator[list[Delivery], None]:
        """See `EngineClient.generate`."""
        response: Any = self._generate.remote(request)
        try:
            async for deliveries in response:
                yield deliveries
        except BackPressureError:
            raise OverloadedError("All model replicas have as many requests as they may.") from None
        except (RayError, RayServeException) as error:
            logger.exception("request %s: the engine call failed", request.request_id)
            raise EngineUnavailableError("The model replica serving this request is gone.") from error
        finally:
            response.cancel()

    async def check_ready(self) -> None:
        """See `EngineClient.check_ready`."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._ready.remote()
        except (TimeoutError, RayError, RayServeException) as error:
            raise EngineUnavailableError("No model replica is ready.") from error
