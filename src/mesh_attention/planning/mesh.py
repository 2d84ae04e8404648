"""Mesh-Attention a×b: point-to-point transfers in a greedy order.

Ring-Attention is its one-row tile, pass-Q its one-column tile, LoongTrain's double ring the one-row tile with an inner
tile of one row, on the ring route.
"""

from __future__ import annotations

from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.schedule import Schedule
from mesh_attention.plan.steps import Direction
from mesh_attention.planning.choice import Choice
from mesh_attention.planning.costs import Costs, estimate_costs, shard_sizes
from mesh_attention.planning.entries import check_inner_rings, with_early_entries
from mesh_attention.planning.greedy import greedy_moves
from mesh_attention.problem import Problem


def mesh_schedule(problem: Problem, choice: Choice, direction: Direction, costs: Costs | None = None) -> Schedule:
    """Fetch shards and return partials one by one, attending meanwhile. The choice is settled."""
    assignment = choice.assignment
    moves = greedy_moves(
        assignment.tile,
        direction,
        costs=estimate_costs(problem, assignment, direction) if costs is None else costs,
        blocks_per_call=choice.blocks_per_call,
        have=choice.keep if direction == "backward" else (),
        route=choice.route,
        sizes=tuple(shard_sizes(problem, assignment).items()),
    )
    if "ring" in (choice.route, choice.partials):
        assert choice.layout is not None
        check_inner_rings(BlockMatrix(problem, choice.layout, assignment))
    if choice.route == "ring":
        moves = with_early_entries(moves, assignment)
    return Schedule(moves=moves, route=choice.route, partials=choice.partials, keep=choice.keep)
