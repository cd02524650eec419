"""Every way to leave: {queued, prefill, decode} x {stream, JSON} x {n=1, n=4} x {disconnect, deadline, cancel}.

The runner takes its steps one by one, as the test lets it. So "within one step" is exact: once the engine knows that a call
is over, no later plan has a row of it.
"""

import json
import socket
import threading
import time

import pytest

from tests.api.server import ask, serving
from tests.fakes import ScriptedRunner, counting

NAME = "victim"
PROMPTS = {"queued": "q" * 8, "prefill": "p" * 400, "decode": "d" * 8}
TIMEOUT_S = 0.4


class Turnstile:
    """Lets the runner's steps through one by one, or all."""

    def __init__(self, runner):
        self._turns = threading.Semaphore(0)
        self._is_open = False
        self.at_gate = threading.Semaphore(0)
        runner.before_step = self._pass

    def _pass(self, _plan):
        self.at_gate.release()
        if not self._is_open:
            assert self._turns.acquire(timeout=20)

    def one(self):
        """Ends the step that waits, and waits until the next one is planned."""
        self._turns.release()
        assert self.at_gate.acquire(timeout=20)

    def open(self):
        self._is_open = True
        self._turns.release()


def victims(plan):
    return [row.sequence for row in plan.rows if row.sequence.request.call_id == NAME]


def is_at(stage, server, num_choices):
    """Whether the victim's choices are where the test wants them, looked at while a step waits at the turnstile."""
    scheduler = server.engine._scheduler
    waiting = [s for s in scheduler.waiting if s.request.call_id == NAME]
    if stage == "queued":
        return len(waiting) == num_choices
    rows = victims(server.runner.plans[-1])
    if stage == "prefill":  # the first choice computes the prompt that the others wait to share
        return bool(rows) and rows[0].status == "prefill" and rows[0].num_computed_tokens > 0
    return len(rows) == num_choices and all(row.num_output_tokens >= 2 for row in rows)


def send(server, prompt, stream, num_choices, headers):
    """Sends the victim's request on a socket of its own, which can be broken off."""
    fields = {"max_tokens": 300, "request_id": NAME, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"prompt": prompt, "n": num_choices, "stream": stream, **fields}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    connection.sendall(head.encode() + body)
    return connection


def read_all(connection):
    raw = b""
    while piece := connection.recv(65536):
        raw += piece
    return raw.decode()


@pytest.mark.parametrize("cause", ["disconnect", "deadline", "cancel"])
@pytest.mark.parametrize("num_choices", [1, 4])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "json"])
@pytest.mark.parametrize("stage", ["queued", "prefill", "decode"])
def test_the_cancellation_matrix(stage, stream, num_choices, cause):
    alone = "".join(chr((ord("a") + 1 + i) % 128) for i in range(20))
    runner = ScriptedRunner(counting, max_model_len=1024, num_blocks=1024)
    turnstile = Turnstile(runner)
    places = 1 if stage == "queued" else 8
    with serving(runner, max_batch_size=places, max_batched_tokens=16) as server:
        bystander = {}
        other = threading.Thread(
            target=lambda: bystander.update(
                answer=ask(server.http, "/v1/completions", {"prompt": "a", "max_tokens": 20, "temperature": 0})
            )
        )
        other.start()
        assert turnstile.at_gate.acquire(timeout=20)
        headers = f"X-Request-Timeout-Seconds: {TIMEOUT_S}\r\n" if cause == "deadline" else ""
        connection = send(server, PROMPTS[stage], stream, num_choices, headers)
        sent_at = time.monotonic()
        while server.engine.num_unfinished < 1 + num_choices:
            assert time.monotonic() < sent_at + 20
            time.sleep(0.001)
        for _ in range(15):
            turnstile.one()
            if is_at(stage, server, num_choices):
                break
        assert is_at(stage, server, num_choices)

        if cause == "disconnect":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # a reset
            connection.close()
        elif cause == "cancel":
            answer = server.http.post(f"/v1/cancel/cmpl-{NAME}")
            assert answer.json() == {"id": f"cmpl-{NAME}", "object": "cancellation", "cancelled": num_choices}
        else:
            time.sleep(max(0.0, sent_at + TIMEOUT_S + 0.05 - time.monotonic()))
        until = time.monotonic() + 20
        while cause != "deadline" and len(server.engine._departures) < num_choices:
            assert time.monotonic() < until
            time.sleep(0.001)

        num_plans = len(runner.plans)
        turnstile.open()
        if cause != "disconnect":
            raw = read_all(connection)
            status, code = (504, "deadline_exceeded") if cause == "deadline" else (499, "cancelled")
            if stream and stage == "decode":
                assert raw.startswith("HTTP/1.1 200")
                assert raw.count('data: {"error"') == 1
                assert "[DONE]" not in raw
            else:
                assert raw.startswith(f"HTTP/1.1 {status}")
            assert f'"{code}"' in raw
            connection.close()
        other.join(20)
        assert bystander["answer"].text == alone
        server.wait_until_idle()  # every block is free, and the ledger balanced

        later = runner.plans[num_plans:]
        assert not any(victims(plan) for plan in later)
        if stage == "queued":
            assert not any(victims(plan) for plan in runner.plans)  # never computed
        until = time.monotonic() + 5
        while not (records := [record for record in server.records if record.request_id == NAME]):
            assert time.monotonic() < until
            time.sleep(0.005)
        [record] = records
        assert record.ending == {"disconnect": "disconnected", "deadline": "deadline", "cancel": "cancelled"}[cause]


def test_a_call_that_is_not_running_cannot_be_cancelled():
    with serving(ScriptedRunner(counting)) as server:
        assert server.http.post("/v1/cancel/nobody").status_code == 404
        assert server.http.get("/v1/cancel/nobody").status_code == 405
