"""The block ledger: who holds which KV-cache block, and what each block can be reused for. No tensors.

A block is in exactly one of three states:

    fresh      free, holds nothing worth keeping
    cached     free, but its content is known by hash and may be shared again; evicted least recently used first
    held       referenced by one or more sequences

`num_free` counts the first two, so `num_free + num_held == num_blocks` always; `check()` proves it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence


class OutOfBlocksError(Exception):
    """Fewer blocks are free than asked for. The scheduler preempts; the caller never sees it."""


class BlockLedger:
    """Allocates, shares and releases the blocks `0 .. num_blocks - 1`, each of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._fresh: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    def __repr__(self) -> str:
        return f"<BlockLedger {self.num_held} held, {len(self._cached)} cached, {len(self._fresh)} fresh>"

    @property
    def num_free(self) -> int:
        return len(self._fresh) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `hashes`. They are not held yet: `share` them."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_after_sharing(self, blocks: Sequence[int]) -> int:
        """Free blocks that remain once `blocks` are shared."""
        return self.num_free - sum(1 for block in blocks if self._references[block] == 0)

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to blocks that `match` found."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks, fresh ones first, then the least recently used cached ones; in ascending order.

        Blocks come back last one first. In ascending order a context lies in as few pieces as it can, and memory reads
        ahead best.

        Raises:
            OutOfBlocksError: fewer are free; nothing was taken.
        """
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks asked, {self.num_free} free")
        blocks = sorted(self._fresh.popleft() if self._fresh else self._evict() for _ in range(count))
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block

    def register(self, block: int, block_hash: bytes) -> None:
        """Makes a held, full block known by its hash. The first block with a hash keeps it."""
        assert self._references[block] > 0
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference of each. The last blocks of a sequence become the first to be evicted."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._fresh.append(block)

    def forget(self) -> None:
        """Forgets all cached content (after a step that failed half way, nothing it wrote is trusted)."""
        for block in self._cached:
            self._fresh.append(block)
        self._cached.clear()
        self._hash_of.clear()
        self._block_of.clear()

    def check(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Proves the sums; with `holders` (each sequence's blocks) also that nothing leaked. Raises AssertionError."""
        fresh, cached = set(self._fresh), set(self._cached)
        held = {block for block, count in enumerate(self._references) if count > 0}
        assert len(fresh) == len(self._fresh) and not fresh & cached and not held & (fresh | cached)
        assert self.num_free + len(held) == self.num_blocks, "free + held != total"
        assert all(self._block_of[block_hash] == block for block, block_hash in self._hash_of.items())
        assert len(self._hash_of) == len(self._block_of) and cached <= self._hash_of.keys()
        if holders is not None:
            counts = [0] * self.num_blocks
            for blocks in holders:
                for block in blocks:
                    counts[block] += 1
            assert counts == self._references, "a block is held by nobody, or by somebody unknown"
