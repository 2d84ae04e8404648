"""Other methods next to a plan, and the ways to plan a decoded step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import gcd
from typing import Any, cast

from mesh_attention.plan.assignment import Tile, divisors
from mesh_attention.plan.plan import Plan, PlanRequest, RankCosts, program_flops, rank_costs
from mesh_attention.plan.steps import Direction
from mesh_attention.planners.choice import Choice, Family, default_layout
from mesh_attention.planners.costs import received_by_tile
from mesh_attention.planners.make import StatedStrategy, make_plan
from mesh_attention.planners.over_cache import Combining, Queries, StepShape, plan_decode
from mesh_attention.problem import Problem
from mesh_attention.simulation.simulate import ALL_RANKS, MANY_RANKS, simulate
from mesh_attention.timeline import Timeline
from mesh_attention.topology import Topology
from mesh_attention.tuning.bounds import plan_on, traffic
from mesh_attention.tuning.result import NEAR_TIE, Forecast, Trial
from mesh_attention.tuning.search import MOST_TRANSFERS, groupings
from mesh_attention.units import Progress, format_time
from mesh_attention_lab.bounds import least_received_nbytes
from mesh_attention_lab.decode_simulator import decode_seconds, simulate_decode

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


def rivals(problem: Problem, like: Choice) -> Iterator[Choice]:
    """The main methods that fit the problem, with the layout of a choice, what it keeps, its routes and grouping."""
    whole = Choice(layout=like.layout, keep=like.keep)
    ordered = replace(whole, route=like.route, partials=like.partials, blocks_per_call=like.blocks_per_call)
    yield replace(ordered, method="ring")
    yield replace(ordered, method="pass-q")
    yield ordered
    yield replace(whole, method="attention2d")
    degrees = divisors(gcd(problem.ranks, problem.kv_heads))
    mixed = [degree for degree in degrees if 1 < degree < problem.ranks]
    if mixed:
        yield replace(ordered, ulysses_degree=mixed[-1])
    if problem.ranks in degrees:
        yield replace(whole, method="ulysses")


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

    def to_json(self) -> dict[str, Any]:
        """As of a trial of the tuner, with the digests of the plans."""
        forecasts = {direction: asdict(forecast) for direction, forecast in self.forecasts.items()}
        digests = {direction: plan.digest for direction, plan in self.plans.items()}
        return {"family": self.family, "forecasts": forecasts, "reason": self.reason, "digests": digests}


# Decoded steps: the ways to plan one layer, and their forecasts


WAYS: dict[str, tuple[Queries, Combining]] = {
    "replicated, all_gather": ("replicated", "all_gather"),
    "replicated, reduce_scatter": ("replicated", "reduce_scatter"),
    "sharded": ("sharded", "reduce_scatter"),
}
"""Simplest first."""


def decode_plans(problem: Problem, *, queries: Queries | None = None) -> dict[str, Plan]:
    """Every way to plan a step, or those of `queries`. Each batch entry is a sequence with its new tokens."""
    shape = StepShape(
        new_tokens=(problem.seq_q,) * problem.batch,
        ranks=problem.ranks,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        head_dim_qk=problem.head_dim_qk,
        head_dim_v=problem.head_dim_v,
        dtype=problem.dtype,
    )
    ways = {name: way for name, way in WAYS.items() if queries in (None, way[0])}
    return {name: plan_decode(shape, queries=held, combining=combine) for name, (held, combine) in ways.items()}


def decode_trials(
    problem: Problem, topology: Topology, *, queries: Queries | None = None, spans_of: Sequence[int] = ()
) -> tuple[PlanTrial, ...]:
    """The chosen way, then the others and why they are not, fastest first."""
    attend_s, trials = decode_seconds(topology.device, problem), []
    for name, plan in decode_plans(problem, queries=queries).items():
        timeline = simulate_decode(plan, topology, attend_s=attend_s, spans_of=spans_of)
        trials.append(PlanTrial.of(name, {"forward": plan}, {"forward": timeline}))
    first, *losers = sorted(trials, key=lambda trial: trial.time_s)
    return first, *(replace(loser, reason=_why_not(loser, first)) for loser in losers)


def _why_not(loser: PlanTrial, chosen: PlanTrial) -> str:
    exposed_s, compute_s = loser.exposed_s - chosen.exposed_s, loser.compute_s - chosen.compute_s
    if loser.time_s <= chosen.time_s:
        return "as fast"
    if compute_s > exposed_s:
        return f"merges and copies for {format_time(compute_s)} longer"
    is_longer = WAYS[chosen.family][1] == "all_gather" != WAYS[loser.family][1]
    return f"{'one more exchange' if is_longer else 'larger exchanges'}: {format_time(exposed_s)} longer"


# Counts of plans, side by side


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
    plans = []
    for other in rivals(plan.problem, replace(choice, layout=plan.layout)):
        report(f"planning {other.method}", 0.0)
        resolved = grouped(other, plan.problem, plan.direction)
        if resolved.assignment.tile.rows + resolved.assignment.tile.cols <= MOST_TRANSFERS:
            plans.append(make_plan(plan.problem, resolved, direction=plan.direction))
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


def sampled_ranks(ranks: int, *, all_up_to: int = ALL_RANKS, sample: int = 16) -> tuple[int, ...]:
    """Every rank if there are at most `all_up_to`, otherwise a sample spread evenly from the first to the last; of many
    ranks, these two."""
    if ranks <= all_up_to:
        return tuple(range(ranks))
    sample = 2 if ranks >= MANY_RANKS else sample
    return tuple(index * (ranks - 1) // (sample - 1) for index in range(sample))
