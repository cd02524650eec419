"""Body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from serve_app.engine.request import MAX_TOP_LOGPROBS
from serve_app.ingress.schema.base import Flag, problem
from serve_app.ingress.schema.generation import GenerationRequest

MAX_PROMPTS = 1024


def _prompts(value: Any) -> Any:
    """A string, a list of strings, token ids, or a list of lists of token ids, as a tuple of prompts."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if _are_ids(value):
            return (tuple(value),)
        if all(isinstance(item, list) and _are_ids(item) for item in value):
            return tuple(tuple(item) for item in value)
    raise PydanticCustomError(
        "prompt", "must be a string, a list of strings, token ids, or a list of lists of token ids, and not empty"
    )


def _are_ids(value: Sequence[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "suffix": "this model does not fill in the middle; put all text into the prompt"
    }

    prompt: Annotated[
        tuple[str | tuple[int, ...], ...],
        BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
        Field(max_length=MAX_PROMPTS, description="An empty one is refused."),
    ]
    logprobs: Annotated[
        int | None,
        Field(ge=0, le=MAX_TOP_LOGPROBS, description="Report log-probabilities, and so many most probable tokens."),
    ] = None
    echo: Annotated[Flag, Field(description="The text begins with the prompt; with max_tokens 0 that is all.")] = False
    best_of: Annotated[int | None, Field(ge=1, description="Only as many as n: nothing is drawn and thrown away.")] = None

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise problem("max_tokens", "max_tokens must be at least 1, except with echo")
        if self.best_of not in (None, self.n):
            raise problem("best_of", "best_of must equal n")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return self.echo
