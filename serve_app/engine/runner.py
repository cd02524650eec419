"""What the engine asks of whatever computes its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from serve_app.engine.request import TokenLogprobs
from serve_app.engine.scheduler import StepPlan
from serve_app.errors import ServeAppError


@dataclass(frozen=True, slots=True)
class Draw:
    """The token drawn for one row."""

    token: int
    logprobs: TokenLogprobs | None = None


class Runner(Protocol):
    """Computes a step. `ModelRunner` is the real one; tests script others."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def end_token_ids(self) -> frozenset[int]: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...

    def run(self, plan: StepPlan) -> list[Draw | ServeAppError]:
        """Computes all rows of `plan`; returns, for each of its drawing rows in order, a draw or that row's own error."""
