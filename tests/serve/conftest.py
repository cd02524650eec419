"""One small Ray for the whole session, with the applications of the real YAML on it."""

from __future__ import annotations

import asyncio
import copy
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest
import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from serve_app.engine.engine import EngineStats
from tests.collector import Collector, collecting
from tests.fakes import VOCAB_SIZE, byte_tokenizer
from tests.families import FAMILIES, tiny_model

YAML = Path(__file__).parents[2] / "serve_config.yaml"
TINY = "tiny"
HEAD = {
    "num_cpus": 6,
    "resources": {"head": 1},
    "object_store_memory": 200 * 1024 * 1024,
    "_system_config": {"metrics_report_interval_ms": 1000},  # tests wait for figures
}
ResultT = TypeVar("ResultT")


class Deployed:
    """The running applications: the built-in model at `url`, a tiny random one at `url`/tiny."""

    def __init__(self, config: dict[str, Any], url: str, cluster: Cluster) -> None:
        self.config, self.url, self.cluster = config, url, cluster
        self.http = httpx.Client(base_url=url, timeout=300, trust_env=False)
        self._handles: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()  # handles want a running one (serve.env)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def deploy(self, change: Callable[[dict[str, Any]], None] = lambda config: None) -> None:
        """Applies the config, as `serve deploy` does, with a change; waits until all is running."""
        config = copy.deepcopy(self.config)
        change(config)
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))
        deadline = time.monotonic() + 240
        while not all(app.status == "RUNNING" for app in serve.status().applications.values()):
            failed = [app for app in serve.status().applications.values() if app.status == "DEPLOY_FAILED"]
            told = [message for app in failed for message in (app.message, *(d.message for d in app.deployments.values()))]
            assert not failed, "\n".join(told)
            assert time.monotonic() < deadline, serve.status()
            time.sleep(0.2)

    def stats(self, app: str = TINY) -> EngineStats:
        """The stats of an engine replica."""

        async def call() -> EngineStats:
            if app not in self._handles:
                self._handles[app] = serve.get_deployment_handle("Engine", app)
            stats: EngineStats = await self._handles[app].stats.remote()
            return stats

        return self.run(call(), 30)

    def run(self, work: Coroutine[Any, Any, ResultT], timeout_s: float) -> ResultT:
        """Runs a coroutine on the loop to which the handles belong."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=timeout_s)

    def wait_for(self, condition: Callable[[EngineStats], bool], timeout_s: float = 30) -> EngineStats:
        """Waits until the tiny engine's stats fulfil a condition; fails when that takes too long."""
        deadline = time.monotonic() + timeout_s
        while not condition(stats := self.stats()):
            assert time.monotonic() < deadline, stats
            time.sleep(0.01)
        return stats

    def wait_until_idle(self, timeout_s: float = 10) -> None:
        """Waits until the tiny engine runs nothing and holds no block."""
        self.wait_for(lambda s: not s.num_running and not s.num_waiting and s.num_free_blocks == s.num_blocks, timeout_s)


def application_of(config: dict[str, Any], name: str = TINY) -> dict[str, Any]:
    """An application's section of a config, to be changed."""
    [application] = [application for application in config["applications"] if application["name"] == name]
    found: dict[str, Any] = application
    return found


def deployment_of(config: dict[str, Any], name: str, app: str = TINY) -> dict[str, Any]:
    """A deployment's section of a config, to be changed."""
    [deployment] = [d for d in application_of(config, app)["deployments"] if d["name"] == name]
    return deployment


def replicas(deployment: str) -> list[psutil.Process]:
    """The tiny application's replica processes; all of them are ours, below this one."""
    title = f"ServeReplica:{TINY}:{deployment}"
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended since
            if title in " ".join(child.cmdline()):
                found.append(child)
    return found


def states_of(deployment: str) -> dict[str, int]:
    """How many of the tiny application's replicas are in which state."""
    states: dict[str, int] = serve.status().applications[TINY].deployments[deployment].replica_states
    return states


def wait_for_replicas(deployment: str, count: int, timeout_s: float = 120) -> None:
    """Waits until so many run and no others are there; fails when that takes too long.

    Looks at the processes too: Serve believes for a while that a replica runs that was killed.
    """
    deadline = time.monotonic() + timeout_s
    while states_of(deployment) != ({"RUNNING": count} if count else {}) or len(replicas(deployment)) != count:
        assert time.monotonic() < deadline, serve.status()
        time.sleep(0.2)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A model folder as one would have it from a hub: tiny random Llama, byte-level tokenizer, chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    config = FAMILIES["llama"]()
    config.vocab_size = VOCAB_SIZE
    config.max_position_embeddings = 4096
    tiny_model(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Where the tiny application sends its traces."""
    with collecting() as running:
        yield running


@pytest.fixture(scope="session")
def deployed(tiny_folder, collector) -> Iterator[Deployed]:
    """Both applications, from the YAML that operators edit; only port, names and sizes are changed.

    The tiny model runs on torch's operations: with our kernels its streams end before a test can do anything to them.
    It is watched as closely and traced as some tests need it, so that they need no replicas of their own.
    """
    config = yaml.safe_load(YAML.read_text())
    [builtin] = config["applications"]
    builtin["name"] = "builtin"
    builtin["args"]["model"]["dtype"] = "float32"
    builtin["args"]["engine"] |= {"kv_cache_tokens": 8192}
    tiny = copy.deepcopy(builtin)
    tiny |= {"name": TINY, "route_prefix": f"/{TINY}"}
    tiny["args"] = {
        "model": {"source": str(tiny_folder), "dtype": "float32"},
        "engine": {"num_threads": 1, "max_batched_tokens": 128, "kv_cache_tokens": 131072, "native_kernels": False},
        "tracing": {"endpoint": collector.endpoint, "sample_ratio": 0.0},  # only calls that say so
    }
    deployment_of({"applications": [tiny]}, "Engine")["health_check_period_s"] = 1
    # a backlog of long streams must not add a replica in the middle of a test, and one that a test adds goes with it
    deployment_of({"applications": [tiny]}, "Engine")["autoscaling_config"] |= {
        "upscale_delay_s": 3600,
        "downscale_delay_s": 1,
    }
    config["applications"] = [builtin, tiny]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    config["http_options"]["port"] = port
    config["proxy_location"] = "HeadOnly"  # nodes that a test adds are on this machine, where the port is taken
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(http_options=config["http_options"], proxy_location="HeadOnly")
    running = Deployed(config, f"http://127.0.0.1:{port}", cluster)
    try:
        running.deploy()
        yield running
    finally:
        running.http.close()
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
        asyncio.set_event_loop(None)
