"""Mesh-Attention a×b: point-to-point transfers in a greedy order.

Ring-Attention is its one-row tile, pass-Q its one-column tile, LoongTrain's double ring the one-row tile with an inner
tile of one row, on the ring route.
"""

from __future__ import annotations

from mesh_attention.plan.assignment import Assignment, Tile
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.schedule import Route, Schedule
from mesh_attention.plan.steps import Direction, Kind
from mesh_attention.planning.costs import Costs, estimate_costs, shard_sizes
from mesh_attention.planning.entries import check_inner_rings, with_early_entries
from mesh_attention.planning.greedy import greedy_moves
from mesh_attention.planning.ulysses import trade_heads
from mesh_attention.problem import Problem


def plan_mesh(
    problem: Problem,
    *,
    tile: Tile,
    layout: Layout,
    direction: Direction = "forward",
    ulysses_degree: int = 1,
    inner: Tile | None = None,
    route: Route = "direct",
    partials: Route = "direct",
    blocks_per_call: int | None = None,
    costs: Costs | None = None,
    keep: tuple[Kind, ...] = (),
    method: str = "mesh",
) -> Plan:
    """Fetch shards and return partials one by one, attending meanwhile."""
    assignment = Assignment(tile, ulysses_degree, inner)
    costs = estimate_costs(problem, assignment, direction) if costs is None else costs
    have = keep if direction == "backward" else ()
    moves = greedy_moves(
        tile,
        direction,
        costs=costs,
        blocks_per_call=blocks_per_call,
        have=have,
        route=route,
        sizes=tuple(shard_sizes(problem, assignment).items()),
    )
    if "ring" in (route, partials):
        check_inner_rings(BlockMatrix(problem, layout, assignment))
    if route == "ring":
        moves = with_early_entries(moves, assignment)
    return Plan(
        method=method,
        direction=direction,
        problem=problem,
        layout=layout,
        assignment=assignment,
        schedule=Schedule(
            moves=trade_heads(moves, direction, ulysses_degree, have=have), route=route, partials=partials, keep=keep
        ),
    )
