"""Memory that the system gets back: weights are used once, when they are packed, and then only take room."""

from __future__ import annotations

import ctypes
import gc
import mmap

import torch
from torch import nn

MADV_PAGEOUT = 21
"""Linux: these pages will not be read soon. Pages of a mapped file go at once; nothing is lost in any case."""


def page_out(tensor: torch.Tensor) -> None:
    """Tells the system that a CPU tensor's memory is not needed soon; where it does not listen nothing happens."""
    if tensor.device.type != "cpu":
        return
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.numel() * tensor.itemsize - first
    if advise is not None and length > 0:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(length), MADV_PAGEOUT)


def return_freed_memory(model: nn.Module) -> None:
    """Gives the memory of a CPU model's replaced weights back to the system.

    What is left of the weights is copied, because one tensor of a mapped file keeps the whole file mapped; and glibc's
    allocator is told to keep nothing.
    """
    for parameter in model.parameters():
        if parameter.device.type != "cpu":
            return
        parameter.data = parameter.data.clone()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
