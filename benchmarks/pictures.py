"""The pictures of the documents, from the running server: the chat page, and the dashboard's panels under a load.

    python -m benchmarks.pictures

Needs Chromium and Prometheus (`make debian`). Starts `serve_config.yaml` on a free port of loopback, asks the page a
question, loads the server for two minutes as the dashboard's Prometheus watches, and writes docs/images/*.png.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from playwright.sync_api import Browser, sync_playwright

from benchmarks.server import ROOT, free_port, our_config, ray_serve
from serve_app.loadgen import Target, mixed_jobs, run_open_load

IMAGES = ROOT / "docs" / "images"
DISCOVERY = "/tmp/ray/prom_metrics_service_discovery.json"
"""Where Ray lists its metrics endpoints (deploy/prometheus.yml)."""
MODEL = "smollm2-135m-instruct"
QUESTION = "Explain in three short points, with a heading, why the sky is blue. Then show a line of Python that prints it."
RATES = (1.0, 4.0, 8.0, 1.0)
"""Calls per second, for PHASE_S each: quiet, busy, more than it can do, quiet."""
PHASE_S = 30
INTERVAL = "20s"
UNITS = {"s": "s", "reqps": "calls/s", "percentunit": "share", "short": ""}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


def picture_page(browser: Browser, url: str, scheme: str) -> None:
    """A question and its answer, as one sees them."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1080, "height": 720}, device_scale_factor=1.5)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(url)
    page.get_by_label("Message").fill(QUESTION)
    page.keyboard.press("Enter")
    page.locator("article.assistant .figures").last.get_by_text("tokens/s").wait_for(timeout=120_000)
    page.screenshot(path=IMAGES / f"chat-{scheme}.png")
    context.close()


@contextmanager
def prometheus() -> Iterator[str]:
    """Prometheus with the project's configuration, but a shorter interval: its address."""
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "2s"
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        command = ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder}/data"]
        command.append(f"--web.listen-address=127.0.0.1:{port}")
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


async def load(url: str) -> None:
    """The load that the dashboard's picture shows."""
    for phase, rate in enumerate(RATES):
        jobs = mixed_jobs(int(rate * PHASE_S), phase, (30, 120), (16, 128))
        result = await run_open_load(Target(url, MODEL), jobs, rate)
        told = f"{rate}/s: {len(result.outcomes)} answered, {result.num_refused} refused, {len(result.errors)} failed"
        print(told, file=sys.stderr)


def series_of(url: str, query: str, since: float, until: float) -> list[dict[str, Any]]:
    """What Prometheus has for a query of the dashboard, every two seconds."""
    asked = {"query": query.replace("$__rate_interval", INTERVAL), "start": since, "end": until, "step": 2}
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{urllib.parse.urlencode(asked)}", timeout=60) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def named(legend: str, labels: dict[str, str]) -> str:
    """A legend of the dashboard, `{{label}}` replaced by a series' value of it."""
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend)


def picture_dashboard(url: str, since: float, until: float) -> None:
    """All panels of deploy/grafana/dashboard.json, where they are in it."""
    from matplotlib.figure import Figure

    panels = json.loads((ROOT / "deploy" / "grafana" / "dashboard.json").read_text())["panels"]
    figure = Figure(figsize=(16, 18), layout="constrained")
    axes = figure.subplots(math.ceil(len(panels) / 3), 3)
    for panel, axis in zip(panels, axes.flat, strict=False):
        for target in panel["targets"]:
            for series in series_of(url, target["expr"], since, until):
                label = named(target["legendFormat"], series["metric"])
                points = [(float(at) - since, float(value)) for at, value in series["values"]]
                axis.plot(*zip(*points, strict=True), label=label, linewidth=1.5)
        unit = UNITS[panel["fieldConfig"]["defaults"].get("unit", "short")]
        axis.set_title(panel["title"] + (f" ({unit})" if unit else ""), fontsize=11)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8, loc="upper left")
    figure.supxlabel("seconds")
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / "dashboard.png", dpi=70)


def main() -> None:
    """Makes them all."""
    chromium = shutil.which("chromium")
    if chromium is None or shutil.which("prometheus") is None:
        sys.exit("needs Chromium and Prometheus: make debian")
    IMAGES.mkdir(exist_ok=True)
    port = free_port()
    config = our_config(port)
    for deployment in config["applications"][0]["deployments"]:
        deployment["health_check_period_s"] = 1  # an engine reports its figures then
    with ray_serve(config, port) as server, prometheus() as metrics:
        server.settle()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            for scheme in ("light", "dark"):
                picture_page(browser, server.url, scheme)
            browser.close()
        since = time.time()
        asyncio.run(load(server.url))
        time.sleep(5)
        picture_dashboard(metrics, since, time.time())
    for path in sorted(IMAGES.glob("*.png")):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
