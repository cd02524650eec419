"""Starts a server on loopback for a benchmark, waits until it answers, watches what it uses, and stops it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 240
SETTLE_S = 30
RESTING_CORES = 0.08
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    url: str
    pid: int

    def processes(self) -> list[int]:
        """The server's process and all below it."""
        children: dict[int, list[int]] = {}
        for pid, fields in _stats():
            children.setdefault(int(fields[1]), []).append(pid)
        found, unseen = [], [self.pid]
        while unseen:
            found.append(unseen.pop())
            unseen += children.get(found[-1], [])
        return found

    def cpu_s(self) -> float:
        """Processor seconds of all its living processes so far."""
        mine = set(self.processes())
        return sum((int(fields[11]) + int(fields[12])) / TICKS_PER_S for pid, fields in _stats() if pid in mine)

    def settle(self) -> None:
        """Waits until it rests: what a server does after its start is not part of serving."""
        for _ in range(SETTLE_S // 2):
            before = self.cpu_s()
            time.sleep(2)
            if self.cpu_s() - before < 2 * RESTING_CORES:
                return

    def largest_peak_bytes(self) -> int:
        """The highest resident memory that any one of its processes ever had."""
        return max(_peak(pid) for pid in self.processes())


def _stats() -> Iterator[tuple[int, list[str]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            yield int(entry.name), text[text.rindex(")") + 2 :].split()


def _peak(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


@contextmanager
def running(
    command: Sequence[str], url: str, *, environment: Mapping[str, str] | None = None, model: str | None = None
) -> Iterator[Server]:
    """Runs a command until the block ends; waits until /v1/completions answers first.

    Raises:
        RuntimeError: it ended, or did not come up in time; with the end of its log.
    """
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            _wait_until_up(process, url, model, log.name)
            yield Server(url, process.pid)
        finally:
            process.terminate()  # a shell's background job would not hear SIGINT
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_until_up(process: subprocess.Popen[bytes], url: str, model: str | None, log: str) -> None:
    named = "" if model is None else f'"model": "{model}", '
    body = f'{{{named}"prompt": "hello", "max_tokens": 1}}'.encode()
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"the server did not come up:\n{Path(log).read_text()[-3000:]}")


def our_config(port: int) -> dict[str, Any]:
    """serve_config.yaml as it is, on another port."""
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = port
    return dict(config)


def deployment_of(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The section of a deployment in a config of one application, to be changed."""
    [application] = config["applications"]
    found: dict[str, Any]
    [found] = [deployment for deployment in application["deployments"] if deployment["name"] == name]
    return found


def free_port() -> int:
    """One of loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def serve_switches() -> dict[str, str]:
    """The environment variables of serve.env."""
    lines = (ROOT / "serve.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@contextmanager
def ray_serve(config: dict[str, Any], port: int, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Runs `serve run` with a config, under the switches of serve.env as `make serve` does, and further variables."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [str(Path(sys.executable).parent / "serve"), "run", "--app-dir", str(ROOT), str(path)]
        with running(command, f"http://127.0.0.1:{port}", environment=serve_switches() | dict(environment or {})) as server:
            yield server
