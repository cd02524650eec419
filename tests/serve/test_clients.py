"""Clients that people use, each against the running server: a chat, a stream, a bad request."""

import json
import subprocess
from pathlib import Path

import httpx
import litellm
import openai
import pytest
from langchain_openai import ChatOpenAI

MODEL = "smollm2-135m-instruct"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
ASKED = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 16}
CLIENTS = Path(__file__).parents[1] / "clients"


@pytest.fixture(scope="module")
def client(deployed):
    with openai.OpenAI(base_url=f"{deployed.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def answer(client):
    text = client.chat.completions.create(**ASKED).choices[0].message.content
    assert "Paris" in text
    return text


def test_openai_streams_and_raw_responses(client, answer):
    stream = client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
    assert last.usage.completion_tokens <= 16
    raw = client.chat.completions.with_raw_response.create(**ASKED, extra_headers={"X-Request-Id": "my-call"})
    assert raw.headers["x-request-id"] == "my-call"
    assert raw.parse().choices[0].message.content == answer
    assert raw.parse().id == "chatcmpl-my-call"


def test_openai_errors_are_structured(client):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**{**ASKED, "temperature": 9})
    assert (bad.value.status_code, bad.value.param, bad.value.type) == (400, "temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**{**ASKED, "model": "nope"})
    assert unknown.value.code == "model_not_found"


def test_openai_responses(client, answer):
    asked = {"model": MODEL, "input": MESSAGES[0]["content"], "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(**asked)
    assert whole.output_text == answer
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == answer
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.output_text == answer
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == answer


async def test_openai_async(deployed, answer):
    async with openai.AsyncOpenAI(base_url=f"{deployed.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(**ASKED)
        assert whole.choices[0].message.content == answer
        stream = await client.chat.completions.create(**ASKED, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == answer
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(**{**ASKED, "n": 0})


def test_langchain(deployed, answer):
    with httpx.Client() as http:
        chat = ChatOpenAI(
            base_url=f"{deployed.url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=16, http_client=http
        )
        assert chat.invoke(MESSAGES).content == answer
        assert "".join(chunk.content for chunk in chat.stream(MESSAGES)) == answer
        with pytest.raises(openai.BadRequestError):
            chat.invoke(MESSAGES, temperature=9)


@pytest.mark.filterwarnings("ignore:Item:UserWarning")  # pydantic about a type of LiteLLM's own
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_litellm(deployed, answer):
    asked = {**ASKED, "model": f"openai/{MODEL}", "api_base": f"{deployed.url}/v1", "api_key": "none", "num_retries": 0}
    assert litellm.completion(**asked).choices[0].message.content == answer
    stream = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**asked, "temperature": 9})


def test_the_npm_client(deployed, answer):
    command = ["node", str(CLIENTS / "chat.mjs"), f"{deployed.url}/v1", MODEL]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert said["whole"] == said["streamed"] == said["response"] == answer
    assert said["usage"]["total_tokens"] > said["usage"]["prompt_tokens"]
    assert said["refused"] == {"name": "BadRequestError", "status": 400, "param": "temperature"}
