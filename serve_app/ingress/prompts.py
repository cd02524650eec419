"""What the model reads: chat templates and tokenizing, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from serve_app.errors import ContextLengthError, RequestError
from serve_app.ingress.schema import ChatRequest, CompletionRequest
from serve_app.models.facts import ModelFacts
from serve_app.text.tokenizer import Tokenizer


class Prompter:
    """Turns requests into prompts of token ids.

    Args:
        tokenizer: with the model's chat template.
        facts: the model's context - text that cannot fit is refused before it is tokenized - and vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer, facts: ModelFacts) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = facts.max_model_len
        self._vocab_size = facts.vocab_size

    async def chat(self, request: ChatRequest) -> list[list[int]]:
        """The one prompt of a conversation. Raises `RequestError` when the template refuses it or it cannot fit."""
        return [await asyncio.to_thread(self._chat, request)]

    async def completion(self, request: CompletionRequest) -> list[list[int]]:
        """One prompt per element of `prompt`. Raises `RequestError` for an empty one or one that cannot fit."""
        return [await asyncio.to_thread(self._completion, prompt) for prompt in request.prompt]

    def _chat(self, request: ChatRequest) -> list[int]:
        rendered = self._tokenizer.render_chat([message.for_template() for message in request.messages])
        return self._encode(rendered, "messages", add_special_tokens=False)  # the template writes them

    def _completion(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self._encode(prompt, "prompt", add_special_tokens=True)
        else:
            token_ids = list(prompt)
            unknown = next((token for token in token_ids if not 0 <= token < self._vocab_size), None)
            if unknown is not None:
                raise RequestError(f"prompt: token id {unknown} is not in the vocabulary of {self._vocab_size}.", "prompt")
        if not token_ids:
            raise RequestError("The prompt is empty.", "prompt")
        return token_ids

    def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        fewest = self._tokenizer.fewest_tokens(text)
        if fewest >= self._max_model_len:
            raise ContextLengthError(
                f"This model's context is {self._max_model_len} tokens, but the prompt has at least {fewest}; shorten it.",
                param,
            )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
