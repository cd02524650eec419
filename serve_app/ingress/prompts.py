"""What the model reads: chat templates and tokenizing, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.errors import ContextLengthError, RequestError
from serve_app.ingress.schema.chat import ChatMessage, ChatRequest
from serve_app.ingress.schema.completion import CompletionRequest
from serve_app.ingress.schema.tokens import TokenizeRequest
from serve_app.models.facts import ModelFacts
from serve_app.text.tokenizer import Tokenizer


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

    async def chat(self, request: ChatRequest) -> list[Prompt]:
        """The one prompt of a conversation. Raises `RequestError` when the template refuses it or it cannot fit."""
        if request.chat_template is not None and not self._allows_templates():
            raise RequestError(
                "chat_template: this server uses the model's own template only (allow_chat_template is off).",
                "chat_template",
            )
        return [
            await asyncio.to_thread(
                self._conversation,
                request.messages,
                add_generation_prompt=request.opens_a_turn,
                continue_final_message=request.continue_final_message,
                chat_template=request.chat_template,
                variables=request.chat_template_kwargs,
            )
        ]

    async def completion(self, request: CompletionRequest) -> list[Prompt]:
        """One prompt per element of `prompt`. Raises `RequestError` for an empty one or one that cannot fit."""
        return [await asyncio.to_thread(self._completion, prompt) for prompt in request.prompt]

    async def tokenize(self, request: TokenizeRequest) -> Prompt:
        """The prompt that /tokenize asks about; may be empty."""
        if request.prompt is not None:
            adds = request.add_special_tokens is not False
            return await asyncio.to_thread(self._encode, request.prompt, "prompt", add_special_tokens=adds)
        return await asyncio.to_thread(
            self._conversation,
            request.messages or (),
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=request.chat_template_kwargs,
            add_special_tokens=bool(request.add_special_tokens),
        )

    def _conversation(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,  # the template writes them
    ) -> Prompt:
        rendered = self._tokenizer.render_chat(
            [message.for_template() for message in messages],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            variables=variables,
        )
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
