"""The life of a request in the engine, as a table of legal moves."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    """Queued: owns no blocks (never started, or preempted and to be recomputed)."""
    PREFILL = "prefill"
    """Running: owns blocks; tokens before the last are still to be computed."""
    DECODE = "decode"
    """Running: each step draws one token."""
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


MOVES: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.PREFILL, Status.CANCELLED, Status.FAILED}),
    Status.PREFILL: frozenset({Status.DECODE, Status.FINISHED, Status.WAITING, Status.CANCELLED, Status.FAILED}),
    Status.DECODE: frozenset({Status.FINISHED, Status.WAITING, Status.CANCELLED, Status.FAILED}),
    Status.FINISHED: frozenset(),
    Status.CANCELLED: frozenset(),
    Status.FAILED: frozenset(),
}
"""From each status, the statuses that may follow. A row has exactly one ending: the last three lead nowhere."""


class IllegalMoveError(AssertionError):
    """A status was asked to move where the table has no way: a fault of ours."""


def move(current: Status, to: Status) -> Status:
    """Returns `to`. Raises `IllegalMoveError` when the table has no such move."""
    if to not in MOVES[current]:
        raise IllegalMoveError(f"illegal move {current} -> {to}")
    return to
