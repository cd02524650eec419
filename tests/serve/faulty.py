"""The application, with engine replicas that break when they are told to."""

from __future__ import annotations

import time
from typing import Any

from ray.serve import Application

from serve_app import app
from serve_app.replica import EngineReplica


class FaultyReplica(EngineReplica):
    """An engine replica with two faults to choose from."""

    async def wedge(self) -> None:
        """From now on no step ends."""
        runner: Any = self._engine.runner
        runner.run = lambda plan: time.sleep(3600)

    async def break_loop(self) -> None:
        """The next step ends the engine's thread."""
        scheduler: Any = self._engine._scheduler
        scheduler.plan = None


def build_app(args: dict[str, Any]) -> Application:
    """`serve_app.app.build_app`, with those replicas."""
    app.EngineReplica = FaultyReplica
    return app.build_app(args)
