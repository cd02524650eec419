"""Attention out of torch operations: a step's decoding rows in groups of similar length, its prompt chunks one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from serve_app.engine.attention.layout import AttentionCall, DecodeGroup, LayerCache, PackedLayout, PrefillSpan


class GroupedAttention(ABC):
    """What the backends that are made of torch operations share. Shapes: heads = kv heads * group."""

    def attend(
        self,
        query: torch.Tensor,
        new: LayerCache,
        cache: LayerCache,
        layout: PackedLayout,
        call: AttentionCall,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        layout.write(cache, new.keys, new.values)
        parts = [
            self.decode(query[:, group.start : group.start + group.num_rows], cache, group, call)
            for group in layout.decode_groups
        ]
        for span in layout.prefill_spans:
            here = slice(span.start, span.start + span.num_tokens)
            chunk = LayerCache(new.keys[:, here], new.values[:, here])
            parts.append(self.prefill(query[:, here], chunk, cache, span, call))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @abstractmethod
    def decode(self, query: torch.Tensor, cache: LayerCache, group: DecodeGroup, call: AttentionCall) -> torch.Tensor:
        """One new token per row. query [heads, rows, key dim] -> [rows, heads, value dim]."""

    @abstractmethod
    def prefill(
        self,
        query: torch.Tensor,
        new: LayerCache,
        cache: LayerCache,
        span: PrefillSpan,
        call: AttentionCall,
    ) -> torch.Tensor:
        """A prompt chunk. query [heads, tokens, key dim] -> [tokens, heads, value dim].

        `new` holds the chunk's own keys and values [kv heads, tokens, dim], `cache` (already written) the whole context.
        """
