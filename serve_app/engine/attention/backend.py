"""The small interface behind which each device has its own file, and its registration with `transformers`.

`transformers` calls `packed_attention` once per layer (see `AttentionInterface`); the step's layout and the caches arrive
as one more keyword argument, so no global state is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from serve_app.engine.attention.layout import AttentionCall, DecodeGroup, LayerCache, PackedLayout, PrefillSpan
from serve_app.errors import UnsupportedModelError

ATTENTION_NAME = "serve_app_packed"


class AttentionBackend(Protocol):
    """Attention over the cache, on one kind of device. Shapes: heads = kv heads * group."""

    def decode(self, query: torch.Tensor, cache: LayerCache, group: DecodeGroup, call: AttentionCall) -> torch.Tensor:
        """One new token per row. query [heads, rows, key dim] -> [rows, heads, value dim]."""

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


@dataclass(slots=True)
class AttentionStep:
    """What every layer's attention needs in one step."""

    layout: PackedLayout
    caches: dict[int, LayerCache]
    backend: AttentionBackend


@dataclass(slots=True)
class LayerProbe:
    """What a layer showed when it was called for the first time: the shapes of its cache, and its window."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    sliding_window: int | None


@dataclass(slots=True)
class AttentionProbe:
    """Stands in for a step when a model is first loaded: records each layer's shapes and gives zeros."""

    layers: dict[int, LayerProbe] = field(default_factory=dict)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    attention_step: AttentionStep | AttentionProbe | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of `AttentionInterface`: query [1, heads, T, dim] -> ([1, T, heads, value dim], None)."""
    if attention_step is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not pass extra arguments on to its attention")
    layer_idx = getattr(module, "layer_idx", None)
    if not isinstance(layer_idx, int):
        raise UnsupportedModelError(f"{type(module).__name__} does not say which layer it is (layer_idx)")
    call = AttentionCall(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    queries, keys, values = query[0], key[0], value[0]
    if isinstance(attention_step, AttentionProbe):
        attention_step.layers[layer_idx] = LayerProbe(
            keys.shape[0], keys.shape[-1], values.shape[-1], keys.dtype, sliding_window
        )
        return torch.zeros(
            1, queries.shape[1], queries.shape[0], values.shape[-1], dtype=query.dtype, device=query.device
        ), None
    return _attend(attention_step, attention_step.caches[layer_idx], queries, keys, values, call)[None], None


def _attend(
    step: AttentionStep,
    cache: LayerCache,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    call: AttentionCall,
) -> torch.Tensor:
    layout, backend = step.layout, step.backend
    layout.write(cache, keys, values)
    parts = [
        backend.decode(queries[:, group.start : group.start + group.num_rows], cache, group, call)
        for group in layout.decode_groups
    ]
    for span in layout.prefill_spans:
        here = slice(span.start, span.start + span.num_tokens)
        new = LayerCache(keys[:, here], values[:, here])
        parts.append(backend.prefill(queries[:, here], new, cache, span, call))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _no_mask(*_: Any, **__: Any) -> None:
    """The mask function that belongs to `packed_attention`: the layout knows who sees whom."""


AttentionInterface.register(ATTENTION_NAME, packed_attention)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
