"""An engine without a replica (`min_replicas: 0`, or the last one died): calls wait for one, or are told when to come."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from serve_app.errors import ColdStartError
from serve_app.ingress.engine_client import EngineClient

logger = logging.getLogger(__name__)

FRESH_S = 10.0
"""So long after a sign of life nobody asks whether there is a replica: whoever goes for want of work idled for longer."""
GUESS_S = 30.0
"""What a start is taken for as long as none was measured."""


class ColdStart:
    """Knows whether there is a replica; while there is none, asks for one, and measures how long that takes.

    Args:
        client: of the engine.
        longest_wait_s: asked at each call: how long calls may wait for a start.
        clock: monotonic seconds.
    """

    def __init__(
        self, client: EngineClient, longest_wait_s: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._longest_wait_s = longest_wait_s
        self._clock = clock
        self._alive_at = -math.inf
        self._expected_s = GUESS_S
        self._began_at = 0.0
        self._starting: asyncio.Task[None] | None = None

    def saw_life(self) -> None:
        """A token came."""
        self._alive_at = self._clock()

    async def check(self) -> None:
        """Returns when a replica is there, or soon enough to be waited for.

        Raises:
            ColdStartError: there is none, and its start will take longer than calls may wait.
        """
        if self._starting is None:
            if self._clock() - self._alive_at < FRESH_S:
                return
            if await self._client.has_replica():
                self.saw_life()
                return
        if self._starting is None:  # still: others have asked meanwhile
            self._began_at = self._clock()
            self._starting = asyncio.create_task(self._start())
        elapsed_s = self._clock() - self._began_at
        # one that takes longer than expected is taken to need half as long again as it has taken
        left_s = max(1, math.ceil(max(self._expected_s - elapsed_s, elapsed_s / 2)))
        if left_s > self._longest_wait_s():
            raise ColdStartError(f"No model replica is running. One is being started: come back in {left_s} s.", left_s)

    async def _start(self) -> None:
        try:
            await self._client.wait_for_replica()
            self._expected_s = self._clock() - self._began_at
            self.saw_life()
        except Exception:  # the next call asks again
            logger.exception("no replica could be asked for")
        finally:
            self._starting = None
