"""One plan beside what the other planners make of the same problem, in numbers. Prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

from mesh_attention.cli.progress import Report
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.queries import RankCosts, imbalance, rank_costs
from mesh_attention.planning.choice import Method
from mesh_attention.planning.limits import limits
from mesh_attention.planning.registry import make_plan
from mesh_attention.problem import Problem

ALL_RANKS = 64
"""Up to this many ranks, every one is counted."""
SAMPLED_RANKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan and the worst of its counted ranks, for each number by itself."""

    method: str
    ulysses: int
    tile: str
    is_this_plan: bool
    sent_nbytes: int
    received_nbytes: int
    against_ring: float | None = None
    against_bound: float | None = None
    flops: int
    imbalance: float
    peak_nbytes: int
    kernel_calls: int
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`counted_ranks` are those whose worst the rows state; `bound_nbytes` is the least an average rank receives."""

    counted_ranks: tuple[int, ...]
    bound_nbytes: float
    rows: tuple[Row, ...]


def compare(plan: Plan, *, blocks_per_call: int | None, report: Report) -> Comparison:
    """The rivals share layout, direction, routes, grouping and what is kept with the plan. Ring is the measure."""
    plans = list(_rivals(plan, blocks_per_call, report))
    if plan not in plans:
        plans.insert(0, plan)
    ranks = counted_ranks(plan.problem.ranks)
    rows = []
    for number, rival in enumerate(plans):
        costs: list[RankCosts] = []
        for rank in ranks:
            report(f"counting {rival.method}", (number + len(costs) / len(ranks)) / len(plans))
            costs.append(rank_costs(rival, rank))
        rows.append(_row(rival, costs, is_this_plan=rival == plan))
    ring = next(row for row in rows if row.method == "ring" and row.ulysses == 1).received_nbytes
    bound = limits(plan.problem, plan.direction).received_nbytes
    is_bound = not (plan.schedule.keep and plan.direction == "backward")  # what was kept need not be received
    measured = [
        replace(
            row,
            against_ring=_times(row.received_nbytes, ring),
            against_bound=_times(row.received_nbytes, bound if is_bound else 0.0),
        )
        for row in rows
    ]
    return Comparison(counted_ranks=ranks, bound_nbytes=bound, rows=tuple(measured))


def _times(nbytes: int, measure: float) -> float | None:
    return nbytes / measure if measure else None


def counted_ranks(ranks: int) -> tuple[int, ...]:
    """All of them, or some, evenly spread from the first to the last."""
    if ranks <= ALL_RANKS:
        return tuple(range(ranks))
    return tuple(index * (ranks - 1) // (SAMPLED_RANKS - 1) for index in range(SAMPLED_RANKS))


def _rivals(plan: Plan, blocks_per_call: int | None, report: Report) -> Iterator[Plan]:
    wanted: list[tuple[Method, int | None]] = [("ring", None), ("pass-q", None), ("mesh", None), ("attention2d", None)]
    degree = _mixed_degree(plan.problem)
    if degree is not None:
        wanted.append(("mesh", degree))
    if plan.problem.kv_heads % plan.problem.ranks == 0:
        wanted.append(("ulysses", None))
    for number, (method, ulysses_degree) in enumerate(wanted):
        report(f"planning {method}", number / len(wanted))
        is_greedy = method not in ("attention2d", "ulysses")
        yield make_plan(
            plan.problem,
            method=method,
            layout=plan.layout,
            direction=plan.direction,
            ulysses_degree=ulysses_degree,
            route=plan.schedule.route if is_greedy else None,
            partials=plan.schedule.partials if is_greedy else None,
            blocks_per_call=blocks_per_call if is_greedy else None,
            keep=plan.schedule.keep,
        )


def _mixed_degree(problem: Problem) -> int | None:
    """The largest Ulysses degree that fits and leaves a grid of more than one place."""
    common = gcd(problem.ranks, problem.kv_heads)
    degrees = (u for u in range(common, 1, -1) if common % u == 0 and u < problem.ranks)
    return next(degrees, None)


def _row(plan: Plan, costs: Sequence[RankCosts], *, is_this_plan: bool) -> Row:
    return Row(
        method=plan.method,
        ulysses=plan.assignment.ulysses,
        tile=str(plan.assignment.tile),
        is_this_plan=is_this_plan,
        sent_nbytes=max(cost.sent_nbytes for cost in costs),
        received_nbytes=max(cost.received_nbytes for cost in costs),
        flops=max(cost.flops for cost in costs),
        imbalance=imbalance(cost.flops for cost in costs),
        peak_nbytes=max(cost.peak_nbytes for cost in costs),
        kernel_calls=max(cost.kernel_calls for cost in costs),
        messages=max(cost.messages for cost in costs),
    )
