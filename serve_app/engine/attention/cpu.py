"""Attention on CPU.

Masked SDPA at query length 1 is a trap there (see docs/architecture.md): decode gathers the blocks of a group of rows
once and multiplies the query heads of each key head as one small matrix.
"""

from __future__ import annotations

import torch

from serve_app.engine.attention.grouped import GroupedAttention
from serve_app.engine.attention.layout import (
    AttentionCall,
    DecodeGroup,
    LayerCache,
    PrefillSpan,
    gather_context,
    scores_to_weights,
)


class CpuAttention(GroupedAttention):
    """Grouped matrix products over gathered blocks for decode; SDPA per chunk for prefill."""

    def decode(self, query: torch.Tensor, cache: LayerCache, group: DecodeGroup, call: AttentionCall) -> torch.Tensor:
        """See `GroupedAttention.decode`."""
        num_kv_heads, rows = cache.keys.shape[0], group.num_rows
        keys, values = (self._gather(stored, group) for stored in (cache.keys, cache.values))
        queries = (query * call.scaling).view(num_kv_heads, -1, rows, query.shape[-1]).transpose(1, 2)
        queries = queries.reshape(num_kv_heads * rows, -1, query.shape[-1])
        scores = torch.bmm(queries, keys.transpose(1, 2)).view(num_kv_heads, rows, -1, group.padded_len)
        weights = scores_to_weights(scores, group.mask(call.sliding_window, scores.dtype)[None, :, None], call)
        mixed = torch.bmm(weights.flatten(0, 1), values)
        return mixed.view(num_kv_heads, rows, -1, values.shape[-1]).transpose(0, 1).flatten(1, 2)

    @staticmethod
    def _gather(stored: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        """[kv heads * rows, padded length, head dim]"""
        num_kv_heads, num_blocks, block_size, head_dim = stored.shape
        blocks = stored.view(num_kv_heads * num_blocks, block_size * head_dim)
        index = group.gather_index(num_kv_heads, num_blocks)
        return blocks.index_select(0, index).view(num_kv_heads * group.num_rows, -1, head_dim)

    def prefill(
        self,
        query: torch.Tensor,
        new: LayerCache,
        cache: LayerCache,
        span: PrefillSpan,
        call: AttentionCall,
    ) -> torch.Tensor:
        """See `GroupedAttention.prefill`."""
        if span.is_whole:
            keys, values = new.keys, new.values
        else:
            keys = gather_context(cache.keys, span.block_ids, span.context_len)
            values = gather_context(cache.values, span.block_ids, span.context_len)
        group_size = query.shape[0] // keys.shape[0]
        if call.softcap is not None or call.sinks is not None:
            return self._explicit(query, keys, values, span, call)
        is_plain = span.is_whole and (call.sliding_window is None or call.sliding_window >= span.context_len)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query[None],
            keys.repeat_interleave(group_size, 0)[None],
            values.repeat_interleave(group_size, 0)[None],
            attn_mask=None if is_plain else span.mask(call.sliding_window),
            is_causal=is_plain,
            scale=call.scaling,
        )
        return mixed[0].transpose(0, 1)

    @staticmethod
    def _explicit(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: PrefillSpan, call: AttentionCall
    ) -> torch.Tensor:
        """Prefill with what SDPA does not know: a soft cap or sinks."""
        num_kv_heads, tokens = keys.shape[0], span.num_tokens
        queries = (query * call.scaling).view(num_kv_heads, -1, tokens, query.shape[-1]).transpose(1, 2)
        scores = queries.flatten(1, 2) @ keys.transpose(1, 2)
        mask = torch.zeros(tokens, 1, span.context_len, dtype=scores.dtype, device=scores.device)
        mask.masked_fill_(~span.mask(call.sliding_window)[:, None], float("-inf"))
        weights = scores_to_weights(scores.view(num_kv_heads, tokens, -1, span.context_len), mask, call)
        mixed = weights.flatten(1, 2) @ values
        return mixed.view(num_kv_heads, tokens, -1, values.shape[-1]).transpose(0, 1).flatten(1, 2)
