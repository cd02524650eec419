"""Who waits, and whose turn it is: weighted fair queueing between tenants, ranks within one. Pure Python.

Every tenant has a counter of the tokens it was given, divided by its weight (the virtual token counter of Sheng et al.,
"Fairness in Serving Large Language Models", 2024). The tenant with the smallest is next. One that comes back from idling
starts level with the least served of those that are at work: time in which it asked for nothing is not saved up.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from serve_app.engine.sequence import Sequence


@dataclass(slots=True)
class _Tenant:
    """One tenant with work.

    Attributes:
        served: tokens computed for it, by weight.
        weight: its newest request's.
        num_present: its sequences without an ending, waiting or not.
        waiting: those that wait, by rank.
    """

    served: float
    weight: float
    num_present: int = 0
    waiting: list[Sequence] = field(default_factory=list)


class FairQueue:
    """The waiting sequences, and what each tenant with work was given.

    A sequence is present from `enter` to `leave`; between `add` and `remove` it waits.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, tenant by tenant, each by rank."""
        for tenant in tuple(self._tenants.values()):
            yield from tuple(tenant.waiting)

    @property
    def num_tenants(self) -> int:
        """Tenants with work."""
        return len(self._tenants)

    def enter(self, sequence: Sequence) -> None:
        """A sequence has come."""
        request = sequence.request
        if request.tenant not in self._tenants:
            level = min((tenant.served for tenant in self._tenants.values()), default=0.0)
            self._tenants[request.tenant] = _Tenant(level, request.weight)
        tenant = self._tenants[request.tenant]
        tenant.weight = request.weight
        tenant.num_present += 1

    def leave(self, sequence: Sequence) -> None:
        """A sequence has had its ending."""
        tenant = self._of(sequence)
        tenant.num_present -= 1
        if not tenant.num_present:
            del self._tenants[sequence.request.tenant]

    def add(self, sequence: Sequence) -> None:
        """Lets a sequence wait, at its rank."""
        bisect.insort(self._of(sequence).waiting, sequence, key=_rank)
        self._length += 1

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer."""
        self._of(sequence).waiting.remove(sequence)
        self._length -= 1

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Tokens are computed for a sequence."""
        tenant = self._of(sequence)
        tenant.served += num_tokens / tenant.weight

    def standing(self, sequence: Sequence) -> tuple[float, int, tuple[int, int]]:
        """Orders sequences of all tenants: the least served tenant's first (of two, who asks for less), then by rank."""
        tenant = self._of(sequence)
        return tenant.served, tenant.num_present, sequence.rank

    def share(self, sequence: Sequence, num_places: int) -> int:
        """How many of so many places its tenant has a right to by weight; at least one."""
        weights = sum(tenant.weight for tenant in self._tenants.values())
        return max(1, int(num_places * self._of(sequence).weight / weights))

    def turns(self) -> Iterator[Sequence]:
        """The waiting in the order in which they are to start, as if each that starts were given its pending tokens."""
        tenants = [tenant for tenant in self._tenants.values() if tenant.waiting]
        if len(tenants) == 1:
            yield from tuple(tenants[0].waiting)
            return
        heap = [(self.standing(tenant.waiting[0]), tenant.weight, tuple(tenant.waiting)) for tenant in tenants]
        heapq.heapify(heap)
        while heap:
            (served, num_present, _), weight, (sequence, *others) = heapq.heappop(heap)
            yield sequence
            if others:
                served += sequence.num_pending_tokens / weight
                heapq.heappush(heap, ((served, num_present, others[0].rank), weight, tuple(others)))

    def _of(self, sequence: Sequence) -> _Tenant:
        return self._tenants[sequence.request.tenant]


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
