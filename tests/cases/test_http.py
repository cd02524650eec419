"""Cases that speak of HTTP: status codes, bodies, fields, roles, log-probabilities."""

import json
import math
import pickle
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain

import httpx
import openai
import psutil
import pytest
import torch

from serve_app.config import IngressLimits
from serve_app.ingress.schema.base import parse_request
from serve_app.ingress.schema.chat import ChatRequest
from serve_app.text import template_worker
from tests.api.server import MODEL, serving
from tests.cases.tiny_server import new_tiny_model, serving_tiny_model
from tests.fakes import EOS, ScriptedRunner, counting, echo, ids, text_tokenizer
from tests.families import generate_alone

HELLO = [{"role": "user", "content": "hello"}]
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
ROUTES = {"/v1/completions": {"prompt": "hello"}, "/v1/chat/completions": {"messages": HELLO}}


@pytest.fixture(scope="module")
def server():
    """Echoes prompts."""
    with serving(ScriptedRunner(echo)) as running:
        yield running


@pytest.fixture(scope="module")
def tiny():
    """A real (tiny, random) model."""
    with serving_tiny_model() as running:
        yield running


@pytest.fixture(autouse=True)
def _control(request):
    """After every case the server answers as before."""
    yield
    for name in {"server", "tiny"} & set(request.fixturenames):
        server = request.getfixturevalue(name)
        answer = server.ask("Hello", max_tokens=4)
        assert answer.status == 200
        if name == "server":
            assert answer.text == "Hell"


def refused(server, path, body, stream=False, status=400):
    """The error of a refused call."""
    if isinstance(body, dict):
        answer = server.http.post(path, json={**body, "stream": stream})
    else:
        answer = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return error


def test_br_031_every_stream_has_an_ending():
    runner = ScriptedRunner(counting)
    with serving(runner, max_batch_size=64) as server:

        def fail_at_five(plan):
            if any(
                row.sequence.num_output_tokens == 5 and row.sequence.request.prompt_token_ids == ids("bad")
                for row in plan.rows
            ):
                raise RuntimeError("a fault within the step")

        runner.before_step = fail_at_five
        broken = server.ask("bad", stream=True, max_tokens=20)
        assert broken.events[-1]["error"]["type"] == "server_error"
        assert "fault within" not in broken.raw
        assert broken.raw.count("[DONE]") == 0
        runner.before_step = None
        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(lambda i: server.ask(f"{i}", stream=True, max_tokens=8), range(200)))
        assert all(answer.finish_reason == "length" and answer.raw.endswith("data: [DONE]\n\n") for answer in answers)


@BOTH
@pytest.mark.parametrize("path", ROUTES)
def test_br_033_a_refusal_has_its_status_in_both_modes(server, path, stream):
    for wrong in ({"temperature": 3}, {"max_tokens": 10**6}, {"n": 0}, {"model": "nope"}, {"logit_bias": {"9999999": 1}}):
        body = {**ROUTES[path], **wrong}
        status = 404 if "model" in wrong else 400
        error = refused(server, path, body, stream, status)
        assert error["param"] == next(iter(wrong))
    long = {"prompt": "x" * 600} if "prompt" in ROUTES[path] else {"messages": [{"role": "user", "content": "x" * 600}]}
    assert refused(server, path, long, stream)["code"] == "context_length_exceeded"


WRONG_VALUES = ["text", -7, 10**40, 1e308, [], {}, {"a": {"b": []}}, [[]], True]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"])
def test_br_035_wrong_values_of_every_field_are_4xx(server, path):
    needed = {**ROUTES, "/v1/responses": {"input": "x"}, "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [5]}}[path]
    described = server.http.get("/openapi.json").json()
    reference = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = described["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
    for field in fields:
        for value in WRONG_VALUES:
            answer = server.http.post(
                path, json={**needed, "max_tokens": 1, field: value} if "max_tokens" in fields else {**needed, field: value}
            )
            assert answer.status_code in (200, 400, 404), (field, value, answer.text)
            if answer.status_code == 400:
                assert (answer.json()["error"]["param"] or "").split("[")[0].split(".")[0] in fields, answer.text
    for body in ({"messages": []}, {"n": "two"}, {"stream": "maybe"}, {"tokens": [-1]}):
        assert server.http.post(path, json={**needed, **body}).status_code == 400


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (None, 200),
        ("text/plain", 200),
        ("application/x-www-form-urlencoded", 200),
        ("application/json; charset=utf-8", 200),
        ("application/json; profile=x", 200),
        ("application/json; charset=latin-1", 415),
    ],
)
def test_br_037_content_types(server, kind, status):
    headers = {} if kind is None else {"Content-Type": kind}
    answer = server.http.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}', headers=headers)
    assert answer.status_code == status


def test_br_039_the_sdk_reads_our_errors(server):
    with pytest.raises(openai.BadRequestError) as bad:
        server.openai.completions.create(model=MODEL, prompt="x", top_p=2)
    assert bad.value.param == "top_p"
    assert "top_p" in bad.value.message
    assert bad.value.body["type"] == "invalid_request_error"
    for method, path, status in (("GET", "/nope", 404), ("GET", "/v1/completions", 405), ("PUT", "/health", 405)):
        answer = server.http.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@BOTH
def test_br_041_a_long_prompt_is_blamed_on_the_prompt(server, stream):
    error = refused(server, "/v1/completions", {"prompt": "x" * 700}, stream)
    assert error["code"] == "context_length_exceeded"
    assert "700" in error["message"]
    assert "512" in error["message"]
    assert "max_tokens" not in error["message"]


def test_br_043_an_overlong_prompt_disturbs_nobody():
    with serving(ScriptedRunner(counting, step_s=0.005)) as server, ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(server.ask, f"{i}", stream=True, max_tokens=60) for i in range(3)]
        refused(server, "/v1/completions", {"prompt": "x" * 5120})
        assert server.ask("Hello", max_tokens=4).status == 200
        assert all(stream.result().usage["completion_tokens"] == 60 for stream in streams)


def test_br_045_every_choice_ends_once(tiny):
    body = {"messages": HELLO, "n": 3, "max_tokens": 8, "temperature": 1, "seed": 7, "ignore_eos": True}
    events = tiny.ask(**body, stream=True).events
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 24
    assert last["usage"]["prompt_tokens"] == len("user: hello\nassistant: ")
    texts = {0: "", 1: "", 2: ""}
    for index in texts:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [c["delta"].get("role") for c in mine].count("assistant") == 1
        assert [c["finish_reason"] for c in mine].count("length") == 1
        assert mine[-1]["finish_reason"] == "length"
        texts[index] = "".join(c["delta"].get("content", "") for c in mine)
    assert len(set(texts.values())) == 3
    whole = tiny.ask(**body).body["choices"]
    assert {c["index"]: c["message"]["content"] for c in whole} == texts


EMOJI = "ok 🌶️!"


@BOTH
def test_br_053_bytes_of_a_token_are_its_own(stream):
    with serving(ScriptedRunner(lambda prompt: [*ids(EMOJI), EOS])) as server:
        answer = server.ask(messages=HELLO, logprobs=True, top_logprobs=2, stream=stream)
        if stream:
            entries = [
                e
                for chunk in answer.events
                for c in chunk["choices"]
                for e in (c["logprobs"] or {"content": []})["content"]
            ]
        else:
            entries = answer.body["choices"][0]["logprobs"]["content"]
        assert answer.text == EMOJI
        assert bytes(b for entry in entries for b in entry["bytes"]) == EMOJI.encode()
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
        assert all(len(entry["bytes"]) == 1 for entry in entries)


@BOTH
def test_br_055_each_route_has_its_own_layout_of_logprobs(tiny, stream):
    chat = tiny.ask(messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=5, stream=stream)
    plain = tiny.ask("hello", logprobs=2, max_tokens=5, stream=stream)
    if stream:
        chat_part = [e for x in chat.events for c in x["choices"] for e in (c["logprobs"] or {"content": []})["content"]]
        plain_parts = [c["logprobs"] for x in plain.events for c in x["choices"]]
        part = {key: list(chain.from_iterable(p[key] for p in plain_parts)) for key in plain_parts[0]}
    else:
        chat_part, part = chat.body["choices"][0]["logprobs"]["content"], plain.body["choices"][0]["logprobs"]
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in chat_part)
    assert chat_part[0]["top_logprobs"][0]["logprob"] == pytest.approx(chat_part[0]["logprob"])  # greedy
    assert set(part) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert part["text_offset"] == sorted(part["text_offset"])
    assert len(part["tokens"]) == len(part["token_logprobs"]) == len(part["text_offset"]) == 5
    for path, wrong in (
        ("/v1/chat/completions", {"messages": HELLO, "top_logprobs": 2}),
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 21}),
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": -1}),
        ("/v1/completions", {"prompt": "x", "logprobs": True}),
        ("/v1/completions", {"prompt": "x", "logprobs": 21}),
    ):
        assert "logprobs" in refused(tiny, path, wrong, stream)["param"]


@BOTH
def test_offsets_and_echo_match_the_text(tiny, stream):
    prompt = "héllo"
    answer = tiny.ask(prompt, echo=True, logprobs=1, max_tokens=6, stream=stream)
    assert answer.text.startswith(prompt)
    parts = (
        [c["logprobs"] for e in answer.events for c in e["choices"]] if stream else [answer.body["choices"][0]["logprobs"]]
    )
    offsets, tokens = (
        list(chain.from_iterable(p["text_offset"] for p in parts)),
        list(chain.from_iterable(p["tokens"] for p in parts)),
    )
    assert len(offsets) == len(prompt.encode()) + 6
    assert offsets[:6] == [0, 1, 1, 2, 3, 4]  # é is two tokens; its text comes with the second
    assert tokens[:4] == ["h", "bytes:\\xc3", "bytes:\\xa9", "l"]
    assert parts[0]["token_logprobs"][0] is None
    assert answer.usage["completion_tokens"] == 6


@BOTH
def test_a_prompt_can_be_scored_without_drawing(tiny, stream):
    answer = tiny.ask("hello", echo=True, logprobs=0, max_tokens=0, stream=stream)
    assert (answer.text, answer.finish_reason) == ("hello", "length")
    assert answer.usage == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}
    choice = answer.events[0]["choices"][0] if stream else answer.body["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == 5
    assert refused(tiny, "/v1/completions", {"prompt": "x", "max_tokens": 0}, stream)["param"] == "max_tokens"


def test_logprobs_are_log_softmax(tiny):
    """What HTTP says equals a direct computation on the model."""
    answer = tiny.ask("hello world", logprobs=3, echo=True, max_tokens=6, ignore_eos=True)
    said = answer.body["choices"][0]["logprobs"]
    prompt = ids("hello world")
    [request] = [r for r in tiny.client.requests if r.prompt_token_ids == prompt][-1:]
    assert request.sampling.prompt_logprobs == 3
    sequence = [*prompt]
    plain = new_tiny_model()  # the same weights, its own attention
    sequence += generate_alone(plain, prompt, 6)
    with torch.inference_mode():
        expected = torch.log_softmax(plain(torch.tensor([sequence])).logits[0].float(), -1)
    for position in range(1, len(sequence)):
        assert said["token_logprobs"][position] == pytest.approx(
            float(expected[position - 1, sequence[position]]), abs=1e-4
        )
        top = expected[position - 1].topk(3).values.tolist()
        assert sorted(said["top_logprobs"][position].values(), reverse=True)[:3] == pytest.approx(top, abs=1e-4)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e400", '"nan"'])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p"]
)
def test_br_057_not_a_number_is_not_a_number(server, literal, field):
    body = f'{{"prompt": "x", "{field}": {literal}}}'.encode()
    assert refused(server, "/v1/completions", body)["param"] in (field, None)
    refused(server, "/v1/completions", f'{{"prompt": "x", "logit_bias": {{"5": {literal}}}}}'.encode())


def test_br_059_top_k_and_top_p(tiny):
    for value in (0.01, "40", -2, True):
        assert refused(tiny, "/v1/completions", {"prompt": "x", "top_k": value})["param"] == "top_k"
    for value in (0, -0.1, 1.0001, "0.9"):
        assert refused(tiny, "/v1/completions", {"prompt": "x", "top_p": value})["param"] == "top_p"
    greedy = tiny.ask("abc", max_tokens=8).text
    assert tiny.both("abc", max_tokens=8, temperature=1, top_k=1).text == greedy
    for off in (-1, 0):
        assert tiny.ask("abc", max_tokens=4, top_k=off).status == 200


def test_br_061_penalties_count_what_was_drawn(tiny):
    prompt = "Paris Paris Paris Paris"
    first = tiny.ask(prompt, max_tokens=1).text
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert tiny.both(prompt, max_tokens=1, **{penalty: 2}).text == first
        assert refused(tiny, "/v1/completions", {"prompt": "x", penalty: 2.1})["param"] == penalty
        assert tiny.ask(prompt, max_tokens=1, **{penalty: None}).text == first
        assert tiny.ask(prompt, max_tokens=4, **{penalty: -2}).status == 200
    forced = {"logit_bias": {str(ids("a")[0]): 100, str(ids("b")[0]): 97}, "max_tokens": 8, "ignore_eos": True}
    assert tiny.both(prompt, **forced).text == "a" * 8
    penalised = tiny.both(prompt, **forced, frequency_penalty=2).text
    assert penalised[0] == "a"
    assert "b" in penalised
    assert tiny.both(prompt, **forced, repetition_penalty=2).text != "a" * 8


@BOTH
def test_br_063_a_bias_for_no_token_is_refused(tiny, stream):
    for key in ("99999999", "-1", str(tiny.runner.vocab_size), "five", "1.5", ""):
        error = refused(tiny, "/v1/completions", {"prompt": "x", "logit_bias": {key: 5}}, stream)
        assert error["param"].startswith("logit_bias")
        assert key in error["message"]
    assert tiny.both("x", max_tokens=3, logit_bias={str(ids("z")[0]): 100}).text == "zzz"
    assert refused(tiny, "/v1/completions", {"prompt": "x", "logit_bias": {"5": 101}}, stream)["param"].startswith(
        "logit_bias"
    )


@BOTH
@pytest.mark.parametrize("prompt", ["", [""], [], [[]], None, ["a", ""], [[5], []]])
def test_br_065_an_empty_prompt_is_refused(server, prompt, stream):
    assert refused(server, "/v1/completions", {"prompt": prompt}, stream)["param"] == "prompt"
    assert refused(server, "/v1/completions", {}, stream)["param"] == "prompt"


def test_br_067_text_parts_are_joined(server):
    parts = [{"type": "text", "text": "How many "}, {"type": "text", "text": "primary colours?"}]
    joined = server.both(messages=[{"role": "user", "content": "How many primary colours?"}])
    assert server.both(messages=[{"role": "user", "content": parts}]).same == joined.same
    for wrong in (
        [],
        [{"type": "image_url", "image_url": {"url": "data:"}}],
        [{"type": "input_audio", "input_audio": {}}],
        [{"type": "hologram"}],
        [{"type": "text"}],
        ["text"],
        5,
    ):
        error = refused(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": wrong}]})
        assert error["param"].startswith("messages[0].content")
    error = refused(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
    assert "image_url" in error["message"]


CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "What time is it?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    {
        "role": "assistant",
        "content": "Noon.",
        "refusal": None,
        "audio": None,
        "annotations": [],
        "function_call": None,
        "id": "x",
    },
    {"role": "user", "content": "Thanks", "name": "Ada"},
]


def test_br_069_a_parsed_conversation_can_be_sent_and_read_twice(server):
    call = parse_request(ChatRequest, {"messages": CONVERSATION})
    again = pickle.loads(pickle.dumps(call))
    assert again == call
    turns = [message.for_template() for message in again.messages]
    assert turns == [message.for_template() for message in again.messages]
    assert turns[3]["tool_calls"][0]["function"]["name"] == "clock"
    assert "tool: noon" in server.both(messages=CONVERSATION).text


NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ messages[0].content }}"
)


@BOTH
def test_br_071_a_template_without_system_messages(stream):
    with serving(ScriptedRunner(echo), tokenizer=text_tokenizer(NO_SYSTEM)) as server:
        error = refused(server, "/v1/chat/completions", {"messages": [{"role": "system", "content": "x"}, *HELLO]}, stream)
        assert "System role not supported" in error["message"]
        assert server.ask(messages=HELLO).text == "hello"


@BOTH
def test_br_073_a_model_without_a_template(stream):
    with serving(ScriptedRunner(echo), tokenizer=text_tokenizer(None)) as server:
        assert "no chat template" in refused(server, "/v1/chat/completions", {"messages": HELLO}, stream)["message"]
        assert "no chat template" in refused(server, "/v1/responses", {"input": "x"}, stream)["message"]
        assert server.ask("hello").text == "hello"


PREFILL = [*HELLO, {"role": "assistant", "content": "According to "}]


def test_br_075_an_assistants_last_message(server):
    said = server.both(messages=PREFILL)
    assert said.text == "user: hello\nassistant: According to \nassistant: "  # (a) a turn like any other
    for more in ({"add_generation_prompt": False}, {}):
        continued = server.both(messages=PREFILL, continue_final_message=True, **more)
        assert continued.text == "user: hello\nassistant: According to "  # (b) the echo of a prompt that ends there
    both = {"messages": PREFILL, "continue_final_message": True, "add_generation_prompt": True}
    assert refused(server, "/v1/chat/completions", both)["param"] == "continue_final_message"
    assert server.both(messages=HELLO, add_generation_prompt=False).text == "user: hello\n"


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@BOTH
@pytest.mark.parametrize("choice", ["required", "auto", "none", {"type": "function", "function": {"name": "g"}}])
def test_br_077_tools_are_refused_never_pretended(server, choice, stream):
    for more in ({"tools": TOOLS, "tool_choice": choice}, {"tool_choice": choice}, {"tools": TOOLS}):
        error = refused(server, "/v1/chat/completions", {"messages": HELLO, **more}, stream)
        assert error["param"] in more
        assert "does not call tools" in error["message"]


@BOTH
@pytest.mark.parametrize(
    "format_",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strng"}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nope"}}},
        {"type": "json_schema"},
        {"type": "json_object"},
        {"type": "xml"},
        "(",
    ],
)
def test_br_079_formats_other_than_text_are_refused(server, format_, stream):
    error = refused(server, "/v1/chat/completions", {"messages": HELLO, "response_format": format_}, stream)
    assert error["param"].startswith("response_format")


@pytest.mark.parametrize("depth", [65, 1000, 20_000, 100_000])
@pytest.mark.parametrize("where", ["junk", "metadata", "tools"])
def test_br_081_deep_json_is_refused_fast(server, depth, where):
    flat = b'{"prompt": "x", "%s": [%s1]}' % (where.encode(), b"1," * 3 * depth)
    arrays = b'{"prompt": "x", "%s": %s%s}' % (where.encode(), b"[" * depth, b"]" * depth)
    objects = b'{"prompt": "x", "%s": %s1%s}' % (where.encode(), b'{"a":' * depth, b"}" * depth)
    took_s = []
    for body in (flat, arrays, objects):
        began_at = time.monotonic()
        refused(server, "/v1/completions", body)
        took_s.append(time.monotonic() - began_at)
    assert max(took_s[1:]) < 20 * (took_s[0] + 0.05)  # depth costs no more than length does; 0.05: a machine that was busy


def test_br_083_fields_that_clients_send_routinely(server):
    routine = {
        "store": False,
        "metadata": {},
        "user": "u",
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
    }
    assert server.both(messages=[{**HELLO[0], "name": "Ada", "id": "m1"}], **routine).text == "user: hello\nassistant: "
    # where the report would ignore what nobody knows, this server says so: a misspelt field is a mistake worth knowing
    assert refused(server, "/v1/chat/completions", {"messages": HELLO, "foo": 1})["param"] == "foo"
    assert refused(server, "/v1/chat/completions", {"messages": [{**HELLO[0], "foo": 1}]})["param"] == "messages[0].foo"


@BOTH
def test_br_085_wrong_model_names(server, stream):
    for name in ("nope", ""):
        error = refused(server, "/v1/completions", {"prompt": "x", "model": name}, stream, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert MODEL in error["message"]
    assert refused(server, "/v1/completions", {"prompt": "x", "model": 5}, stream)["param"] == "model"
    for body in ({"prompt": "x", "max_tokens": 1}, {"prompt": "x", "max_tokens": 1, "model": None}):
        assert server.http.post("/v1/completions", json={**body, "stream": stream}).status_code == 200
    listed = server.http.get("/v1/models").json()
    assert listed["object"] == "list"
    for card in listed["data"]:
        assert card["object"] == "model"
        assert server.http.get(f"/v1/models/{card['id']}").json()["id"] == card["id"]
    assert server.http.get("/v1/models/some/other").status_code == 404


def test_br_129_preflight_and_head(server):
    preflight = {"Origin": "http://x", "Access-Control-Request-Method": "POST"}
    assert server.http.options("/v1/chat/completions", headers=preflight).status_code == 405  # CORS is off
    for path in ("/health", "/v1/models"):
        head = server.http.head(path)
        assert (head.status_code, head.content) == (200, b"")
    assert "access-control-allow-origin" not in server.http.get("/health", headers={"Origin": "http://x"}).headers


def test_a_body_larger_than_the_limit_is_refused_while_it_is_read():
    with serving(ScriptedRunner(echo), limits=IngressLimits(max_body_bytes=1000)) as server:

        def endless():
            for _ in range(10_000):
                yield b" " * 1000

        # the connection may close before all is sent, which says the same
        with httpx.Client(base_url=server.url, trust_env=False) as http, suppress(httpx.WriteError):
            assert http.post("/v1/completions", content=endless()).status_code == 413
        assert server.http.post("/v1/completions", content=b"x" * 1001).status_code == 413
        assert server.ask("ok").text == "ok"


def test_request_ids(server):
    answer = server.http.post("/v1/completions", json={"prompt": "x", "request_id": "mine"})
    assert answer.json()["id"] == "cmpl-mine"
    assert answer.headers["x-request-id"] == "mine"
    answer = server.http.post(
        "/v1/completions", json={"prompt": "x", "request_id": "mine"}, headers={"X-Request-Id": "yours"}
    )
    assert answer.json()["id"] == "cmpl-mine"
    answer = server.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "yours"})
    assert answer.json()["id"] == "cmpl-yours"
    for wrong in ("a b", "x" * 129, "a/b"):
        assert refused(server, "/v1/completions", {"prompt": "x", "request_id": wrong})["param"] == "request_id"
        answer = server.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": wrong})
        assert answer.json()["error"]["param"] == "X-Request-Id"
    barrier = threading.Barrier(4)

    def send(_):
        barrier.wait()
        return server.ask("same", request_id="twice", stream=True).text

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(send, range(4))) == ["same"] * 4


def test_usage_along_the_stream(server):
    body = {"prompt": "hello", "stream": True, "stream_options": {"continuous_usage_stats": True, "include_usage": True}}
    raw = server.http.post("/v1/completions", json=body).text
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert all(event["usage"]["prompt_tokens"] == 5 for event in events)


@BOTH
def test_stop_strings_may_be_shown(server, stream):
    assert server.ask("one STOP two", stop=["STOP"], stream=stream).text == "one "
    shown = server.ask("one STOP two", stop=["STOP"], include_stop_str_in_output=True, stream=stream)
    assert (shown.text, shown.finish_reason) == ("one STOP", "stop")


@BOTH
def test_special_tokens_may_be_shown(stream):
    with serving(ScriptedRunner(lambda prompt: [*ids("a"), 3, *ids("b"), EOS])) as server:
        assert server.ask("x", stream=stream).text == "ab"
        assert server.ask("x", skip_special_tokens=False, stream=stream).text == "a<eot>b"


def test_salts_keep_prefix_caches_apart(tiny):
    prompt = "a prompt that fills some blocks of the cache with its text"
    hits = []
    for salt in ("one", "one", "two"):
        before = tiny.engine.stats().num_prefix_hit_tokens
        answer = tiny.ask(prompt, max_tokens=1, cache_salt=salt)
        hits.append(tiny.engine.stats().num_prefix_hit_tokens - before)
        assert answer.num_cached_tokens == hits[-1]
    assert hits[0] == hits[2] == 0
    assert hits[1] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_what_of_the_prompts_was_cached(tiny, stream):
    """Of each prompt once, as its tokens are counted once, however many choices it has."""
    cached = []
    for prompt in ("q" * 64, ["q" * 64, "r" * 64], ["q" * 64, "r" * 64]):
        answer = tiny.ask(prompt, max_tokens=3, n=2, cache_salt=f"cached {stream}", stream=stream, temperature=1)
        cached.append(answer.num_cached_tokens)
        assert cached[-1] < answer.usage["prompt_tokens"]
    assert cached[0] == 0
    assert 0 < cached[1] == cached[2] / 2
    asked = {"model": MODEL, "input": "q" * 64, "max_output_tokens": 16}
    told = [tiny.http.post("/v1/responses", json=asked).json()["usage"] for _ in range(2)]
    assert told[1]["input_tokens_details"]["cached_tokens"] >= told[0]["input_tokens_details"]["cached_tokens"]
    assert told[1]["input_tokens_details"]["cached_tokens"] > 0


def test_choices_share_the_blocks_of_their_prompt(tiny):
    before = tiny.engine.stats()
    tiny.ask("p" * 400, n=8, max_tokens=2, temperature=1, cache_salt="n")
    after = tiny.engine.stats()
    assert after.num_computed_tokens - before.num_computed_tokens < 2 * 400


def test_prompt_logprobs(tiny):
    answer = tiny.ask("hello", prompt_logprobs=2, max_tokens=1)
    first, *rest = answer.body["choices"][0]["prompt_logprobs"]
    assert first is None
    assert len(rest) == 4
    assert all(2 <= len(entry) <= 3 for entry in rest)
    assert str(ids("e")[0]) in rest[0]
    assert all(math.isfinite(value["logprob"]) for entry in rest for value in entry.values())
    streamed = tiny.ask("hello", prompt_logprobs=2, max_tokens=1, stream=True)
    [told] = [c["prompt_logprobs"] for e in streamed.events for c in e["choices"] if "prompt_logprobs" in c]
    assert told == [first, *rest]


@BOTH
def test_reasoning_is_split_off_where_the_model_has_tags(stream):
    script = [*ids("<think>\nhm, 🌶️\n</think>\n\nhello"), EOS]
    with serving(ScriptedRunner(lambda prompt: script), reasoning_tags=("<think>", "</think>")) as server:
        answer = server.ask(messages=HELLO, stream=stream)
        if stream:
            thoughts = "".join(c["delta"].get("reasoning_content", "") for e in answer.events for c in e["choices"])
        else:
            thoughts = answer.body["choices"][0]["message"]["reasoning_content"]
        assert answer.text == "hello"
        assert thoughts.strip() == "hm, 🌶️"
        assert server.ask("x", stream=stream).text == "<think>\nhm, 🌶️\n</think>\n\nhello"  # completions are plain text


@BOTH
def test_templates_of_callers(stream):
    mine = {
        "messages": HELLO,
        "chat_template": "{{ messages[0].content }} from {{ place }}",
        "chat_template_kwargs": {"place": "here"},
    }
    with serving(ScriptedRunner(echo)) as server:
        assert refused(server, "/v1/chat/completions", mine, stream)["param"] == "chat_template"
        taken = {"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}
        assert refused(server, "/v1/chat/completions", taken, stream)["param"] == "chat_template_kwargs"
    with serving(ScriptedRunner(echo), limits=IngressLimits(allow_chat_template=True)) as server:
        assert server.ask(**mine, stream=stream).text == "hello from here"
        for bad in (
            "{{",
            "{{ 1/0 }}",
            "{{ messages.x.y }}",
            "{% for %}",
            "{{ ''.__class__.__mro__ }}",
            "{{ raise_exception('no') }}",
        ):
            answer = server.http.post("/v1/chat/completions", json={**mine, "chat_template": bad, "stream": stream})
            assert answer.status_code == 400, bad
        for taken in ("messages", "conversations", "tools"):
            with_taken = {**mine, "chat_template_kwargs": {taken: 1}}
            assert refused(server, "/v1/chat/completions", with_taken, stream)["param"] == "chat_template_kwargs"


PATHOLOGICAL = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "fills the memory": "{{ 'x' * 10**11 }}",
    "grows": "{% set ns = namespace(x='x' * 1000) %}{% for i in range(99999) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "writes much": "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
    "recurses": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "one long operation": "{{ '%099999999999d' % 1 }}",
}


@pytest.mark.parametrize("template", PATHOLOGICAL.values(), ids=PATHOLOGICAL)
def test_a_pathological_template_harms_nobody(template):
    before = psutil.Process().memory_info().rss
    with (
        serving(ScriptedRunner(echo), limits=IngressLimits(allow_chat_template=True)) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        body = {"messages": HELLO, "chat_template": template}
        bad = pool.submit(server.http.post, "/v1/chat/completions", json=body)
        began_at, slowest_s = time.monotonic(), 0.0
        while not bad.done():
            asked_at = time.monotonic()
            assert server.ask("meanwhile").text == "meanwhile"
            slowest_s = max(slowest_s, time.monotonic() - asked_at)
        if time.monotonic() - began_at > template_worker.TIMEOUT_S:  # all its time: whoever waited for it did so as long
            assert slowest_s < 0.9 * template_worker.TIMEOUT_S
        error = bad.result().json()["error"]
        assert bad.result().status_code == 400
        assert error["param"] == "chat_template"
        mine = {"messages": HELLO, "chat_template": "{{ messages[0].content }}"}
        assert server.ask(**mine).text == "hello"
    assert psutil.Process().memory_info().rss - before < 100 * 1024 * 1024


def test_a_template_process_that_somebody_ended_is_started_again():
    mine = {"messages": HELLO, "chat_template": "{{ messages[0].content }}"}
    with serving(ScriptedRunner(echo), limits=IngressLimits(allow_chat_template=True)) as server:
        for _ in range(3):
            assert server.ask(**mine).text == "hello"
            workers = [child for child in psutil.Process().children() if template_worker.__name__ in child.cmdline()]
            assert workers
            for worker in workers:
                worker.kill()
                psutil.Process(worker.pid).wait(5)


def test_a_flood_of_templates_is_refused():
    body = {"messages": HELLO, "chat_template": PATHOLOGICAL["loops"]}
    with (
        serving(ScriptedRunner(echo), limits=IngressLimits(allow_chat_template=True)) as server,
        ThreadPoolExecutor(20) as pool,
    ):
        flood = [pool.submit(server.http.post, "/v1/chat/completions", json=body, timeout=60) for _ in range(20)]
        refusals = [call.result().status_code for call in flood]
        assert sorted(set(refusals)) == [400, 429]
        assert refusals.count(400) == template_worker.MAX_WAITING


def test_responses_and_stored_ones(server):
    whole = server.openai.responses.create(model=MODEL, input="hello", instructions="be kind")
    assert whole.output_text == "system: be kind\nuser: hello\nassistant: "
    assert whole.status == "completed"
    cut = server.openai.responses.create(model=MODEL, input="hello", max_output_tokens=3)
    assert (cut.output_text, cut.status, cut.incomplete_details.reason) == ("use", "incomplete", "max_output_tokens")
    turns = [
        {"role": "user", "content": "a"},
        *(item.model_dump() for item in cut.output),
        {"role": "user", "content": "b"},
    ]
    assert "assistant: use" in server.openai.responses.create(model=MODEL, input=turns).output_text
    events = list(server.openai.responses.create(model=MODEL, input="hello", stream=True))
    assert events[-1].type == "response.completed"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == events[-1].response.output_text
    for act in (server.openai.responses.retrieve, server.openai.responses.cancel, server.openai.responses.delete):
        with pytest.raises(openai.BadRequestError, match="not stored"):
            act(whole.id)
    with pytest.raises(openai.BadRequestError, match="whole conversation"):
        server.openai.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        server.openai.embeddings.create(model=MODEL, input="x")


def test_a_response_that_breaks_ends_with_an_error_event():
    runner = ScriptedRunner(counting)
    with serving(runner) as server:

        def fail(plan):
            if plan.rows[0].sequence.num_output_tokens == 3:
                raise RuntimeError("a fault within the step")

        runner.before_step = fail
        events = list(server.openai.responses.create(model=MODEL, input="x", stream=True))
        assert events[-1].type == "error"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "fault within" not in events[-1].message


def test_tokenize_and_back(server):
    asked = server.http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert asked["tokens"] == list(ids("héllo"))
    assert asked["count"] == 6
    assert len(asked["token_strs"]) == 6
    assert server.http.post("/detokenize", json={"tokens": asked["tokens"]}).json() == {"prompt": "héllo"}
    chat = server.http.post("/tokenize", json={"messages": HELLO}).json()
    assert chat["tokens"] == list(ids("user: hello\nassistant: "))
    assert chat["token_strs"] is None
    for wrong in ({}, {"prompt": "x", "messages": HELLO}, {"prompt": 5}):
        refused_status = server.http.post("/tokenize", json=wrong).status_code
        assert refused_status == 400
    assert server.http.post("/detokenize", json={"tokens": [10**6]}).json()["error"]["param"] == "tokens"
    assert server.http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []


def test_the_api_describes_itself(server):
    described = server.http.get("/openapi.json").json()
    assert set(described["paths"]["/v1/chat/completions"]["post"]["responses"]) >= {"200", "400", "429"}
    page = server.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    for field in ("messages", "top_logprobs", "cache_salt"):
        assert f"<code>{field}</code>" in page.text
    assert server.http.get("/version").json()["version"]


def leave(server, body, *, after, reset):
    """Sends a call on a socket of its own, reads until `after` is seen, and closes it."""
    host, port = server.url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(raw), raw))
    seen = b""
    while seen.count(after) < 3:
        seen += connection.recv(4096)
    if reset:  # closing with a linger of 0 sends RST instead of FIN
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
def test_br_087_a_caller_who_leaves_frees_his_row(reset):
    with serving(ScriptedRunner(counting, max_model_len=4096, num_blocks=4096, step_s=0.001)) as server:
        for _ in range(50):
            leave(server, {"prompt": "x", "max_tokens": 4000, "stream": True}, after=b"data: ", reset=reset)
        server.wait_until_idle()
        assert server.engine.stats().num_drawn_tokens < 50 * 400
        assert server.ask("ok", max_tokens=4).status == 200


def test_br_089_a_caller_who_leaves_the_queue_is_never_computed():
    with serving(ScriptedRunner(counting, max_model_len=4096, num_blocks=4096, step_s=0.001), max_batch_size=1) as server:
        with ThreadPoolExecutor(2) as pool:
            running = pool.submit(server.ask, "running", max_tokens=800)
            server.wait_until_running()
            host, port = server.url.removeprefix("http://").split(":")
            body = b'{"prompt": "gone", "max_tokens": 100}'
            leavers = [socket.create_connection((host, int(port)), timeout=10) for _ in range(20)]
            for connection in leavers:
                connection.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
                )
            while server.engine.stats().num_waiting < 20:
                time.sleep(0.001)
            stayer = pool.submit(server.ask, "stayer", max_tokens=5)
            for connection in leavers:
                connection.close()
            assert running.result().usage["completion_tokens"] == 800
            assert stayer.result().usage["completion_tokens"] == 5
        assert server.engine.stats().num_drawn_tokens == 805


@BOTH
def test_br_133_an_engine_that_is_gone_is_not_an_empty_200(stream):
    with serving(ScriptedRunner(echo)) as server:
        server.engine.shutdown()
        answer = server.http.post("/v1/completions", json={"prompt": "x", "stream": stream})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unavailable"
        assert server.http.get("/ready").status_code == 503
        assert server.http.get("/health").status_code == 200


def test_br_131_deadlines():
    slow = ScriptedRunner(counting, max_model_len=4096, num_blocks=4096, step_s=0.005)
    with serving(slow, max_batch_size=1, limits=IngressLimits(request_timeout_s=5)) as server:
        body, asked = {"prompt": "x", "max_tokens": 4000}, {"X-Request-Timeout-Seconds": "0.3"}
        answer = server.http.post("/v1/completions", json=body, headers=asked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        raw = server.http.post("/v1/completions", json={**body, "stream": True}, headers=asked).text
        assert '"text":' in raw
        assert raw.count("deadline_exceeded") == 1
        assert "[DONE]" not in raw
        server.wait_until_idle()
        assert server.engine.stats().num_drawn_tokens < 4000
        with ThreadPoolExecutor(1) as pool:  # one that only waits
            running = pool.submit(server.ask, "running", max_tokens=150)
            server.wait_until_running()
            answer = server.http.post("/v1/completions", json=body, headers=asked)
            assert answer.status_code == 504
            assert running.result().usage["completion_tokens"] == 150
        server.wait_until_idle()
        assert server.engine.stats().num_drawn_tokens < 150 + 2 * 120
        for wrong in ("0", "-1", "nan", "1e3", "soon", ""):
            answer = server.http.post("/v1/completions", json=body, headers={"X-Request-Timeout-Seconds": wrong})
            assert answer.status_code == 400, wrong
            assert answer.json()["error"]["param"] == "X-Request-Timeout-Seconds"
        server.api.limits = IngressLimits(request_timeout_s=0.2)
        assert server.http.post("/v1/completions", json=body).status_code == 504
        later = server.http.post("/v1/completions", json=body, headers={"X-Request-Timeout-Seconds": "60"})
        assert later.status_code == 504  # the server's own limit is the longest


def unread_stream(host, port, body):
    """A connection on which a stream was asked for, and that takes little unless it is read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    return connection


def test_a_reader_who_takes_nothing_is_cut_off_and_his_work_ends():
    runner = ScriptedRunner(lambda _: [ids("a")[0]] * 70000, max_model_len=80000, num_blocks=20000, step_s=0.001)
    with serving(runner, limits=IngressLimits(reader_timeout_s=0.5)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "a", "max_tokens": 70000, "stream": True, "logprobs": 5}).encode()
        with unread_stream(host, port, body):
            deadline = time.monotonic() + 30
            while not (cut := [record for record in server.records if record.stream]):
                assert time.monotonic() < deadline
                assert server.ask("others", max_tokens=3).text == "aaa"
                time.sleep(0.05)
            [record] = cut
            assert record.ending == "slow_reader"
            assert record.completion_tokens < 70000
            server.wait_until_idle()


def test_br_091_slow_readers_slow_nobody_else_and_get_all_of_it():
    with serving(ScriptedRunner(counting, max_model_len=4096, num_blocks=8192, step_s=0.001), max_batch_size=16) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "a", "max_tokens": 2000, "stream": True, "ignore_eos": True}).encode()
        alone = server.ask("fast", stream=True, max_tokens=200)
        slow = [unread_stream(host, port, body) for _ in range(6)]
        with ThreadPoolExecutor(4) as pool:
            fast = list(pool.map(lambda _: server.ask("fast", stream=True, max_tokens=200), range(4)))
        assert all(answer.text == alone.text for answer in fast)
        expected = server.ask("a", max_tokens=2000, ignore_eos=True).text
        for connection in slow:  # at last they read
            raw = b""
            while b"[DONE]" not in raw:
                raw += connection.recv(65536)
            connection.close()
            lines = [line for line in raw.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data: {")]
            assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines) == expected
            assert len(lines) < 2000  # what had waited came in larger pieces
