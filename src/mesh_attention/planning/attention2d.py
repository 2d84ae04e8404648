"""ATTENTION2D a×b: the same grid with collectives instead of an order. Gather, attend in large calls, reduce."""

from __future__ import annotations

from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.schedule import Meet, Move, Return, Schedule, Together
from mesh_attention.plan.steps import AXIS_OF, INPUTS, OUTPUTS, Direction, Kind
from mesh_attention.planning.choice import Choice


def attention2d_schedule(choice: Choice, direction: Direction) -> Schedule:
    """All-gather Q along rows and KV along columns, one attend of the whole tile, reduce the results to their homes.

    The choice is settled.
    """
    tile, have = choice.assignment.tile, choice.keep if direction == "backward" else ()
    moves: tuple[Move, ...] = (
        *(Together("gather", kind) for kind in INPUTS[direction] if _size(kind, tile) > 1 and kind not in have),
        Meet(tuple(range(tile.rows)), tuple(range(tile.cols))),
        *(Together("reduce", kind) if _size(kind, tile) > 1 else Return(kind, 0) for kind in OUTPUTS[direction]),
    )
    return Schedule(moves=moves, keep=choice.keep)


def _size(kind: Kind, tile: Tile) -> int:
    return tile.rows if AXIS_OF[kind] == "row" else tile.cols
