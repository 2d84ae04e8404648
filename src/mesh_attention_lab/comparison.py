"""A plan next to those that the other methods make of the same problem, and how their blocks are grouped into calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.counts import RankCosts, imbalance, rank_costs, sampled_ranks
from mesh_attention.plan.plan import Plan, PlanRequest
from mesh_attention.plan.steps import Direction
from mesh_attention.planners.choice import Choice, default_layout
from mesh_attention.planners.costs import limits, received_by_tile
from mesh_attention.planners.make import StatedStrategy, make_plan
from mesh_attention.problem import Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Topology
from mesh_attention.tuning.result import NEAR_TIE, Trial
from mesh_attention.tuning.search import MOST_TRANSFERS
from mesh_attention.tuning.traffic import plan_on
from mesh_attention.units import Progress

MOST_BLOCKS, BLOCKS_PER_CALL = 16384, 16
"""Blocks of a rank up to which each is a call unless a number is stated; and the number where there are more."""


def grouped(choice: Choice, problem: Problem, direction: Direction, *, blocks_per_call: int | None = None) -> Choice:
    """The resolved choice, with this grouping where it does not say: by default the costs of a plan size its calls.

    Where a rank has very many blocks, several of them are a call.
    """
    resolved = choice.resolved(problem, direction)
    if resolved.is_collective or resolved.blocks_per_call is not None:
        return resolved
    is_long = resolved.assignment.places > MOST_BLOCKS
    return replace(resolved, blocks_per_call=BLOCKS_PER_CALL if is_long else blocks_per_call)


def single_block_plan(topology: Topology, problem: Problem, choice: Choice, direction: Direction) -> Plan:
    """The plan on a cluster with one block per call, where the choice does not say."""
    return plan_on(topology, problem, grouped(choice, problem, direction, blocks_per_call=1), direction)


def usual_ring_plan(plan: Plan, topology: Topology) -> Plan:
    """Ring-Attention as it is usually run: shards and partials travel along the ring, one block per call."""
    choice = Choice(method="ring", layout=plan.layout, route="ring", partials="ring", keep=plan.schedule.keep)
    return single_block_plan(topology, plan.problem, choice, plan.direction)


def choice_without_costs(problem: Problem, topology: Topology, trial: Trial) -> Choice | None:
    """One choice for all passes of a trial that is as fast without costs, by the prices of a Hopper GPU or with its own
    grouping; None if there is none."""
    first, *others = trial.choices.values()
    if any(other != first for other in others):
        return None
    for choice in dict.fromkeys((replace(first, blocks_per_call=None), first)):
        layout = choice.layout or default_layout(problem)
        request = PlanRequest(problem=problem, layout=layout, on_gpu=True, needs_gradient=False)
        plans = StatedStrategy(choice).plans(request)
        times_s = [simulate(plans[direction], topology).time_s for direction in trial.choices]
        if sum(times_s) <= trial.time_s * (1 + NEAR_TIE):
            return choice
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan; each number is that of the worst of the counted ranks."""

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
    """`bound_nbytes` is a lower bound on the bytes that an average rank receives."""

    counted_ranks: tuple[int, ...]
    bound_nbytes: float
    rows: tuple[Row, ...]


def compare(plan: Plan, choice: Choice, *, report: Progress) -> Comparison:
    """Rivals have the layout of the plan, and the routes, grouping and kept inputs of its choice."""
    plans = list(_rivals(plan, choice, report))
    if plan not in plans:
        plans.insert(0, plan)
    ranks = sampled_ranks(plan.problem.ranks)
    rows = []
    for number, rival in enumerate(plans):
        costs: list[RankCosts] = []
        for rank in ranks:
            report(f"counting {rival.method}", (number + len(costs) / len(ranks)) / len(plans))
            costs.append(rank_costs(rival, rank))
        rows.append(_row(rival, costs, is_this_plan=rival == plan))
    ring = received_by_tile(plan.problem, plan.layout, plan.direction, 1)[Tile(1, plan.problem.ranks)]
    ring = next((row.received_nbytes for row in rows if row.method == "ring" and row.ulysses == 1), ring)
    bound = limits(plan.problem, plan.direction).received_nbytes
    # What forward kept is not received again: the bound does not hold.
    has_bound = bound and not (plan.schedule.keep and plan.direction == "backward")
    measured = [
        replace(
            row,
            against_ring=row.received_nbytes / ring if ring else None,
            against_bound=row.received_nbytes / bound if has_bound else None,
        )
        for row in rows
    ]
    return Comparison(counted_ranks=ranks, bound_nbytes=bound, rows=tuple(measured))


def _rivals(plan: Plan, choice: Choice, report: Progress) -> Iterator[Plan]:
    whole = Choice(layout=plan.layout, keep=choice.keep)
    greedy = replace(whole, route=choice.route, partials=choice.partials, blocks_per_call=choice.blocks_per_call)
    wanted = [replace(greedy, method="ring"), replace(greedy, method="pass-q"), greedy]
    wanted.append(replace(whole, method="attention2d"))
    degree = _mixed_degree(plan.problem)
    if degree is not None:
        wanted.append(replace(greedy, ulysses_degree=degree))
    if plan.problem.kv_heads % plan.problem.ranks == 0:
        wanted.append(replace(whole, method="ulysses"))
    for number, rival in enumerate(wanted):
        report(f"planning {rival.method}", number / len(wanted))
        resolved = grouped(rival, plan.problem, plan.direction)
        if resolved.assignment.tile.rows + resolved.assignment.tile.cols <= MOST_TRANSFERS:
            yield make_plan(plan.problem, resolved, direction=plan.direction)


def _mixed_degree(problem: Problem) -> int | None:
    """The largest Ulysses degree that fits and leaves a grid of more than one place."""
    common = gcd(problem.ranks, problem.kv_heads)
    return next((u for u in range(common, 1, -1) if common % u == 0 and u < problem.ranks), None)


def _row(plan: Plan, costs: list[RankCosts], *, is_this_plan: bool) -> Row:
    counted = ("sent_nbytes", "received_nbytes", "flops", "peak_nbytes", "kernel_calls", "messages")
    worst: dict[str, Any] = {name: max(getattr(cost, name) for cost in costs) for name in counted}
    return Row(
        method=plan.method,
        ulysses=plan.assignment.ulysses_degree,
        tile=str(plan.assignment.tile),
        is_this_plan=is_this_plan,
        imbalance=imbalance(cost.flops for cost in costs),
        **worst,
    )
