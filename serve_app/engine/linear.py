"""Linear layers with weights prepacked for the CPU.

A plain `F.linear` on CPU repacks or strides through its weight at every call; packed once, a step of few rows is
1.3 to 2 times as fast (benchmarks/notes.md). The result is the same product, summed in another order.
"""

from __future__ import annotations

import torch
from torch import nn

from serve_app.engine.native.kernels import Arithmetic, Kernels

ONEDNN_ROWS = 32
"""The row count that oneDNN's packed layout is chosen for; it serves other counts as well (measured from 1 to 512)."""


class PackedLinear(nn.Module):
    """Stands in for `nn.Linear` on CPU, inference only: [..., in features] -> [..., out features]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class OneDnnLinear(PackedLinear):
    """On oneDNN's kernels.

    Args:
        weight: [out features, in features], float32 or bfloat16.
        bias: [out features] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ONEDNN_ROWS)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in features] -> [..., out features]"""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")
        return product


class NativeLinear(PackedLinear):
    """On our own kernels; a row's result does not depend on the rows beside it.

    Args:
        kernels: the compiled library.
        weight: [out features, in features], float32 or bfloat16.
        bias: [out features] or None.
        arithmetic: what the product multiplies in.
    """

    def __init__(
        self,
        kernels: Kernels,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        arithmetic: Arithmetic = Arithmetic.FLOAT32,
    ) -> None:
        super().__init__(weight, None if bias is None else bias.detach().float())
        self._kernels = kernels
        self._packed = kernels.pack(weight.detach(), arithmetic)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in features] -> [..., out features]"""
        return self._kernels.linear(inputs.float(), self._packed, self.bias, self.out_features).to(inputs.dtype)


def pack_linears(model: nn.Module, kernels: Kernels | None, arithmetic: Arithmetic = Arithmetic.FLOAT32) -> int:
    """Replaces every plain `nn.Linear` of a CPU model by a packed one; returns how many.

    `arithmetic` is that of our own kernels, which take float32 and bfloat16.

    Subclasses and layers whose weight something else reads (a tied embedding keeps its own) stay correct: the original
    tensor lives as long as somebody refers to it.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            packed = _packed(child, kernels, arithmetic) if type(child) is nn.Linear else None
            if packed is not None:
                setattr(parent, name, packed)
                count += 1
    return count


def _packed(linear: nn.Linear, kernels: Kernels | None, arithmetic: Arithmetic) -> PackedLinear | None:
    if kernels is not None and linear.weight.dtype in (torch.float32, torch.bfloat16):
        return NativeLinear(kernels, linear.weight, linear.bias, arithmetic)
    if torch._C._has_mkldnn and linear.weight.dtype in (torch.float32, torch.bfloat16):
        return OneDnnLinear(linear.weight, linear.bias)
    return None
