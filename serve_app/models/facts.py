"""What a checkpoint's small files say about it. Reads no weights, so the ingress can read it too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from serve_app.errors import ModelNotFoundError, UnsupportedModelError
from serve_app.models.checkpoint import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""Rotary scalings whose frequencies depend on the longest position of the batch: one row would change another's."""
DEFAULT_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's authors recommend (generation_config.json), used where a caller does not say; else OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts that serving needs.

    Attributes:
        end_token_ids: every id that the generation config or the config declares as an end.
        max_model_len: longest prompt + output in tokens.
        vocab_size: ids that the model knows.
        sampling: the recommended sampling.
    """

    end_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    sampling: SamplingDefaults = SamplingDefaults()


def read_facts(checkpoint: Checkpoint, max_model_len: int | None = None) -> ModelFacts:
    """Reads config.json and generation_config.json.

    Raises:
        ModelNotFoundError: no config can be read there.
        UnsupportedModelError: an encoder-decoder model, or shorter than `max_model_len`.
    """
    # Here, as wherever the ingress uses it: importing it takes seconds, and building the application needs none of it.
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(checkpoint.path, revision=checkpoint.revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"model.source: {checkpoint.path!r} cannot be read: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{checkpoint.name} is an encoder-decoder model; only decoder-only models are served")
    text_config = config.get_text_config()
    generation = _read_generation_config(checkpoint)
    declared = [getattr(text_config, "eos_token_id", None), generation.get("eos_token_id")]
    return ModelFacts(
        frozenset(token for ids in declared for token in _as_ids(ids)),
        _longest(checkpoint, text_config, max_model_len),
        int(text_config.vocab_size),
        _sampling_defaults(generation),
    )


def _read_generation_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """What generation_config.json says, without the library's own defaults; empty when there is none."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(checkpoint.path, revision=checkpoint.revision or "main")
    except OSError:
        return {}
    return {name: value for name, value in vars(generation).items() if value is not None}


def _sampling_defaults(generation: dict[str, Any]) -> SamplingDefaults:
    if generation.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0)
    names = [field.name for field in fields(SamplingDefaults)]
    return SamplingDefaults(**{name: generation[name] for name in names if generation.get(name) is not None})


def _as_ids(ids: int | Iterable[int] | None) -> Iterable[int]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else ids


def _longest(checkpoint: Checkpoint, config: PreTrainedConfig, asked: int | None) -> int:
    own = int(getattr(config, "max_position_embeddings", 0) or 0)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        own = int(rope.get("original_max_position_embeddings") or own)
    if asked is None:
        return own or DEFAULT_CONTEXT
    if own and asked > own:
        raise UnsupportedModelError(
            f"model.max_model_len: {asked} is more than the {own} tokens that {checkpoint.name} supports"
        )
    return asked
