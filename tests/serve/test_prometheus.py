"""The real Prometheus reads the server, and answers every query of the dashboard."""

import json
import math
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import ray
import yaml

from tests.api.server import ask
from tests.serve.conftest import TINY

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Ray's own, while it runs in this process
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus (Debian's package; `make debian`)"),
]
DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture
def prometheus(deployed, tmp_path):
    """A Prometheus with the project's configuration, but for the paths and the interval: a client for its API."""
    targets = [f"127.0.0.1:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]
    (tmp_path / "discovery.json").write_text(json.dumps([{"labels": {"job": "ray"}, "targets": targets}]))
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    [scraped] = config["scrape_configs"]
    scraped["file_sd_configs"][0]["files"] = [str(tmp_path / "discovery.json")]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=log,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)


def values(prometheus, expression):
    """What a query gives now; None while Prometheus is not up."""
    try:
        answer = prometheus.get("/api/v1/query", params={"query": expression})
    except httpx.TransportError:
        return None
    assert answer.status_code in (200, 503), answer.text
    if answer.status_code == 503:
        return None
    return [float(result["value"][1]) for result in answer.json()["data"]["result"]]


def test_every_query_of_the_dashboard_has_an_answer(deployed, prometheus):
    panels = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())["panels"]
    queries = {target["expr"].replace("$__rate_interval", "60s") for panel in panels for target in panel["targets"]}
    assert len(queries) > 20
    answers, deadline = {}, time.monotonic() + 240
    while not all(found and all(map(math.isfinite, found)) for found in answers.values()) or not answers:
        assert time.monotonic() < deadline, {q: found for q, found in answers.items() if not found}
        body = {"prompt": "the same beginning " * 3, "max_tokens": 30, "ignore_eos": True}
        assert ask(deployed.http, f"/{TINY}/v1/completions", body).status == 200
        assert deployed.http.post(f"/{TINY}/v1/completions", json={"nonsense": 1}).status_code == 400
        late = {"X-Request-Timeout-Seconds": "0.1"}
        deployed.http.post(f"/{TINY}/v1/completions", json={"prompt": "x", "max_tokens": 3500}, headers=late)
        answers = {query: values(prometheus, query) for query in queries}
        time.sleep(1)
