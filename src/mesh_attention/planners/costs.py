"""Costs of transfers and kernel calls in blocks of compute (real numbers), and the tile that moves the fewest bytes.

A transfer costs the number of blocks that hide it. A call of r rows and c columns costs r·c blocks, plus `call` once,
`row` for every row and `col` for every column that its partial results are added to. Rows and columns that are not
adjacent are attended in several calls.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace

from mesh_attention.clusters import UNKNOWN
from mesh_attention.errors import ScheduleError
from mesh_attention.plan.assignment import Assignment, Tile, check_assignment, divisors, tiles_of
from mesh_attention.plan.blocks import BlockMatrix, token_nbytes
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.steps import AXIS_OF, DIRECTIONS, INPUTS, KINDS, OUTPUTS, Direction, Item, Kind
from mesh_attention.problem import Problem

FLOPS_PER_BYTE = UNKNOWN.device.forward.tflops * 1e12 / (UNKNOWN.between.gb_per_s * 1e9)

CALL_COSTS = ("call", "row", "col")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Blocks of compute that hide one transfer of each kind, and what a call costs besides its blocks: by default
    nothing, as in the paper."""

    q: float = 1.0
    kv: float = 1.0
    do: float = 1.0
    o: float = 1.0
    dq: float = 1.0
    dkv: float = 1.0
    call: float = 0.0
    row: float = 0.0
    col: float = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            cost, may_be_0 = getattr(self, f.name), f.name in CALL_COSTS
            is_number = isinstance(cost, int | float) and 0 <= cost < float("inf")
            if not is_number or not (cost or may_be_0):
                expected = "a number, 0 or above" if may_be_0 else "a number above 0"
                raise ScheduleError(f"cost of {f.name} is {cost!r}: expected {expected}")

    @property
    def has_call_costs(self) -> bool:
        return any(getattr(self, name) for name in CALL_COSTS)

    def without_call_costs(self) -> Costs:
        return replace(self, **dict.fromkeys(CALL_COSTS, 0.0)) if self.has_call_costs else self

    def of_call(self, rows: int, cols: int) -> float:
        """The price of attending rows with columns. Both are sets of offsets, as bit masks."""
        num_rows, num_cols = rows.bit_count(), cols.bit_count()
        if not self.call + self.row + self.col:
            return num_rows * num_cols
        row_runs, col_runs = (rows & ~(rows << 1)).bit_count(), (cols & ~(cols << 1)).bit_count()
        touched = self.row * num_rows * col_runs + self.col * num_cols * row_runs
        return num_rows * num_cols + self.call * row_runs * col_runs + touched

    def in_waves(self, assignment: Assignment) -> Costs:
        """The same costs in blocks of one wave. A wave of rows meets whole columns."""
        whole = CALL_COSTS[:1] if assignment.cut == "heads" else ("call", "col", "kv", "dkv")
        return replace(self, **{name: getattr(self, name) * assignment.waves for name in whole})

    def of(self, kind: Kind) -> float:
        cost: float = getattr(self, kind)
        return cost


def estimate_costs(
    problem: Problem, assignment: Assignment, direction: Direction, *, flops_per_byte: float = FLOPS_PER_BYTE
) -> Costs:
    """Costs on a machine that computes `flops_per_byte` operations in the time its link moves a byte.

    Blocks are taken as equal: a mask's work is spread evenly over all of them, as zigzag and striped layouts do.
    """
    check_assignment(assignment, problem)
    if direction not in DIRECTIONS:
        raise ScheduleError(f"direction {direction!r}: expected {' or '.join(DIRECTIONS)}")
    flops, nbytes = block_flops(problem, assignment, direction), shard_sizes(problem, assignment)
    return Costs(**{kind: flops_per_byte * nbytes[kind] / flops for kind in KINDS})


def even_costs(problem: Problem, assignment: Assignment, direction: Direction) -> Costs:
    """Costs where no machine is known: those of a fast GPU and link, scaled down until transfers take no longer than
    compute. Orders differ most where both take equally long."""
    costs = estimate_costs(problem, assignment, direction)
    kinds = (*INPUTS[direction], *OUTPUTS[direction])
    traded = 1 - 1 / assignment.ulysses_degree
    link = sum(costs.of(kind) * (assignment.size(AXIS_OF[kind]) - 1 + traded) for kind in kinds)
    scale = min(1.0, assignment.tile.rows * assignment.tile.cols / max(link, 1e-9))
    return replace(costs, **{kind: costs.of(kind) * scale for kind in KINDS})


def block_flops(problem: Problem, assignment: Assignment, direction: Direction) -> float:
    """FLOPs of an average block, over all slices of the heads, for one batch entry."""
    flops = problem.flops(direction, pairs=max(1, problem.pairs))
    return flops / (problem.batch * assignment.places**2)


def shard_sizes(problem: Problem, assignment: Assignment) -> dict[Kind, float]:
    """Bytes of a place's average shard of each kind, over all slices of the heads, for one batch entry."""
    tokens = {"row": problem.seq_q / assignment.places, "col": problem.seq_kv / assignment.places}
    return {kind: tokens[AXIS_OF[kind]] * token_nbytes(kind, problem) for kind in KINDS}


# Bytes

SAMPLED_PLACES = 16
"""Places whose bytes are counted, including the first and the last; masks and layouts are regular."""


def least_volume_tile(problem: Problem, layout: Layout, direction: Direction, *, ulysses_degree: int = 1) -> Tile:
    """The tile whose busiest rank receives the fewest bytes; ties go to fewer rows. Overlap is ignored."""
    volumes = received_by_tile(problem, layout, direction, ulysses_degree)
    return min(volumes, key=lambda tile: volumes[tile])


def least_volume_degree(
    problem: Problem, layout: Layout, directions: Sequence[Direction], *, may_keep: bool = False
) -> int:
    """The Ulysses degree whose busiest rank receives the fewest bytes over these passes, each with its best tile; ties
    go to the smaller degree. If inputs may be kept, backward does not exchange them again."""

    def received(degree: int) -> float:
        kept = {"forward": (), "backward": INPUTS["forward"] if may_keep else ()}
        return sum(min(received_by_tile(problem, layout, d, degree, kept=kept[d]).values()) for d in directions)

    return min((degree for degree in divisors(problem.ranks) if problem.kv_heads % degree == 0), key=received)


def received_by_tile(
    problem: Problem, layout: Layout, direction: Direction, ulysses_degree: int, *, kept: Collection[Kind] = ()
) -> dict[Tile, float]:
    """Tensor bytes that reach the busiest rank in one pass, with any planner, for every tile of a Ulysses degree. Kinds
    that are kept are not exchanged."""
    places = _sample(problem.ranks // ulysses_degree)
    grids = [Assignment(tile, ulysses_degree) for tile in tiles_of(problem.ranks // ulysses_degree)]
    matrix = BlockMatrix(problem, layout, grids[0])
    kinds = (*INPUTS[direction], *OUTPUTS[direction])
    largest = {kind: max(matrix.nbytes(Item(kind, place)).payload for place in places) for kind in kinds}
    exchanged = sum(largest[kind] for kind in kinds if kind not in kept) * (1 - 1 / ulysses_degree)
    if matrix.is_uniform:
        return {g.tile: exchanged + sum(largest[kind] * (g.size(AXIS_OF[kind]) - 1) for kind in kinds) for g in grids}
    matrices = [BlockMatrix(problem, layout, grid) for grid in grids]
    return {
        m.assignment.tile: exchanged + max(received_nbytes(m, place, direction) for place in places) for m in matrices
    }


def received_nbytes(matrix: BlockMatrix, place: int, direction: Direction) -> int:
    """Tensor bytes that reach a place of the grid in one pass, for one slice of the heads, with any planner."""
    total = 0
    for kind in (*INPUTS[direction], *OUTPUTS[direction]):
        axis = AXIS_OF[kind]
        for other in matrix.assignment.group(axis, place):
            if other != place and kind in INPUTS[direction] and matrix.needs(axis, place, other):
                total += matrix.nbytes(Item(kind, other)).payload
            if other != place and kind in OUTPUTS[direction] and matrix.needs(axis, other, place):
                total += matrix.nbytes(Item(kind, place)).payload
    return total


def _sample(places: int) -> list[int]:
    count = min(places, SAMPLED_PLACES)
    return sorted({index * (places - 1) // max(1, count - 1) for index in range(count)})
