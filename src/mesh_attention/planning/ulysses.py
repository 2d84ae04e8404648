"""Ulysses as a factor: trade heads for tokens, run any moves on the smaller grid, trade back."""

from __future__ import annotations

from mesh_attention.plan.schedule import Move, Together
from mesh_attention.plan.steps import INPUTS, OUTPUTS, Direction, Kind


def trade_heads(
    moves: tuple[Move, ...], direction: Direction, degree: int, *, have: tuple[Kind, ...] = ()
) -> tuple[Move, ...]:
    """The moves between exchanges of every input it does not `have` and every result; unchanged for degree 1."""
    if degree == 1:
        return moves
    before = tuple(Together("exchange", kind) for kind in INPUTS[direction] if kind not in have)
    after = tuple(Together("exchange", kind) for kind in OUTPUTS[direction])
    return before + moves + after
