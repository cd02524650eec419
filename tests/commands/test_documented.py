"""Every command that the documents show is run here, as it stands there, or it is said why it is not."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.server import running

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PORT = 8000  # that of serve_config.yaml, which the documents name
QUESTION = "What is the capital of France?\n"

# What stands for something in a document, and what it stands for here.
STANDS_FOR = {"my_config.yaml": "serve_config.yaml", "SOURCE": "builtin", "NAME": "alice", "COMMAND": "bench"}

# Command: what it must print.
WITHOUT_A_SERVER = {
    "make setup": "",
    "serve-app doctor": "smollm2-135m-instruct",
    "serve-app doctor my_config.yaml": "smollm2-135m-instruct",
    "serve-app check": "",
    "serve-app check my_config.yaml": "",
    "serve-app key": None,
    "serve-app key NAME": "sha256",
    "serve-app pull": "",
    "serve-app pull SOURCE": "",
    "serve-app COMMAND --help": "Usage",
    'serve-app complete "The capital of France is"': "Paris",
}
AT_THE_SERVER = {
    "serve-app chat": "Paris",
    "serve-app bench": "goodput",
    "serve status": "RUNNING",
    "serve deploy": None,
    "serve deploy serve_config.yaml": "",
    "serve deploy my_config.yaml": "",
}
FURTHER = {"serve-app bench": " --requests 4 --concurrency 2 --output-tokens 4-8"}
"""Arguments to be done sooner."""
ELSEWHERE = {
    "make serve": "the server of this module",
    "serve run": "what `make serve` runs",
    "serve run serve_config.yaml": "the same",
    "export RAY_AUTH_MODE=token": "part of the environment of all that is run here",
    "make test": "what runs this test",
    "make bench": "minutes of load",
    "make chaos": "ten minutes; half a minute of it in tests/serve/test_faults.py",
    "python -m benchmarks.compare": "needs the other servers",
    "python -m benchmarks.overload": "minutes of load",
    "python -m benchmarks.autoscaling": "minutes of load",
    "python -m benchmarks.routing": "minutes of load",
    "python -m benchmarks.perplexity": "minutes of load",
    "python -m benchmarks.observing": "minutes of load",
    "python -m benchmarks.pictures": "minutes of load",
    "serve-app pull Qwen/Qwen3-0.6B": "needs a model hub",
    "set -a; . ./serve.env; set +a": "the first line of `make serve`",
    "ray get-auth-token --generate > /dev/null": "`make serve` makes one where there is none",
    "ray start --head --node-ip-address HEAD --dashboard-host 127.0.0.1": "two hosts; see tests/serve/test_faults.py",
    "ray start --address HEAD:6379": "the same",
    "docker build -f deploy/Dockerfile -t REGISTRY/serve-app:0.1.0 .": "needs Docker; see tests/test_deploy.py",
    "docker push REGISTRY/serve-app:0.1.0": "the same",
    "kubectl apply -f deploy/kuberay/rayservice.yaml": "needs Kubernetes; see tests/test_deploy.py",
    "kubectl get rayservice serve-app": "the same",
    "kubectl port-forward service/serve-app-serve-svc 8000:8000": "the same",
}


def commands_of(document: Path) -> set[str]:
    """The commands of its code blocks, without comments, and those within its text."""
    text = document.read_text()
    found = {
        command
        for language, block in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
        if language == "bash"
        for command in _lines(block)
    }
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    within = re.findall(r"`((?:make|serve-app|serve|python -m|curl) [^`\n]+)`", prose)
    return found | {command for command in within if not command.startswith("curl -N")}


def _lines(block: str) -> list[str]:
    """A block's commands; one goes on over lines while a quote is open."""
    commands, begun = [], ""
    for line in block.splitlines():
        begun += f"\n{line}" if begun else line
        try:
            shlex.split(begun, comments=True)
        except ValueError:
            continue
        commands.append(re.sub(r"\s+# .*", "", begun).replace(".venv/bin/", ""))
        begun = ""
    return [command for command in commands if command]


def run(command: str, typed: str = "") -> str:
    """Runs a command as one types it at the top of a checkout, as docs/operations.md says."""
    for name, meaning in STANDS_FOR.items():
        command = command.replace(name, meaning)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "200", "NO_PROXY": "*", "RAY_AUTH_MODE": "token"}
    done = subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        input=typed,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def shown() -> set[str]:
    return set().union(*map(commands_of, DOCUMENTS))


def test_every_command_is_known():
    curls = {command for command in shown() if command.startswith("curl ")}
    assert shown() - curls == {*WITHOUT_A_SERVER, *AT_THE_SERVER, *ELSEWHERE}


@pytest.fixture(scope="module")
def ports() -> None:
    """Those that a server takes as it is delivered."""
    for port in (PORT, 8404, 9101):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                pytest.skip(f"port {port} is in use")


@pytest.mark.parametrize("command", [command for command, told in WITHOUT_A_SERVER.items() if told is not None])
def test_a_command_without_a_server(ports, command):
    assert (WITHOUT_A_SERVER[command] or "") in run(command)


def test_make_serve_and_what_one_does_then(ports):
    with running(["make", "serve"], f"http://127.0.0.1:{PORT}"):
        for command in shown():
            if command.startswith("curl "):
                assert "Paris" in run(command)
        [openai] = [
            block
            for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
            if "openai" in block
        ]
        assert "Paris" in run(f"python -c {shlex.quote(openai)}")
        for command, told in AT_THE_SERVER.items():
            if told is not None:
                assert told in run(command + FURTHER.get(command, ""), QUESTION)
