"""The HTTP API on a real socket, over a real engine with a scripted runner, in this process: all but Ray."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn
from opentelemetry.trace import Tracer

from serve_app.config import IngressLimits
from serve_app.engine.engine import BatchInferenceEngine
from serve_app.engine.request import Delivery, EngineLoad, RequestFailure, UserRequest
from serve_app.errors import ServeAppError
from serve_app.ingress.call_log import CallRecord
from serve_app.ingress.routes import Api
from serve_app.ingress.served_model import ServedModel
from serve_app.ingress.tracing import TracedClient
from serve_app.models.facts import ModelFacts
from serve_app.text.tokenizer import Tokenizer
from tests.fakes import text_tokenizer

MODEL = "scripted"


class LocalEngineClient:
    """An `EngineClient` on an engine in this process: what the replica does, without Serve."""

    def __init__(self, engine: BatchInferenceEngine) -> None:
        self.engine = engine
        self.requests: list[UserRequest] = []

    async def generate(self, request: UserRequest) -> AsyncGenerator[list[Delivery], None]:
        self.requests.append(request)
        [stream] = self.engine.add_to_queue([request])
        try:
            async for outputs in stream.batches():
                yield list(outputs)
        except ServeAppError as error:
            yield [RequestFailure(request.request_id, error)]
        finally:
            stream.close()

    async def cancel_call(self, call_id: str, tenant: str | None) -> int:
        return self.engine.cancel_call(call_id, tenant)

    async def loads(self) -> list[EngineLoad]:
        return [self.engine.load()]

    async def has_replica(self) -> bool:
        return True

    async def wait_for_replica(self) -> None:
        pass

    async def check_ready(self) -> None:
        self.engine.check_health(60)


@dataclass
class Answer:
    """What a caller got, streamed or whole, in one shape."""

    status: int
    text: str
    finish_reason: str | None
    told: dict[str, Any] | None
    """The usage."""
    body: Any
    events: list[dict[str, Any]]
    raw: str = ""

    @property
    def same(self) -> tuple[Any, ...]:
        """What must not depend on `stream`."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return self.status, self.text, self.finish_reason, self.usage, error

    @property
    def usage(self) -> dict[str, int] | None:
        """The counts, without the details."""
        return self.told and {name: count for name, count in self.told.items() if name != "prompt_tokens_details"}

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts', which depends on what was asked before."""
        assert self.told is not None
        return int(self.told["prompt_tokens_details"]["cached_tokens"])


class Server:
    """A running API: its engine, its runner, and clients for it."""

    def __init__(
        self, url: str, engine: BatchInferenceEngine, client: LocalEngineClient, api: Api, records: list[CallRecord]
    ) -> None:
        self.url, self.engine, self.client, self.api, self.records = url, engine, client, api, records
        self.runner: Any = engine.runner
        self.http = httpx.Client(base_url=url, timeout=30, trust_env=False)
        self.openai = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=httpx.Client(timeout=30, trust_env=False)
        )

    def ask(self, prompt: Any = None, *, stream: bool = False, path: str | None = None, **fields: Any) -> Answer:
        """A completions call (or chat, when `messages` are given), as `Answer`."""
        body = {"model": MODEL, "temperature": 0, **fields}
        if prompt is not None:
            body["prompt"] = prompt
        path = path or ("/v1/chat/completions" if "messages" in fields else "/v1/completions")
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return ask(self.http, path, body)

    def both(self, prompt: Any = None, **fields: Any) -> Answer:
        """Asks with `stream` false and true, checks that both say the same, and returns the streamed answer."""
        whole, streamed = self.ask(prompt, **fields), self.ask(prompt, stream=True, **fields)
        assert whole.same == streamed.same
        return streamed

    def wait_for_records(self, count: int, timeout_s: float = 10.0) -> list[CallRecord]:
        """The first `count` records; a call's own comes after its answer. Fails when that takes too long."""
        deadline = time.monotonic() + timeout_s
        while len(self.records) < count:
            assert time.monotonic() < deadline, self.records
            time.sleep(0.005)
        return self.records[:count]

    def wait_until_running(self, timeout_s: float = 5.0) -> None:
        """Waits until a request runs; fails when that takes too long."""
        deadline = time.monotonic() + timeout_s
        while not self.engine.stats().num_running:
            assert time.monotonic() < deadline, f"nothing runs: {self.engine.stats()}"
            time.sleep(0.001)

    def wait_until_idle(self, timeout_s: float = 5.0) -> None:
        """Waits until nothing runs; fails when that takes too long or a block leaked."""
        deadline = time.monotonic() + timeout_s
        while self.engine.num_unfinished or self.engine.stats().num_running:
            assert time.monotonic() < deadline, f"still busy: {self.engine.stats()}"
            time.sleep(0.005)
        self.engine.check()
        assert self.engine.stats().num_free_blocks == self.engine.stats().num_blocks


def ask(http: httpx.Client, path: str, body: dict[str, Any], begun: threading.Event | None = None) -> Answer:
    """Sends a body; reads whole answers and streams (with `include_usage`) alike. `begun` is set by the first bytes."""
    raw = ""
    with http.stream("POST", path, json=body) as response:
        for piece in response.iter_text():
            raw += piece
            if begun is not None:
                begun.set()
    if not response.headers["content-type"].startswith("text/event-stream"):
        payload = json.loads(raw)
        if response.status_code != 200:
            return Answer(response.status_code, "", None, None, payload, [], raw)
        choice = payload["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return Answer(200, text, choice["finish_reason"], payload["usage"], payload, [], raw)
    events, usage, text, reason = read_events(raw), None, "", None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            if choice["index"] == 0:
                text += (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]
                reason = choice["finish_reason"] or reason
    return Answer(200, text, reason, usage, {}, events, raw)


def read_events(raw: str) -> list[dict[str, Any]]:
    """The JSON events of a server-sent stream, strictly: `data: {...}` and blank lines only, `[DONE]` last."""
    frames = raw.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    datas = [frame.removeprefix("data: ") for frame in frames]
    events = [json.loads(data) for data in datas if data != "[DONE]"]
    if "error" not in events[-1]:
        assert datas[-1] == "[DONE]"
    assert datas.count("[DONE]") <= 1
    return events


@contextmanager
def serving(
    runner: Any,
    *,
    tokenizer: Tokenizer | None = None,
    limits: IngressLimits | None = None,
    facts: ModelFacts | None = None,
    reasoning_tags: tuple[str, str] | None = None,
    tracer: Tracer | None = None,
    more_models: Sequence[str] = (),
    **engine_options: Any,
) -> Iterator[Server]:
    """Runs the API over `runner` until the block ends; then nothing may be left over."""
    engine = BatchInferenceEngine(runner, **engine_options)
    client = LocalEngineClient(engine)
    records: list[CallRecord] = []
    api = Api(
        models=[
            ServedModel(
                name,
                tokenizer or text_tokenizer(),
                facts or ModelFacts(runner.end_token_ids, runner.max_model_len, runner.vocab_size),
                client if tracer is None else TracedClient(client, tracer),
                allows_templates=lambda: api.limits.allow_chat_template,
                cold_start_wait_s=lambda: api.limits.cold_start_wait_s,
                reasoning_tags=reasoning_tags,
            )
            for name in (MODEL, *more_models)
        ],
        tracer=tracer,
        limits=limits or IngressLimits(),
        report=records.append,
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does so for the sockets that it makes itself
    # a pooled connection must not be closed just as a client that was kept waiting reuses it
    server = uvicorn.Server(uvicorn.Config(api.asgi(), log_level="warning", lifespan="off", timeout_keep_alive=300))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    engine.start()
    thread.start()
    while not server.started:
        time.sleep(0.005)
    running = Server(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, client, api, records)
    try:
        yield running
    finally:
        running.http.close()
        running.openai.close()
        server.should_exit = True
        thread.join(10)
        engine.shutdown()
        engine.check()
