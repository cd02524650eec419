"""What the model reads: chat templates and tokenizing, off the event loop unless they are over in a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from serve_app.errors import ContextLengthError, RequestError
from serve_app.ingress.schema.chat import ChatMessage, ChatRequest
from serve_app.ingress.schema.completion import CompletionRequest
from serve_app.ingress.schema.tokens import TokenizeRequest
from serve_app.models.facts import ModelFacts
from serve_app.text.template_worker import TemplateWorker
from serve_app.text.tokenizer import Tokenizer

SHORT = 4_000
"""Characters (or ids) that are tokenized in about a millisecond: a thread costs the caller more than it spares others."""
TURN = 100
"""Characters that stand for what a template does for a turn, whatever its length."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text that they come from (empty where the caller gave ids)."""

    token_ids: tuple[int, ...]
    text: str = ""


class Prompter:
    """Turns requests into prompts of token ids.

    Args:
        tokenizer: with the model's chat template.
        facts: the model's context - text that cannot fit is refused before it is tokenized - and vocabulary.
        allows_templates: whether callers may bring their own chat template.
    """

    def __init__(self, tokenizer: Tokenizer, facts: ModelFacts, allows_templates: Callable[[], bool]) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = facts.max_model_len
        self._vocab_size = facts.vocab_size
        self._allows_templates = allows_templates
        self._template_worker = TemplateWorker()

    async def chat(self, request: ChatRequest) -> list[Prompt]:
        """The one prompt of a conversation. Raises `RequestError` when the template refuses it or it cannot fit."""
        if request.chat_template is not None:
            return [await self._by_callers_template(request, request.chat_template)]
        conversation = partial(
            self._conversation,
            request.messages,
            add_generation_prompt=request.opens_a_turn,
            continue_final_message=request.continue_final_message,
            variables=request.chat_template_kwargs,
        )
        return [await _run(conversation, on_loop=_are_short(request.messages, request.chat_template_kwargs))]

    async def _by_callers_template(self, request: ChatRequest, template: str) -> Prompt:
        if not self._allows_templates():
            raise RequestError(
                "chat_template: this server uses the model's own template only (allow_chat_template is off).",
                "chat_template",
            )
        rendered = await self._template_worker.render(
            conversations=[[message.for_template() for message in request.messages]],
            chat_template=template,
            add_generation_prompt=request.opens_a_turn,
            continue_final_message=request.continue_final_message,
            **self._tokenizer.template_variables(request.chat_template_kwargs),
        )
        return await _run(partial(self._encode_conversation, rendered), on_loop=False)

    async def completion(self, request: CompletionRequest) -> list[Prompt]:
        """One prompt per element of `prompt`. Raises `RequestError` for an empty one or one that cannot fit."""
        are_short = sum(map(len, request.prompt)) <= SHORT
        return [await _run(partial(self._completion, prompt), on_loop=are_short) for prompt in request.prompt]

    async def tokenize(self, request: TokenizeRequest) -> Prompt:
        """The prompt that /tokenize asks about; may be empty."""
        if request.prompt is not None:
            adds = request.add_special_tokens is not False
            encode = partial(self._encode, request.prompt, "prompt", add_special_tokens=adds)
            return await _run(encode, on_loop=len(request.prompt) <= SHORT)
        messages = request.messages or ()
        conversation = partial(
            self._conversation,
            messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=request.chat_template_kwargs,
            add_special_tokens=bool(request.add_special_tokens),
        )
        return await _run(conversation, on_loop=_are_short(messages, request.chat_template_kwargs))

    def _conversation(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,  # the template writes them
    ) -> Prompt:
        rendered = self._tokenizer.render_chat(
            [message.for_template() for message in messages],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        return self._encode_conversation(rendered, add_special_tokens=add_special_tokens)

    def _encode_conversation(self, rendered: str, *, add_special_tokens: bool = False) -> Prompt:
        prompt = self._encode(rendered, "messages", add_special_tokens=add_special_tokens)
        if not prompt.token_ids:
            raise RequestError("The conversation gives an empty prompt.", "messages")
        return prompt

    def _completion(self, prompt: str | tuple[int, ...]) -> Prompt:
        if isinstance(prompt, str):
            encoded = self._encode(prompt, "prompt", add_special_tokens=True)
        else:
            unknown = next((token for token in prompt if not 0 <= token < self._vocab_size), None)
            if unknown is not None:
                raise RequestError(f"prompt: token id {unknown} is not in the vocabulary of {self._vocab_size}.", "prompt")
            encoded = Prompt(prompt, self._tokenizer.decode(prompt))
        if not encoded.token_ids:
            raise RequestError("The prompt is empty.", "prompt")
        return encoded

    def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> Prompt:
        fewest = self._tokenizer.fewest_tokens(text)
        if fewest >= self._max_model_len:
            raise ContextLengthError(
                f"This model's context is {self._max_model_len} tokens, but the prompt has at least {fewest}; shorten it.",
                param,
            )
        return Prompt(tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens)), text)


def _are_short(messages: Sequence[ChatMessage], variables: Mapping[str, Any] | None) -> bool:
    """Whether the model's template and tokenizer are through with them in a moment."""
    if variables or any(message.tool_calls for message in messages):
        return False
    return sum(TURN + len(message.content or message.refusal or "") for message in messages) <= SHORT


async def _run(work: Callable[[], ResultT], *, on_loop: bool) -> ResultT:
    return work() if on_loop else await asyncio.to_thread(work)
