"""Who runs in the next step. Pure Python: touches no device, no clock and no thread.

The rules, in order:

1. Every decoding row gets its one token, except that it waits for one step in which the prompt of a less served tenant
   ends. When blocks run out the last running row in standing is preempted: it gives its blocks back and is recomputed
   later, from where it was.
2. Waiting rows are admitted, the least served tenant's first and by rank (priority, then arrival) within a tenant, while
   there are places in the batch and blocks for all their known tokens. Nobody overtakes at this door, so nobody starves
   within a tenant's priority. One exception: a row whose next block is being computed by a running row waits until it can
   share it. A tenant that has fewer places or blocks than its share does not wait for them: rows of tenants above their
   share are preempted for it.
3. The rest of the token budget goes to prompts, in chunks, the least served tenant's first. Of what a tenant gets at least
   half goes to its oldest, the remainder to those with the fewest tokens left. So a short prompt never waits for a long
   one to end, and a long one always advances.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Self

from serve_app.engine.fair_queue import FairQueue
from serve_app.engine.kv_cache import BlockLedger
from serve_app.engine.sequence import Sequence
from serve_app.engine.status import Status


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A sequence's share of one step: compute its tokens [start, end).

    The facts are those at planning time; the sequence itself moves on when the step is settled.

    Attributes:
        draws: whether a token is drawn: the chunk reaches the last known token.
    """

    sequence: Sequence
    start: int
    end: int
    draws: bool

    @classmethod
    def next_tokens(cls, sequence: Sequence, num_tokens: int) -> Self:
        """The sequence's next `num_tokens` tokens."""
        end = sequence.num_computed_tokens + num_tokens
        return cls(sequence, sequence.num_computed_tokens, end, draws=end == sequence.num_tokens)

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def scored_tokens(self) -> range:
        """Indices of the prompt tokens that this chunk predicts and whose log-probabilities are still wanted."""
        if not self.sequence.num_unscored_tokens:
            return range(0)
        first = max(self.start + 1, 1 + len(self.sequence.prompt_logprobs))
        return range(first, min(self.end + 1, self.sequence.num_prompt_tokens))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes: decode rows first, then prompt chunks."""

    rows: tuple[PlannedRow, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def drawing_rows(self) -> tuple[PlannedRow, ...]:
        return tuple(row for row in self.rows if row.draws)

    def halves(self) -> tuple[StepPlan, StepPlan] | None:
        """The same work in two smaller steps, one after the other; None for a single token, which cannot be halved."""
        if len(self.rows) > 1:
            middle = len(self.rows) // 2
            return StepPlan(self.rows[:middle]), StepPlan(self.rows[middle:])
        (row,) = self.rows
        if row.num_tokens == 1:
            return None
        token = row.start + row.num_tokens // 2
        return StepPlan((replace(row, end=token, draws=False),)), StepPlan((replace(row, start=token),))


class Scheduler:
    """Holds the waiting and the running sequences and decides each step.

    Args:
        max_batch_size: rows running at the same time; an idle scheduler starts at once when so many wait.
        batch_wait_timeout_s: an idle scheduler starts a partial batch when its oldest row has waited this long.
        max_batched_tokens: tokens of one step. Decode rows always run; prompts get what they leave, one block at least.
    """

    def __init__(
        self,
        ledger: BlockLedger,
        *,
        max_batch_size: int,
        max_batched_tokens: int,
        batch_wait_timeout_s: float = 0.0,
        prefix_cache: bool = True,
    ) -> None:
        self.ledger = ledger
        self.max_batch_size = max_batch_size
        self.max_batched_tokens = max_batched_tokens
        self.batch_wait_timeout_s = batch_wait_timeout_s
        self.prefix_cache = prefix_cache
        self.waiting = FairQueue()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._token_budget = max_batched_tokens  # less for a while after a step that did not fit into memory
        self._in_progress: dict[bytes, Sequence] = {}  # full blocks of known tokens that a running row is yet to compute

    def __repr__(self) -> str:
        return f"<Scheduler {len(self.waiting)} waiting, {len(self.running)} running, {self.ledger!r}>"

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queues a newcomer."""
        self.waiting.enter(sequence)
        self.waiting.add(sequence)

    def seconds_until_due(self, now: float) -> float:
        """How long the waiting rows may still wait for company; 0 when the next step is due."""
        if self.running or len(self.waiting) >= self.max_batch_size or not self.waiting:
            return 0.0
        oldest = min(sequence.request.created_at for sequence in self.waiting)
        return max(0.0, oldest + self.batch_wait_timeout_s - now)

    def plan(self, now: float) -> StepPlan:
        """Decides the next step and takes the blocks it needs. Empty when nothing is due at `now` (monotonic seconds)."""
        if not self.has_work or self.seconds_until_due(now) > 0:
            return StepPlan()
        rows = self._plan_decodes()
        self._admit()
        rows = [row for row in rows if row.sequence.status is Status.DECODE]  # without those that had to make way
        prefills = self._plan_prefills(max(self._token_budget - len(rows), self.ledger.block_size))
        self._token_budget = min(self._token_budget + 1, self.max_batched_tokens)
        return StepPlan((*self._without_those_who_can_wait(rows, prefills), *prefills))

    def lower_budget(self, num_tokens: int) -> None:
        """A step of `num_tokens` did not fit into memory: the next are half as large, and grow by a token each."""
        self._token_budget = min(self._token_budget, num_tokens // 2)

    def _without_those_who_can_wait(self, decodes: list[PlannedRow], prefills: list[PlannedRow]) -> list[PlannedRow]:
        """Leaves out the decode rows of tenants that were given more, in a step that ends the prompt of one given less.

        Its first token is there sooner by what they would have cost. They lose no more than that one step would have
        taken longer, and once per prompt.
        """
        if self.waiting.num_tenants == 1 or not prefills or not prefills[0].draws:
            return decodes
        first = self.waiting.standing(prefills[0].sequence)[:2]  # without the rank, which orders a tenant's own
        return [row for row in decodes if self.waiting.standing(row.sequence)[:2] <= first]

    def _plan_decodes(self) -> list[PlannedRow]:
        rows = []
        for sequence in self._by_standing(self.running):  # a victim always comes after the rows already planned
            if sequence.status is Status.DECODE and self._make_room(sequence):
                rows.append(PlannedRow.next_tokens(sequence, 1))
        return rows

    def _make_room(self, sequence: Sequence) -> bool:
        """Ensures a block for the sequence's last token; False when the sequence itself had to give way."""
        if self.ledger.blocks_for(sequence.num_tokens) <= len(sequence.block_ids):
            return True
        while self.ledger.num_free == 0:
            victim = self._by_standing(self.running)[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_ids += self.ledger.allocate(1)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.move(Status.WAITING)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(sequence)

    def _by_standing(self, sequences: list[Sequence]) -> list[Sequence]:
        """Running sequences, the first to be served first; `running` itself is by rank."""
        return sorted(sequences, key=self.waiting.standing) if self.waiting.num_tenants > 1 else list(sequences)

    def _admit(self) -> None:
        for sequence in islice(self.waiting.turns(), 2 * self.max_batch_size):  # rows that wait to share may be passed
            if len(self.running) >= self.max_batch_size and not self._clear_a_place(sequence):
                break
            hashes = self._shareable_hashes(sequence)
            shared = self.ledger.match(hashes)
            if len(shared) < len(hashes) and hashes[len(shared)] in self._in_progress:
                continue
            while not (has_blocks := self._take_blocks(sequence, shared)):
                if not self._clear_blocks(sequence, len(shared)):
                    break
                shared = self.ledger.match(hashes)
            if not has_blocks:
                break
            self.waiting.remove(sequence)
            sequence.move(Status.PREFILL)
            bisect.insort(self.running, sequence, key=_rank)

    def _clear_a_place(self, sequence: Sequence) -> bool:
        """Preempts a row of a tenant that has more places than its share, for a tenant that has fewer; False if none is."""
        return self._make_way(sequence, Counter(row.request.tenant for row in self.running), 1, self.max_batch_size)

    def _clear_blocks(self, sequence: Sequence, num_shared: int) -> bool:
        """The same for the blocks that a waiting sequence needs; False when its tenant's share does not hold them."""
        held: Counter[str] = Counter()
        for row in self.running:
            held[row.request.tenant] += len(row.block_ids)
        num_new = self.ledger.blocks_for(sequence.num_tokens) - num_shared
        return self._make_way(sequence, held, num_new, self.ledger.num_blocks)

    def _make_way(self, sequence: Sequence, held: Counter[str], num_wanted: int, num_there: int) -> bool:
        """Preempts the last row of a tenant that holds more than its share of what there is, for one that then does not."""
        fair = self.waiting
        if fair.num_tenants == 1 or held[sequence.request.tenant] + num_wanted > fair.share(sequence, num_there):
            return False
        for victim in reversed(self._by_standing(self.running)):
            if held[victim.request.tenant] > fair.share(victim, num_there):
                self._preempt(victim)
                return True
        return False

    def _shareable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Identities of the blocks that the sequence may take from others."""
        if not self.prefix_cache or sequence.num_unscored_tokens:
            return []
        # the last token is always computed: its logits are wanted
        return sequence.block_hashes(self.ledger.block_size, (sequence.num_tokens - 1) // self.ledger.block_size)

    def _take_blocks(self, sequence: Sequence, shared: list[int]) -> bool:
        """Gives a waiting sequence blocks for all its known tokens, first the `shared` ones; False if too few are free."""
        ledger = self.ledger
        num_new = ledger.blocks_for(sequence.num_tokens) - len(shared)
        reserve = len(self.running)  # one block each, so that admission does not cause a preemption at once
        if num_new + reserve > ledger.num_free_after_sharing(shared):
            return False
        ledger.share(shared)
        sequence.block_ids = shared + ledger.allocate(num_new)
        sequence.num_computed_tokens = sequence.num_cached_tokens = len(shared) * ledger.block_size
        sequence.num_registered_blocks = len(shared)
        if self.prefix_cache:
            num_full = sequence.num_tokens // ledger.block_size
            for block_hash in sequence.block_hashes(ledger.block_size, num_full)[len(shared) :]:
                self._in_progress.setdefault(block_hash, sequence)
        return True

    def _plan_prefills(self, budget: int) -> list[PlannedRow]:
        prompts = self._by_standing([sequence for sequence in self.running if sequence.status is Status.PREFILL])
        rows: list[PlannedRow] = []
        for _, of_tenant in groupby(prompts, key=lambda sequence: sequence.request.tenant):
            shares = self._share_out(budget, list(of_tenant))
            budget -= sum(row.num_tokens for row in shares)
            rows += shares
            if not budget:
                break
        return rows

    def _share_out(self, budget: int, prompts: list[Sequence]) -> list[PlannedRow]:
        """A token budget, shared by one tenant's prompts."""
        oldest, *others = prompts
        first = min(oldest.num_pending_tokens, budget - budget // 2 if others else budget)
        left = budget - first
        rows = []
        for sequence in sorted(others, key=lambda sequence: sequence.num_pending_tokens):
            share = min(sequence.num_pending_tokens, left)
            if share > 0:
                rows.append(PlannedRow.next_tokens(sequence, share))
                left -= share
        first += min(left, oldest.num_pending_tokens - first)
        return [PlannedRow.next_tokens(oldest, first), *rows]

    def settle(self, row: PlannedRow) -> None:
        """Records that a row's tokens are computed and makes its full blocks known to others."""
        sequence = row.sequence
        sequence.num_computed_tokens = row.end
        if self.prefix_cache:
            num_full = row.end // self.ledger.block_size
            hashes = sequence.block_hashes(self.ledger.block_size, num_full)
            for index in range(sequence.num_registered_blocks, num_full):
                self.ledger.register(sequence.block_ids[index], hashes[index])
                self._in_progress.pop(hashes[index], None)
            sequence.num_registered_blocks = max(sequence.num_registered_blocks, num_full)
        if row.end > sequence.num_charged_tokens:  # what is computed again after a preemption is not the tenant's debt
            self.waiting.charge(sequence, row.end - max(row.start, sequence.num_charged_tokens))
            sequence.num_charged_tokens = row.end
        if row.draws and sequence.status is Status.PREFILL:
            sequence.move(Status.DECODE)

    def remove(self, sequence: Sequence, ending: Status) -> None:
        """Ends a sequence, wherever it is, and frees its blocks."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._give_back(sequence)
        self.waiting.leave(sequence)
        sequence.move(ending)

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.status is Status.PREFILL:
            self._in_progress = {key: owner for key, owner in self._in_progress.items() if owner is not sequence}
        self.ledger.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed_tokens = 0
        sequence.num_registered_blocks = 0

    def check(self) -> None:
        """Proves that blocks are held by running sequences only, and that the ledger's sums hold."""
        assert all(not sequence.block_ids for sequence in self.waiting)
        self.ledger.check(sequence.block_ids for sequence in self.running)


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
