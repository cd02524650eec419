"""Hugging Face causal language models on Ray Serve: OpenAI API, continuous batching behind `@serve.batch`.

    engine = load_engine("builtin")
    [stream] = engine.add_to_queue([UserRequest("a", prompt_token_ids, SamplingParams(max_tokens=16))])
    for output in stream: ...

`LocalModel` does the same with text. `build_app` is what `serve_config.yaml` names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from serve_app.engine.engine import BatchInferenceEngine
from serve_app.engine.request import SamplingParams, TokenOutput, UserRequest

if TYPE_CHECKING:
    from serve_app.app import build_app
    from serve_app.loading import load_engine
    from serve_app.local import LocalModel

__all__ = [
    "BatchInferenceEngine",
    "LocalModel",
    "SamplingParams",
    "TokenOutput",
    "UserRequest",
    "build_app",
    "load_engine",
]

_HOMES = {"LocalModel": "serve_app.local", "build_app": "serve_app.app", "load_engine": "serve_app.loading"}
"""Names whose modules import torch or ray; looked up when first used, so that the ingress never loads torch."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
