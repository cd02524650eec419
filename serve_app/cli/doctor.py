"""`serve-app doctor`: what on this machine would keep the server from starting, or from being fast, and what to change."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from serve_app.cache import cache_root
from serve_app.config import INGRESS, EngineConfig, ModelConfig, ServeConfig, parse_section
from serve_app.engine.native.kernels import Arithmetic, load_kernels
from serve_app.errors import ConfigError, ServeAppError
from serve_app.models.checkpoint import Checkpoint, find_checkpoint
from serve_app.models.facts import read_facts
from serve_app.models.loader import choose_device
from serve_app.serve_file import IMPORT_PATH, check_file

PACKAGES = ("ray", "torch", "transformers", "starlette", "pydantic")
STATISTICS_PORT = ("RAY_SERVE_HAPROXY_STATS_PORT", "8404")
MIN_FILES = 4096
MIN_SHARED_MEMORY = 1 << 30
ENGINE_OVERHEAD = 700 << 20
"""Bytes of an engine replica beside its weights: Python, torch and the built-in model's cache (docs/operations.md)."""


class Verdict(StrEnum):
    """How a finding stands."""

    GOOD = "good"
    SLOW = "slow or unsafe"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        advice: what to change; empty when it is good.
    """

    subject: str
    verdict: Verdict
    found: str
    advice: str = ""


def examine(path: Path) -> Iterator[Finding]:
    """All findings about a config file and this machine, in the order in which a start would meet them."""
    yield from _packages()
    try:
        check_file(path)
    except ConfigError as error:
        yield Finding("config", Verdict.WRONG, str(error), f"edit {path}")
        return
    yield Finding("config", Verdict.GOOD, str(path))
    content = yaml.safe_load(path.read_text())
    for application in content["applications"]:
        if application["import_path"] == IMPORT_PATH:
            yield from _application(application)
    yield from _network(content)
    yield _open_files()
    yield _shared_memory()


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding(name, Verdict.GOOD, version(name))
        except PackageNotFoundError:
            yield Finding(name, Verdict.WRONG, "not installed", "make setup")


def _application(application: dict[str, Any]) -> Iterator[Finding]:
    config = parse_section(ServeConfig, application.get("args"), "args")
    for name, (model, engine) in config.engines().items():
        [deployment] = [one for one in application.get("deployments", []) if one["name"] == name] or [{}]
        yield from _model(model, engine, _num_replicas(deployment))


def _model(model: ModelConfig, engine: EngineConfig, num_replicas: int) -> Iterator[Finding]:
    try:
        checkpoint = find_checkpoint(model.source, model.revision)
        facts = read_facts(checkpoint, model.max_model_len)
    except ServeAppError as error:
        yield Finding("model", Verdict.WRONG, str(error), f"serve-app pull {model.source}")
        return
    if checkpoint.is_local:
        yield Finding("model", Verdict.GOOD, f"{checkpoint.name}, context {facts.max_model_len}")
    else:
        yield Finding(
            "model", Verdict.SLOW, f"{checkpoint.name}, fetched at the start", f"serve-app pull {checkpoint.path}"
        )
    try:
        device = choose_device(model.device).type
    except ServeAppError as error:
        yield Finding("device", Verdict.WRONG, str(error), "model.device: auto")
        return
    yield Finding("device", Verdict.GOOD, device)
    if device == "cpu":
        yield _kernels(engine)
        yield _threads(engine, num_replicas)
        yield _memory(checkpoint, num_replicas)


def _kernels(engine: EngineConfig) -> Finding:
    if not engine.native_kernels:
        return Finding("kernels", Verdict.SLOW, "switched off", "engine.native_kernels: true")
    kernels = load_kernels()
    if kernels is None:
        return Finding("kernels", Verdict.SLOW, "cannot be built", "install g++ (Debian: apt-get install g++)")
    known = [arithmetic.name.lower() for arithmetic in Arithmetic if kernels.supports(arithmetic)]
    return Finding("kernels", Verdict.GOOD, f"{', '.join(known)}, in {cache_root()}")


def _threads(engine: EngineConfig, num_replicas: int) -> Finding:
    cores = len(os.sched_getaffinity(0))
    wanted = (engine.num_threads or cores) * num_replicas
    found = f"{wanted} for {cores} cores"
    if wanted > cores:
        each = max(1, cores // num_replicas)
        return Finding("threads", Verdict.SLOW, found, f"engine.num_threads: {each}, or fewer replicas")
    return Finding("threads", Verdict.GOOD, found)


def _memory(checkpoint: Checkpoint, num_replicas: int) -> Finding:
    weights = sum(file.stat().st_size for file in Path(checkpoint.path).glob("*.safetensors"))
    needed = (weights + ENGINE_OVERHEAD) * num_replicas
    free = _available_memory()
    found = f"{free >> 20:,} MiB available, at most {needed >> 20:,} MiB needed"
    if needed > free:
        return Finding("memory", Verdict.WRONG, found, "a smaller model, fewer replicas, or more memory")
    return Finding("memory", Verdict.GOOD, found)


def _num_replicas(deployment: dict[str, Any]) -> int:
    """Engine replicas at the start; more may come with the load."""
    fewest = (deployment.get("autoscaling_config") or {}).get("min_replicas", deployment.get("num_replicas") or 1)
    return max(1, int(fewest))


def _available_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    [available] = [line for line in lines if line.startswith("MemAvailable:")]
    return int(available.split()[1]) << 10


def _network(content: dict[str, Any]) -> Iterator[Finding]:
    http = content.get("http_options") or {}
    host, port = str(http.get("host", "127.0.0.1")), int(http.get("port", 8000))
    yield _port("port", host, port, "stop what listens there, or change http_options.port")
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        statistics_port = int(os.environ.get(*STATISTICS_PORT))
        yield _port("HAProxy's port", "0.0.0.0", statistics_port, f"another {STATISTICS_PORT[0]}")
        yield Finding("switches", Verdict.GOOD, "HAProxy, one event loop per replica")
    else:
        advice = "start with make serve, or first: set -a; . ./serve.env; set +a"
        yield Finding("switches", Verdict.SLOW, "serve.env is not set: the Python proxy streams slowly", advice)
    if host not in ("127.0.0.1", "localhost", "::1") and not _has_keys(content):
        advice = "api_keys (serve-app key NAME), and docs/security.md"
        yield Finding("access", Verdict.SLOW, f"everybody who reaches {host}:{port} may call", advice)
    else:
        yield Finding("access", Verdict.GOOD, f"{host}:{port}")


def _has_keys(content: dict[str, Any]) -> bool:
    return all(
        (deployment.get("user_config") or {}).get("api_keys") is not None
        for application in content["applications"]
        for deployment in application.get("deployments", [])
        if deployment["name"] == INGRESS
    )


def _port(subject: str, host: str, port: int, advice: str) -> Finding:
    try:
        with socket.create_server((host, port)):
            return Finding(subject, Verdict.GOOD, f"{host}:{port} is free")
    except OSError as error:
        return Finding(subject, Verdict.WRONG, f"{host}:{port}: {error.strerror or error}", advice)


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_FILES:
        return Finding("open files", Verdict.SLOW, f"{soft} at most: one per caller", "ulimit -n 65536")
    return Finding("open files", Verdict.GOOD, "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} at most")


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free
    found = f"{free >> 20:,} MiB free in /dev/shm"
    if free < MIN_SHARED_MEMORY:
        return Finding("shared memory", Verdict.SLOW, found, "Ray then uses the disk; in Docker: --shm-size=2g")
    return Finding("shared memory", Verdict.GOOD, found)
