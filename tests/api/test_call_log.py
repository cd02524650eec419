"""One line of JSON per call."""

import json
import logging

import pytest
from starlette.responses import PlainTextResponse

from serve_app.config import ApiKey, IngressLimits
from serve_app.ingress.access import digest_of
from serve_app.ingress.call_log import CallLog, write
from tests.api.server import MODEL, serving
from tests.fakes import ScriptedRunner, echo

KEY = "sk-of-this-test"


@pytest.fixture
def server():
    with serving(
        ScriptedRunner(echo), limits=IngressLimits(api_keys=[ApiKey(name="team-a", sha256=digest_of(KEY))])
    ) as server:
        server.http.headers["Authorization"] = f"Bearer {KEY}"
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_says_who_what_and_how_long_and_not_the_prompt(server, caplog, stream):
    server.http.post(
        "/v1/completions",
        json={"prompt": "a secret", "max_tokens": 3, "stream": stream},
        headers={"X-Request-Id": "call-1"},
    )
    record = server.wait_for_records(1)[-1]
    with caplog.at_level(logging.INFO, "serve_app.calls"):
        write(record)
    line = json.loads(caplog.records[-1].message)
    told = ("id", "key", "method", "path", "model", "stream", "status", "ending", "prompt_tokens", "completion_tokens")
    assert [line[name] for name in told] == [
        "call-1",
        "team-a",
        "POST",
        "/v1/completions",
        MODEL,
        stream,
        200,
        "length",
        8,
        3,
    ]
    assert 0 < line["first_token_ms"] <= line["total_ms"]
    assert "secret" not in caplog.text
    assert KEY not in caplog.text


def test_a_refused_call_has_its_id_too(server):
    for path, body, key in (
        ("/v1/completions", {"nonsense": 1}, KEY),
        ("/v1/completions", {"prompt": "x"}, "sk-wrong"),
        ("/v1/nowhere", {}, KEY),
    ):
        headers = {"X-Request-Id": f"call{path}".replace("/", "."), "Authorization": f"Bearer {key}"}
        assert server.http.post(path, json=body, headers=headers).status_code in (400, 401, 404)
        record = server.wait_for_records(1)[-1]
        assert record.request_id == headers["X-Request-Id"]
        server.records.clear()


def test_prompts_are_logged_where_they_are_asked_for(server):
    server.api.limits = server.api.limits.model_copy(update={"log_prompts": True})
    server.ask("a secret", max_tokens=3)
    assert server.wait_for_records(1)[-1].as_json()["prompt"] == "a secret"


def test_every_other_ending_has_its_word(server):
    calls = [
        ("GET", "/v1/models", None, "ok"),
        ("POST", "/v1/completions", {"prompt": "x"}, "stop"),
        ("POST", "/v1/completions", {"prompt": "x", "temperature": 9}, "invalid_request_error"),
        ("POST", "/v1/completions", {"prompt": "x", "model": "other"}, "model_not_found"),
        ("POST", "/v1/completions", {"prompt": "x" * 5000}, "context_length_exceeded"),
        ("GET", "/nowhere", None, "invalid_request_error"),
    ]
    for index, (method, path, body, ending) in enumerate(calls):
        answer = server.http.request(method, path, json=body)
        record = server.wait_for_records(index + 1)[-1]
        assert record.status == answer.status_code
        assert record.ending == ending
    server.http.headers["Authorization"] = "Bearer wrong"
    assert server.http.get("/v1/models").status_code == 401
    record = server.wait_for_records(len(calls) + 1)[-1]
    assert (record.ending, record.key) == ("invalid_api_key", None)


def test_a_probe_that_is_answered_has_no_line(caplog, server):
    server.http.get("/health")
    with caplog.at_level(logging.INFO, "serve_app.calls"):
        write(server.wait_for_records(1)[-1])
    assert not caplog.records


async def test_a_call_whose_record_cannot_be_counted_is_answered_all_the_same(caplog):
    def broken(record):
        raise ValueError("the counters are gone")

    sent = []

    async def send(message):
        sent.append(message["type"])

    await CallLog(PlainTextResponse("answer"), broken)(
        {"type": "http", "method": "GET", "path": "/", "headers": []}, None, send
    )
    assert sent == ["http.response.start", "http.response.body"]
    assert "the counters are gone" in caplog.text
