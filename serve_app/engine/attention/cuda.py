"""Attention on CUDA: fused SDPA over gathered blocks, for decode as for prefill.

A soft cap or sinks, which SDPA does not know, take the explicit road that the CPU backend has.
"""

from __future__ import annotations

import torch

from serve_app.engine.attention.cpu import CpuAttention
from serve_app.engine.attention.layout import AttentionCall, DecodeGroup, LayerCache


class CudaAttention(CpuAttention):
    """Decode rows of a group share one SDPA call; the query heads of a key head are its query rows."""

    def decode(self, query: torch.Tensor, cache: LayerCache, group: DecodeGroup, call: AttentionCall) -> torch.Tensor:
        """See `GroupedAttention.decode`."""
        if call.softcap is not None or call.sinks is not None:
            return super().decode(query, cache, group, call)
        num_kv_heads, rows = cache.keys.shape[0], group.num_rows
        keys, values = (
            self._gather(stored, group).view(num_kv_heads, rows, group.padded_len, -1).transpose(0, 1)
            for stored in (cache.keys, cache.values)
        )
        queries = query.view(num_kv_heads, -1, rows, query.shape[-1]).permute(2, 0, 1, 3)
        mask = group.mask(call.sliding_window, query.dtype)[:, None, None]
        mixed = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=call.scaling)
        return mixed.flatten(1, 2)
