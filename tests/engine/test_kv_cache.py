"""The block ledger: its sums hold whatever is done with it."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from serve_app.engine.kv_cache import BlockLedger, OutOfBlocksError


def test_allocate_takes_all_or_nothing():
    ledger = BlockLedger(4, 16)
    ledger.allocate(3)
    with pytest.raises(OutOfBlocksError):
        ledger.allocate(2)
    assert ledger.num_free == 1
    ledger.check()


def test_released_blocks_stay_known_until_they_are_needed():
    ledger = BlockLedger(4, 16)
    blocks = ledger.allocate(2)
    ledger.register(blocks[0], b"a")
    ledger.register(blocks[1], b"b")
    ledger.release(blocks)
    assert ledger.match([b"a", b"b", b"c"]) == blocks
    ledger.allocate(3)  # two fresh ones and one cached: the end of a sequence goes first
    assert ledger.match([b"a", b"b"]) == blocks[:1]
    ledger.check()


def test_least_recently_used_is_evicted_first():
    ledger = BlockLedger(2, 16)
    first, second = ledger.allocate(2)
    ledger.register(first, b"a")
    ledger.register(second, b"b")
    ledger.release([first])
    ledger.release([second])
    ledger.share([first])  # used again
    ledger.release([first])
    ledger.allocate(1)
    assert ledger.match([b"a"]) == [first]
    assert ledger.match([b"b"]) == []


def test_shared_blocks_live_as_long_as_one_holder():
    ledger = BlockLedger(2, 16)
    blocks = ledger.allocate(1)
    ledger.share(blocks)
    ledger.release(blocks)
    assert ledger.num_held == 1
    ledger.release(blocks)
    assert ledger.num_held == 0


def test_a_block_is_not_released_twice():
    ledger = BlockLedger(2, 16)
    blocks = ledger.allocate(1)
    ledger.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        ledger.release(blocks)


def test_check_finds_a_leak():
    ledger = BlockLedger(2, 16)
    ledger.allocate(1)
    with pytest.raises(AssertionError, match="held by nobody"):
        ledger.check([])


class LedgerMachine(RuleBasedStateMachine):
    """Any order of allocate, register, share, release and forget."""

    def __init__(self):
        super().__init__()
        self.ledger = BlockLedger(8, 4)
        self.holders = []
        self.names = 0

    @rule(count=st.integers(1, 4))
    def allocate(self, count):
        try:
            self.holders.append(self.ledger.allocate(count))
        except OutOfBlocksError:
            assert count > self.ledger.num_free

    @rule(data=st.data())
    def register(self, data):
        if self.holders:
            holder = data.draw(st.sampled_from(self.holders))
            self.names += 1
            self.ledger.register(holder[0], str(data.draw(st.integers(0, 5))).encode())

    @rule(name=st.integers(0, 5))
    def share(self, name):
        blocks = self.ledger.match([str(name).encode()])
        if blocks:
            self.ledger.share(blocks)
            self.holders.append(blocks)

    @rule(data=st.data())
    def release(self, data):
        if self.holders:
            self.ledger.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @rule()
    def forget(self):
        self.ledger.forget()
        assert not self.ledger.match([b"0"])

    @invariant()
    def sums_hold(self):
        self.ledger.check(self.holders)


TestLedgerMachine = LedgerMachine.TestCase
