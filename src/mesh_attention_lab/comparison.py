"""Other methods next to a plan: their plans of the same problem, and a bound for StarTrail, which has none here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, cast

from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.plan import Plan, PlanRequest, RankCosts, program_flops, rank_costs
from mesh_attention.plan.steps import Direction
from mesh_attention.planners.choice import Choice, Family, default_layout
from mesh_attention.planners.costs import received_by_tile
from mesh_attention.planners.make import StatedStrategy, make_plan
from mesh_attention.problem import Problem
from mesh_attention.simulation.simulate import ALL_RANKS, MANY_RANKS, simulate
from mesh_attention.timeline import Timeline
from mesh_attention.topology import Topology
from mesh_attention.tuning.bounds import plan_on, traffic
from mesh_attention.tuning.candidates import shapes
from mesh_attention.tuning.result import NEAR_TIE, Forecast, Trial, Tuning
from mesh_attention.tuning.search import MOST_TRANSFERS, groupings
from mesh_attention.units import GIB, Progress
from mesh_attention_lab.bounds import least_received_nbytes

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


TRIED, PRICED_RANKS = 3, 8
"""Placements, routes and groupings of a tile that are simulated, the most promising first, and then the first of them
with a cost-based grouping; and the ranks of each whose calls are priced."""


def fastest(choices: Sequence[Choice], problem: Problem, topology: Topology, direction: Direction) -> Forecast:
    """The forecast of the fastest of the most promising choices, in any grouping."""
    candidates = [replace(choice, blocks_per_call=blocks) for choice in choices for blocks in groupings(choice)]
    promising = sorted(candidates, key=lambda choice: traffic(choice, problem, topology, direction).estimate_s)
    tried = dict.fromkeys((*promising[:TRIED], replace(promising[0], blocks_per_call=None)))
    plans = [plan_on(topology, problem, choice, direction) for choice in tried]
    forecasts = [Forecast.of(simulate(plan, topology, priced_ranks=PRICED_RANKS)) for plan in plans]
    return min(forecasts, key=lambda forecast: forecast.time_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTrial(Trial):
    """Plans that no choice made, under a name, and their timelines."""

    plans: Mapping[Direction, Plan]
    timelines: Mapping[Direction, Timeline]

    @classmethod
    def of(cls, name: str, plans: Mapping[Direction, Plan], timelines: Mapping[Direction, Timeline]) -> PlanTrial:
        forecasts = {direction: Forecast.of(timeline) for direction, timeline in timelines.items()}
        return cls(family=cast("Family", name), choices={}, forecasts=forecasts, plans=plans, timelines=timelines)


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


def flops_by_rank(plan: Plan) -> list[int]:
    return [program_flops(plan, program) for program in plan.all_programs()]


def imbalance(flops: Iterable[int]) -> float:
    """The extra work of the busiest rank relative to the average: 0 is even, 1 means twice as much."""
    flops = list(flops)
    mean = sum(flops) / max(1, len(flops))
    return max(flops) / mean - 1 if mean else 0.0


def compare(plan: Plan, choice: Choice, *, report: Progress) -> Comparison:
    """Rivals have the layout of the plan, and the routes, grouping and kept inputs of its choice."""
    plans = list(_rivals(plan, choice, report))
    if plan not in plans:
        plans.insert(0, plan)
    ranks = sampled_ranks(plan.problem.ranks)
    costs: list[list[RankCosts]] = []
    for number, rival in enumerate(plans):
        report(f"counting {rival.method}", number / len(plans))
        costs.append([rank_costs(rival, rank) for rank in ranks])
    ring = received_by_tile(plan.problem, plan.layout, plan.direction, 1)[Tile(1, plan.problem.ranks)]
    for rival, counted in zip(plans, costs, strict=True):
        if rival.method == "ring" and rival.assignment.ulysses_degree == 1:
            ring = max(cost.received_nbytes for cost in counted)
    bound = least_received_nbytes(plan.problem, plan.direction)
    # What forward kept is not received again: the bound does not hold.
    least = 0 if plan.schedule.keep and plan.direction == "backward" else bound
    rows = [_row(rival, counted, ring, least, rival == plan) for rival, counted in zip(plans, costs, strict=True)]
    return Comparison(counted_ranks=ranks, bound_nbytes=bound, rows=tuple(rows))


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


def _row(plan: Plan, costs: Sequence[RankCosts], ring: float, least: float, is_this_plan: bool) -> Row:
    counted = ("sent_nbytes", "received_nbytes", "flops", "peak_nbytes", "kernel_calls", "messages")
    worst: dict[str, Any] = {name: max(getattr(cost, name) for cost in costs) for name in counted}
    return Row(
        method=plan.method,
        ulysses=plan.assignment.ulysses_degree,
        tile=str(plan.assignment.tile),
        is_this_plan=is_this_plan,
        against_ring=worst["received_nbytes"] / ring if ring else None,
        against_bound=worst["received_nbytes"] / least if least else None,
        imbalance=imbalance(cost.flops for cost in costs),
        **worst,
    )


# StarTrail: with degree C, it gathers Q, K and V in teams of C, passes the gathered K and V round rings of teams, and
# reduces the outputs in teams. A rank computes C query shards with n / C key/value shards: the blocks of a mesh tile of
# C rows. It sends everything that mesh does, and also gathers K and V. So it takes at least as long as the fastest
# schedule found for a mesh tile of C rows.


STARTRAIL = cast("Family", "startrail")
MOST_DEGREES = 2


def startrail_degrees(ranks: int) -> list[int]:
    """Degrees C for which n is a multiple of C²; without 1, which is Ring-Attention."""
    return [c for c in range(2, ranks) if c * c <= ranks and ranks % (c * c) == 0]


def startrail(tuning: Tuning, problem: Problem, topology: Topology, *, memory_limit: float | None) -> Trial | None:
    """The bound of its best degree, one for both passes; None where there is none that fits, or for many ranks."""
    if problem.ranks >= MANY_RANKS:
        return None
    chosen, most_nbytes = tuning.chosen.choices, memory_limit or topology.device.memory_gib * GIB
    layout = next(iter(chosen.values())).layout or default_layout(problem)
    tiles: dict[int, list[Choice]] = {degree: [] for degree in startrail_degrees(problem.ranks)}
    for choice in shapes(problem, topology, layout=layout):
        if _startrail_degree(choice) in tiles:
            tiles[choice.assignment.tile.rows].append(choice)

    def least_s(degree: int) -> float:
        return sum(min(traffic(c, problem, topology, direction).bound_s for c in tiles[degree]) for direction in chosen)

    bounds = []
    for degree in sorted(tiles, key=least_s)[:MOST_DEGREES]:
        forecasts = {}
        for direction in chosen:
            tuned = [t.forecasts[direction] for t in tuning.trials if _startrail_degree(t.choices[direction]) == degree]
            forecasts[direction] = min(
                [fastest(tiles[degree], problem, topology, direction), *tuned], key=lambda forecast: forecast.time_s
            )
        bounds.append(Trial(family=STARTRAIL, choices={}, forecasts=forecasts))
    return min((b for b in bounds if b.peak_nbytes <= most_nbytes), key=lambda bound: bound.time_s, default=None)


def _startrail_degree(choice: Choice) -> int | None:
    """The degree whose blocks a choice computes without Ulysses; None for other choices."""
    return None if choice.assignment.ulysses_degree > 1 or choice.keep else choice.assignment.tile.rows


def sampled_ranks(ranks: int, *, all_up_to: int = ALL_RANKS, sample: int = 16) -> tuple[int, ...]:
    """Every rank if there are at most `all_up_to`, otherwise a sample spread evenly from the first to the last; of many
    ranks, these two."""
    if ranks <= all_up_to:
        return tuple(range(ranks))
    sample = 2 if ranks >= MANY_RANKS else sample
    return tuple(index * (ranks - 1) // (sample - 1) for index in range(sample))
