"""Small modules of a CPU model, each replaced by one call of our kernels.

Nothing is recognised by its name alone: a candidate is taken only if it gives what the original gives on random inputs.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn

from serve_app.engine.linear import PackedLinear
from serve_app.engine.native.kernels import Kernels

TRIAL_ROWS = 3


class NativeRMSNorm(nn.Module):
    """x / rms(x) * (weight + offset), float32, over the last dimension."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor, epsilon: float, offset: float) -> None:
        super().__init__()
        self._kernels = kernels
        self.weight = weight
        self.epsilon, self.offset = epsilon, offset

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., dim] -> [..., dim]"""
        return self._kernels.rms_norm(hidden_states, self.weight, self.epsilon, self.offset)


class NativeGatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), the feed-forward part of Llama and its many relatives."""

    def __init__(self, kernels: Kernels, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self._kernels = kernels
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., dim] -> [..., dim]"""
        mixed: torch.Tensor = self.down_proj(self._kernels.silu_mul_(self.gate_proj(x), self.up_proj(x)))
        return mixed


def fuse(model: nn.Module, kernels: Kernels) -> int:
    """Replaces RMS norms and gated feed-forward parts of a float32 CPU model; returns how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fused = fused_norm(child, kernels) or _fused_mlp(child, kernels)
            if fused is not None:
                setattr(parent, name, fused)
                count += 1
    return count


def fused_norm(module: object, kernels: Kernels) -> NativeRMSNorm | None:
    """The replacement of a module, if it is an RMS norm."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return None
    if not isinstance(module, nn.Module) or not isinstance(epsilon, float) or weight.dtype != torch.float32:
        return None
    for offset in (0.0, 1.0):  # Gemma's norm multiplies by 1 + weight
        candidate = NativeRMSNorm(kernels, weight.detach().clone(), epsilon, offset)
        if _agree(module, candidate, weight.shape[0]):
            return candidate
    return None


def _fused_mlp(module: nn.Module, kernels: Kernels) -> nn.Module | None:
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (isinstance(gate, PackedLinear) and isinstance(up, PackedLinear) and isinstance(down, PackedLinear)):
        return None
    candidate = NativeGatedMlp(kernels, gate, up, down)
    return candidate if _agree(module, candidate, gate.in_features) else None


def _agree(original: nn.Module, candidate: nn.Module, dim: int) -> bool:
    """Whether both take one tensor and give the same for random inputs, small and large."""
    if len(inspect.signature(original.forward).parameters) != 1:
        return False
    inputs = torch.randn(TRIAL_ROWS, dim, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[0.01], [1.0], [30.0]]
    )
    with torch.inference_mode():
        return torch.allclose(original(inputs), candidate(inputs), rtol=1e-4, atol=1e-5)
