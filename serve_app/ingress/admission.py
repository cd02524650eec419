"""Admission by work: how many tokens may wait, and when to come back if they are too many.

Who is refused is told when there will be room, and that room is kept for him: it is promised to the call, which is known
again by what it asks. So a caller who comes back when he was told to gets in, also while others keep coming. Not all come
back: room is kept for as large a part of the promised as was claimed lately, and what is promised for later serves those
who are here now. A part of the budget is for tenants of whom little waits, so that none can lock the others out.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

from serve_app.errors import OverloadedError
from serve_app.ingress.cold_start import ColdStart
from serve_app.ingress.engine_client import EngineClient

RESERVE = 0.2
"""The part of the budget that is for tenants who have no more than so much waiting."""
AIM = 0.6
"""The part of the budget that is to wait when somebody comes back: below 1 - RESERVE, because estimates err."""
MEMORY_S = 10.0
"""How long the measured rate remembers."""
EARLY_S = 0.5
"""So much before his time a caller may be back."""
IDLE_S = 1.0
"""When the queue is shorter than that, whoever is here gets in: promises are no reason to have the engines idle."""
PATIENCE_S = 5.0
"""A promise lapses so long after its time, or half as long as the wait was, if that is longer."""
LONGEST_S = 600
"""No longer wait is promised."""
MANY = 1_000
"""Promises at a time; who is refused beyond that gets an estimate only."""
FORGETTING = 0.01
"""How much one promise, claimed or lapsed, tells of the next."""
FRESH_S = 1.0
"""How old the replicas' own numbers may be while work waits."""


@dataclass(slots=True)
class _Promise:
    """Room for so many tokens from `due` until `lapses`, on the monotonic clock."""

    num_tokens: int
    due: float
    lapses: float


class Rate:
    """Tokens per second that leave the queue while there is one.

    Attributes:
        guess: taken as long as nothing is measured.
    """

    def __init__(self) -> None:
        self.guess = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """So many left in so long a time with a queue."""
        kept = math.exp(-seconds / MEMORY_S)
        self._tokens = self._tokens * kept + num_tokens
        self._seconds = self._seconds * kept + seconds

    def seconds_for(self, num_tokens: float) -> float:
        """How long so many will take; a second, if nothing at all is known."""
        if num_tokens <= 0:
            return 0.0
        if self._tokens:
            return num_tokens * self._seconds / self._tokens
        return num_tokens / self.guess if self.guess else 1.0


class Admission:
    """The door of an ingress replica, before any engine replica is asked.

    Args:
        client: asked for what waits at the replicas, of other ingress replicas too, and for how much may.
        cold_start_wait_s: asked at each call: how long calls may wait while there is no replica.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        client: EngineClient,
        cold_start_wait_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._cold_start = ColdStart(client, cold_start_wait_s, clock)
        self._clock = clock
        self._rate = Rate()
        self._waiting: Counter[str] = Counter()  # tokens, by tenant
        self._changed_at = clock()
        self._promises: dict[Hashable, _Promise] = {}
        self._claimed = 1.0  # the part of promises that are claimed
        self._budget: int | None = None
        self._of_others = 0
        self._looked_at = -math.inf
        self._looking: asyncio.Task[None] | None = None

    async def enter(self, call: Hashable, num_tokens: int, tenant: str = "") -> Ticket:
        """Lets a call in, or tells it when to come back.

        Args:
            call: what it asks; the same when it comes again.
            num_tokens: prompts and requested tokens of all its choices.
            tenant: whose it is.

        Raises:
            ColdStartError: there is no replica, and its start takes longer than calls may wait.
            OverloadedError: more waits than may.
        """
        await self._cold_start.check()
        if self._looked_at == -math.inf:
            await self._look()
        elif (self._waiting or self._of_others) and self._clock() - self._looked_at > FRESH_S:  # nobody waits for it
            self._looking = asyncio.create_task(self._look())
        error = self._refusal(call, num_tokens, tenant)
        if error is not None:
            raise error
        if self._promises.pop(call, None) is not None:
            self._learn(1.0)
        self._count(tenant, num_tokens, left=0)
        return Ticket(self._cold_start.saw_life, partial(self._leave, tenant, num_tokens))

    async def _look(self) -> None:
        """Asks the replicas. While none answers (one that hangs is waited for), what was known goes on to count."""
        self._looked_at = self._clock()  # one asks, others go on with what is known
        loads = await self._client.loads()
        if not loads:
            return
        limits = [load.max_waiting_tokens for load in loads]
        self._budget = None if None in limits else sum(limit or 0 for limit in limits)
        self._rate.guess = sum(load.tokens_per_s for load in loads)
        self._of_others = max(0, sum(load.num_waiting_tokens for load in loads) - self._waiting.total())

    def _refusal(self, call: Hashable, num_tokens: int, tenant: str) -> OverloadedError | None:
        now, backlog = self._clock(), self._waiting.total() + self._of_others
        for key in [key for key, promise in self._promises.items() if promise.lapses <= now]:
            del self._promises[key]
            self._learn(0.0)
        if self._budget is None:
            return None
        mine = self._promises.get(call)
        if mine is not None and now < mine.due - EARLY_S:
            return self._busy(mine.due - now)
        has_little = self._waiting[tenant] + num_tokens <= RESERVE * self._budget
        limit = self._budget if has_little or mine is not None else (1 - RESERVE) * self._budget
        queue_s = self._rate.seconds_for(backlog)
        keeps = mine is None and not has_little and queue_s > IDLE_S
        kept = self._kept(now + queue_s + EARLY_S) if keeps else 0.0
        if backlog + kept == 0 or backlog + kept + num_tokens <= limit:
            return None
        ahead = 0.0 if mine is not None else self._kept(math.inf)
        wait_s = self._rate.seconds_for(backlog + ahead + num_tokens - AIM * self._budget)
        wait_s = min(max(math.ceil(wait_s), 1), LONGEST_S)
        if mine is not None or len(self._promises) < MANY:
            self._promises[call] = _Promise(num_tokens, now + wait_s, now + wait_s + max(PATIENCE_S, wait_s / 2))
        return self._busy(wait_s)

    def _kept(self, until: float) -> float:
        """Tokens of the promises that are due by then, as far as they will be claimed."""
        return self._claimed * sum(promise.num_tokens for promise in self._promises.values() if promise.due <= until)

    def _learn(self, claimed: float) -> None:
        self._claimed += FORGETTING * (claimed - self._claimed)

    def _busy(self, wait_s: float) -> OverloadedError:
        seconds = max(1, math.ceil(wait_s))
        return OverloadedError(
            f"The server is busy: {self._waiting.total() + self._of_others} tokens wait, {self._budget} may. "
            f"There will be room for this request in {seconds} s.",
            retry_after_s=seconds,
        )

    def _leave(self, tenant: str, num_tokens: int, *, has_started: bool) -> None:
        self._count(tenant, -num_tokens, left=num_tokens if has_started else 0)

    def _count(self, tenant: str, change: int, left: int) -> None:
        now = self._clock()
        if self._waiting:
            self._rate.add(left, now - self._changed_at)
        self._changed_at = now
        self._waiting[tenant] += change
        if not self._waiting[tenant]:
            del self._waiting[tenant]


class Ticket:
    """A call's place in the queue, until it starts or leaves."""

    def __init__(self, saw_life: Callable[[], None], leave: Callable[..., None]) -> None:
        self._saw_life = saw_life
        self._leave = leave
        self._is_waiting = True

    def start(self) -> None:
        """The call has a token; the first ends its waiting."""
        self._saw_life()
        self._end(has_started=True)

    def give_up(self) -> None:
        """The call is over; does nothing when it has started."""
        self._end(has_started=False)

    def _end(self, *, has_started: bool) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._leave(has_started=has_started)
