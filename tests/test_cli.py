"""The commands, as a person runs them; those that talk to a server, against one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from serve_app.cli.bench import Objective
from serve_app.cli.main import app
from serve_app.config import ApiKey, IngressLimits
from serve_app.ingress.access import new_key
from serve_app.loadgen import Outcome
from tests.api.server import serving
from tests.fakes import EOS, ScriptedRunner, echo, ids

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "serve_config.yaml"


def run(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


@pytest.mark.parametrize("command", ["pull", "check", "doctor", "chat", "bench", "complete", "key"])
def test_every_command_explains_itself(command):
    assert command in run("--help").output
    told = run(command, "--help")
    assert told.exit_code == 0
    assert "Usage" in told.output


# ---- chat


def texts_of(request):
    return bytes(token - 4 for token in request.prompt_token_ids if 4 <= token < 260).decode(errors="replace")


def test_a_conversation_in_the_terminal():
    with serving(ScriptedRunner(lambda prompt: [*ids("Hello, you."), EOS])) as server:
        lines = "/help\n/system Be brief.\nHi\nAnd again\n/new\nfresh\n/exit\n"
        told = run("chat", server.url, "--temperature", 0, "--max-tokens", 40, input=lines)
        assert told.exit_code == 0, told.output
        assert told.output.count("Hello, you.") == 3
        assert told.output.count("tokens/s") == 3
        first, second, third = server.client.requests
        assert first.sampling.max_tokens == 40
        assert len(first.prompt_token_ids) < len(second.prompt_token_ids)
        assert len(third.prompt_token_ids) < len(second.prompt_token_ids)


def test_what_a_model_writes_does_not_steer_the_terminal():
    with serving(ScriptedRunner(lambda prompt: [*ids("a\x1b[2Jb\x07\x9b\rc\nd"), EOS])) as server:
        told = run("chat", server.url, input="Hi\n").output
        assert "a[2Jbc\nd" in told
        assert not {"\x1b[2J", "\x07", "\r"} & set(told)


def test_chat_tells_errors_and_goes_on():
    secret, digest = new_key()
    limits = IngressLimits(api_keys=[ApiKey(name="alice", sha256=digest)])
    with serving(ScriptedRunner(echo), limits=limits) as server:
        told = run("chat", server.url)
        assert told.exit_code == 1
        assert "API key is required" in told.output
        told = run("chat", server.url, "--api-key", secret, input=f"{'x' * 3000}\nshort\n")
        assert told.exit_code == 0
        assert "context" in told.output  # the first was too long, and is not part of the second
        assert len(server.client.requests) == 1
        assert secret not in told.output
    assert "cannot be reached" in run("chat", server.url).output


@pytest.fixture
def heard_ctrl_c():
    """A shell's background job ignores it, and so would its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_the_answer_and_not_the_conversation(heard_ctrl_c):
    long = ids("word " * 300)  # for longer than is waited below
    slow = ScriptedRunner(lambda prompt: long, step_s=0.03, max_model_len=2048, num_blocks=1024)
    with serving(slow) as server:
        command = [sys.executable, "-m", "serve_app.cli", "chat", server.url]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, text=True, env={**os.environ, "COLUMNS": "200"}, **pipes) as chat:
            chat.stdin.write("go on\n")
            chat.stdin.flush()
            server.wait_until_running(timeout_s=60)
            chat.send_signal(signal.SIGINT)
            server.wait_until_idle(30)  # who stopped is not computed for
            told, _ = chat.communicate("/exit\n", timeout=60)
        assert chat.returncode == 0
        assert "stopped" in told


# ---- bench


def test_bench_measures_closed_and_open_loads(tmp_path):
    figures, chart = tmp_path / "figures.json", tmp_path / "chart.png"
    with serving(ScriptedRunner(step_s=0.001)) as server:
        small = ["--requests", 6, "--prompt-words", "3-5", "--output-tokens", "4-8"]
        told = run("bench", server.url, "--concurrency", "1,3", "--rate", "50", *small, "--json", figures, "--chart", chart)
        assert told.exit_code == 0, told.output
        assert len(server.client.requests) == 18
        assert len({request.prompt_token_ids for request in server.client.requests}) == 18
        rows = json.loads(figures.read_text())
        assert [row["load"] for row in rows] == ["c=1", "c=3", "50/s"]
        for row in rows:
            assert row["errors"] == []
            assert row["tokens_per_s"] > 0
            assert row["ttft_p50_ms"] <= row["ttft_p95_ms"]
        assert chart.read_bytes().startswith(b"\x89PNG")
        assert run("bench", server.url, "--chat", "--no-ignore-eos", "--concurrency", 2, *small).exit_code == 0
        assert not server.client.requests[-1].sampling.ignore_eos


def test_bench_says_what_failed():
    with serving(ScriptedRunner()) as server:
        told = run("bench", server.url, "--model", "nope", "--concurrency", "2", "--requests", 3)
        assert told.exit_code == 1
        assert "nope" in told.output
        assert "3 failed" in told.output
    for wrong in (["--concurrency", "x"], ["--concurrency", "0"], ["--rate", "-1"], ["--prompt-words", "9-3"]):
        assert run("bench", *wrong).exit_code == 2


def test_goodput_counts_answers_that_meet_both_objectives():
    objective = Objective(ttft_s=0.5, tpot_s=0.1)
    assert objective.is_met(Outcome(0.5, 1.5, 11))
    assert not objective.is_met(Outcome(0.6, 1.0, 11))
    assert not objective.is_met(Outcome(0.5, 1.6, 11))
    assert objective.is_met(Outcome(0.1, 0.1, 1))


# ---- doctor


def with_changes(folder, change):
    content = yaml.safe_load(CONFIG.read_text())
    content["http_options"]["port"] = free_port()
    change(content)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def doctor(path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", str(free_port()))  # the usual one may be in use by other tests
    told = run("doctor", path)
    return told.exit_code, told.output


def test_doctor_finds_nothing_wrong_with_what_we_deliver(tmp_path, monkeypatch):
    code, told = doctor(with_changes(tmp_path, lambda content: None), monkeypatch)
    assert code == 0, told
    assert "smollm2-135m-instruct" in told
    for subject in ("ray", "torch", "config", "model", "device", "kernels", "threads", "memory", "port", "open files"):
        assert subject in told


def engine_of(content):
    return content["applications"][0]["args"]["engine"]


def test_doctor_says_what_to_change(tmp_path, monkeypatch):
    def expect(change, code, *words):
        found, told = doctor(with_changes(tmp_path, change), monkeypatch)
        assert found == code, told
        assert all(word in told for word in words), told

    expect(lambda content: engine_of(content).update(block_sise=3), 1, "block_sise", "wrong")
    expect(lambda content: engine_of(content).update(num_threads=999), 0, "999 for", "engine.num_threads")
    expect(lambda content: engine_of(content).update(native_kernels=False), 0, "engine.native_kernels: true")
    model = {"source": str(tmp_path / "nothing")}
    expect(lambda content: content["applications"][0]["args"].update(model=model), 1, "no folder")
    expect(lambda content: content["http_options"].update(host="0.0.0.0"), 0, "everybody", "api_keys")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        expect(lambda content: content["http_options"].update(port=port), 1, "http_options.port", str(port))
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    expect(lambda content: None, 0, "serve.env")
