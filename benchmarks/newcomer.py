"""A newcomer's path: clone, `make serve`, open the page, get an answer. Timed.

    .venv/bin/python -m benchmarks.newcomer

Clones this checkout (what is committed) into an empty folder and works there with nothing but what `make serve` makes; pip
takes packages from its cache if it has them. Needs port 8000 and Chromium. Exits with 1 after more than five minutes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from playwright.sync_api import sync_playwright

from benchmarks.pictures import FLAGS
from benchmarks.server import ROOT

URL = "http://127.0.0.1:8000"
LIMIT_S = 300


def wait_for_page(server: subprocess.Popen[bytes]) -> None:
    """Until the page is there."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(URL, timeout=10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    sys.exit("make serve has ended")


def ask() -> str:
    """Opens the page, asks, and reads the answer."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page()
        page.goto(URL)
        page.get_by_label("Message").fill("What is the capital of France?")
        page.keyboard.press("Enter")
        page.locator("article.assistant .figures").last.get_by_text("tokens/s").wait_for(timeout=120_000)
        answer = page.locator("article.assistant").last.inner_text()
        browser.close()
    return answer


def main() -> int:
    """See the module's docstring."""
    times = [("start", time.monotonic())]

    def done(step: str) -> None:
        times.append((step, time.monotonic()))
        print(f"{step:12} {times[-1][1] - times[-2][1]:6.1f} s", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "serve_app"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
        done("clone")
        # not this environment, and no model from before
        environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        environment |= {"PYTHON": f"{sys.base_prefix}/bin/python3", "XDG_CACHE_HOME": f"{folder}/cache"}
        environment["PIP_CACHE_DIR"] = subprocess.run(
            [sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=True
        ).stdout.strip()
        server = subprocess.Popen(["make", "serve"], cwd=checkout, env=environment, start_new_session=True)
        try:
            wait_for_page(server)
            done("make serve")
            answer = ask()
            done("an answer")
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(120)
    print(answer)
    whole_s = times[-1][1] - times[0][1]
    print(f"{'together':12} {whole_s:6.1f} s (target: at most {LIMIT_S} s)")
    return 0 if whole_s <= LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
