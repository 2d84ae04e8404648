"""StarTrail, which this library has no plan for: a bound from the cost model of its paper.

StarTrail with degree C gathers Q, K and V in teams of C, passes the gathered K and V round rings of teams, and reduces
the outputs in teams. A rank computes C query shards with n / C key/value shards: the blocks of a mesh tile of C rows.
It sends everything that mesh does, and also gathers K and V. So it takes at least as long as the fastest schedule found
for a mesh tile of C rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.counts import MANY_RANKS
from mesh_attention.plan.steps import Direction
from mesh_attention.planners.choice import Choice, Family, default_layout
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.candidates import shapes
from mesh_attention.tuning.result import Trial, Tuning
from mesh_attention.tuning.search import PassSearch, effort
from mesh_attention.tuning.traffic import traffic
from mesh_attention.tuning.tune import PRICED_RANKS_AT_LAST, why_not
from mesh_attention.units import GIB

STARTRAIL = cast("Family", "startrail")
MOST_DEGREES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound(Trial):
    """Lower bounds of a method that this library has no plan for. Its choices are those of the blocks it computes."""


def startrail_degrees(ranks: int) -> list[int]:
    """Degrees C for which n is a multiple of C²; without 1, which is Ring-Attention."""
    return [c for c in range(2, ranks) if c * c <= ranks and ranks % (c * c) == 0]


def startrail(tuning: Tuning, problem: Problem, topology: Topology, *, memory_limit: float | None) -> Bound | None:
    """The bound of its best degree, one for both passes; None where there is none that fits, or for many ranks."""
    layout = next(iter(tuning.chosen.choices.values())).layout or default_layout(problem)
    candidates = [
        c for c in shapes(problem, topology, layout=layout) if not c.is_collective and c.assignment.ulysses_degree == 1
    ]
    is_uniform = not candidates or BlockMatrix(problem, layout, candidates[0].assignment).is_uniform
    if is_uniform and problem.ranks >= MANY_RANKS:
        return None
    if memory_limit is None:
        memory_limit = topology.device.memory_gib * GIB
    searches: dict[Direction, PassSearch] = {}
    for direction in tuning.chosen.choices:
        search = PassSearch(problem, topology, direction, effort(problem.ranks), memory_limit, lambda *progress: None)
        search.priced_ranks = PRICED_RANKS_AT_LAST if is_uniform else problem.ranks
        search.tried = {trial.choices[direction]: trial.forecasts[direction] for trial in tuning.trials}
        searches[direction] = search
    bounds = [_bound(choices, searches) for choices in _most_promising(candidates, searches)]
    fitting = [
        bound for bound in bounds if all(forecast.peak_nbytes <= memory_limit for forecast in bound.forecasts.values())
    ]
    best = min(fitting, key=lambda bound: bound.time_s, default=None)
    return None if best is None else replace(best, reason=why_not(best, tuning.chosen))


def _most_promising(
    candidates: list[Choice], searches: Mapping[Direction, PassSearch]
) -> list[dict[Direction, Choice]]:
    """For each of the most promising degrees, the choice of every pass with the lowest bound."""
    by_bound: list[tuple[float, dict[Direction, Choice]]] = []
    for degree in startrail_degrees(candidates[0].assignment.places) if candidates else ():
        same = [choice for choice in candidates if choice.assignment.tile.rows == degree]
        least = {
            direction: min((traffic(c, s.problem, s.topology, direction).bound_s, i) for i, c in enumerate(same))
            for direction, s in searches.items()
        }
        choices = {direction: searches[direction].grouped(same[index]) for direction, (_, index) in least.items()}
        by_bound.append((sum(bound for bound, _ in least.values()), choices))
    by_bound.sort(key=lambda pair: pair[0])
    return [choices for _, choices in by_bound[:MOST_DEGREES]]


def _bound(choices: Mapping[Direction, Choice], searches: Mapping[Direction, PassSearch]) -> Bound:
    """The fastest of each pass with these tiles: of those that were tuned, and of these with two groupings."""
    fastest: dict[Direction, Choice] = {}
    for direction, choice in choices.items():
        search, tile = searches[direction], choice.assignment.tile
        for blocks in (None, choice.blocks_per_call):
            search.simulate(replace(choice, blocks_per_call=blocks))
        same = [c for c in search.tried if (c.assignment.tile, c.assignment.ulysses_degree) == (tile, 1) and not c.keep]
        fastest[direction] = min(same, key=lambda c, tried=search.tried: tried[c].time_s)  # type: ignore[misc]
    forecasts = {direction: searches[direction].tried[choice] for direction, choice in fastest.items()}
    return Bound(family=STARTRAIL, choices=fastest, forecasts=forecasts)
