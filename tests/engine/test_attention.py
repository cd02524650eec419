"""Every attention backend against the plain reference, over scattered blocks."""

import random

import pytest
import torch

from serve_app.engine.attention.backend import AttentionStep, packed_attention
from serve_app.engine.attention.cpu import CpuAttention
from serve_app.engine.attention.cuda import CudaAttention
from serve_app.engine.attention.layout import LayerCache, PackedLayout, Segment
from serve_app.engine.attention.native import NativeAttention
from serve_app.engine.attention.reference import ReferenceAttention
from serve_app.engine.native.kernels import load_kernels

BLOCK_SIZE, NUM_BLOCKS = 4, 64
KERNELS = load_kernels()
assert KERNELS is not None, "the tests want a C++ compiler"
BACKENDS = [CpuAttention(), CudaAttention(), NativeAttention(KERNELS)]


class Layer(torch.nn.Module):
    layer_idx = 0


def run(backend, segments, call, *, heads=6, kv_heads=2, key_dim=16, value_dim=16):
    """Attention over caches filled with the same random numbers, whichever backend."""
    torch.manual_seed(0)
    cache = LayerCache(
        torch.randn(kv_heads, NUM_BLOCKS, BLOCK_SIZE, key_dim), torch.randn(kv_heads, NUM_BLOCKS, BLOCK_SIZE, value_dim)
    )
    total = sum(segment.num_tokens for segment in segments)
    query, key = torch.randn(1, heads, total, key_dim), torch.randn(1, kv_heads, total, key_dim)
    value = torch.randn(1, kv_heads, total, value_dim)
    step = AttentionStep(PackedLayout(segments, BLOCK_SIZE, torch.device("cpu")), {0: cache}, backend)
    out, _ = packed_attention(Layer(), query, key, value, None, attention_step=step, **call)
    assert out.shape == (1, total, heads, value_dim)
    return out


def segments_of(*rows):
    """(new tokens, context length) each, over blocks in random order that no two rows share."""
    blocks = random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    segments = []
    for num_tokens, context_len in rows:
        count = -(-context_len // BLOCK_SIZE)
        segments.append(Segment(num_tokens, context_len, [blocks.pop() for _ in range(count)]))
    return segments


MIXES = {
    "one row": [(1, 1)],
    "decode of one length": [(1, 9), (1, 9), (1, 9)],
    "decode of many lengths": [(1, 60), (1, 40), (1, 9), (1, 8), (1, 1)],
    "whole prompts": [(5, 5), (12, 12)],
    "chunks": [(3, 11), (4, 30)],
    "all together": [(1, 33), (1, 30), (1, 2), (7, 7), (6, 25), (2, 3)],
}
CALLS = {
    "plain": {},
    "scaled": {"scaling": 0.5},
    "window": {"sliding_window": 5},
    "wide window": {"sliding_window": 500},
    "soft cap": {"softcap": 2.0},
    "sinks": {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -2.0])},
    "everything": {"sliding_window": 6, "softcap": 3.0, "s_aux": torch.ones(6), "scaling": 0.2},
}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: type(backend).__name__)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_equals_the_reference(backend, call, mix):
    segments = segments_of(*mix)
    torch.testing.assert_close(
        run(backend, segments, call), run(ReferenceAttention(), segments, call), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: type(backend).__name__)
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "kv_heads": 4},
        {"heads": 8, "kv_heads": 1},
        {"heads": 4, "kv_heads": 2, "key_dim": 24, "value_dim": 8},
    ],
    ids=str,
)
def test_head_layouts(backend, shape):
    segments = segments_of(*MIXES["all together"])
    torch.testing.assert_close(
        run(backend, segments, {}, **shape), run(ReferenceAttention(), segments, {}, **shape), rtol=1e-4, atol=1e-5
    )


def test_rows_of_very_different_lengths_are_not_padded_to_the_longest():
    layout = PackedLayout(segments_of((1, 100), (1, 98), (1, 9), (1, 8)), BLOCK_SIZE, torch.device("cpu"))
    assert [(group.num_rows, group.padded_len) for group in layout.decode_groups] == [(2, 100), (2, 12)]
