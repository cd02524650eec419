"""Tiny random models of many families: the tests' models, a few thousand parameters each, in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

VOCAB_SIZE = 320
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def _with(**more: Any) -> dict[str, Any]:
    return {**COMMON, **more}


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**COMMON),
    "qwen2": lambda: hf.Qwen2Config(**COMMON),
    "qwen3": lambda: hf.Qwen3Config(**_with(head_dim=16)),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**_with(head_dim=16, **EXPERTS)),
    "mistral_sliding": lambda: hf.MistralConfig(**_with(sliding_window=8)),
    "gemma2": lambda: hf.Gemma2Config(**_with(head_dim=16, sliding_window=8, query_pre_attn_scalar=16)),
    "gemma3": lambda: hf.Gemma3TextConfig(**_with(head_dim=16, sliding_window=8, query_pre_attn_scalar=16)),
    "phi3": lambda: hf.Phi3Config(**COMMON),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=64, n_layer=3, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2
    ),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**COMMON),
    "olmo2": lambda: hf.Olmo2Config(**COMMON),
    "mixtral": lambda: hf.MixtralConfig(**_with(**EXPERTS)),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **_with(
            num_key_value_heads=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=20,
        )
    ),
    "gpt_oss": lambda: hf.GptOssConfig(**_with(head_dim=16, sliding_window=8, **EXPERTS)),
}

REFUSED: dict[str, Callable[[], Any]] = {
    "bloom": lambda: hf.BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=64, n_layer=2, n_head=4),
    "mamba": lambda: hf.MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, state_size=8),
    "falcon": lambda: hf.FalconConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True
    ),
}


def tiny_model(config: Any, seed: int = 0) -> PreTrainedModel:
    """A random float32 model, spread enough that its greedy choices are not ties."""
    torch.manual_seed(seed)
    model: PreTrainedModel = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("sinks"):
                torch.nn.init.normal_(parameter, std=0.2 if parameter.dim() > 1 else 1.0)
    model.train(False)
    model.requires_grad_(False)
    return model


def generate_alone(model: PreTrainedModel, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """The oracle: greedy `model.generate` of one prompt, exactly `num_tokens` tokens."""
    inputs = torch.tensor([prompt])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in output[0][len(prompt) :]]
