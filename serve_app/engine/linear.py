"""Linear layers with weights prepacked for the CPU's matrix kernels (oneDNN).

A plain `F.linear` on CPU repacks or strides through its weight at every call; packed once, a step of few rows is
1.3 to 2 times as fast (benchmarks/notes.md). The result is the same product, summed in another order.
"""

from __future__ import annotations

import torch
from torch import nn

PACKED_FOR_ROWS = 32
"""The row count that the packed layout is chosen for; it serves other counts as well (measured from 1 to 512)."""


class PackedLinear(nn.Module):
    """Stands in for `nn.Linear` on CPU, inference only: [..., in features] -> [..., out features].

    Args:
        weight: [out features, in features], float32 or bfloat16.
        bias: [out features] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR_ROWS)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in features] -> [..., out features]"""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")
        return product

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack_linears(model: nn.Module) -> int:
    """Replaces every plain `nn.Linear` of a CPU model by a packed one; returns how many.

    Subclasses and layers whose weight something else reads (a tied embedding keeps its own) stay correct: the original
    tensor lives as long as somebody refers to it.
    """
    if not torch._C._has_mkldnn:
        return 0
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype in (torch.float32, torch.bfloat16):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
                count += 1
    return count
