"""ATTENTION2D a×b: the same grid with collectives instead of an order. Gather, attend in large calls, reduce."""

from __future__ import annotations

from itertools import chain

from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.schedule import Meet, Move, Return, Together
from mesh_attention.plan.steps import AXIS_OF, INPUTS, OUTPUTS, Direction, Kind


def attention2d_moves(tile: Tile, direction: Direction, *, have: tuple[Kind, ...]) -> tuple[Move, ...]:
    """All-gather Q along rows and KV along columns, except kinds that the rank has, one attend of the whole tile,
    reduce the results to their homes."""
    return (
        *(Together("gather", kind) for kind in INPUTS[direction] if _size(kind, tile) > 1 and kind not in have),
        Meet(tuple(range(tile.rows)), tuple(range(tile.cols))),
        *chain.from_iterable(_returns(kind, tile) for kind in OUTPUTS[direction]),
    )


def _returns(kind: Kind, tile: Tile) -> tuple[Move, ...]:
    own = Return(kind, 0)
    return (Together("reduce", kind), own) if _size(kind, tile) > 1 else (own,)


def _size(kind: Kind, tile: Tile) -> int:
    return tile.rows if AXIS_OF[kind] == "row" else tile.cols
