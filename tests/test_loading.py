"""Settings on their way from the configuration to the runner."""

import pytest

from serve_app import loading
from serve_app.config import EngineConfig, ModelConfig


@pytest.mark.parametrize(
    ("dtype", "precision", "expected"),
    [
        ("auto", "auto", "auto"),
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "auto"),
        ("float32", "bfloat16", "bfloat16"),
        ("auto", "float32", "float32"),
    ],
)
def test_a_type_that_was_asked_for_is_respected(dtype, precision, expected, monkeypatch, builtin_checkpoint):
    given = {}
    monkeypatch.setattr(loading, "load_model", lambda *_, **settings: given.update(settings))
    monkeypatch.setattr(loading, "ModelRunner", lambda _, **settings: given.update(settings))
    loading.load_runner(ModelConfig(dtype=dtype), EngineConfig(precision=precision, quantization="int8"))
    assert given["precision"] == expected
    assert given["quantization"] == "int8"
