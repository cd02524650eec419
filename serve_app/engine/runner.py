"""What the engine asks of whatever computes its steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from serve_app.engine.request import TokenLogprobs
from serve_app.engine.scheduler import StepPlan
from serve_app.errors import ServeAppError


@dataclass(frozen=True, slots=True)
class Draw:
    """The token drawn for one row."""

    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave.

    Attributes:
        draws: for each drawing row of the plan, in order, a draw or that row's own error.
        prompt_logprobs: by request id, for the rows that score their prompt: one entry per token that this chunk predicts.
    """

    draws: list[Draw | ServeAppError]
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)


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

    def interrupt(self) -> None:
        """Called by other threads: the plan that is being run is to be given up. A wish, which may come too late."""

    def run(self, plan: StepPlan) -> StepResult:
        """Computes all rows of `plan`.

        Raises:
            StepInterruptedError: it was interrupted. Nothing of the plan counts as computed then; the engine plans anew.
            OutOfMemoryError: they do not fit into memory together. Nothing of the plan counts as computed then; the engine
                tries it again in smaller plans.
            EngineUnavailableError: no further step can succeed, such as on a device that is lost: the engine ends.
            Exception: something in the plan makes it fail. The engine finds the row by halving, and ends it alone.
        """
