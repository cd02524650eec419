"""Attention written from its definition, one row and one head at a time, in float32: the tests' oracle."""

from __future__ import annotations

import torch

from serve_app.engine.attention.grouped import GroupedAttention
from serve_app.engine.attention.layout import (
    AttentionCall,
    DecodeGroup,
    LayerCache,
    PrefillSpan,
    gather_context,
)


class ReferenceAttention(GroupedAttention):
    """Slow and plain. Computes the same as every other backend."""

    def decode(self, query: torch.Tensor, cache: LayerCache, group: DecodeGroup, call: AttentionCall) -> torch.Tensor:
        """See `GroupedAttention.decode`."""
        rows = []
        for row in range(group.num_rows):
            length = int(group.context_lens[row])
            keys = gather_context(cache.keys, group.block_table[row], length)
            values = gather_context(cache.values, group.block_table[row], length)
            rows.append(_attend(query[:, row : row + 1], keys, values, call))
        return torch.cat(rows)

    def prefill(
        self,
        query: torch.Tensor,
        new: LayerCache,
        cache: LayerCache,
        span: PrefillSpan,
        call: AttentionCall,
    ) -> torch.Tensor:
        """See `GroupedAttention.prefill`."""
        keys = gather_context(cache.keys, span.block_ids, span.context_len)
        values = gather_context(cache.values, span.block_ids, span.context_len)
        return _attend(query, keys, values, call)


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    heads, tokens, _ = query.shape
    context_len = keys.shape[1]
    group_size = heads // keys.shape[0]
    out = torch.empty(tokens, heads, values.shape[-1], dtype=torch.float32, device=query.device)
    for head in range(heads):
        for token in range(tokens):
            position = context_len - tokens + token
            first = 0 if call.sliding_window is None else max(0, position + 1 - call.sliding_window)
            seen = slice(first, position + 1)
            scores = keys[head // group_size, seen].float() @ query[head, token].float() * call.scaling
            if call.softcap is not None:
                scores = torch.tanh(scores / call.softcap) * call.softcap
            if call.sinks is not None:
                scores = torch.cat([scores, call.sinks[head : head + 1].float()])
            weights = torch.softmax(scores, 0)[: position + 1 - first]
            out[token, head] = weights @ values[head // group_size, seen].float()
    return out.to(query.dtype)
