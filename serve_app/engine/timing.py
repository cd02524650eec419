"""What the engine measures, one value at a time, kept until somebody takes it (for histograms)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

MAX_STEPS = 128
"""Steps of a request that its trace names: the first ones."""
MANY = 100_000
"""Values that are kept while nobody takes them; then the oldest go."""


class Timing(StrEnum):
    """Kinds of values. Times in seconds."""

    QUEUE = "a request's time from its arrival to its first step"
    PREFILL = "from there to its first token"
    DECODE = "from there to its last token"
    STEP = "a step's time"
    BATCH_SIZE = "a step's rows"
    STEP_TOKENS = "a step's tokens"


@dataclass(frozen=True, slots=True)
class StepTrace:
    """A step that a traced request took part in. Times on the monotonic clock."""

    number: int
    started_at: float
    ended_at: float
    num_rows: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """A request that came with a `traceparent`, at its end. Times on the monotonic clock, 0 for what it did not reach."""

    request_id: str
    traceparent: str
    arrived_at: float
    started_at: float
    first_token_at: float
    ended_at: float
    ending: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    steps: Sequence[StepTrace]


class Timings:
    """Values that one thread notes and another takes."""

    def __init__(self) -> None:
        self._values: deque[tuple[Timing, float]] = deque(maxlen=MANY)

    def note(self, kind: Timing, value: float) -> None:
        """Keeps a value."""
        self._values.append((kind, value))

    def take(self) -> Iterator[tuple[Timing, float]]:
        """All values that nobody has taken yet, the oldest first."""
        while self._values:
            yield self._values.popleft()
