"""The table of legal moves."""

import pytest

from serve_app.engine.status import MOVES, IllegalMoveError, Status, move


@pytest.mark.parametrize("current", Status)
@pytest.mark.parametrize("to", Status)
def test_only_moves_of_the_table_are_possible(current, to):
    if to in MOVES[current]:
        assert move(current, to) is to
    else:
        with pytest.raises(IllegalMoveError):
            move(current, to)


def test_endings_are_final_and_reachable():
    for ending in (Status.FINISHED, Status.CANCELLED, Status.FAILED):
        assert not MOVES[ending]
        assert any(ending in moves for moves in MOVES.values())
