"""Attention on CPU by our own kernel: reads the cache's blocks where they lie, in one call per layer and step."""

from __future__ import annotations

from dataclasses import replace

import torch

from serve_app.engine.attention.layout import AttentionCall, LayerCache, PackedLayout
from serve_app.engine.native.kernels import AttentionArguments, Kernels

NATIVE_DTYPES = (torch.float32, torch.bfloat16)


class NativeAttention:
    """For tensors and caches of float32 or bfloat16; sums are float32 in any case."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def attend(
        self,
        query: torch.Tensor,
        new: LayerCache,
        cache: LayerCache,
        layout: PackedLayout,
        call: AttentionCall,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        if call.sinks is not None:
            call = replace(call, sinks=call.sinks.float().contiguous())
        query, key, value = (_with_plain_rows(tensor) for tensor in (query, new.keys, new.values))
        arguments = attention_arguments(call, query.shape[0], cache, query.dtype)
        set_cache(arguments, cache)
        set_step(arguments, layout)
        out = query.new_empty(query.shape[1], query.shape[0], cache.values.shape[-1])
        arguments.query, arguments.key, arguments.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        arguments.query_head_stride, arguments.query_token_stride = query.stride(0), query.stride(1)
        arguments.key_head_stride, arguments.key_token_stride = key.stride(0), key.stride(1)
        arguments.value_head_stride, arguments.value_token_stride = value.stride(0), value.stride(1)
        arguments.out = out.data_ptr()
        self.kernels.attention(arguments)
        return out


def attention_arguments(call: AttentionCall, num_heads: int, cache: LayerCache, dtype: torch.dtype) -> AttentionArguments:
    """What stays the same from step to step, given any cache of the layer's shape and dtype, and the tensors' dtype."""
    num_kv_heads, _, _, value_dim = cache.values.shape
    return AttentionArguments(
        sinks=None if call.sinks is None else call.sinks.data_ptr(),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=cache.keys.shape[-1],
        value_dim=value_dim,
        window=call.sliding_window or 0,
        scaling=call.scaling,
        softcap=call.softcap or 0.0,
        num_threads=torch.get_num_threads(),
        is_bf16=int(dtype == torch.bfloat16),
        cache_is_bf16=int(cache.keys.dtype == torch.bfloat16),
    )


def set_cache(arguments: AttentionArguments, cache: LayerCache) -> None:
    """Which cache a layer has."""
    _, num_blocks, block_size, _ = cache.keys.shape
    arguments.keys, arguments.values = cache.keys.data_ptr(), cache.values.data_ptr()
    arguments.block_size, arguments.num_slots = block_size, num_blocks * block_size


def set_step(arguments: AttentionArguments, layout: PackedLayout) -> None:
    """What a step brings, but for its own tensors."""
    arguments.rows, arguments.blocks = layout.rows.data_ptr(), layout.blocks.data_ptr()
    arguments.slots = layout.slots.data_ptr()
    arguments.num_rows, arguments.num_tokens = layout.rows.shape[0], layout.slots.shape[0]


def _with_plain_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose last dimension lies in one piece."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
