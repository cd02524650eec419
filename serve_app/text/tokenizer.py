"""Text to token ids and back. Safe to use from several threads at once."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from serve_app.errors import RequestError, UnsupportedModelError
from serve_app.text.detokenizer import Detokenizer, TokenBytes, new_detokenizer

if TYPE_CHECKING:  # see read_facts
    from transformers import TokenizersBackend


class Tokenizer:
    """A fast Hugging Face tokenizer, with the chat template of its model.

    Works on the Rust tokenizer below the `transformers` one: the upper one changes shared state on every call, which two
    threads must not do.
    """

    def __init__(self, tokenizer: TokenizersBackend) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._bytes = TokenBytes(self._backend)
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._longest_token_bytes = max((len(piece.encode()) for piece in tokenizer.get_vocab()), default=1)

    @classmethod
    def load(cls, path: str, revision: str | None = None) -> Tokenizer:
        """Loads from a folder or hub id. Raises `UnsupportedModelError` when there is no fast tokenizer."""
        from transformers import AutoTokenizer, TokenizersBackend

        try:
            tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise UnsupportedModelError(f"{path} has no tokenizer that can be loaded: {error}") from error
        if not isinstance(tokenizer, TokenizersBackend):
            raise UnsupportedModelError(f"{path} has no fast tokenizer (tokenizer.json)")
        return cls(tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with the tokens that the tokenizer puts around every text unless told not to."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of a text, without tokenizing it."""
        return len(text.encode("utf-8", "surrogatepass")) // self._longest_token_bytes

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; see `TokenBytes`."""
        return self._bytes.of(token_id)

    def token_text(self, token_id: int) -> str:
        """A token as its vocabulary writes it; empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model's chat template writes it.

        Args:
            messages: what was said.
            add_generation_prompt: end where the assistant is to speak.
            continue_final_message: end within the last message, so that it is continued.
            variables: more variables for the template.

        Raises:
            RequestError: the model has no template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise RequestError(
                "This model has no chat template, so it cannot serve chat; use /v1/completions instead.", "messages"
            )
        _check_names(variables)
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(variables or {}),
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise RequestError(f"The chat template refuses these messages: {error}", "messages") from error
        assert isinstance(rendered, str)
        return rendered

    def template_variables(self, variables: Mapping[str, Any] | None) -> dict[str, Any]:
        """What a template of the caller's own sees besides the messages: the special tokens, and the caller's variables.

        Raises:
            RequestError: one of them has a name that is taken.
        """
        _check_names(variables)
        return {**self._tokenizer.special_tokens_map, **(variables or {})}

    def new_detokenizer(self, *, skip_special_tokens: bool = True, shown: Sequence[str] = ()) -> Detokenizer:
        """An incremental decoder for one sequence. Special tokens give no text, but for those that are `shown`."""
        skipped = self._special_ids if skip_special_tokens else frozenset[int]()
        return new_detokenizer(self._backend, skipped - {self._backend.token_to_id(piece) for piece in shown})


@cache
def _reserved_variables() -> frozenset[str]:
    """Names that a caller's template variables must not have."""
    from transformers import TokenizersBackend

    parameters = inspect.signature(TokenizersBackend.apply_chat_template).parameters
    return frozenset({*parameters, "messages", "conversations"})


def _check_names(variables: Mapping[str, Any] | None) -> None:
    taken = sorted(_reserved_variables().intersection(variables)) if variables else []
    if taken:
        raise RequestError(f"chat_template_kwargs: {taken[0]} is set by other fields.", "chat_template_kwargs")
