"""What a transfer costs, in blocks: how many blocks of compute hide one transfer of each kind. Real numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mesh_attention.errors import ScheduleError
from mesh_attention.plan.assignment import Assignment, check_assignment
from mesh_attention.plan.blocks import elements_a_token
from mesh_attention.plan.steps import AXIS_OF, DIRECTIONS, KINDS, Direction, Kind
from mesh_attention.problem import Problem

FLOPS_PER_BYTE = 12_000.0
"""A Hopper GPU behind a 400 Gb/s link: 600 TFLOP/s of attention over 50 GB/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Blocks of compute that hide one transfer of each kind."""

    q: float = 1.0
    kv: float = 1.0
    do: float = 1.0
    o: float = 1.0
    dq: float = 1.0
    dkv: float = 1.0

    def __post_init__(self) -> None:
        for f in fields(self):
            cost = getattr(self, f.name)
            if not isinstance(cost, int | float) or not 0 < cost < float("inf"):
                raise ScheduleError(f"cost of {f.name} is {cost!r}: expected a number above 0")

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
    everything = {"q": range(problem.seq_q), "kv": range(problem.seq_kv)}
    pairs = problem.mask.pairs(**everything, seq_q=problem.seq_q, seq_kv=problem.seq_kv)
    inner = problem.head_dim_qk + problem.head_dim_v
    if direction == "backward":
        inner += 2 * problem.head_dim_qk + problem.head_dim_v
    block_flops = 2 * max(1, pairs) * problem.heads * inner / assignment.places**2
    return Costs(**{kind: flops_per_byte * _nbytes(kind, problem, assignment) / block_flops for kind in KINDS})


def _nbytes(kind: Kind, problem: Problem, assignment: Assignment) -> float:
    """Bytes of a place's average shard, over all slices of the heads, a batch entry."""
    payload, statistics = elements_a_token(kind, problem)
    tokens = (problem.seq_q if AXIS_OF[kind] == "row" else problem.seq_kv) / assignment.places
    return tokens * (payload * problem.itemsize + statistics * problem.accumulator_itemsize)
