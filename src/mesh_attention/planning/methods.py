"""The moves of each method on an a×b tile, for one wave and without Ulysses' exchanges.

Mesh-Attention makes point-to-point transfers in a greedy order. ATTENTION2D is the same grid with collectives instead
of an order: gather, attend in large calls, reduce.

Ring-Attention is mesh's one-row tile, pass-Q its one-column tile, LoongTrain's double ring the one-row tile with an
inner tile of one row, on the ring route.

In a ring of inner rings, shards that cross to the next inner ring are fetched early. The links between inner rings
(between nodes) are slower than those inside, and carry one shard while the inner ring passes on several. Fetched in the
order of offsets, that shard would wait until the inner ring is done.
"""

from __future__ import annotations

from mesh_attention.errors import ScheduleError
from mesh_attention.plan.assignment import AXES, Assignment, Axis
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.schedule import Fetch, Meet, Move, Return, Together
from mesh_attention.plan.steps import AXIS_OF, INPUTS, OUTPUTS, Direction, Kind
from mesh_attention.planning.choice import Choice
from mesh_attention.planning.costs import Costs, shard_sizes
from mesh_attention.planning.greedy import greedy_moves
from mesh_attention.problem import Problem


def mesh_moves(
    problem: Problem, choice: Choice, direction: Direction, *, costs: Costs, have: tuple[Kind, ...]
) -> tuple[Move, ...]:
    """Fetch shards, except those of kinds that the rank has, and return partials, one by one, attending meanwhile.

    The choice is resolved.
    """
    assignment = choice.assignment
    moves = greedy_moves(
        assignment.tile,
        direction,
        costs=costs,
        blocks_per_call=choice.blocks_per_call,
        have=have,
        route=choice.route,
        sizes=tuple(shard_sizes(problem, assignment).items()),
    )
    if "ring" in (choice.route, choice.partials):
        assert choice.layout is not None
        _check_inner_rings(BlockMatrix(problem, choice.layout, assignment))
    if choice.route == "ring":
        moves = _with_early_entries(moves, assignment)
    return moves


def _with_early_entries(moves: tuple[Move, ...], assignment: Assignment) -> tuple[Move, ...]:
    """Each fetch of an inner ring's first shard, moved up to where the shard it follows is first attended.

    Not further: a rank passes on what it has received, and that is where it waits for it anyway.
    """
    for axis in AXES:
        inner, size = assignment.inner_size(axis), assignment.size(axis)
        if 1 < inner < size:
            for offset in range(inner, size, inner):
                moves = _moved_up(moves, axis, offset, before_meet_of=offset - inner)
    return moves


def has_inner_rings(assignment: Assignment) -> bool:
    """True if a group is a ring of several inner rings."""
    return any(1 < assignment.inner_size(axis) < assignment.size(axis) for axis in AXES)


def _check_inner_rings(matrix: BlockMatrix) -> None:
    """Raise where a mask leaves out shards: shards then skip ranks on their way round, and two ranks that pass them on
    for each other could each wait for the other."""
    if has_inner_rings(matrix.assignment) and not matrix.is_uniform:
        raise ScheduleError(
            f"inner tile {matrix.assignment.inner} on the ring route needs a mask and a layout under which every rank "
            f"needs every shard, and {matrix.problem.mask} on {matrix.layout.name} leaves some out; use direct routes"
        )


def _moved_up(moves: tuple[Move, ...], axis: Axis, offset: int, *, before_meet_of: int) -> tuple[Move, ...]:
    fetches = [m for m in moves if isinstance(m, Fetch) and AXIS_OF[m.kind] == axis and m.offset == offset]
    meets = (i for i, move in enumerate(moves) if isinstance(move, Meet) and before_meet_of in move.side(axis))
    target = next(meets, None)
    if not fetches or target is None or moves.index(fetches[-1]) < target:
        return moves
    before = [move for move in moves[:target] if move not in fetches]
    after = [move for move in moves[target:] if move not in fetches]
    return (*before, *fetches, *after)


def attention2d_moves(assignment: Assignment, direction: Direction, *, have: tuple[Kind, ...]) -> tuple[Move, ...]:
    """All-gather Q along rows and KV along columns, except kinds that the rank has, one attend of the whole tile,
    reduce the results to their homes."""
    travelling = [kind for kind, axis in AXIS_OF.items() if assignment.size(axis) > 1]
    gathered = [Together("gather", kind) for kind in INPUTS[direction] if kind in travelling and kind not in have]
    results: list[Move] = []
    for kind in OUTPUTS[direction]:
        results += [Together("reduce", kind)] if kind in travelling else []
        results.append(Return(kind, 0))
    return (*gathered, Meet(tuple(range(assignment.tile.rows)), tuple(range(assignment.tile.cols))), *results)
