"""Every field of the `openai` package's request types is honoured, accepted without effect, or refused by name."""

import pytest

from tests.api.field_tables import DOCUMENT, REFUSED, TYPES, openai_fields, status, with_tables
from tests.api.server import MODEL, serving
from tests.fakes import ScriptedRunner, echo

NEEDED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}
SAMPLES = {
    "frequency_penalty": 0.5,
    "logit_bias": {"50": -100},
    "logprobs": True,
    "max_completion_tokens": 5,
    "max_output_tokens": 5,
    "max_tokens": 5,
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "model": MODEL,
    "n": 2,
    "parallel_tool_calls": True,
    "presence_penalty": 0.5,
    "prompt_cache_key": "key",
    "reasoning_effort": "low",
    "response_format": {"type": "text"},
    "safety_identifier": "someone",
    "seed": 1,
    "service_tier": "auto",
    "stop": ["x"],
    "store": False,
    "stream": False,
    "stream_options": None,
    "temperature": 0.5,
    "text": {"format": {"type": "text"}},
    "top_logprobs": None,
    "top_p": 0.5,
    "user": "someone",
    "verbosity": "low",
    "best_of": 1,
    "echo": True,
    "background": False,
    "instructions": "be short",
    "truncation": "disabled",
}
"""A value of each field that is not refused."""
FIELDS = [(path, field) for path in TYPES for field in sorted(openai_fields(path) - set(NEEDED[path]))]


@pytest.fixture(scope="module")
def server():
    with serving(ScriptedRunner(echo)) as running:
        yield running


def test_the_tables_of_the_reference_are_true():
    text = DOCUMENT.read_text()
    assert all(f"<!-- fields of {path} -->" in text for path in TYPES)
    assert text == with_tables(text), "run: python -m tests.api.field_tables"


@pytest.mark.parametrize(("path", "field"), FIELDS, ids=lambda value: value.replace("/v1/", ""))
def test_each_field_does_what_the_table_says(server, path, field):
    is_refused = status(path, field) == REFUSED
    value = 1 if path == "/v1/completions" and field == "logprobs" else SAMPLES.get(field, "a value")
    answer = server.http.post(path, json={**NEEDED[path], field: value})
    if is_refused:
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == field
        assert error["message"].startswith(f"{field} is not supported: "), "says what to do"
    else:
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", TYPES)
@pytest.mark.parametrize("stream", [True, False])
def test_unknown_fields_are_refused_by_name(server, path, stream):
    answer = server.http.post(path, json={**NEEDED[path], "stream": stream, "foo": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "foo"
