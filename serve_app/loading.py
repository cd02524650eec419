"""From settings to a runner or an engine that is ready to step. The one place where models and engine meet."""

from __future__ import annotations

import os
from functools import partial

from serve_app.config import EngineConfig, EngineLimits, ModelConfig
from serve_app.engine.engine import BatchInferenceEngine
from serve_app.engine.model_runner import ModelRunner
from serve_app.models.checkpoint import find_checkpoint
from serve_app.models.facts import read_facts
from serve_app.models.loader import load_model


def load_runner(model: ModelConfig, engine: EngineConfig) -> ModelRunner:
    """Loads and proves the configured model.

    Raises:
        ModelError: there is no such model, or it cannot be served; the message says why.
        ConfigError: the cache cannot hold the model's context.
    """
    checkpoint = find_checkpoint(model.source, model.revision)
    facts = read_facts(checkpoint, model.max_model_len)
    return ModelRunner(
        load_model(checkpoint, dtype=model.dtype, device=model.device),
        end_token_ids=facts.end_token_ids,
        max_model_len=facts.max_model_len,
        block_size=engine.block_size,
        kv_cache_tokens=engine.kv_cache_tokens,
        num_threads=engine.num_threads or len(os.sched_getaffinity(0)),
        native_kernels=engine.native_kernels,
        precision=_precision(model, engine),
        quantization=engine.quantization,
    )


def _precision(model: ModelConfig, engine: EngineConfig) -> str:
    """`auto` respects a type that was asked for."""
    return "float32" if engine.precision == "auto" and model.dtype == "float32" else engine.precision


def load_engine(
    source: str = "builtin",
    *,
    model: ModelConfig | None = None,
    engine: EngineConfig | None = None,
    limits: EngineLimits | None = None,
) -> BatchInferenceEngine:
    """A started engine in this process, without Ray.

    Args:
        source: `builtin`, a local folder, or a hub id (used when `model` is not given).
        model, engine, limits: settings, as in `serve_config.yaml`.

    Raises:
        ModelError, ConfigError: as `load_runner`.
    """
    engine, limits = engine or EngineConfig(), limits or EngineLimits()
    model = model or ModelConfig(source=source)
    return BatchInferenceEngine.launch(
        partial(load_runner, model, engine),
        max_batch_size=limits.max_batch_size,
        max_batched_tokens=engine.max_batched_tokens,
        batch_wait_timeout_s=limits.batch_wait_timeout_s,
        max_waiting_tokens=limits.max_waiting_tokens,
        prefix_cache=engine.prefix_cache,
    )
