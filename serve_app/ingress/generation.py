"""From a parsed request to a stream of text deltas: the one path that streamed and whole answers share."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Self

from serve_app.config import ApiKey
from serve_app.engine.request import FinishReason, RequestFailure, TokenLogprobs, TokenOutput, UserRequest
from serve_app.errors import ContextLengthError, DeadlineError, GenerationError
from serve_app.ingress.admission import Admission
from serve_app.ingress.call_log import CallRecord
from serve_app.ingress.engine_client import EngineClient
from serve_app.ingress.prompts import Prompt
from serve_app.ingress.schema.generation import GenerationRequest
from serve_app.models.facts import ModelFacts
from serve_app.text.assembler import TextAssembler, TextDelta, TokenPiece
from serve_app.text.reasoning import ReasoningSplitter
from serve_app.text.tokenizer import Tokenizer

LATE_S = 1.0
"""How much longer than a deadline the engine may take to say that it is over: the length of a step, and the way."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a call must be done.

    Attributes:
        timeout_s: how long it may take.
        at: when that is over, on the event loop's clock.
    """

    timeout_s: float
    at: float

    @classmethod
    def after(cls, timeout_s: float) -> Self:
        """A deadline that begins now."""
        return cls(timeout_s, asyncio.get_running_loop().time() + timeout_s)

    def left_s(self) -> float:
        """Seconds until then. Raises `DeadlineError` when it is over."""
        left_s = self.at - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise self.error()
        return left_s

    def error(self) -> DeadlineError:
        """What is said to the caller when it is over."""
        return DeadlineError(f"The call was not done within {self.timeout_s:g} s.")


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New text of the choice with this index.

    Attributes:
        prompt_logprobs: on a choice's first delta, when asked for: of the prompt's tokens, the first of which has none.
    """

    index: int
    delta: TextDelta
    prompt_logprobs: tuple[TokenPiece, ...] | None = None


@dataclass(slots=True)
class Usage:
    """Tokens counted so far: those of a prompt once, however many choices it has, `completion_tokens` as they are drawn.

    `cached_tokens` are those of the prompts that were in the prefix cache, when each prompt's first choice began.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        """OpenAI's shape."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Choice:
    """A choice as it grows; the whole answer is a fold of the deltas."""

    index: int
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    pieces: list[TokenPiece] = field(default_factory=list)
    prompt_logprobs: tuple[TokenPiece, ...] | None = None
    finish_reason: FinishReason | None = None

    def add(self, choice_delta: ChoiceDelta) -> None:
        """Appends a delta."""
        delta = choice_delta.delta
        self.text.append(delta.text)
        self.reasoning.append(delta.reasoning)
        self.pieces += delta.pieces
        self.finish_reason = delta.finish_reason
        self.prompt_logprobs = self.prompt_logprobs or choice_delta.prompt_logprobs


class Generation:
    """All choices of one call.

    Args:
        request: the parsed call.
        prompts: each is continued `n` times.
        client: the engine.
        tokenizer: turns tokens into text.
        facts: the model's context and recommended sampling.
        request_id: the caller's name of the call, for the log and to cancel it by.
        caller: whose key it came with: the tenant. Without keys `user` says who it is.
        record: what becomes of it.
        admission: lets it in, or not.
        reasoning_tags: what opens and closes the model's reasoning, when that is to be split off.
        deadline: when its work ends, done or not.

    Raises:
        ContextLengthError: a prompt, or a prompt with the tokens asked for, does not fit.
        RequestError: sampling values do not go together.
    """

    def __init__(
        self,
        request: GenerationRequest,
        prompts: Sequence[Prompt],
        client: EngineClient,
        tokenizer: Tokenizer,
        facts: ModelFacts,
        *,
        request_id: str,
        caller: ApiKey | None = None,
        record: CallRecord,
        admission: Admission,
        reasoning_tags: tuple[str, str] | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        self._request = request
        self._client = client
        self._tokenizer = tokenizer
        self._reasoning_tags = reasoning_tags
        self._deadline = deadline
        self._record = record
        self._admission = admission
        self.usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))
        self.num_choices = len(prompts) * request.n
        record.prompt_tokens = self.usage.prompt_tokens
        call_id = f"{request_id}.{uuid.uuid4().hex[:12]}"  # a caller may use his id twice
        self._choices: list[tuple[Prompt, UserRequest]] = []
        for prompt in prompts:
            max_tokens = _token_limit(request, len(prompt.token_ids), facts.max_model_len)
            for choice in range(request.n):
                user_request = UserRequest(
                    f"{call_id}-{len(self._choices)}",
                    prompt.token_ids,
                    request.sampling(facts.sampling, max_tokens, choice),
                    cache_salt=request.cache_salt or "",
                    priority=request.priority,
                    tenant=(request.user or "") if caller is None else caller.name,
                    weight=1.0 if caller is None else caller.weight,
                    call_id=request_id,
                    timeout_s=None if deadline is None else deadline.left_s(),
                )
                self._choices.append((prompt, user_request))

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """The deltas of all choices as they come; counts `usage`. Closing it cancels what still runs.

        Raises:
            OverloadedError: more waits than may; nothing was begun.
            DeadlineError: the time is over; what still ran is cancelled.
        """
        num_tokens = sum(request.num_tokens_at_most for _, request in self._choices)
        ticket = await self._admission.enter(self._fingerprint(), num_tokens, self._choices[0][1].tenant)
        streams = [self._one(index, prompt, request) for index, (prompt, request) in enumerate(self._choices)]
        merged = streams[0] if len(streams) == 1 else _merge(streams)
        reasons: set[FinishReason] = set()
        try:
            async with aclosing(merged if self._deadline is None else _until(self._deadline, merged)) as deltas:
                async for choice_delta in deltas:
                    self.usage.completion_tokens += choice_delta.delta.num_tokens
                    ticket.start()
                    self._record.token_came(choice_delta.delta.num_tokens)
                    if choice_delta.delta.finish_reason is not None:
                        reasons.add(choice_delta.delta.finish_reason)
                    yield choice_delta
        except BaseException as error:  # also when the reader leaves
            self._record.fail(error)
            raise
        finally:
            ticket.give_up()
        self._record.finish(reasons)

    def _fingerprint(self) -> int:
        """The same when the same caller asks the same again."""
        _, first = self._choices[0]
        prompts = tuple(request.prompt_token_ids for _, request in self._choices[:: self._request.n])
        return hash((first.tenant, first.sampling, self._request.n, prompts))

    async def whole(self) -> list[Choice]:
        """All choices, complete."""
        choices = [Choice(index) for index in range(self.num_choices)]
        async with aclosing(self.deltas()) as deltas:
            async for choice_delta in deltas:
                choices[choice_delta.index].add(choice_delta)
        return choices

    async def _one(self, index: int, prompt: Prompt, request: UserRequest) -> AsyncGenerator[ChoiceDelta, None]:
        assembler = self._assembler(prompt)
        is_first = True
        async with aclosing(self._client.generate(request)) as deliveries:
            async for batch in deliveries:
                outputs = _tokens(batch)
                prompt_logprobs = None
                if is_first:
                    is_first = False
                    if index % self._request.n == 0:
                        self.usage.cached_tokens += outputs[0].num_cached_tokens
                    pieces = self._prompt_pieces(prompt, outputs[0].prompt_logprobs)
                    prompt_logprobs = pieces if self._request.prompt_logprobs is not None else None
                    if self._request.echoes:
                        is_all = self._request.token_limit == 0
                        ending = FinishReason.LENGTH if is_all else None
                        yield ChoiceDelta(index, TextDelta(prompt.text, 0, ending, "", pieces), prompt_logprobs)
                        if is_all:
                            return
                        prompt_logprobs = None
                delta = assembler.push(outputs)
                yield ChoiceDelta(index, delta, prompt_logprobs)
                if delta.finish_reason is not None:
                    return
        raise GenerationError("The model replica ended this request without an ending.")

    def _assembler(self, prompt: Prompt) -> TextAssembler:
        request, tags = self._request, self._reasoning_tags
        detokenizer = self._tokenizer.new_detokenizer(skip_special_tokens=request.skip_special_tokens, shown=tags or ())
        splitter = None if tags is None else ReasoningSplitter(*tags, is_open=prompt.text.rstrip().endswith(tags[0]))
        return TextAssembler(
            detokenizer,
            request.stop,
            includes_stop=request.include_stop_str_in_output,
            reasoning=splitter,
            offset=len(prompt.text) if request.echoes else 0,
        )

    def _prompt_pieces(self, prompt: Prompt, logprobs: Sequence[TokenLogprobs] | None) -> tuple[TokenPiece, ...]:
        """The prompt's tokens with where they begin in its text and what was reported of them."""
        if logprobs is None:
            return ()
        detokenizer = self._tokenizer.new_detokenizer()
        pieces, offset = [], 0
        for token, reported in zip(prompt.token_ids, (None, *logprobs), strict=True):
            pieces.append(TokenPiece(token, offset, reported))
            offset += len(detokenizer.push(token))
        return tuple(pieces)


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
            request.PROMPT,
        )
    if asked is not None and num_prompt_tokens + asked > max_model_len:
        raise ContextLengthError(
            f"This model's context is {max_model_len} tokens, but the prompt has {num_prompt_tokens} and {asked} more are "
            "asked for; shorten the prompt or ask for fewer tokens.",
            "max_tokens",
        )
    # the engine draws at least one token, also for a caller who only wants his prompt scored
    return max_model_len - num_prompt_tokens if asked is None else max(asked, 1)


async def _until(deadline: Deadline, items: AsyncGenerator[ChoiceDelta, None]) -> AsyncGenerator[ChoiceDelta, None]:
    """Items that come in time. The engine keeps the deadline; this is for what does not reach it. Closing it closes the
    source."""
    async with aclosing(items):
        while True:
            try:
                async with asyncio.timeout_at(deadline.at + LATE_S):
                    item = await anext(items)
            except StopAsyncIteration:
                return
            except (TimeoutError, DeadlineError):
                raise deadline.error() from None
            yield item


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
