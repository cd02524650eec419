"""The HTTP routes. Each reads as: parse, prompt, generate, answer."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from importlib.metadata import version
from typing import TypeVar

from opentelemetry.trace import Tracer
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from serve_app.config import IngressLimits
from serve_app.errors import RequestError, ServeAppError, UnknownModelError, UnknownRouteError
from serve_app.ingress.access import LIVENESS, Cors, KeyGate, caller_of
from serve_app.ingress.answers import (
    EventStream,
    NamedEventStream,
    Primed,
    error_answer,
    on_bug,
    on_http_exception,
    on_serve_app_error,
    until_disconnect,
)
from serve_app.ingress.body import read_json
from serve_app.ingress.call_log import REQUEST_ID_HEADER, CallLog, CallRecord, record_of, write
from serve_app.ingress.chat_page import page_routes
from serve_app.ingress.generation import ChoiceDelta, Deadline, Generation
from serve_app.ingress.openapi import describe, page
from serve_app.ingress.prompts import Prompt
from serve_app.ingress.rendering import ChatRenderer, CompletionRenderer, Json, Renderer
from serve_app.ingress.response_rendering import ResponseRenderer
from serve_app.ingress.schema.base import Schema, parse_request
from serve_app.ingress.schema.chat import ChatRequest
from serve_app.ingress.schema.completion import CompletionRequest
from serve_app.ingress.schema.generation import REQUEST_ID, GenerationRequest
from serve_app.ingress.schema.responses import ResponsesRequest
from serve_app.ingress.schema.tokens import DetokenizeRequest, TokenizeRequest
from serve_app.ingress.serve_headers import timeout_of
from serve_app.ingress.served_model import ServedModel
from serve_app.ingress.tracing import TraceCalls

VERSION = version("serve_app")


SchemaT = TypeVar("SchemaT", bound=Schema)


class Api:
    """The OpenAI API over one or several models.

    Args:
        models: what is served; the first one also answers calls that name none.
        limits: what a request may be; may be replaced while serving.
        report: is told of every call that is over.
        tracer: makes a span of every call; None for no traces.
    """

    def __init__(
        self,
        *,
        models: Sequence[ServedModel],
        limits: IngressLimits,
        report: Callable[[CallRecord], None] = write,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._report = report
        self.limits = limits
        self._models = {model.name: model for model in models}

    def asgi(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=self.routes(),
            middleware=[
                *([] if self._tracer is None else [Middleware(TraceCalls, self._tracer)]),
                Middleware(CallLog, self._report),
                Middleware(Cors, lambda: self.limits),
                Middleware(KeyGate, lambda: self.limits),
            ],
            exception_handlers={
                ServeAppError: on_serve_app_error,
                HTTPException: on_http_exception,
                Exception: on_bug,
            },
        )

    def routes(self) -> list[Route]:
        """All that the API answers to."""
        return [
            *page_routes(),
            Route(LIVENESS, self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/docs", self.docs, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model_id:path}", self.model, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/responses/{response_id:path}", self.stored_response, methods=["GET", "POST", "DELETE"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/cancel/{request_id}", self.cancel, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def health(self, _: Request) -> Response:
        """Alive: this process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Ready: of every model a replica answers and makes progress."""
        try:
            for model in self._models.values():
                await model.client.check_ready()
        except ServeAppError as error:
            return error_answer(error)
        return JSONResponse({"status": "ready"})

    async def version(self, _: Request) -> Response:
        """What is running."""
        return JSONResponse({"version": VERSION})

    async def openapi(self, _: Request) -> Response:
        """The API, as OpenAPI 3.1, made from the same models that parse the requests."""
        return JSONResponse(describe(VERSION))

    async def docs(self, _: Request) -> Response:
        """The same for people."""
        return HTMLResponse(page(describe(VERSION)))

    async def models(self, _: Request) -> Response:
        """The served models, as a list."""
        return JSONResponse({"object": "list", "data": [model.card() for model in self._models.values()]})

    async def model(self, request: Request) -> Response:
        """One model's card. Raises `UnknownModelError`."""
        return JSONResponse(self._model(request.path_params["model_id"]).card())

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        deadline = self._deadline(request)
        call = await self._parse(request, ChatRequest)
        request_id = _request_id(request, call.request_id)
        model = self._model(call.model)
        renderer = ChatRenderer(call, model.name, request_id, model.tokenizer.token_bytes)
        prompts = await model.prompter.chat(call)
        return await self._answer(
            request, call, model, prompts, renderer, request_id, deadline, reasoning_tags=model.reasoning_tags
        )

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        deadline = self._deadline(request)
        call = await self._parse(request, CompletionRequest)
        request_id = _request_id(request, call.request_id)
        model = self._model(call.model)
        renderer = CompletionRenderer(call, model.name, request_id, model.tokenizer.token_bytes)
        prompts = await model.prompter.completion(call)
        return await self._answer(request, call, model, prompts, renderer, request_id, deadline)

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses"""
        deadline = self._deadline(request)
        call = await self._parse(request, ResponsesRequest)
        request_id = _request_id(request, None)
        model = self._model(call.model)
        renderer = ResponseRenderer(call, model.name, request_id)
        chat = call.as_chat()
        try:
            prompts = await model.prompter.chat(chat)
            return await self._answer(
                request, chat, model, prompts, renderer, request_id, deadline, stream_kind=NamedEventStream
            )
        except RequestError as error:
            error.param = call.CHAT_FIELDS.get(error.param or "", error.param)
            raise

    async def stored_response(self, _: Request) -> Response:
        """GET, DELETE and cancel of a response. Raises `RequestError`."""
        raise RequestError("Responses are not stored here: they can be neither retrieved, deleted nor cancelled by id.")

    async def cancel(self, request: Request) -> Response:
        """POST /v1/cancel/{request_id}: ends a call, wherever it is, by its `request_id` or its answer's `id`.

        With API keys one's own only. Raises `UnknownRouteError` when no such call is running.
        """
        name: str = request.path_params["request_id"]
        caller = caller_of(request)
        for call_id in dict.fromkeys((name, re.sub("^(chatcmpl-|cmpl-|resp_)", "", name))):
            tenant = None if caller is None else caller.name
            counts = [await model.client.cancel_call(call_id, tenant) for model in self._models.values()]
            num_cancelled = sum(counts)
            if num_cancelled:
                return JSONResponse({"id": name, "object": "cancellation", "cancelled": num_cancelled})
        raise UnknownRouteError(f"No call {name!r} is running.")

    async def embeddings(self, _: Request) -> Response:
        """POST /v1/embeddings. Raises `RequestError`."""
        raise RequestError("Models here generate text; this server makes no embeddings.", "model")

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        call = await self._parse(request, TokenizeRequest)
        model = self._model(call.model)
        prompt = await model.prompter.tokenize(call)
        shows_texts = call.return_token_strs
        answer: Json = {
            "count": len(prompt.token_ids),
            "max_model_len": model.facts.max_model_len,
            "tokens": prompt.token_ids,
            "token_strs": [model.tokenizer.token_text(token) for token in prompt.token_ids] if shows_texts else None,
        }
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        call = await self._parse(request, DetokenizeRequest)
        model = self._model(call.model)
        unknown = next((token for token in call.tokens if token >= model.facts.vocab_size), None)
        if unknown is not None:
            raise RequestError(f"tokens: {unknown} is not in the vocabulary of {model.facts.vocab_size}.", "tokens")
        return JSONResponse({"prompt": model.tokenizer.decode(call.tokens, skip_special_tokens=False)})

    async def _parse(self, request: Request, kind: type[SchemaT]) -> SchemaT:
        return parse_request(kind, await read_json(request, self.limits))

    async def _answer(
        self,
        request: Request,
        call: GenerationRequest,
        model: ServedModel,
        prompts: list[Prompt],
        renderer: Renderer,
        request_id: str,
        deadline: Deadline | None,
        *,
        reasoning_tags: tuple[str, str] | None = None,
        stream_kind: type[EventStream] = EventStream,
    ) -> Response:
        record = record_of(request)
        record.request_id, record.model, record.stream = request_id, model.name, call.stream
        if self.limits.log_prompts:
            record.prompt = "\n".join(prompt.text for prompt in prompts)
        generation = Generation(
            call,
            prompts,
            model.client,
            model.tokenizer,
            model.facts,
            request_id=request_id,
            caller=caller_of(request),
            record=record,
            admission=model.admission,
            reasoning_tags=reasoning_tags,
            deadline=deadline,
        )
        # Serve gives every request that header, and echoes it; without Serve it is ours to echo
        headers = {} if REQUEST_ID_HEADER in request.headers else {REQUEST_ID_HEADER: request_id}
        if not call.stream:
            choices = await until_disconnect(request.receive, generation.whole())
            return JSONResponse(renderer.whole(choices, generation.usage), headers=headers)
        deltas = await until_disconnect(request.receive, Primed.wait(generation.deltas()))
        return stream_kind(_events(generation, deltas, renderer), deltas, self.limits.reader_timeout_s, headers)

    def _deadline(self, request: Request) -> Deadline | None:
        """The caller's, but no later than the server's. Raises `RequestError`."""
        limits = [seconds for seconds in (timeout_of(request), self.limits.request_timeout_s) if seconds is not None]
        return Deadline.after(min(limits)) if limits else None

    def _model(self, name: str | None) -> ServedModel:
        """The model of that name; the first one without a name. Raises `UnknownModelError`."""
        if name is None:
            return next(iter(self._models.values()))
        if name not in self._models:
            served = ", ".join(self._models)
            raise UnknownModelError(f"The model {name!r} is not served here; served: {served}.", "model")
        return self._models[name]


def _request_id(request: Request, given: str | None) -> str:
    """The caller's name for the call: the body's, else the header's (Serve sets one if the caller does not), or new."""
    named = record_of(request).request_id
    if named is None and REQUEST_ID_HEADER in request.headers:
        raise RequestError(f"{REQUEST_ID_HEADER} must match {REQUEST_ID}.", REQUEST_ID_HEADER)
    return given or named or uuid.uuid4().hex


async def _events(
    generation: Generation, deltas: AsyncIterator[ChoiceDelta], renderer: Renderer
) -> AsyncGenerator[Json, None]:
    for event in renderer.opening(generation.num_choices, generation.usage):
        yield event
    async for choice_delta in deltas:
        for event in renderer.chunk(choice_delta, generation.usage):
            yield event
    for event in renderer.closing(generation.usage):
        yield event
