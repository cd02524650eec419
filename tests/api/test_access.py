"""Who gets in, and who gets how much."""

import logging
import threading

import httpx
import openai
import pytest
from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.config import ApiKey, IngressLimits
from serve_app.ingress.access import new_key
from serve_app.ingress.chat_page import FILES
from tests.api.server import MODEL, serving
from tests.fakes import ScriptedRunner, echo

SECRET, DIGEST = new_key()
OTHER_SECRET, OTHER_DIGEST = new_key()
KEYS = [ApiKey(name="alice", sha256=DIGEST), ApiKey(name="bob", sha256=OTHER_DIGEST, weight=2.0)]
BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 4}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def locked():
    with serving(ScriptedRunner(echo), limits=IngressLimits(api_keys=KEYS)) as server:
        yield server


def test_no_route_but_liveness_and_the_chat_pages_files_answers_without_a_key(locked):
    paths = [
        route.path.replace("{model_id:path}", MODEL).replace("{response_id:path}", "x") for route in locked.api.routes()
    ]
    assert {"/health", "/ready", "/docs", "/openapi.json", "/v1/models", "/v1/chat/completions"} <= set(paths)
    for path in [*paths, "/nothing/here", "/page", "/page/", "/page/../v1/models", "/page/x.js"]:
        for method in ("GET", "POST", "DELETE", "OPTIONS", "HEAD"):
            answer = locked.http.request(method, path, json=BODY if method == "POST" else None)
            if path == "/health" or path in FILES:  # static, and where a person enters his key
                assert answer.status_code in (200, 405)
            else:
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert answer.json()["error"]["code"] == "invalid_api_key"


WRONG = [
    "",
    "Bearer",
    f"Bearer {SECRET}x",
    f"Bearer {SECRET[:-1]}",
    f"Basic {SECRET}",
    SECRET,
    f"Bearer {DIGEST}",
    "Bearer é",
]


@pytest.mark.parametrize("header", WRONG)
def test_what_is_not_a_key_does_not_open(locked, header):
    headers = {"Authorization": header.encode("latin-1")}
    assert locked.http.post("/v1/completions", json=BODY, headers=headers).status_code == 401


def test_the_openai_client_gets_in_with_its_key_and_knows_the_error(locked):
    client = locked.openai.with_options(api_key=SECRET)
    assert client.completions.create(**BODY).choices[0].text == "hi"
    with pytest.raises(openai.AuthenticationError):
        locked.openai.with_options(api_key="sk-wrong").completions.create(**BODY)


def test_the_key_is_the_tenant_and_user_is_not(locked):
    locked.http.post("/v1/completions", json=BODY | {"user": "mallory"}, headers=bearer(OTHER_SECRET))
    request = locked.client.requests[-1]
    assert (request.tenant, request.weight) == ("bob", 2.0)


def test_without_keys_user_is_the_tenant():
    with serving(ScriptedRunner(echo)) as server:
        assert server.ask("hi", user="carol").text == "hi"
        assert server.ask("hi").text == "hi"
        assert server.http.post("/v1/responses", json={"model": MODEL, "input": "hi", "user": "dave"}).status_code == 200
        assert [request.tenant for request in server.client.requests] == ["carol", "", "dave"]


def test_keys_change_while_serving():
    with serving(ScriptedRunner(echo), limits=IngressLimits(api_keys=[])) as server:
        assert server.http.post("/v1/completions", json=BODY, headers=bearer(SECRET)).status_code == 401
        server.api.limits = IngressLimits(api_keys=KEYS)
        assert server.http.post("/v1/completions", json=BODY, headers=bearer(SECRET)).status_code == 200
        server.api.limits = IngressLimits(api_keys=KEYS[1:])
        assert server.http.post("/v1/completions", json=BODY, headers=bearer(SECRET)).status_code == 401
        server.api.limits = IngressLimits()
        assert server.http.post("/v1/completions", json=BODY).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_key_has_no_more_calls_at_once_than_it_may(stream):
    gate = threading.Event()
    runner = ScriptedRunner(echo)
    runner.before_step = lambda _: gate.wait(10)
    limits = IngressLimits(api_keys=[KEYS[0].model_copy(update={"max_calls": 1}), KEYS[1]])
    with serving(runner, limits=limits) as server:
        results = []

        def call():
            body = BODY | {"stream": stream}
            results.append(httpx.post(f"{server.url}/v1/completions", json=body, headers=bearer(SECRET), trust_env=False))

        first = threading.Thread(target=call)
        first.start()
        server.wait_until_running()
        refused = server.http.post("/v1/completions", json=BODY, headers=bearer(SECRET))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        gate.set()
        assert server.http.post("/v1/completions", json=BODY, headers=bearer(OTHER_SECRET)).status_code == 200
        first.join(10)
        assert results[0].status_code == 200
        assert server.http.post("/v1/completions", json=BODY, headers=bearer(SECRET)).status_code == 200


def test_a_key_is_never_in_the_log(locked, caplog):
    with caplog.at_level(logging.DEBUG):
        for key in (SECRET, SECRET + "x"):
            locked.http.post("/v1/completions", json=BODY, headers=bearer(key))
            locked.http.post("/v1/completions", json=BODY | {"temperature": "hot"}, headers=bearer(key))
    assert SECRET not in caplog.text


def test_pages_of_other_origins_may_not_call_unless_configured():
    ask = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    with serving(ScriptedRunner(echo)) as server:
        assert server.http.options("/v1/completions", headers=ask).status_code == 405
        answer = server.http.post("/v1/completions", json=BODY, headers={"Origin": "https://chat.example"})
        assert "access-control-allow-origin" not in answer.headers
        server.api.limits = IngressLimits(cors_origins=["https://chat.example"], api_keys=KEYS)
        preflight = server.http.options("/v1/completions", headers=ask)
        assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
        wrong = server.http.options("/v1/completions", headers=ask | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in wrong.headers
        refused = server.http.post("/v1/completions", json=BODY, headers={"Origin": "https://chat.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://chat.example"  # so that the page can read why
        server.api.limits = IngressLimits()
        assert server.http.options("/v1/completions", headers=ask).status_code == 405


def test_the_command_line_makes_a_key_that_opens():
    result = CliRunner().invoke(app, ["key", "erin"])
    assert result.exit_code == 0
    key = result.stdout.split()[0]
    digest = result.stdout.rsplit("sha256: ", 1)[1].split("}")[0]
    with serving(ScriptedRunner(echo), limits=IngressLimits(api_keys=[ApiKey(name="erin", sha256=digest)])) as server:
        assert server.http.get("/v1/models", headers=bearer(key)).status_code == 200
