"""Composition root: `build_app` turns the YAML's `args` into a Serve application. The only file that binds deployments."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application

from serve_app.config import INGRESS, ServeConfig, parse_section
from serve_app.ingress.deployment import IngressReplica
from serve_app.replica import EngineReplica


def build_app(args: dict[str, Any]) -> Application:
    """Called by `serve run serve_config.yaml` (`import_path: serve_app.app:build_app`).

    Args:
        args: the YAML's `args`, see `ServeConfig`.

    Raises:
        ConfigError: an unknown key or an impossible value, named by its path.
    """
    config = parse_section(ServeConfig, args, "args")
    models = [
        (model, serve.deployment(name=name)(EngineReplica).bind(model, engine, config.tracing))
        for name, (model, engine) in config.engines().items()
    ]
    ingress: Application = serve.deployment(name=INGRESS)(IngressReplica).bind(models, config.tracing)
    return ingress
