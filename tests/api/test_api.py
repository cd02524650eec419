"""The routes, through real clients."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from serve_app.config import IngressLimits
from tests.api.server import MODEL, serving
from tests.fakes import EOS, ScriptedRunner, counting, echo, ids, text_tokenizer


@pytest.fixture(scope="module")
def server():
    """Echoes prompts. For chat the prompt is the rendered conversation."""
    with serving(ScriptedRunner(echo, max_model_len=512)) as running:
        yield running


HELLO = [{"role": "user", "content": "hello"}]


def test_completion(server):
    answer = server.both("hello")
    assert answer.text == "hello"
    assert answer.finish_reason == "stop"
    assert answer.usage == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}


def test_chat(server):
    answer = server.both(messages=HELLO)
    assert answer.text == "user: hello\nassistant: "
    assert answer.usage["prompt_tokens"] == len("user: hello\nassistant: ")


def test_chat_stream_shape(server):
    events = server.ask(messages=HELLO, stream=True).events
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    first, *rest, last = [event["choices"][0] for event in events[:-1]]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in choice["delta"] for choice in rest)
    assert last["finish_reason"] == "stop"
    assert events[-1]["choices"] == []


def test_openai_client(server):
    chat = server.openai.chat.completions.create(model=MODEL, messages=HELLO)
    assert chat.choices[0].message.content == "user: hello\nassistant: "
    stream = server.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "user: hello\nassistant: "
    completion = server.openai.completions.create(model=MODEL, prompt="abc", max_tokens=2)
    assert completion.choices[0].text == "ab"
    assert completion.choices[0].finish_reason == "length"
    assert [model.id for model in server.openai.models.list()] == [MODEL]
    assert server.openai.models.retrieve(MODEL).id == MODEL


def test_openai_client_errors(server):
    with pytest.raises(openai.NotFoundError) as unknown:
        server.openai.chat.completions.create(model="nope", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    assert unknown.value.param == "model"
    assert MODEL in unknown.value.message
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("no/such")
    with pytest.raises(openai.BadRequestError) as bad:
        server.openai.chat.completions.create(model=MODEL, messages=HELLO, temperature=3)
    assert bad.value.param == "temperature"


def test_the_model_may_be_left_out(server):
    assert server.http.post("/v1/completions", json={"prompt": "x"}).json()["model"] == MODEL


def test_prompts_in_all_their_forms(server):
    assert server.both(list(ids("hey"))).text == "hey"
    answer = server.ask(["one", "two"])
    assert [choice["text"] for choice in answer.body["choices"]] == ["one", "two"]
    assert answer.usage == {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14}
    streamed = server.ask([list(ids("one")), list(ids("two"))], stream=True)
    texts = ["", ""]
    for event in streamed.events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["one", "two"]
    assert streamed.usage == answer.usage


def test_n_choices_each_end_once():
    with serving(ScriptedRunner(echo)) as server:
        streamed = server.ask(messages=HELLO, stream=True, n=3, max_tokens=8, temperature=1, seed=5)
        ends = [choice for event in streamed.events for choice in event["choices"] if choice["finish_reason"]]
        assert sorted(choice["index"] for choice in ends) == [0, 1, 2]
        assert streamed.usage["completion_tokens"] == 24
        assert streamed.usage["prompt_tokens"] == len("user: hello\nassistant: ")
        assert [request.sampling.seed for request in server.client.requests] == [5, 6, 7]


def test_content_parts_are_joined(server):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert server.both(messages=[{"role": "user", "content": parts}]).same == server.both(messages=HELLO).same


def test_max_tokens_defaults_to_what_fits():
    with serving(ScriptedRunner(counting, max_model_len=64)) as server:
        answer = server.both("x" * 10)
        assert answer.usage["completion_tokens"] == 54
        assert answer.finish_reason == "length"


BAD = {
    "temperature high": ({"temperature": 2.5}, "temperature"),
    "temperature type": ({"temperature": "warm"}, "temperature"),
    "top_p zero": ({"top_p": 0}, "top_p"),
    "top_k float": ({"top_k": 0.5}, "top_k"),
    "top_k bool": ({"top_k": True}, "top_k"),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens float": ({"max_tokens": 1e308}, "max_tokens"),
    "min over max": ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    "n word": ({"n": "two"}, "n"),
    "n huge": ({"n": 10**6}, "n"),
    "stream word": ({"stream": "maybe"}, "stream"),
    "stream_options alone": ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
    "stop number": ({"stop": [5]}, "stop[0]"),
    "stop empty": ({"stop": ""}, "stop[0]"),
    "stop too many": ({"stop": ["x"] * 17}, "stop"),
    "seed float": ({"seed": 1.5}, "seed"),
    "seed huge": ({"seed": 10**30}, "seed"),
    "unknown field": ({"foo": 1}, "foo"),
    "refused field": ({"suffix": "x"}, "suffix"),
    "store": ({"store": True}, "store"),
    "prompt null": ({"prompt": None}, "prompt"),
    "prompt empty": ({"prompt": ""}, "prompt"),
    "prompt empty list": ({"prompt": []}, "prompt"),
    "prompt nested empty": ({"prompt": [[]]}, "prompt"),
    "prompt mixed": ({"prompt": ["a", 5]}, "prompt"),
    "prompt negative id": ({"prompt": [-1]}, "prompt"),
    "prompt unknown id": ({"prompt": [99999]}, "prompt"),
    "model number": ({"model": 5}, "model"),
}


@pytest.mark.parametrize(("fields", "param"), BAD.values(), ids=BAD)
def test_bad_fields_are_refused_by_name_in_both_modes(server, fields, param):
    body = {"prompt": "hello", **fields}
    answers = [server.http.post("/v1/completions", json={"stream": stream, **body}) for stream in (False, True)]
    for answer in answers:
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/json"
        error = answer.json()["error"]
        assert error["param"] == param
        assert set(error) == {"message", "type", "param", "code"}
    assert answers[0].json() == answers[1].json()


BAD_CHATS = {
    "no messages": ({}, "messages"),
    "empty": ({"messages": []}, "messages"),
    "role": ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
    ),
    "empty parts": ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    "extra key": ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
    "string": ({"messages": "hello"}, "messages[0]"),
    "two limits": ({"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
}


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS.values(), ids=BAD_CHATS)
def test_bad_chats_are_refused_by_name(server, fields, param):
    answer = server.http.post("/v1/chat/completions", json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_context_overflow_has_the_numbers(server):
    for fields in ({"prompt": "x" * 600}, {"prompt": "x" * 500, "max_tokens": 100}):
        answer = server.both(**fields)
        assert answer.status == 400
        assert answer.body["error"]["code"] == "context_length_exceeded"
        assert "512" in answer.body["error"]["message"]
    assert server.both("hello").text == "hello"


BODIES = {
    "not json": (b"{", 400),
    "not utf-8": (b'{"prompt": "\xff"}', 400),
    "half a surrogate": (b'{"prompt": "\\ud800"}', 400),
    "nan": (b'{"prompt": "x", "temperature": NaN}', 400),
    "infinity": (b'{"prompt": "x", "temperature": -Infinity}', 400),
    "overflow": (b'{"prompt": "x", "temperature": 1e400}', 400),
    "a list": (b"[]", 400),
    "deep": (b'{"prompt": "x", "foo": ' + b"[" * 20000 + b"]" * 20000 + b"}", 400),
    "large": (b" " * (5 * 1024 * 1024), 413),
}


@pytest.mark.parametrize(("raw", "status"), BODIES.values(), ids=BODIES)
def test_bodies_that_are_no_request(server, raw, status):
    answer = server.http.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert server.ask("hello").text == "hello"


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8"]
)
def test_json_is_read_whatever_it_is_called(server, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    assert server.http.post("/v1/completions", content=b'{"prompt": "hello"}', headers=headers).status_code == 200


def test_other_charsets_are_refused(server):
    headers = {"Content-Type": "application/json; charset=latin-1"}
    assert server.http.post("/v1/completions", content=b'{"prompt": "hello"}', headers=headers).status_code == 415


def test_routes_that_are_not_there(server):
    unknown = server.http.get("/nope")
    wrong = server.http.get("/v1/completions")
    assert (unknown.status_code, wrong.status_code) == (404, 405)
    assert unknown.json()["error"]["message"] and wrong.json()["error"]["message"]
    assert wrong.headers["allow"] == "POST"


def test_health_and_ready(server):
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").status_code == 200


def test_ready_tells_the_truth():
    with serving(ScriptedRunner()) as server:
        server.engine.shutdown()
        answer = server.http.get("/ready")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unavailable"
        assert server.http.get("/health").status_code == 200
        assert server.both("hello").status == 503


def test_a_body_that_does_not_arrive_in_time_gets_408():
    with serving(ScriptedRunner(), limits=IngressLimits(body_timeout_s=0.2)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_overload_is_429_with_retry_after():
    with serving(ScriptedRunner(step_s=0.02), max_batch_size=1, max_waiting_tokens=100) as server:
        running = {"prompt": "a", "max_tokens": 60, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=running) as first, ThreadPoolExecutor(3) as pool:
            next(first.iter_raw())
            waiting = {"prompt": "c", "max_tokens": 90}
            calls = [pool.submit(server.http.post, "/v1/completions", json=waiting) for _ in range(3)]
            answers = [call.result() for call in calls]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 2
    assert int(refused[0].headers["retry-after"]) >= 1
    assert refused[0].json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_departed_caller_frees_his_rows(stream, n):
    with serving(ScriptedRunner(step_s=0.01)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "a", "max_tokens": 400, "stream": stream, "n": n}).encode()
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            while server.engine.stats().num_running < n:
                time.sleep(0.005)
        server.wait_until_idle()
        assert server.engine.stats().num_drawn_tokens < 200 * n


def test_special_tokens_are_not_shown():
    with serving(ScriptedRunner(lambda prompt: [*ids("ab"), 1, *ids("c"), EOS])) as server:
        assert server.both("x").text == "abc"


def test_a_model_without_a_template_serves_completions_only():
    with serving(ScriptedRunner(echo), tokenizer=text_tokenizer(None)) as server:
        refused = server.both(messages=HELLO)
        assert refused.status == 400
        assert "no chat template" in refused.body["error"]["message"]
        assert server.both("hello").text == "hello"


def test_internals_never_reach_the_caller():
    with serving(ScriptedRunner(echo)) as server:
        server.api._model(None).prompter._tokenizer = None  # any bug
        answer = server.http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "Internal server error."
