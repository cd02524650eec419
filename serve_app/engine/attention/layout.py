"""How a step's tokens lie in the packed input and in the KV cache: what the attention backends read.

The packed input is one row of T tokens: first the decoding rows' single tokens, then the prompt chunks. Nothing is
padded. The cache of one layer is a tensor [kv heads, blocks, block size, head dim]; a row's context is a list of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

PADDING_LIMIT = 0.6
"""A decode group holds rows whose context has at least this fraction of the blocks of the group's longest."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One row's tokens in this step: `num_tokens` new ones that end a context of `context_len` tokens in `block_ids`."""

    num_tokens: int
    context_len: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys [kv heads, blocks, block size, key dim] and values [kv heads, blocks, block size, value dim] of one layer."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer asks for besides its tensors.

    Attributes:
        scaling: factor of the scores.
        sliding_window: a token sees itself and this many tokens less one before it; None sees all.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [heads], one more score per head that takes mass and gives no value (GPT-OSS).
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(slots=True)
class DecodeGroup:
    """Decoding rows of similar context length, computed together.

    Attributes:
        start: index of the group's first token in the packed input; row i has token start + i.
        block_table: int64 [rows, blocks], padded with block 0.
        context_lens: int64 [rows].
        block_size: tokens of a block.
    """

    start: int
    block_table: torch.Tensor
    context_lens: torch.Tensor
    block_size: int
    _gather: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.block_table.shape[0]

    @property
    def padded_len(self) -> int:
        return self.block_table.shape[1] * self.block_size

    def gather_index(self, num_kv_heads: int, num_blocks: int) -> torch.Tensor:
        """Index [kv heads * rows * blocks] into a cache seen as [kv heads * blocks, ...]; made once a step."""
        key = (num_kv_heads, num_blocks)
        if key not in self._gather:
            heads = torch.arange(num_kv_heads, device=self.block_table.device) * num_blocks
            self._gather[key] = (heads[:, None, None] + self.block_table[None]).reshape(-1)
        return self._gather[key]

    def mask(self, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask [rows, padded length]: 0 where a row's token may look, -inf elsewhere; made once a step."""
        key = (sliding_window, dtype)
        if key not in self._masks:
            positions = torch.arange(self.padded_len, device=self.context_lens.device)
            visible = positions < self.context_lens[:, None]
            if sliding_window is not None:
                visible &= positions >= self.context_lens[:, None] - sliding_window
            mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            self._masks[key] = mask.masked_fill_(~visible, float("-inf"))
        return self._masks[key]


@dataclass(slots=True)
class PrefillSpan:
    """A prompt chunk: tokens [start, start + num_tokens) of the packed input, at the end of a context."""

    start: int
    num_tokens: int
    context_len: int
    block_ids: torch.Tensor
    """int64 [blocks]"""
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether the chunk is the whole context, so that nothing need be read from the cache."""
        return self.num_tokens == self.context_len

    def mask(self, sliding_window: int | None) -> torch.Tensor:
        """bool [tokens, context length]: True where a token may look; made once a step."""
        if sliding_window not in self._masks:
            device = self.block_ids.device
            query = torch.arange(self.context_len - self.num_tokens, self.context_len, device=device)[:, None]
            key = torch.arange(self.context_len, device=device)[None]
            visible = key <= query
            if sliding_window is not None:
                visible &= key > query - sliding_window
            self._masks[sliding_window] = visible
        return self._masks[sliding_window]


class PackedLayout:
    """Where each packed token's key and value are written, and what each row may look at.

    Args:
        segments: decoding rows (one token each) first, then prompt chunks.
        block_size: tokens of a cache block.
        device: where the index tensors live.
    """

    def __init__(self, segments: Sequence[Segment], block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        self._segments = segments
        self._num_decodes = next((i for i, s in enumerate(segments) if s.num_tokens > 1), len(segments))
        assert all(s.num_tokens > 1 for s in segments[self._num_decodes :]), "decoding rows come first"
        slots = [
            self._slot(s, position) for s in segments for position in range(s.context_len - s.num_tokens, s.context_len)
        ]
        self.slots = torch.tensor(slots, dtype=torch.int64, device=device)
        """int64 [T]: where each token's key and value go, as block * block size + place in the block."""
        self._write_index: dict[tuple[int, int], torch.Tensor] = {}

    @cached_property
    def rows(self) -> torch.Tensor:
        """int64 [rows, 4]: first token in the packed input, tokens, context length, start of the row's ids in `blocks`."""
        table, start, num_blocks = [], 0, 0
        for s in self._segments:
            table.append((start, s.num_tokens, s.context_len, num_blocks))
            start += s.num_tokens
            num_blocks += len(s.block_ids)
        return torch.tensor(table, dtype=torch.int64, device=self.device)

    @cached_property
    def blocks(self) -> torch.Tensor:
        """int64: the block ids of all rows, one row after the other."""
        ids = [block for s in self._segments for block in s.block_ids]
        return torch.tensor(ids, dtype=torch.int64, device=self.device)

    @cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        """The decoding rows, those of similar length together."""
        return self._group(self._segments[: self._num_decodes])

    @cached_property
    def prefill_spans(self) -> list[PrefillSpan]:
        """The prompt chunks."""
        spans, start = [], self._num_decodes
        for s in self._segments[self._num_decodes :]:
            blocks = torch.tensor(s.block_ids, dtype=torch.int64, device=self.device)
            spans.append(PrefillSpan(start, s.num_tokens, s.context_len, blocks))
            start += s.num_tokens
        return spans

    def _slot(self, segment: Segment, position: int) -> int:
        return segment.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _group(self, segments: Sequence[Segment]) -> list[DecodeGroup]:
        """Cuts the decoding rows, which come longest first, where padding would waste too much."""
        needed = [-(-s.context_len // self.block_size) for s in segments]
        assert needed == sorted(needed, reverse=True), "decoding rows come longest first"
        groups, start = [], 0
        while start < len(segments):
            longest, end = needed[start], start + 1
            while end < len(segments) and needed[end] >= PADDING_LIMIT * longest:
                end += 1
            table = [
                [*s.block_ids[:n], *[0] * (longest - n)]
                for s, n in zip(segments[start:end], needed[start:end], strict=True)
            ]
            lens = [s.context_len for s in segments[start:end]]
            groups.append(
                DecodeGroup(
                    start,
                    torch.tensor(table, dtype=torch.int64, device=self.device),
                    torch.tensor(lens, dtype=torch.int64, device=self.device),
                    self.block_size,
                )
            )
            start = end
        return groups

    def write(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes this step's keys [kv heads, T, key dim] and values [kv heads, T, value dim] into the cache."""
        for stored, new in ((cache.keys, key), (cache.values, value)):
            num_kv_heads, num_blocks, block_size, head_dim = stored.shape
            index = self._index_for(num_kv_heads, num_blocks * block_size)
            stored.view(-1, head_dim).index_copy_(0, index, new.reshape(-1, head_dim))

    def _index_for(self, num_kv_heads: int, num_slots: int) -> torch.Tensor:
        key = (num_kv_heads, num_slots)
        if key not in self._write_index:
            heads = torch.arange(num_kv_heads, device=self.device) * num_slots
            self._write_index[key] = (heads[:, None] + self.slots[None]).reshape(-1)
        return self._write_index[key]


def gather_context(stored: torch.Tensor, block_ids: torch.Tensor, context_len: int) -> torch.Tensor:
    """One row's context out of a cache tensor: [kv heads, context_len, head dim]."""
    num_kv_heads, _, _, head_dim = stored.shape
    return stored.index_select(1, block_ids).view(num_kv_heads, -1, head_dim)[:, :context_len]


def scores_to_weights(scores: torch.Tensor, mask: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Attention weights from scaled scores [kv heads, ..., group, context], with soft cap, additive mask and sinks."""
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores + mask
    if call.sinks is None:
        return torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)
    num_kv_heads, group = scores.shape[0], scores.shape[-2]
    sinks = call.sinks.to(scores.dtype).view(num_kv_heads, *[1] * (scores.dim() - 3), group, 1)
    with_sink = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    return torch.softmax(with_sink, -1, dtype=torch.float32).to(scores.dtype)[..., :-1]
