"""What chat and completions have in common."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from serve_app.engine.request import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_SEED,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)
from serve_app.ingress.schema.base import Flag, ItemList, Schema, StringOrList, User, default, no_effect, problem
from serve_app.models.facts import SamplingDefaults

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_CHOICES = 128
MAX_BIASES = 1024
MAX_PRIORITY = 2**31 - 1
REQUEST_ID = r"^[A-Za-z0-9._:-]{1,128}$"

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, default(0.0), Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]


def _biases(value: Any) -> Any:
    """OpenAI writes the token ids as JSON keys, that is, as strings."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "must map token ids to numbers")
    for key in value:
        if not (key.isascii() and key.isdigit()):
            raise PydanticCustomError("logit_bias", "{key} is not a token id", {"key": repr(key[:40])})
    return tuple((int(key), bias) for key, bias in value.items())


class StreamOptions(Schema):
    """Options of a streamed answer."""

    include_usage: Annotated[Flag, Field(description="One last chunk, without choices, has the token counts.")] = False
    continuous_usage_stats: Annotated[Flag, Field(description="Every chunk has the token counts so far.")] = False
    include_obfuscation: Annotated[Literal[False] | None, no_effect("Chunks are never padded.")] = None


class GenerationRequest(Schema):
    """What chat and completions have in common."""

    PROMPT: ClassVar[str] = "prompt"
    """The field that the prompt comes from."""

    model: Annotated[
        str | None, Field(description="Must be a served name, else 404; when absent the served model answers.")
    ] = None
    max_tokens: Annotated[int | None, Field(ge=0, description="Tokens at most; absent: as many as the context leaves.")] = (
        None
    )
    temperature: Annotated[
        float | None,
        Field(ge=0, le=2, description="0 is greedy. Absent, here and below: what the model's authors recommend."),
    ] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, description="0 or -1: off; 1: greedy.")] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    presence_penalty: Annotated[Penalty, Field(description="Counts drawn tokens, not the prompt.")] = 0.0
    frequency_penalty: Annotated[Penalty, Field(description="Counts drawn tokens, not the prompt.")] = 0.0
    repetition_penalty: Annotated[
        float, default(1.0), Field(ge=MIN_REPETITION_PENALTY, le=100, description="Counts the prompt too; 1 is off.")
    ] = 1.0
    logit_bias: Annotated[
        tuple[tuple[TokenId, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]], ...],
        BeforeValidator(_biases, json_schema_input_type=dict[str, float] | None),
        Field(max_length=MAX_BIASES, description="Token id -> number added to its logit."),
    ] = ()
    seed: Annotated[
        int | None, Field(ge=-MAX_SEED - 1, le=MAX_SEED, description="Choice i of `n` uses seed + i. Absent: random.")
    ] = None
    stop: Annotated[
        tuple[StopString, ...],
        StringOrList,
        Field(
            max_length=MAX_STOP_STRINGS, description="Strings that end the text, not part of it; an empty one is refused."
        ),
    ] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], ItemList, Field(max_length=MAX_STOP_STRINGS)] = ()
    include_stop_str_in_output: Annotated[Flag, Field(description="The stop string that was found ends the text.")] = False
    min_tokens: Annotated[int, default(0), Field(ge=0, description="No end token is drawn before so many tokens.")] = 0
    ignore_eos: Annotated[Flag, Field(description="The model's own end tokens do not end.")] = False
    skip_special_tokens: Annotated[bool, default(True), Field(description="Special tokens give no text.")] = True
    prompt_logprobs: Annotated[
        int | None, Field(ge=0, le=MAX_TOP_LOGPROBS, description="Of each prompt token, with so many most probable ones.")
    ] = None
    n: Annotated[
        int, default(1), Field(ge=1, le=MAX_CHOICES, description="Choices per prompt; they share its cache blocks.")
    ] = 1
    stream: Annotated[Flag, Field(description="Server-sent events.")] = False
    stream_options: StreamOptions | None = None
    request_id: Annotated[
        str | None,
        Field(pattern=REQUEST_ID, description="Part of the answer's id; else the X-Request-Id header is."),
    ] = None
    cache_salt: Annotated[
        str | None, Field(min_length=1, max_length=256, description="Only equal salts share cached prefixes.")
    ] = None
    priority: Annotated[
        int, default(0), Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Lower goes first among a tenant's.")
    ] = 0
    user: User = None
    metadata: Annotated[dict[str, Any] | None, no_effect()] = None
    store: Annotated[Literal[False] | None, no_effect("Answers are never stored; true is refused.")] = None
    service_tier: Annotated[Literal["auto", "default"] | None, no_effect("Other tiers are refused.")] = None
    safety_identifier: Annotated[str | None, no_effect()] = None
    prompt_cache_key: Annotated[str | None, no_effect("Equal prompts are found without it.")] = None

    @model_validator(mode="after")
    def _options_belong_to_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise problem("stream_options", "stream_options needs stream to be true")
        return self

    @property
    def token_limit(self) -> int | None:
        """How many tokens the caller asks for at most, if he says."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many most probable tokens to report at each position; None reports no log-probabilities."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_along(self) -> bool:
        """Whether every chunk tells the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling(self, defaults: SamplingDefaults, max_tokens: int, choice: int) -> SamplingParams:
        """The engine's parameters for one of the `n` choices; each gets a seed of its own.

        Raises:
            RequestError: the values do not go together.
        """
        prompt_logprobs = self.prompt_logprobs
        if self.echoes and prompt_logprobs is None:
            prompt_logprobs = self.num_logprobs
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
            logprobs=self.num_logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            prompt_logprobs=prompt_logprobs,
        )
