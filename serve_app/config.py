"""Every setting an operator may change: frozen, checked once, and handed down as the slice that each room needs.

`ServeConfig` is the YAML's `args`; `EngineLimits` and `IngressLimits` are the two deployments' `user_config`, which may
change while the server runs. Unknown keys and impossible values raise `ConfigError` with the key's path.
"""

from __future__ import annotations

from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serve_app.errors import ConfigError

ENGINE, INGRESS = "Engine", "Ingress"
"""Names of the deployments; with several models the engines' are `Engine-NAME`."""


class Section(BaseModel):
    """A part of the configuration: frozen, no unknown keys, no silent conversions (`"8"` is not 8)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelConfig(Section):
    """Which model is served, and as what."""

    source: str = Field(default="builtin", min_length=1)
    """`builtin`, a local folder, or a hub id."""
    name: str | None = Field(default=None, min_length=1)
    """The name callers use; derived from `source` when absent."""
    revision: str | None = None
    """Commit, tag or branch of a hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: bfloat16 where the device computes it natively, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt + output in tokens; the model's own context when absent."""
    reasoning_tags: list[str] | None = Field(default=None, min_length=2, max_length=2)
    """What opens and closes a reasoning model's thoughts, such as [<think>, </think>]: chat then gives them as
    `reasoning_content`. When absent they are part of the text."""


class EngineConfig(Section):
    """The engine's fixed settings. Those that may change live are in `EngineLimits`."""

    max_batched_tokens: int = Field(default=256, ge=1)
    """Tokens of one step, prompts and decodes together: bounds the gap that a long prompt can cause."""
    block_size: int = Field(default=16, ge=1)
    """Tokens of one KV-cache block."""
    kv_cache_tokens: int | None = Field(default=None, ge=1)
    """Size of the KV cache in tokens. When absent: on CUDA what fits, elsewhere twice the context, 16,384 at most."""
    prefix_cache: bool = True
    """Share the blocks of equal prefixes."""
    num_threads: int = Field(default=0, ge=0)
    """Threads of one replica's matrix products on CPU; 0 takes the machine's cores."""
    native_kernels: bool = True
    """On CPU: our own kernels, compiled once where there is a C++ compiler; else, and when false, torch's operations."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """On CPU: what our kernels multiply in, and keep keys and values in. `auto`: bfloat16 where the CPU has instructions
    for it and `model.dtype` is not float32, else float32. Sums, norms and the residual stream are float32 in any case."""
    quantization: Literal["none", "int8"] = "none"
    """On CPU: `int8` rounds the rows of every product to 8 bits, with a scale per 32 values, and weights that a file does
    not hold in fewer. Faster, and less faithful: docs/operations.md says by how much."""
    stall_timeout_s: float = Field(default=60.0, gt=0)
    """Work queued and no step succeeded for this long: the replica ends itself at its next health check, and Serve starts
    another."""


class EngineLimits(Section):
    """What may change on a running engine (`user_config` of the engine deployment)."""

    max_batch_size: int = Field(default=32, ge=1)
    """Rows that share a step, and calls that enter the engine together."""
    batch_wait_timeout_s: float = Field(default=0.0, ge=0, le=10)
    """How long the first call of a batch waits for others. Only the way in waits; running rows never do."""
    max_waiting_tokens: int = Field(default=262_144, ge=1)
    """Tokens (prompt + requested) that may wait; beyond it a request gets 429 with a computed Retry-After."""


class AutoscalingTargets(Section):
    """What an engine replica may have to do before there should be another (`policy_kwargs` of its autoscaling policy)."""

    target_backlog_s: float = Field(default=30.0, gt=0)
    """Seconds of work that it may have in sight, at its measured speed."""
    target_ttft_s: float = Field(default=5.0, gt=0)
    """Seconds of that work that may wait for a place in the batch: the TTFT of whoever comes now."""


class PrefixRouting(Section):
    """When a prompt goes where its beginning is (`request_router_kwargs` of the engine's `request_router_config`)."""

    prefix_weight: float = Field(default=4.0, ge=0)
    """Tokens that a replica may have to do more than another, per token of the prompt that it need not compute."""
    prefix_tokens: int = Field(default=128, ge=1)
    """First tokens of a prompt by which all ingress replicas find the same engine replica for what they do not know."""
    memory_tokens: int = Field(default=4_000_000, ge=1)
    """Tokens of prompts of which an ingress replica remembers where it sent them."""


class ApiKey(Section):
    """One caller (`serve-app key NAME` makes a key and this entry for it)."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """What the log, and nobody else, calls the key."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """The key's SHA-256 in hexadecimal; the key itself is nowhere."""
    weight: float = Field(default=1.0, gt=0, le=1000)
    """When more is wanted than there is: a key of weight 2 gets twice the tokens of one of weight 1."""
    max_calls: int | None = Field(default=None, ge=1)
    """Calls at the same time, per ingress replica; beyond it 429. When absent there is no limit."""


class IngressLimits(Section):
    """What may change on a running ingress (`user_config` of the ingress deployment)."""

    api_keys: list[ApiKey] | None = None
    """Who may call; every route but /health then wants a key. When absent everybody may, when empty nobody."""
    cors_origins: list[str] = []
    """Origins (such as https://chat.example) whose pages may call from a browser; none by default."""
    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1)
    body_timeout_s: float = Field(default=30.0, gt=0)
    """A body that is not complete by then gets 408."""
    request_timeout_s: float | None = Field(default=None, gt=0)
    """No call takes longer, waiting or running: then its work ends with 504, or with an error event in a stream that has
    begun. A caller may ask for less (X-Request-Timeout-Seconds). When absent there is no limit."""
    cold_start_wait_s: float = Field(default=30.0, ge=0)
    """While there is no engine replica, calls wait for one if its start is expected to take no longer (by the last one);
    else they get 503 with a Retry-After, while it starts."""
    reader_timeout_s: float = Field(default=60.0, gt=0)
    """A streaming caller who takes nothing for so long, while there is something for him, is cut off and his work ends."""
    step_channel: bool = True
    """Tokens come from an engine replica on the same machine as one message per step; else as one per token and call."""
    log_prompts: bool = False
    """Whether the line that the log has for every call says what the prompt was."""
    allow_chat_template: bool = False
    """Whether callers may bring their own chat template (in a sandbox, in a process of its own, two seconds at most)."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [key.name for key in self.api_keys or ()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"api_keys has two keys of the name {twice!r}")
        return self


class NamedModelConfig(ModelConfig):
    """One of several models (`args.models`): its name is part of its engine deployment's."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """The name callers use; its deployment is `Engine-NAME`."""
    engine: EngineConfig | None = None
    """Its engine's settings; `args.engine` when absent."""


class TracingConfig(Section):
    """OpenTelemetry traces of calls."""

    endpoint: str | None = Field(default=None, pattern=r"^https?://")
    """Where an OTLP collector takes traces over HTTP, such as http://localhost:4318/v1/traces. When absent: none."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Part of the calls that are traced, of those whose caller sent no `traceparent`; else the caller has decided."""


class ServeConfig(Section):
    """The `args` of the application in `serve_config.yaml`."""

    model: ModelConfig = ModelConfig()
    models: list[NamedModelConfig] | None = Field(default=None, min_length=1, max_length=64)
    """Several models instead of `model`, each with an engine deployment of its own; calls that name none get the first."""
    engine: EngineConfig = EngineConfig()
    tracing: TracingConfig = TracingConfig()

    def engines(self) -> dict[str, tuple[ModelConfig, EngineConfig]]:
        """What each engine deployment serves, by its name; `Engine` where there is one model."""
        if self.models is None:
            return {ENGINE: (self.model, self.engine)}
        return {f"{ENGINE}-{model.name}": (model, model.engine or self.engine) for model in self.models}

    @model_validator(mode="after")
    def _models_are_named_apart(self) -> Self:
        if self.models is not None and self.model != ModelConfig():
            raise ValueError("model and models: give one of them")
        names = [model.name for model in self.models or ()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"models has two of the name {twice!r}")
        return self

    @model_validator(mode="after")
    def _cache_holds_the_context(self) -> Self:
        for model, engine in self.engines().values():
            size, longest = engine.kv_cache_tokens, model.max_model_len
            if size is not None and longest is not None and size < longest:
                raise ValueError(f"engine.kv_cache_tokens ({size}) must be at least model.max_model_len ({longest})")
        return self


SectionT = TypeVar("SectionT", bound=Section)


def parse_section(kind: type[SectionT], raw: Any, path: str) -> SectionT:
    """Checks `raw` (YAML data) against `kind`. Raises `ConfigError` naming each wrong key's path and what was expected."""
    try:
        return kind.model_validate({} if raw is None else raw)
    except ValidationError as error:
        problems = [_describe(path, dict(detail)) for detail in error.errors(include_url=False)]
        raise ConfigError("; ".join(problems)) from None


def _describe(path: str, detail: dict[str, Any]) -> str:
    key = ".".join([path, *map(str, detail["loc"])])
    if detail["type"] == "extra_forbidden":
        return f"{key}: unknown key"
    if detail["type"] == "value_error":
        return f"{key}: {detail['ctx']['error']}"
    return f"{key}: {detail['msg']} (got {detail['input']!r})"
