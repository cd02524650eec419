"""Whatever is sent: valid requests say the same streamed and whole, others are refused, and the server lives on."""

from __future__ import annotations

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error

from tests.api.server import MODEL, ask, serving
from tests.cases.tiny_server import serving_tiny_model
from tests.fakes import VOCAB_SIZE, ScriptedRunner, echo

EXAMPLES = 100
PATIENT = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]


@pytest.fixture(scope="module")
def tiny():
    with serving_tiny_model() as running:
        yield running


@pytest.fixture(scope="module")
def server():
    with serving(ScriptedRunner(echo)) as running:
        yield running


def control(server):
    """The server answers as before."""
    answer = server.ask("Hello", max_tokens=4)
    assert answer.status == 200
    assert answer.text == "Hell"


texts = st.text(st.characters(codec="utf-8"), max_size=20)
token_ids = st.integers(0, VOCAB_SIZE - 1)
sampling = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 24),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.integers(-1, 300),
        "min_p": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.5, 2),
        "logit_bias": st.dictionaries(token_ids.map(str), st.floats(-100, 100), max_size=4),
        "stop": st.one_of(st.none(), texts.filter(bool), st.lists(texts.filter(bool), max_size=4)),
        "stop_token_ids": st.lists(token_ids, max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "min_tokens": st.just(0),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "user": texts,
        "priority": st.integers(-5, 5),
        "cache_salt": texts.filter(bool),
        "prompt_logprobs": st.integers(0, 3),
    },
)
prompts = st.one_of(texts.filter(bool), st.lists(token_ids, min_size=1, max_size=20))
conversations = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "developer"]), "content": texts}),
    min_size=1,
    max_size=4,
)


@given(
    prompt=prompts,
    fields=sampling,
    seed=st.integers(0, 2**62),
    logprobs=st.none() | st.integers(0, 3),
    echoes=st.booleans(),
)
@PATIENT
def test_completions_say_the_same_streamed_and_whole(tiny, prompt, fields, seed, logprobs, echoes):
    fields = {"max_tokens": 12, **fields, "seed": seed, "logprobs": logprobs, "echo": echoes}
    answer = tiny.both(prompt, **fields)
    assert answer.status == 200, answer.body
    assert answer.finish_reason in ("stop", "length")
    assert answer.usage["completion_tokens"] <= fields["max_tokens"]


@given(
    messages=conversations,
    fields=sampling,
    seed=st.integers(0, 2**62),
    n=st.integers(1, 3),
    tops=st.none() | st.integers(0, 3),
)
@PATIENT
def test_chats_say_the_same_streamed_and_whole(tiny, messages, fields, seed, n, tops):
    fields = {"max_tokens": 8, **fields, "seed": seed, "n": n, "logprobs": tops is not None, "top_logprobs": tops}
    answer = tiny.both(messages=messages, **fields)
    assert answer.status == 200, answer.body


@given(path=st.sampled_from(PATHS), body=st.binary(max_size=300))
@PATIENT
def test_random_bytes_are_refused(server, path, body):
    answer = server.http.post(path, content=body)
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["type"] == "invalid_request_error"
    control(server)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(path=st.sampled_from(PATHS), body=values)
@PATIENT
def test_random_json_is_refused(server, path, body):
    answer = server.http.post(path, content=json.dumps(body))
    assert 400 <= answer.status_code < 500
    control(server)


VALID = {
    "/v1/completions": {
        "prompt": "hello",
        "max_tokens": 3,
        "stop": ["x"],
        "logprobs": 1,
        "logit_bias": {"5": 1},
        "stream": False,
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_tokens": 3,
        "n": 2,
        "top_logprobs": 1,
        "logprobs": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {"input": [{"role": "user", "content": "hi"}], "max_output_tokens": 3, "stream": False},
    "/tokenize": {"messages": [{"role": "user", "content": "hi"}]},
    "/detokenize": {"tokens": [5, 6]},
}


@st.composite
def mutated(draw):
    """A valid request with something in it replaced, removed or added."""
    path = draw(st.sampled_from(PATHS))
    body = json.loads(json.dumps(VALID[path]))
    for _ in range(draw(st.integers(1, 2))):
        place = body
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], (dict, list)) and place[key] and draw(st.booleans()):
                place = place[key]
                continue
            break
        action = draw(st.sampled_from(["replace", "remove", "add"]))
        if action == "replace":
            place[key] = draw(values)
        elif action == "remove" and len(place) > 1:
            del place[key]
        elif isinstance(place, dict):
            place[draw(st.text(max_size=5))] = draw(values)
    return path, body


@given(mutated())
@PATIENT
def test_mutated_requests_never_break_the_server(server, call):
    path, body = call
    answer = server.http.post(path, content=json.dumps(body))
    assert answer.status_code < 500, answer.text
    control(server)


def test_schemathesis_finds_no_server_error(server):
    """Requests made from the API's own description, valid and not."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")

    @given(data=st.data(), index=st.integers(0, 10**6))
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    def run(data, index):
        operations = [result.ok() for result in schema.get_all_operations()]
        operation = operations[index % len(operations)]
        case = data.draw(operation.as_strategy())
        case.call_and_validate(checks=[not_a_server_error], timeout=30)

    run()
    control(server)


def test_both_modes_agree_for_the_scripted_model_too(server):
    assert ask(server.http, "/v1/completions", {"model": MODEL, "prompt": "x"}).text == "x"
