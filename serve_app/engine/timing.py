"""What the engine measures, one value at a time, kept until somebody takes it (for histograms)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import StrEnum

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
