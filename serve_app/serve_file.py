"""A Serve config file, checked for what Serve itself would pass over in silence: unknown keys, and keys in the wrong place.

Serve's own schema ignores what it does not know, so that a misspelt `max_queued_requests` would leave the queue without a
bound. `serve-app check` runs this, and `make serve` runs `serve-app check`.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from serve_app.config import (
    INGRESS,
    AutoscalingTargets,
    EngineLimits,
    IngressLimits,
    PrefixRouting,
    Section,
    ServeConfig,
    parse_section,
)
from serve_app.errors import ConfigError

IMPORT_PATH = "serve_app.app:build_app"
OUR_PARTS: dict[tuple[str, str, str, str], type[Section]] = {
    (
        "autoscaling_config.policy",
        "policy_function",
        "serve_app.autoscaling:TokenBacklogPolicy",
        "policy_kwargs",
    ): AutoscalingTargets,
    (
        "request_router_config",
        "request_router_class",
        "serve_app.routing:PrefixRouter",
        "request_router_kwargs",
    ): PrefixRouting,
}
"""A section of a deployment, the key that names a part of ours in it, that name, the key of its arguments: their kind."""


def check_file(path: Path) -> None:
    """Checks a config file.

    Raises:
        ConfigError: all that is wrong with it, each by its key's path, in one message of several lines.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict) or "applications" not in content:
        raise ConfigError(f"{path}: not a Serve config file: it has no applications")
    problems = [*_unknown_keys(ServeDeploySchema, content, "")]
    try:
        ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        problems += [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)]
    else:
        for application in content["applications"]:
            if application["import_path"] == IMPORT_PATH:
                problems += _problems_of_ours(application)
    if problems:
        raise ConfigError("\n".join(problems))


def _problems_of_ours(application: dict[str, Any]) -> Iterator[str]:
    """What our own code would refuse when it starts, and deployments that it does not have."""
    try:
        engines = list(parse_section(ServeConfig, application.get("args"), "args").engines())
    except ConfigError as error:
        yield str(error)
        engines = [deployment["name"] for deployment in application.get("deployments", [])]  # unknown, so all may be
    limits: dict[str, type[Section]] = {**dict.fromkeys(engines, EngineLimits), INGRESS: IngressLimits}
    for deployment in application.get("deployments", []):
        name = deployment["name"]
        if name not in limits:
            yield f"deployments.{name}: unknown deployment{_hint(name, limits)}"
            continue
        try:
            parse_section(limits[name], deployment.get("user_config"), f"{name}.user_config")
        except ConfigError as error:
            yield str(error)
        if problem := _starts_for_old_calls(deployment.get("autoscaling_config")):
            yield f"{name}.autoscaling_config: {problem}"
        for (section, named, ours, arguments), kind in OUR_PARTS.items():
            part = _at(deployment, section)
            if part.get(named) == ours:
                try:
                    parse_section(kind, part.get(arguments), f"{name}.{section}.{arguments}")
                except ConfigError as error:
                    yield str(error)


def _starts_for_old_calls(section: Any) -> str | None:
    """Serve starts a first replica while its mean over `look_back_period_s` holds a call, be it long answered."""
    if not isinstance(section, dict) or section.get("min_replicas") != 0:
        return None
    config = AutoscalingConfig.model_validate(section)
    key = "downscale_delay_s" if config.downscale_to_zero_delay_s is None else "downscale_to_zero_delay_s"
    if getattr(config, key) >= config.look_back_period_s:
        return None
    return f"with min_replicas: 0, {key} must be at least look_back_period_s: else replicas go and come for calls of before"


def _at(part: dict[str, Any], path: str) -> dict[str, Any]:
    """A section of a section; empty when there is none."""
    for key in path.split("."):
        inner = part.get(key)
        part = inner if isinstance(inner, dict) else {}
    return part


def _unknown_keys(schema: type[BaseModel], content: Any, path: str) -> Iterator[str]:
    """Keys that a part of the file has and its schema has not."""
    if not isinstance(content, dict):
        return
    for key, value in content.items():
        place = f"{path}.{key}" if path else str(key)
        if key not in schema.model_fields:
            yield f"{place}: unknown key{_hint(str(key), schema.model_fields)}"
            continue
        inner = _schema_in(schema.model_fields[key].annotation)
        if inner is not None:
            for index, part in enumerate(value if isinstance(value, list) else [value]):
                named = part.get("name", index) if isinstance(part, dict) else index
                yield from _unknown_keys(inner, part, f"{place}.{named}" if isinstance(value, list) else place)


def _schema_in(annotation: Any) -> type[BaseModel] | None:
    """The schema in an annotation such as `list[X]` or `X | dict | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _schema_in(part)) is not None), None)


def _hint(name: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else ""
