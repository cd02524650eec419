"""Body of POST /v1/responses: text in, text out, nothing stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from serve_app.ingress.schema.base import Flag, Schema, User, no_effect
from serve_app.ingress.schema.chat import MAX_MESSAGES, TOOLS, ChatRequest, TextFormat

STATELESS = "nothing is stored here; send the whole conversation as input"
TEXT_PARTS = ("input_text", "output_text", "text")


def _text(value: Any) -> Any:
    """Content of an item: a string, or text parts, joined with nothing between."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise PydanticCustomError("content", "must be a string or parts of type input_text or output_text")
    return "".join(part["text"] for part in value)


class InputMessage(Schema):
    """A message of the input, or one of an earlier output given back."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[str, BeforeValidator(_text, json_schema_input_type=str | list[dict[str, Any]])]
    id: Annotated[str | None, no_effect()] = None
    status: Annotated[str | None, no_effect()] = None
    phase: Annotated[str | None, no_effect()] = None


def _messages(value: Any) -> Any:
    """A string is one message of the user."""
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    return tuple(value) if isinstance(value, list) else value


class TextOptions(Schema):
    """How the text is to look."""

    format: Annotated[TextFormat | None, no_effect("Only text.")] = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, no_effect()] = None


class ResponsesStreamOptions(Schema):
    """Options of a streamed answer."""

    include_obfuscation: Annotated[Literal[False] | None, no_effect("Events are never padded.")] = None


class ResponsesRequest(Schema):
    """Body of POST /v1/responses."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "previous_response_id": STATELESS,
        "conversation": STATELESS,
        "prompt": "there are no stored prompts here; send instructions and input",
        "tools": TOOLS,
        "tool_choice": TOOLS,
        "max_tool_calls": TOOLS,
        "include": "there is nothing to include; leave it out",
        "reasoning": "reasoning is not steered here; use /v1/chat/completions with chat_template_kwargs",
        "image": "this model writes text only",
        "top_logprobs": "log-probabilities come with /v1/chat/completions",
        "moderation": "this server does not moderate; leave it out",
        "context_management": "the input is used as it is; shorten it yourself",
        "background_options": "answers are made while you wait; leave it out",
        "access_programs": "leave it out",
        "prompt_cache_options": "equal prefixes are always shared; leave it out",
        "prompt_cache_retention": "equal prefixes are kept as long as there is room; leave it out",
    }

    CHAT_FIELDS: ClassVar[Mapping[str, str]] = {"messages": "input", "max_tokens": "max_output_tokens"}
    """What fields of the same chat are called here."""

    model: str | None = None
    input: Annotated[
        tuple[InputMessage, ...],
        BeforeValidator(_messages, json_schema_input_type=str | list[InputMessage]),
        Field(min_length=1, max_length=MAX_MESSAGES, description="A string is one message of the user."),
    ]
    instructions: Annotated[str | None, Field(description="Becomes a system message before the input.")] = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    stream: Flag = False
    stream_options: Annotated[ResponsesStreamOptions | None, no_effect()] = None
    text: Annotated[TextOptions | None, no_effect("Only text.")] = None
    background: Annotated[Literal[False] | None, no_effect("true is refused.")] = None
    store: Annotated[Literal[False] | None, no_effect("Answers are never stored; true is refused.")] = None
    truncation: Annotated[Literal["disabled"] | None, no_effect("The input is never cut.")] = None
    parallel_tool_calls: Annotated[bool | None, no_effect("There are no tools.")] = None
    service_tier: Annotated[Literal["auto", "default"] | None, no_effect("Other tiers are refused.")] = None
    metadata: Annotated[dict[str, Any] | None, Field(description="Comes back with the answer.")] = None
    user: User = None
    safety_identifier: Annotated[str | None, no_effect()] = None
    prompt_cache_key: Annotated[str | None, no_effect("Equal prompts are found without it.")] = None

    def as_chat(self) -> ChatRequest:
        """The same call of /v1/chat/completions."""
        instructions = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        turns = [{"role": message.role, "content": message.content} for message in self.input]
        return ChatRequest.model_validate(
            {
                "model": self.model,
                "messages": [*instructions, *turns],
                "max_completion_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "stream": self.stream,
                "user": self.user,
            }
        )
