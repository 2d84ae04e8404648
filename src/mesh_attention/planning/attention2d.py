"""ATTENTION2D a×b: the same grid with collectives instead of an order. Gather, attend in large calls, reduce."""

from __future__ import annotations

from mesh_attention.plan.assignment import Assignment, Tile
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.schedule import Meet, Move, Return, Schedule, Together
from mesh_attention.plan.steps import AXIS_OF, INPUTS, OUTPUTS, Direction, Kind
from mesh_attention.planning.ulysses import trade_heads
from mesh_attention.problem import Problem


def plan_attention2d(
    problem: Problem,
    *,
    tile: Tile,
    layout: Layout,
    direction: Direction = "forward",
    ulysses_degree: int = 1,
    inner: Tile | None = None,
    keep: tuple[Kind, ...] = (),
) -> Plan:
    """All-gather Q along rows and KV along columns, one attend of the whole tile, reduce the results to their homes."""
    have = keep if direction == "backward" else ()
    moves: tuple[Move, ...] = (
        *(Together("gather", kind) for kind in INPUTS[direction] if _size(kind, tile) > 1 and kind not in have),
        Meet(tuple(range(tile.rows)), tuple(range(tile.cols))),
        *(Together("reduce", kind) if _size(kind, tile) > 1 else Return(kind, 0) for kind in OUTPUTS[direction]),
    )
    return Plan(
        method="attention2d",
        direction=direction,
        problem=problem,
        layout=layout,
        assignment=Assignment(tile, ulysses_degree, inner),
        schedule=Schedule(moves=trade_heads(moves, direction, ulysses_degree, have=have), keep=keep),
    )


def _size(kind: Kind, tile: Tile) -> int:
    return tile.rows if AXIS_OF[kind] == "row" else tile.cols
