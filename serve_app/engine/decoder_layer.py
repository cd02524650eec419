"""Whole decoder layers of a CPU model, replaced by one call of our kernels for all that follow each other.

The layers of Llama and its many relatives are alike: norm, attention with rotary positions, norm, gated feed-forward. What
has those parts is tried against its replacement on random inputs, and replaced only if both give the same.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from serve_app.engine.attention.backend import AttentionProbe, AttentionStep, LayerProbe
from serve_app.engine.attention.layout import LayerCache, PackedLayout, Segment
from serve_app.engine.attention.native import NATIVE_DTYPES, NativeAttention, attention_arguments, set_cache, set_step
from serve_app.engine.fusion import NativeRMSNorm, fused_norm
from serve_app.engine.memory import page_out
from serve_app.engine.native.kernels import Arithmetic, AttentionArguments, Kernels, LayerArguments

TRIAL_TOKENS = 7
EXACT_TOLERANCE, ROUNDED_TOLERANCE = 1e-4, 0.05
"""Mean difference of what a layer and its replacement add, over its standard deviation. A wrong activation, position or
norm makes 0.1 and more."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


class NativeDecoderLayers(nn.Module):
    """Decoder layers of one shape that follow each other, in one call: while it runs, Python does other things.

    Between its products everything is float32, also when the model around it is bfloat16.
    """

    def __init__(self, kernels: Kernels, parts: Sequence[NativeLayer]) -> None:
        super().__init__()
        self.kernels = kernels
        self.parts = list(parts)
        self._layers = (LayerArguments * len(parts))(*(part.layer for part in parts))
        self._attentions = (AttentionArguments * len(parts))(*(part.attention for part in parts))
        self._caches: dict[int, LayerCache] = {}  # those that the arguments point to

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_step: AttentionStep,
        **_: Any,
    ) -> torch.Tensor:
        """[1, T, dim] -> [1, T, dim]; position_embeddings: cos and sin, each [1, T, rotary]."""
        cos, sin = (part.float().contiguous() for part in position_embeddings)
        if attention_step.caches is not self._caches:
            self._caches = attention_step.caches
            for part, arguments in zip(self.parts, self._attentions, strict=True):
                set_cache(arguments, self._caches[part.layer_idx])
        set_step(self._attentions[0], attention_step.layout)  # the kernel gives it to all
        hidden = hidden_states.to(torch.float32, copy=True)
        stop = attention_step.stop
        return self.kernels.decoder_layers_(self._layers, self._attentions, hidden, cos, sin, stop).to(hidden_states.dtype)


class NativeLayer:
    """What the kernels want of one layer.

    Args:
        kernels: the compiled library.
        layer: the original; its weights are copied into packed ones.
        probe: what its attention asks for.
        norms: of the layer's input, of the middle, and of each query and key head or None.
        rotary: values of each head that rotate.
        arithmetic: what the products multiply in.
    """

    def __init__(
        self,
        kernels: Kernels,
        layer: nn.Module,
        probe: LayerProbe,
        norms: tuple[NativeRMSNorm, NativeRMSNorm, NativeRMSNorm | None, NativeRMSNorm | None],
        rotary: int,
        arithmetic: Arithmetic,
    ) -> None:
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        self._kernels, self._arithmetic = kernels, arithmetic
        self._kept: list[Any] = [norms, probe]  # what the arguments point to
        self.layer_idx: int = attention.layer_idx
        num_heads = attention.q_proj.out_features // probe.key_dim
        heads = (num_heads, probe.num_kv_heads, probe.key_dim, rotary)
        self.shape = (attention.q_proj.in_features, mlp.gate_proj.out_features, *heads)
        before, middle, query, key = norms
        self.layer = LayerArguments(
            input_norm=before.weight.data_ptr(),
            middle_norm=middle.weight.data_ptr(),
            query_norm=None if query is None else query.weight.data_ptr(),
            key_norm=None if key is None else key.weight.data_ptr(),
            dim=attention.q_proj.in_features,
            inner=mlp.gate_proj.out_features,
            rotary=rotary,
            norm_epsilon=before.epsilon,
            norm_offset=before.offset,
            head_norm_epsilon=0.0 if query is None else query.epsilon,
            head_norm_offset=0.0 if query is None else query.offset,
        )
        self._pack("qkv", attention.q_proj, attention.k_proj, attention.v_proj)
        self._pack("output", attention.o_proj)
        self._pack("gate_up", mlp.gate_proj, mlp.up_proj)
        self._pack("down", mlp.down_proj)
        cache = probe.new_cache(1, 1, torch.device("cpu"))
        self.attention = attention_arguments(probe.call, num_heads, cache, torch.float32)

    def _pack(self, name: str, *linears: nn.Linear) -> None:
        weights: list[torch.Tensor] = [linear.weight for linear in linears]
        packed = self._kernels.pack(torch.cat(weights), self._arithmetic)
        self._kept.append(packed)
        setattr(self.layer, name, packed.arguments)
        if any(linear.bias is not None for linear in linears):
            biases: list[torch.Tensor] = [
                torch.zeros(linear.out_features) if linear.bias is None else linear.bias.float() for linear in linears
            ]
            bias = torch.cat(biases)
            self._kept.append(bias)
            setattr(self.layer, f"{name}_bias", bias.data_ptr())


def fuse_layers(
    model: PreTrainedModel, backend: NativeAttention, probes: Mapping[int, LayerProbe], arithmetic: Arithmetic
) -> int:
    """Replaces the decoder layers of a CPU model that have a replacement; returns how many.

    Args:
        model: float32 or bfloat16.
        backend: attention on the same kernels.
        probes: of each layer, with the type that its cache will have.
        arithmetic: what the products multiply in.
    """
    count = 0
    calls = _record_calls(model)
    parents = [module for module in model.modules() if any(child in calls for child in module.children())]
    for parent in parents:
        names = [name for name, child in parent.named_children() if child in calls]
        positions = []
        for name in names:  # nothing holds a layer that is replaced, so that its weights go as soon as they are packed
            layer = getattr(parent, name)
            call = calls.pop(layer)
            candidate = _candidate(layer, call, backend.kernels, probes, arithmetic)
            if candidate is not None and _agree(layer, candidate, call, backend, probes, arithmetic):
                setattr(parent, name, candidate)
                for parameter in layer.parameters():
                    page_out(parameter)
                positions.append(call["position_embeddings"])
                count += 1
        if isinstance(parent, nn.ModuleList) and len(positions) == len(parent) > 1:
            _join(parent, positions)
    return count


def _join(layers: nn.ModuleList, positions: Sequence[object]) -> None:
    """Makes one module of a whole list of replaced layers, if all are of one shape and get the same positions."""
    replaced = [layer for layer in layers if isinstance(layer, NativeDecoderLayers)]
    parts = [part for layer in replaced for part in layer.parts]
    if len(parts) == len(layers) and len({part.shape for part in parts}) == 1 and len(set(map(id, positions))) == 1:
        joined = NativeDecoderLayers(replaced[0].kernels, parts)
        while len(layers):
            del layers[0]
        layers.append(joined)


def _record_calls(model: PreTrainedModel) -> dict[nn.Module, dict[str, Any]]:
    """The keyword arguments with which the model calls what may be a decoder layer, for TRIAL_TOKENS tokens."""
    calls: dict[nn.Module, dict[str, Any]] = {}

    def record(layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if len(arguments) == 1 and keywords.get("position_embeddings") is not None:
            calls[layer] = keywords

    hooks = [
        module.register_forward_pre_hook(record, with_kwargs=True) for module in model.modules() if _looks_alike(module)
    ]
    positions = torch.arange(TRIAL_TOKENS)[None]
    model(input_ids=positions * 0, position_ids=positions, use_cache=False, attention_step=AttentionProbe())
    for hook in hooks:
        hook.remove()
    return calls


def _looks_alike(layer: nn.Module) -> bool:
    """Whether a module has the parts of a decoder layer, and no others."""
    children = dict(layer.named_children())
    if set(children) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attention, mlp = dict(children["self_attn"].named_children()), dict(children["mlp"].named_children())
    linears = [attention.pop(name, None) for name in PROJECTIONS] + [mlp.pop(name, None) for name in FEED_FORWARD]
    extra = {name for name, child in attention.items() if next(child.parameters(), None) is not None}
    return (
        all(type(linear) is nn.Linear and linear.weight.dtype in NATIVE_DTYPES for linear in linears)
        and extra in (set(), {"q_norm", "k_norm"})
        and set(mlp) <= {"act_fn"}
    )


def _candidate(
    layer: nn.Module, call: dict[str, Any], kernels: Kernels, probes: Mapping[int, LayerProbe], arithmetic: Arithmetic
) -> NativeDecoderLayers | None:
    attention: Any = layer.self_attn
    probe = probes[attention.layer_idx]
    head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    before, middle, query, key = (
        fused_norm(copy.deepcopy(module).float(), kernels) if isinstance(module, nn.Module) else None
        for module in (layer.input_layernorm, layer.post_attention_layernorm, *head_norms)
    )
    if before is None or middle is None or (head_norms[0] is not None and (query is None or key is None)):
        return None
    if probe.key_dim != probe.value_dim:
        return None
    rotary = call["position_embeddings"][0].shape[-1]
    part = NativeLayer(kernels, layer, probe, (before, middle, query, key), rotary, arithmetic)
    return NativeDecoderLayers(kernels, [part])


def _agree(
    layer: nn.Module,
    candidate: NativeDecoderLayers,
    call: dict[str, Any],
    backend: NativeAttention,
    probes: Mapping[int, LayerProbe],
    arithmetic: Arithmetic,
) -> bool:
    """Whether both do the same to random inputs of TRIAL_TOKENS tokens, as far as the arithmetic allows."""
    attention: Any = layer.self_attn
    weight = attention.q_proj.weight
    hidden = torch.randn(1, TRIAL_TOKENS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    changes = []
    for module in (layer, candidate):
        layout = PackedLayout([Segment(TRIAL_TOKENS, TRIAL_TOKENS, [1, 0])], TRIAL_TOKENS - 1, hidden.device)
        caches = {attention.layer_idx: probes[attention.layer_idx].new_cache(2, TRIAL_TOKENS - 1, hidden.device)}
        step = AttentionStep(layout, caches, backend)
        output = module(hidden.clone(), **{**call, "attention_step": step})
        if not isinstance(output, torch.Tensor):
            return False
        changes.append(output.float() - hidden.float())
    expected, given = changes
    is_exact = weight.dtype == torch.float32 and arithmetic == Arithmetic.FLOAT32
    difference = float((given - expected).abs().mean() / expected.std().clamp_min(1e-6))
    return difference < (EXACT_TOLERANCE if is_exact else ROUNDED_TOLERANCE)
