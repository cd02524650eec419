"""The HTTP API over a tiny random model with the byte tokenizer: for cases about real sampling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from serve_app.engine.model_runner import ModelRunner
from tests.api.server import Server, serving
from tests.fakes import EOS, VOCAB_SIZE
from tests.families import FAMILIES, tiny_model


def new_tiny_model() -> PreTrainedModel:
    """A tiny Llama in float32, with the byte tokenizer's vocabulary; the same weights each time."""
    config = FAMILIES["llama"]()
    config.vocab_size = VOCAB_SIZE
    return tiny_model(config)


@contextmanager
def serving_tiny_model(**engine_options: Any) -> Iterator[Server]:
    """Serves the tiny model."""
    runner = ModelRunner(
        new_tiny_model(), end_token_ids=frozenset({EOS}), max_model_len=512, block_size=8, kv_cache_tokens=8192
    )
    options = {"max_batch_size": 16, "max_batched_tokens": 64, **engine_options}
    with serving(runner, **options) as server:
        yield server
