"""The small interface behind which each device has its own file, and its registration with `transformers`.

`transformers` calls `packed_attention` once per layer (see `AttentionInterface`); the step's layout and the caches arrive
as one more keyword argument, so no global state is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from serve_app.engine.attention.layout import AttentionCall, LayerCache, PackedLayout
from serve_app.engine.stop_flag import StopFlag
from serve_app.errors import UnsupportedModelError

ATTENTION_NAME = "serve_app_packed"


class AttentionBackend(Protocol):
    """Attention over the cache, on one kind of device."""

    def attend(
        self,
        query: torch.Tensor,
        new: LayerCache,
        cache: LayerCache,
        layout: PackedLayout,
        call: AttentionCall,
    ) -> torch.Tensor:
        """Writes the step's new keys and values into the cache, and attends to each row's whole context there.

        Args:
            query: [heads, T, key dim], heads = kv heads * group.
            new: this step's keys and values, [kv heads, T, dim].
            cache: of the layer.

        Returns:
            [T, heads, value dim]
        """


@dataclass(slots=True)
class AttentionStep:
    """What every layer's attention needs in one step."""

    layout: PackedLayout
    caches: dict[int, LayerCache]
    backend: AttentionBackend
    stop: StopFlag = field(default_factory=StopFlag)


@dataclass(slots=True)
class LayerProbe:
    """What a layer showed when it was called for the first time: the shapes of its cache, and what it asks for."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    call: AttentionCall

    @property
    def bytes_per_token(self) -> int:
        """Of the layer's cache."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def new_cache(self, num_blocks: int, block_size: int, device: torch.device) -> LayerCache:
        """A zeroed cache (padding that is gathered is multiplied by a weight of 0, so it must not hold NaN)."""

        def zeros(head_dim: int) -> torch.Tensor:
            shape = (self.num_kv_heads, num_blocks, block_size, head_dim)
            if device.type != "cpu":
                return torch.zeros(shape, dtype=self.dtype, device=device)
            # numpy asks the system for zeroed memory, which takes no room until it is written; torch.zeros writes it
            raw = torch.from_numpy(numpy.zeros(math.prod(shape) * self.dtype.itemsize, numpy.uint8))
            return raw.view(self.dtype).view(shape)

        return LayerCache(zeros(self.key_dim), zeros(self.value_dim))


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
        attention_step.layers[layer_idx] = LayerProbe(keys.shape[0], keys.shape[-1], values.shape[-1], keys.dtype, call)
        return torch.zeros(
            1, queries.shape[1], queries.shape[0], values.shape[-1], dtype=query.dtype, device=query.device
        ), None
    step = attention_step
    step.stop.check()
    mixed = step.backend.attend(queries, LayerCache(keys, values), step.caches[layer_idx], step.layout, call)
    return mixed[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """The mask function that belongs to `packed_attention`: the layout knows who sees whom."""


AttentionInterface.register(ATTENTION_NAME, packed_attention)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
