"""From a parsed request to a stream of text deltas: the one path that streamed and whole answers share."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from serve_app.engine.request import FinishReason, RequestFailure, TokenOutput, UserRequest
from serve_app.errors import ContextLengthError, GenerationError
from serve_app.ingress.engine_client import EngineClient
from serve_app.ingress.schema import GenerationRequest
from serve_app.models.facts import ModelFacts
from serve_app.text.assembler import TextAssembler, TextDelta
from serve_app.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New text of the choice with this index."""

    index: int
    delta: TextDelta


@dataclass(slots=True)
class Usage:
    """Tokens counted so far: `prompt_tokens` once per prompt, `completion_tokens` as they are drawn."""

    prompt_tokens: int
    completion_tokens: int = 0

    def as_json(self) -> dict[str, int]:
        """OpenAI's shape."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(slots=True)
class Choice:
    """A choice as it grows; the whole answer is a fold of the deltas."""

    index: int
    text: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, delta: TextDelta) -> None:
        """Appends a delta."""
        self.text.append(delta.text)
        self.finish_reason = delta.finish_reason


class Generation:
    """All choices of one call.

    Args:
        request: the parsed call.
        prompts: token ids of each prompt; each is continued `n` times.
        client: the engine.
        tokenizer: turns tokens into text.
        facts: the model's context and recommended sampling.

    Raises:
        ContextLengthError: a prompt, or a prompt with the tokens asked for, does not fit.
        RequestError: sampling values do not go together.
    """

    def __init__(
        self,
        request: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        client: EngineClient,
        tokenizer: Tokenizer,
        facts: ModelFacts,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._stops = request.stop
        self.usage = Usage(sum(map(len, prompts)))
        self.num_choices = len(prompts) * request.n
        call_id = uuid.uuid4().hex
        self._requests: list[UserRequest] = []
        for prompt in prompts:
            max_tokens = _token_limit(request, len(prompt), facts.max_model_len)
            for choice in range(request.n):
                sampling = request.sampling(facts.sampling, max_tokens, choice)
                self._requests.append(UserRequest(f"{call_id}-{len(self._requests)}", tuple(prompt), sampling))

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """The deltas of all choices as they come; counts `usage`. Closing it cancels what still runs."""
        streams = [self._one(index, request) for index, request in enumerate(self._requests)]
        async with aclosing(streams[0] if len(streams) == 1 else _merge(streams)) as merged:
            async for choice_delta in merged:
                self.usage.completion_tokens += choice_delta.delta.num_tokens
                yield choice_delta

    async def whole(self) -> list[Choice]:
        """All choices, complete."""
        choices = [Choice(index) for index in range(self.num_choices)]
        async with aclosing(self.deltas()) as deltas:
            async for choice_delta in deltas:
                choices[choice_delta.index].add(choice_delta.delta)
        return choices

    async def _one(self, index: int, request: UserRequest) -> AsyncGenerator[ChoiceDelta, None]:
        assembler = TextAssembler(self._tokenizer.new_detokenizer(), self._stops)
        async with aclosing(self._client.generate(request)) as deliveries:
            async for batch in deliveries:
                delta = assembler.push(_tokens(batch))
                yield ChoiceDelta(index, delta)
                if delta.finish_reason is not None:
                    return
        raise GenerationError("The model replica ended this request without an ending.")


def _tokens(batch: Sequence[TokenOutput | RequestFailure]) -> list[TokenOutput]:
    outputs = []
    for delivery in batch:
        if isinstance(delivery, RequestFailure):
            raise delivery.error
        outputs.append(delivery)
    return outputs


def _token_limit(request: GenerationRequest, num_prompt_tokens: int, max_model_len: int) -> int:
    asked = request.token_limit
    if num_prompt_tokens >= max_model_len:
        raise ContextLengthError(
            f"This model's context is {max_model_len} tokens, but the prompt has {num_prompt_tokens}; shorten it.",
            "prompt",
        )
    if asked is not None and num_prompt_tokens + asked > max_model_len:
        raise ContextLengthError(
            f"This model's context is {max_model_len} tokens, but the prompt has {num_prompt_tokens} and {asked} more are "
            "asked for; shorten the prompt or ask for fewer tokens.",
            "max_tokens",
        )
    return max_model_len - num_prompt_tokens if asked is None else asked


async def _merge(streams: Sequence[AsyncGenerator[ChoiceDelta, None]]) -> AsyncGenerator[ChoiceDelta, None]:
    """Interleaves streams as their items come. The first error ends all; closing it closes all."""
    queue: asyncio.Queue[ChoiceDelta | BaseException | None] = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_pour(stream, queue)) for stream in streams]
    try:
        open_streams = len(streams)
        while open_streams:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pour(
    stream: AsyncGenerator[ChoiceDelta, None], queue: asyncio.Queue[ChoiceDelta | BaseException | None]
) -> None:
    try:
        async with aclosing(stream) as items:
            async for item in items:
                await queue.put(item)
    except Exception as error:  # carried over to the reader, who raises it
        await queue.put(error)
    else:
        await queue.put(None)
