"""Body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from serve_app.engine.request import MAX_TOP_LOGPROBS
from serve_app.ingress.schema.base import Flag, ItemList, OptionalItemList, Schema, no_effect, problem
from serve_app.ingress.schema.generation import GenerationRequest

MAX_MESSAGES = 4096
MAX_TEMPLATE_LENGTH = 65_536

TOOLS = "this server does not call tools; describe them in the messages and read the answer's text"


class TextPart(Schema):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


def _text(value: Any) -> Any:
    """Message content: a string, null, or text parts, which are joined without anything between them."""
    if not isinstance(value, list):
        return value
    if not value:
        raise PydanticCustomError("content", "must not be an empty list")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str) or set(part) != {"type", "text"}:
            named = f", not {kind[:40]!r}" if isinstance(kind, str) and kind != "text" else ""
            raise PydanticCustomError(
                "content",
                "must be a string or parts of the form {{'type': 'text', 'text': ...}}{named}; this model takes text only",
                {"named": named},
            )
    return "".join(part["text"] for part in value)


class FunctionCall(Schema):
    """A function that the assistant called."""

    name: str
    arguments: str


class ToolCall(Schema):
    """A call of the assistant in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Schema):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None,
        BeforeValidator(_text, json_schema_input_type=str | list[TextPart] | None),
        Field(description="Parts are joined with nothing between. null only beside tool_calls, or for refusals."),
    ] = None
    tool_calls: Annotated[
        tuple[ToolCall, ...] | None,
        OptionalItemList,
        Field(description="Of an assistant in an earlier turn; for the template."),
    ] = None
    tool_call_id: Annotated[str | None, Field(description="Of a tool's message; for the template.")] = None
    refusal: Annotated[
        str | None, Field(description="Of an assistant in an earlier turn; read as content if there is none.")
    ] = None
    name: Annotated[str | None, no_effect()] = None
    id: Annotated[str | None, no_effect()] = None
    reasoning_content: Annotated[str | None, no_effect("Earlier reasoning is not shown to the model.")] = None
    annotations: Annotated[list[Any] | None, no_effect()] = None
    audio: Annotated[None, no_effect("Only null.")] = None
    function_call: Annotated[None, no_effect("Only null; use tool_calls.")] = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.refusal)):
            raise problem("content", "content is required")
        if self.tool_calls and self.role != "assistant":
            raise problem("tool_calls", "only an assistant has tool_calls")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it: `developer` is OpenAI's newer word for `system`."""
        role = "system" if self.role == "developer" else self.role
        content = self.content if self.content is not None else self.refusal or ""
        turn: dict[str, Any] = {"role": role, "content": content}
        if self.tool_calls:
            turn["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn


class TextFormat(Schema):
    """The only answer format."""

    type: Literal["text"]


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    PROMPT: ClassVar[str] = "messages"

    REFUSED: ClassVar[Mapping[str, str]] = {
        "tools": TOOLS,
        "tool_choice": TOOLS,
        "functions": TOOLS,
        "function_call": TOOLS,
        "audio": "this model speaks text only",
        "prediction": "predicted outputs are not used; leave it out",
        "web_search_options": "this server searches nothing; put what it should know into the messages",
        "moderation": "this server does not moderate; leave it out",
        "prompt_cache_options": "equal prefixes are always shared; use cache_salt to keep them apart",
        "prompt_cache_retention": "equal prefixes are kept as long as there is room; leave it out",
        "guided_json": "constrained output is not supported; ask for the format in the messages",
    }

    messages: Annotated[tuple[ChatMessage, ...], ItemList, Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int | None, Field(ge=1, description="OpenAI's newer name of max_tokens.")] = None
    logprobs: Annotated[
        Flag, Field(description="Log-probabilities of the drawn tokens, before temperature and filters.")
    ] = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS, description="Needs logprobs.")] = None
    add_generation_prompt: Annotated[
        bool | None, Field(description="Open the assistant's turn. Absent: true unless continue_final_message.")
    ] = None
    continue_final_message: Annotated[Flag, Field(description="Go on with the last message instead of opening a turn.")] = (
        False
    )
    chat_template: Annotated[
        str | None,
        Field(
            max_length=MAX_TEMPLATE_LENGTH,
            description="Instead of the model's; only where the server's configuration allows it.",
        ),
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(description="More variables for the template.")] = None
    response_format: Annotated[TextFormat | None, no_effect("Only text.")] = None
    modalities: Annotated[list[Literal["text"]] | None, no_effect("Only text.")] = None
    parallel_tool_calls: Annotated[bool | None, no_effect("There are no tools.")] = None
    reasoning_effort: Annotated[str | None, no_effect("Use chat_template_kwargs where the template knows a switch.")] = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, no_effect()] = None

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        if self.max_tokens == 0:
            raise problem("max_tokens", "max_tokens must be at least 1")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise problem("max_tokens", "max_tokens and max_completion_tokens are one limit, given twice")
        if self.top_logprobs is not None and not self.logprobs:
            raise problem("top_logprobs", "top_logprobs needs logprobs to be true")
        if self.continue_final_message and self.add_generation_prompt:
            raise problem(
                "continue_final_message",
                "continue_final_message and add_generation_prompt contradict each other; set one of them to false",
            )
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def opens_a_turn(self) -> bool:
        """Whether the prompt ends where the assistant is to speak."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
