"""Planners: `make_plan`, by the method that a choice names, and `StatedStrategy`, for both passes of a call.

Below them, the moves of each method on an a×b tile, for one wave and without Ulysses' exchanges. Mesh-Attention makes
point-to-point transfers in a greedy order. ATTENTION2D is the same grid with collectives instead of an order: gather,
attend in large calls, reduce.

Ring-Attention is mesh's one-row tile, pass-Q its one-column tile, LoongTrain's double ring the one-row tile with an
inner tile of one row, on the ring route.

In a ring of inner rings, shards that cross to the next inner ring are fetched early. The links between inner rings
(between nodes) are slower than those inside, and carry one shard while the inner ring passes on several. Fetched in the
order of offsets, that shard would wait until the inner ring is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from typing_extensions import Unpack

from mesh_attention.clusters import UNKNOWN
from mesh_attention.errors import ScheduleError
from mesh_attention.plan.assignment import AXES, Assignment, Axis, Tile
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan, PlanRequest
from mesh_attention.plan.schedule import Fetch, GroupMove, Meet, Move, Return, Route, Schedule
from mesh_attention.plan.steps import AXIS_OF, DIRECTIONS, INPUTS, OUTPUTS, Direction, Kind
from mesh_attention.planners.choice import Choice, ChoiceOptions, as_choice
from mesh_attention.planners.cost_based import ONE_SIZE, Sizes, cost_based_moves
from mesh_attention.planners.costs import Costs, block_flops, estimate_costs, even_costs, shard_sizes
from mesh_attention.planners.greedy import counted_moves
from mesh_attention.planners.waves import brings_input, in_waves
from mesh_attention.prices import meet_seconds, merge_nbytes
from mesh_attention.problem import Problem

Planner = Callable[..., Plan]
"""``planner(problem, direction=…, layout=…)`` gives a plan."""
CostsOf = Callable[[Problem, Choice, Direction], Costs]
"""Costs of a resolved choice: what transfers, and perhaps calls, take on some machine."""


def make_plan(
    problem: Problem,
    choice: Choice | str | None = None,
    *,
    direction: Direction = "forward",
    costs: Costs | None = None,
    **options: Unpack[ChoiceOptions],
) -> Plan:
    """The plan of one pass, by a choice, its text or its fields as keywords: ``make_plan(problem, tile=(4, 8))``.

    `costs` order the transfers of a method that has an order; attention2d and ulysses refuse them.
    """
    if direction not in DIRECTIONS:
        raise ScheduleError(f"direction {direction!r}: expected {' or '.join(DIRECTIONS)}")
    resolved = as_choice(choice, **options).resolved(problem, direction)
    if costs is not None and resolved.is_collective:
        raise ScheduleError(f"{resolved.method} uses collectives and has no costs; leave costs out or use mesh")
    if not isinstance(costs, Costs | None):
        raise ScheduleError(f"costs {costs!r}: expected Costs(...)")
    costs = even_costs(problem, resolved.assignment, direction) if costs is None else costs
    schedule = Schedule(
        moves=_moves(problem, resolved, direction, costs.in_waves(resolved.assignment)),
        route=resolved.route,
        partials=resolved.partials,
        keep=resolved.keep,
    )
    assert resolved.layout is not None
    return Plan(
        method=resolved.method,
        direction=direction,
        problem=problem,
        layout=resolved.layout,
        assignment=resolved.assignment,
        schedule=schedule,
    )


@dataclass(frozen=True)
class StatedStrategy:
    """Makes the plans of both passes of a problem, by the caller's choice or planner, alike on every rank.

    `prove` raises if a plan breaks a rule. It is called on a planner's plans, on that of backward only if gradients are
    needed.
    """

    choice: Choice
    costs: Costs | None = None
    planner: Planner | None = None
    prove: Callable[[Plan], None] | None = None

    decides_what_to_keep: ClassVar[bool] = False

    def plans(self, request: PlanRequest, talk: object = None) -> dict[Direction, Plan]:
        plans = {direction: self._plan(request, direction) for direction in DIRECTIONS}
        for direction, plan in plans.items():
            _check_fit(plan, request.problem, request.layout, direction)
            if self.prove is not None and (direction == "forward" or request.needs_gradient):
                self.prove(plan)
        return plans

    def _plan(self, request: PlanRequest, direction: Direction) -> Plan:
        if self.planner is not None:
            return self.planner(request.problem, direction=direction, layout=request.layout)
        choice = replace(self.choice, layout=request.layout)
        if request.on_gpu and self.costs is None and choice.blocks_per_call is None:
            return make_cost_based_plan(request.problem, choice, direction, gpu_costs)  # one block a call is too small
        return make_plan(request.problem, choice, direction=direction, costs=self.costs)


def _check_fit(plan: Plan, problem: Problem, layout: Layout, direction: Direction) -> None:
    """Raise unless a plan is for this pass of this problem on this layout: another plan would run, and be wrong."""
    if not isinstance(plan, Plan):
        raise ScheduleError(f"the planner returned {type(plan).__name__} for {direction}; expected a Plan")
    pairs: dict[str, tuple[object, object]] = {
        "direction": (plan.direction, direction),
        **{f.name: (getattr(plan.problem, f.name), getattr(problem, f.name)) for f in fields(problem)},
    }
    wrong = [f"{name} {theirs} instead of {ours}" for name, (theirs, ours) in pairs.items() if theirs != ours]
    if plan.layout != layout:
        name = "name" if plan.layout.name != layout.name else "text"
        wrong.append(f"layout {getattr(plan.layout, name)[:60]} instead of {getattr(layout, name)[:60]}")
    if wrong:
        raise ScheduleError(
            f"the {direction} plan is for another call, with {', '.join(wrong)}; make it from the problem, direction "
            "and layout that the planner is given"
        )


def _moves(problem: Problem, choice: Choice, direction: Direction, costs: Costs) -> tuple[Move, ...]:
    """The moves of a resolved choice, in its waves."""
    assignment, kept = choice.assignment, choice.keep if direction == "backward" else ()
    inputs = INPUTS[direction]

    def moves_with(*held_kinds: Kind) -> tuple[Move, ...]:
        """The moves of one wave, without exchanges, for a rank that has some inputs already."""
        if choice.method == "attention2d":
            return attention2d_moves(assignment, direction, held_kinds)
        return mesh_moves(problem, choice, direction, costs=costs, held_kinds=held_kinds)

    def traded(moves: tuple[Move, ...], *held_kinds: Kind) -> tuple[Move, ...]:
        return (
            _trade_heads(moves, direction, [k for k in inputs if k not in held_kinds])
            if assignment.ulysses_degree > 1
            else moves
        )

    gathered = [kind for kind in inputs if kind in kept]
    own = INPUTS["forward"] if "own" in kept else gathered
    first = moves_with(*gathered)
    if assignment.waves == 1:
        return traded(first, *own)
    shared: list[Kind] = ["kv"] if assignment.cut == "rows" else []  # come with the first wave, and stay
    usual = moves_with(*dict.fromkeys([*gathered, *shared]))
    # If all inputs of a wave are there before it begins, rows can be completed one by one from the start.
    fetches = [move for move in usual if brings_input(move, direction)]
    prompt = (*fetches, *moves_with(*inputs))
    candidates = []
    for later in dict.fromkeys((usual, prompt)):
        waves = [traded(first, *own), *[traded(later, *own, *shared)] * (assignment.waves - 1)]
        if shared:  # dK and dV are complete after the last wave
            waves[:-1] = [tuple(m for m in moves if isinstance(m, Meet) or m.kind != "dkv") for moves in waves[:-1]]
        candidates.append(in_waves(waves, direction, assignment=assignment, costs=costs, route=choice.route))
    return min(candidates, key=lambda timed: timed.makespan).moves


def _trade_heads(moves: Iterable[Move], direction: Direction, inputs: Iterable[Kind]) -> tuple[Move, ...]:
    """Ulysses as a factor: trade heads for tokens, make the moves on the smaller grid, trade back."""
    results = OUTPUTS[direction]
    return (
        *(GroupMove("exchange", kind) for kind in inputs),
        *(move for move in moves if not (isinstance(move, Return) and move.offset == 0)),
        *(move for kind in results for move in (Return(kind, 0), GroupMove("exchange", kind))),
        *(GroupMove("unpack", kind) for kind in results),
    )


def make_cost_based_plan(problem: Problem, choice: Choice, direction: Direction, costs_of: CostsOf) -> Plan:
    """The plan of one pass in the order that suits a machine: resolve the choice, ask for its costs, plan it."""
    resolved, costs = with_costs(problem, choice, direction, costs_of)
    return make_plan(problem, resolved, direction=direction, costs=costs)


def with_costs(
    problem: Problem, choice: Choice, direction: Direction, costs_of: CostsOf | None
) -> tuple[Choice, Costs | None]:
    """The choice resolved, and its costs; None for collectives, which have none, or if nothing states them."""
    resolved = choice.resolved(problem, direction)
    return resolved, None if costs_of is None or resolved.is_collective else costs_of(problem, resolved, direction)


def gpu_costs(problem: Problem, choice: Choice, direction: Direction) -> Costs:
    """Costs on a GPU of which no more is known: those of transfers, and the prices of launches and of running sums."""
    assignment, device = choice.assignment, UNKNOWN.device
    costs, sizes = estimate_costs(problem, assignment, direction), shard_sizes(problem, assignment)
    block_s = block_flops(problem, assignment, direction) / (device.rate(direction).tflops * 1e12)
    # Shards of a place hold all the heads of its Ulysses group.
    call_s = meet_seconds(device, direction) * assignment.ulysses_degree
    merged = merge_nbytes(problem.itemsize, problem.accumulator_itemsize) / problem.itemsize
    memory_s = device.touch_seconds(merged, launches=0)
    row, col = (sizes["q"], 0.0) if direction == "forward" else (sizes["dq"], sizes["dkv"])
    return replace(costs, call=call_s / block_s, row=row * memory_s / block_s, col=col * memory_s / block_s)


# Moves


def mesh_moves(
    problem: Problem, choice: Choice, direction: Direction, *, costs: Costs, held_kinds: tuple[Kind, ...]
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
        held_kinds=held_kinds,
        route=choice.route,
        sizes=tuple(shard_sizes(problem, assignment).items()),
    )
    if "ring" in (choice.route, choice.partials):
        assert choice.layout is not None
        _check_inner_rings(BlockMatrix(problem, choice.layout, assignment))
    if choice.route == "ring":
        moves = _with_early_entries(moves, assignment)
    return moves


def greedy_moves(
    tile: Tile,
    direction: Direction,
    *,
    costs: Costs,
    blocks_per_call: int | None = None,
    held_kinds: tuple[Kind, ...] = (),
    route: Route = "direct",
    sizes: Sizes = ONE_SIZE,
) -> tuple[Move, ...]:
    """The moves of one tile, from its own block to the last partial returned. Kinds in `held_kinds` are not fetched.

    If `blocks_per_call` is None, calls are cost-based: each is sized by its price, or is one block if `costs` has no
    costs of calls. If it is a number, costs of calls are ignored.
    """
    if blocks_per_call is None and costs.has_call_costs:
        moves = cost_based_moves(tile, direction, costs=costs, sizes=sizes, held_kinds=held_kinds, route=route)
    else:
        moves = counted_moves(tile, direction, costs.without_call_costs(), blocks_per_call or 1, held_kinds)
    return (*moves, *(Return(kind, 0) for kind in OUTPUTS[direction]))


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


def attention2d_moves(assignment: Assignment, direction: Direction, held_kinds: tuple[Kind, ...]) -> tuple[Move, ...]:
    """All-gather Q along rows and KV along columns, except kinds that the rank has, one attend of the whole tile,
    reduce the results to their homes."""
    travelling = [kind for kind, axis in AXIS_OF.items() if assignment.size(axis) > 1]
    gathered = [GroupMove("gather", k) for k in INPUTS[direction] if k in travelling and k not in held_kinds]
    results: list[Move] = []
    for kind in OUTPUTS[direction]:
        results += [GroupMove("reduce", kind)] if kind in travelling else []
        results.append(Return(kind, 0))
    return (*gathered, Meet(tuple(range(assignment.tile.rows)), tuple(range(assignment.tile.cols))), *results)
