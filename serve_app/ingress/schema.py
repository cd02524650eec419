"""The requests that callers may send, field by field.

A field is honoured, or accepted without effect (the `NoEffect` fields), or refused by name: nothing is ignored in
silence. The same models parse the requests and describe them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from serve_app.engine.request import MAX_SEED, SamplingParams
from serve_app.errors import RequestError
from serve_app.models.facts import SamplingDefaults

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_CHOICES = 128


def _strings(value: Any) -> Any:
    """null, a string or a list of strings, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _default(default: Any) -> BeforeValidator:
    """null means the default."""
    return BeforeValidator(lambda value: default if value is None else value)


def _text(value: Any) -> Any:
    """Message content: a string, or text parts, which are joined without anything between them."""
    if not isinstance(value, list):
        return value
    if not value:
        raise PydanticCustomError("content", "must not be an empty list")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str) or set(part) != {"type", "text"}:
            raise PydanticCustomError(
                "content",
                "must be a string or parts of the form {{'type': 'text', 'text': ...}}; this model takes text only",
            )
    return "".join(part["text"] for part in value)


def _prompts(value: Any) -> Any:
    """A string, a list of strings, token ids, or a list of lists of token ids, as a tuple of prompts."""
    problem = PydanticCustomError(
        "prompt", "must be a string, a list of strings, token ids, or a list of lists of token ids"
    )
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise problem
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if _are_ids(value):
        return (tuple(value),)
    if all(isinstance(item, list) and _are_ids(item) for item in value):
        return tuple(tuple(item) for item in value)
    raise problem


def _are_ids(value: Sequence[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
NoEffect = Any
"""Type of the fields that OpenAI clients send and that change nothing here."""


class Schema(BaseModel):
    """Strict: no unknown fields, no conversions, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Schema):
    """Options of a streamed answer."""

    include_usage: Annotated[bool, _default(False)] = False


class GenerationRequest(Schema):
    """What chat and completions have in common."""

    model: str | None = None
    """Must be the served name; when absent the served model answers."""
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    """Absent: as many as the context leaves."""
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    """This and the next three: when absent, what the model's authors recommend, else OpenAI's default."""
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1)] = None
    """0 or -1: off."""
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] = None
    stop: Annotated[tuple[StopString, ...], BeforeValidator(_strings), Field(max_length=MAX_STOP_STRINGS)] = ()
    stop_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_strings), Field(max_length=MAX_STOP_STRINGS)
    ] = ()
    min_tokens: Annotated[int, _default(0), Field(ge=0)] = 0
    ignore_eos: Annotated[bool, _default(False)] = False
    n: Annotated[int, _default(1), Field(ge=1, le=MAX_CHOICES)] = 1
    stream: Annotated[bool, _default(False)] = False
    stream_options: StreamOptions | None = None
    user: Annotated[str | None, Field(description="no effect")] = None
    metadata: Annotated[dict[str, NoEffect] | None, Field(description="no effect")] = None
    store: Annotated[Literal[False] | None, Field(description="no effect")] = None
    service_tier: Annotated[Literal["auto", "default"] | None, Field(description="no effect")] = None

    @model_validator(mode="after")
    def _options_belong_to_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream to be true")
        return self

    @property
    def token_limit(self) -> int | None:
        """How many tokens the caller asks for at most, if he says."""
        return self.max_tokens

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, defaults: SamplingDefaults, max_tokens: int, choice: int) -> SamplingParams:
        """The engine's parameters for one of the `n` choices; each gets a seed of its own.

        Raises:
            RequestError: the values do not go together.
        """
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_k=max(defaults.top_k if self.top_k is None else self.top_k, 0),
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            seed=None if self.seed is None else (self.seed + choice) % (MAX_SEED + 1),
            stop_token_ids=self.stop_token_ids,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
        )


class ChatMessage(Schema):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text)]
    name: Annotated[str | None, Field(description="no effect")] = None

    def for_template(self) -> dict[str, str]:
        """As chat templates know it: `developer` is OpenAI's newer word for `system`."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[tuple[ChatMessage, ...], BeforeValidator(_strings), Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    """OpenAI's newer name of max_tokens."""

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens are one limit, given twice")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[tuple[str | tuple[int, ...], ...], BeforeValidator(_prompts)]


RequestT = TypeVar("RequestT", bound=Schema)


def parse_request(kind: type[RequestT], body: dict[str, Any]) -> RequestT:
    """Checks a JSON object. Raises `RequestError` that names the first wrong field in `param`."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = _param(first["loc"])
        if first["type"] == "extra_forbidden":
            message = f"{param} is not a field that this server supports here; leave it out."
        elif first["type"] == "missing":
            message = f"{param} is required."
        elif param is None:
            param, message = first["type"], f"{first['msg']}."
        else:
            message = f"{param}: {first['msg']}."
        raise RequestError(message, param) from None


def _param(location: tuple[int | str, ...]) -> str | None:
    """`messages[0].role`, as OpenAI writes it."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".") or None
