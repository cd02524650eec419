"""Loads a checkpoint's weights as a causal LM, ready for `ModelRunner`."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from serve_app.errors import UnsupportedModelError
from serve_app.models.checkpoint import Checkpoint


def choose_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises `UnsupportedModelError` for CUDA where there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModelError("model.device: cuda was asked for, but no CUDA device is available")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(dtype: str, device: torch.device, stored: torch.dtype | None = None) -> torch.dtype:
    """`auto` is bfloat16 where the device multiplies it natively, else float32 (emulated, it is many times slower).

    On CPU a checkpoint that is `stored` in float32 stays so: our kernels round by themselves what they multiply.
    """
    if dtype != "auto":
        chosen = getattr(torch, dtype)
        assert isinstance(chosen, torch.dtype)
        return chosen
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if cpu_has_bfloat16() and stored != torch.float32 else torch.float32


def cpu_has_bfloat16() -> bool:
    """Whether the processor has instructions for it."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def load_model(checkpoint: Checkpoint, *, dtype: str = "auto", device: str = "auto") -> PreTrainedModel:
    """Loads safetensors weights, in evaluation mode, on the device; never runs code from the checkpoint.

    Raises:
        UnsupportedModelError: no safetensors weights, or no causal LM that `transformers` knows.
    """
    place = choose_device(device)
    try:
        config = AutoConfig.from_pretrained(checkpoint.path, revision=checkpoint.revision, trust_remote_code=False)
        stored = getattr(config.get_text_config(), "dtype", None)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            revision=checkpoint.revision,
            dtype=choose_dtype(dtype, place, stored),
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{checkpoint.name} cannot be loaded as a causal LM: {error}") from error
    model.train(False)
    model.requires_grad_(False)
    torch.nn.Module.to(model, place)
    return model
