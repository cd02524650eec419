"""Bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from serve_app.ingress.schema.base import Flag, ItemList, OptionalItemList, Schema, default, problem
from serve_app.ingress.schema.chat import MAX_MESSAGES, ChatMessage
from serve_app.ingress.schema.generation import TokenId


class TokenizeRequest(Schema):
    """Body of POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[
        Annotated[tuple[ChatMessage, ...], Field(min_length=1, max_length=MAX_MESSAGES)] | None, OptionalItemList
    ] = None
    add_special_tokens: Annotated[
        bool | None, Field(description="Absent: true for a prompt; false for messages, whose template writes them.")
    ] = None
    add_generation_prompt: Annotated[bool, default(True)] = True
    continue_final_message: Flag = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: Flag = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise problem("prompt", "give either prompt or messages")
        if self.messages and self.continue_final_message and self.add_generation_prompt:
            raise problem("continue_final_message", "continue_final_message needs add_generation_prompt to be false")
        return self


class DetokenizeRequest(Schema):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[tuple[TokenId, ...], ItemList]
