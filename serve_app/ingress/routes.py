"""The HTTP routes. Each reads as: parse, prompt, generate, answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.config import IngressLimits
from serve_app.errors import ServeAppError, UnknownModelError
from serve_app.ingress.answers import (
    EventStream,
    Primed,
    error_answer,
    on_bug,
    on_http_exception,
    on_serve_app_error,
    until_disconnect,
)
from serve_app.ingress.body import read_json
from serve_app.ingress.engine_client import EngineClient
from serve_app.ingress.generation import ChoiceDelta, Generation
from serve_app.ingress.prompts import Prompter
from serve_app.ingress.rendering import ChatRenderer, CompletionRenderer, Json, Renderer
from serve_app.ingress.schema import ChatRequest, CompletionRequest, GenerationRequest, parse_request
from serve_app.models.facts import ModelFacts
from serve_app.text.tokenizer import Tokenizer

GenerationRequestT = TypeVar("GenerationRequestT", bound=GenerationRequest)


class Api:
    """The OpenAI API over one model.

    Args:
        model_name: the name that callers use.
        tokenizer: the model's.
        facts: the model's context, vocabulary and recommended sampling.
        client: the engine.
        limits: what a request may be; may be replaced while serving.
    """

    def __init__(
        self,
        *,
        model_name: str,
        tokenizer: Tokenizer,
        facts: ModelFacts,
        client: EngineClient,
        limits: IngressLimits,
    ) -> None:
        self.limits = limits
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._facts = facts
        self._client = client
        self._prompter = Prompter(tokenizer, facts)
        self._created = int(time.time())

    def asgi(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/health", self.health, methods=["GET"]),
                Route("/ready", self.ready, methods=["GET"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/models/{model_id:path}", self.model, methods=["GET"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
            ],
            exception_handlers={
                ServeAppError: on_serve_app_error,
                HTTPException: on_http_exception,
                Exception: on_bug,
            },
        )

    async def health(self, _: Request) -> Response:
        """Alive: this process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Ready: a model replica answers and makes progress."""
        try:
            await self._client.check_ready()
        except ServeAppError as error:
            return error_answer(error)
        return JSONResponse({"status": "ready"})

    async def models(self, _: Request) -> Response:
        """The served model, as a list."""
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        """One model's card. Raises `UnknownModelError`."""
        self._check_model(request.path_params["model_id"])
        return JSONResponse(self._model_card())

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        call = await self._parse(request, ChatRequest)
        return await self._answer(request, call, await self._prompter.chat(call), ChatRenderer)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        call = await self._parse(request, CompletionRequest)
        return await self._answer(request, call, await self._prompter.completion(call), CompletionRenderer)

    async def _parse(self, request: Request, kind: type[GenerationRequestT]) -> GenerationRequestT:
        call = parse_request(kind, await read_json(request, self.limits))
        if call.model is not None:
            self._check_model(call.model)
        return call

    async def _answer(
        self,
        request: Request,
        call: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        renderer_kind: Callable[..., Renderer],
    ) -> Response:
        generation = Generation(call, prompts, self._client, self._tokenizer, self._facts)
        renderer = renderer_kind(self._model_name, includes_usage=call.includes_usage)
        if not call.stream:
            choices = await until_disconnect(request.receive, generation.whole())
            return JSONResponse(renderer.whole(choices, generation.usage))
        deltas = await until_disconnect(request.receive, Primed.wait(generation.deltas()))
        return EventStream(_chunks(generation, deltas, renderer, includes_usage=call.includes_usage), deltas)

    def _check_model(self, name: str) -> None:
        if name != self._model_name:
            raise UnknownModelError(f"The model {name!r} is not served here; served: {self._model_name}.", "model")

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "serve_app",
            "max_model_len": self._facts.max_model_len,
        }


async def _chunks(
    generation: Generation, deltas: AsyncIterator[ChoiceDelta], renderer: Renderer, *, includes_usage: bool
) -> AsyncGenerator[Json, None]:
    for chunk in renderer.opening(generation.num_choices):
        yield chunk
    async for choice_delta in deltas:
        if choice_delta.delta.text or choice_delta.delta.finish_reason is not None:
            yield renderer.chunk(choice_delta)
    if includes_usage:
        yield renderer.usage_chunk(generation.usage)
