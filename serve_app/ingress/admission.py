"""Admission by work: how many tokens may wait, and when to come back if they are too many.

Who is refused is told when there will be room, and that room is kept for him: it is promised to the call, which is known
again by what it asks. So a caller who comes back when he was told to gets in, also while others keep coming. A promise
that nobody claims lapses, and while it is far away its room serves those who are here.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from serve_app.errors import OverloadedError
from serve_app.ingress.engine_client import EngineClient

AIM = 0.7
"""The part of the budget that is to wait when somebody comes back: below 1, because estimates err."""
MEMORY_S = 10.0
"""How long the measured rate remembers."""
EARLY_S = 0.5
"""So much before his time a caller may be back."""
PATIENCE_S = 5.0
"""A promise lapses so long after its time, or half as long as the wait was, if that is longer."""
LONGEST_S = 600
"""No longer wait is promised."""
MANY = 10_000
"""Promises at a time; who is refused beyond that gets an estimate only."""
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
        clock: monotonic seconds.
    """

    def __init__(self, client: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._rate = Rate()
        self._waiting = 0
        self._changed_at = clock()
        self._promises: dict[Hashable, _Promise] = {}
        self._budget: int | None = None
        self._of_others = 0
        self._looked_at = -math.inf
        self._looking: asyncio.Task[None] | None = None

    async def enter(self, call: Hashable, num_tokens: int) -> Ticket:
        """Lets a call in, or tells it when to come back.

        Args:
            call: what it asks; the same when it comes again.
            num_tokens: prompts and requested tokens of all its choices.

        Raises:
            OverloadedError: more waits than may.
        """
        if self._looked_at == -math.inf:
            await self._look()
        elif self._waiting and self._clock() - self._looked_at > FRESH_S:  # nobody waits for it
            self._looking = asyncio.create_task(self._look())
        error = self._refusal(call, num_tokens)
        if error is not None:
            raise error
        self._promises.pop(call, None)
        self._count(num_tokens, left=0)
        return Ticket(self._leave, num_tokens)

    async def _look(self) -> None:
        """Asks the replicas."""
        self._looked_at = self._clock()  # one asks, others go on with what is known
        loads = await self._client.loads()
        limits = [load.max_waiting_tokens for load in loads]
        self._budget = None if not limits or None in limits else sum(limit or 0 for limit in limits)
        self._rate.guess = sum(load.tokens_per_s for load in loads)
        self._of_others = max(0, sum(load.num_waiting_tokens for load in loads) - self._waiting)

    def _refusal(self, call: Hashable, num_tokens: int) -> OverloadedError | None:
        now, backlog = self._clock(), self._waiting + self._of_others
        self._promises = {key: promise for key, promise in self._promises.items() if promise.lapses > now}
        if self._budget is None:
            return None
        mine = self._promises.get(call)
        if mine is not None and now < mine.due - EARLY_S:
            return self._busy(mine.due - now)
        soon = now + self._rate.seconds_for(backlog) + EARLY_S
        kept = 0 if mine is not None else sum(p.num_tokens for p in self._promises.values() if p.due <= soon)
        if backlog + kept == 0 or backlog + kept + num_tokens <= self._budget:
            return None
        ahead = 0 if mine is not None else sum(promise.num_tokens for promise in self._promises.values())
        wait_s = self._rate.seconds_for(backlog + ahead + num_tokens - AIM * self._budget)
        wait_s = min(max(math.ceil(wait_s), 1), LONGEST_S)
        if mine is not None or len(self._promises) < MANY:
            self._promises[call] = _Promise(num_tokens, now + wait_s, now + wait_s + max(PATIENCE_S, wait_s / 2))
        return self._busy(wait_s)

    def _busy(self, wait_s: float) -> OverloadedError:
        seconds = max(1, math.ceil(wait_s))
        return OverloadedError(
            f"The server is busy: {self._waiting + self._of_others} tokens wait, {self._budget} may. "
            f"There will be room for this request in {seconds} s.",
            retry_after_s=seconds,
        )

    def _leave(self, num_tokens: int, *, has_started: bool) -> None:
        self._count(-num_tokens, left=num_tokens if has_started else 0)

    def _count(self, change: int, left: int) -> None:
        now = self._clock()
        if self._waiting:
            self._rate.add(left, now - self._changed_at)
        self._changed_at = now
        self._waiting += change


class Ticket:
    """A call's place in the queue, until it starts or leaves."""

    def __init__(self, leave: Callable[..., None], num_tokens: int) -> None:
        self._leave = leave
        self._num_tokens = num_tokens
        self._is_waiting = True

    def start(self) -> None:
        """The call has its first token; does nothing when it had one before."""
        self._end(has_started=True)

    def give_up(self) -> None:
        """The call is over; does nothing when it has started."""
        self._end(has_started=False)

    def _end(self, *, has_started: bool) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._leave(self._num_tokens, has_started=has_started)
