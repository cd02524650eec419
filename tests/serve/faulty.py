"""The application, with engine replicas that break when they are told to."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ray.serve import Application

from serve_app import app
from serve_app.config import EngineConfig, ModelConfig, TracingConfig
from serve_app.replica import EngineReplica

FAULTS = ("wedge", "break_loop")


class FaultyReplica(EngineReplica):
    """An engine replica with two faults to choose from, by a file of their name in the model's folder.

    The replica whose step finds the file takes it, and breaks: one of them, and one that is at work.
    """

    def __init__(self, model: ModelConfig, engine: EngineConfig, tracing: TracingConfig) -> None:
        super().__init__(model, engine, tracing)
        runner: Any = self._engine.runner
        scheduler: Any = self._engine._scheduler
        run = runner.run

        def run_or_break(plan: Any) -> Any:
            if _taken(Path(model.source) / "wedge"):
                time.sleep(3600)  # no step ends any more
            if _taken(Path(model.source) / "break_loop"):
                scheduler.plan = None  # the engine's thread ends after this step
            return run(plan)

        runner.run = run_or_break


def _taken(file: Path) -> bool:
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True


def build_app(args: dict[str, Any]) -> Application:
    """`serve_app.app.build_app`, with those replicas."""
    app.EngineReplica = FaultyReplica
    return app.build_app(args)
