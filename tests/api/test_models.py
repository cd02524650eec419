"""Several models behind one address."""

import openai
import pytest

from tests.api.server import MODEL, serving
from tests.fakes import ScriptedRunner, echo

OTHER = "other"


@pytest.fixture(scope="module")
def server():
    with serving(ScriptedRunner(echo), more_models=[OTHER]) as server:
        yield server


def test_they_are_listed_and_answer_by_name(server):
    assert [model.id for model in server.openai.models.list()] == [MODEL, OTHER]
    assert server.openai.models.retrieve(OTHER).id == OTHER
    for name in (MODEL, OTHER):
        for stream in (False, True):
            answer = server.ask("hello", model=name, stream=stream)
            assert answer.text == "hello"
            told = answer.events if stream else [answer.body]
            assert {part["model"] for part in told} == {name}
        chat = server.ask(messages=[{"role": "user", "content": "hello"}], model=name)
        assert chat.body["model"] == name
        response = server.http.post("/v1/responses", json={"model": name, "input": "hello"}).json()
        assert response["model"] == name
        assert server.http.post("/tokenize", json={"model": name, "prompt": "hello"}).json()["count"] == 5
    assert {record.model for record in server.wait_for_records(10) if record.completion_tokens} == {MODEL, OTHER}


def test_a_call_that_names_none_gets_the_first(server):
    assert server.http.post("/v1/completions", json={"prompt": "hello"}).json()["model"] == MODEL


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"])
def test_an_unknown_name_is_404_and_told_what_there_is(server, path):
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x", "tokens": [5]}
    wanted = {"/v1/completions": "prompt", "/v1/chat/completions": "messages", "/v1/responses": "input"}
    field = wanted.get(path, "prompt" if path == "/tokenize" else "tokens")
    answer = server.http.post(path, json={"model": "nope", field: body[field]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert MODEL in error["message"]
    assert OTHER in error["message"]
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("nope")
