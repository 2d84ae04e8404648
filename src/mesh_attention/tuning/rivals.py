"""Cost models of rivals that this library has no plan for.

StarTrail with degree C gathers Q, K and V in teams of C, passes the gathered K and V round rings of teams, and reduces
the outputs in teams. A rank computes C query shards with n / C key/value shards: the blocks of a mesh tile of C rows.
It sends everything that mesh does, and also gathers K and V. So it takes at least as long as the fastest schedule found
for a mesh tile of C rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.steps import Direction
from mesh_attention.planning.choice import Choice
from mesh_attention.tuning.result import Trial
from mesh_attention.tuning.search import PassSearch, groupings
from mesh_attention.tuning.traffic import traffic

MOST_DEGREES = 2


def startrail_degrees(ranks: int) -> list[int]:
    """Degrees C for which n is a multiple of C²; without 1, which is Ring-Attention."""
    return [c for c in range(2, ranks) if c * c <= ranks and ranks % (c * c) == 0]


def startrail_units(ranks: int, degree: int) -> float:
    """Forward volume per rank at g = 1, in units of (tokens per rank × heads × head size), as its paper states it."""
    return 4 * degree - 1 + 2 * ranks / degree


def startrail(candidates: list[Choice], searches: Mapping[Direction, PassSearch]) -> list[Trial]:
    """A bound for each of the most promising degrees; one degree for both passes."""
    trials = []
    ranks = next(iter(searches.values())).problem.ranks
    for degree in startrail_degrees(ranks):
        assignment = (Tile(degree, ranks // degree), 1)
        same = [
            c for c in candidates if not c.is_collective and (c.assignment.tile, c.assignment.ulysses) == assignment
        ]
        best = {direction: _least(same, search) for direction, search in searches.items()}
        trials.append((sum(bound for bound, _ in best.values()), {d: c for d, (_, c) in best.items()}))
    trials.sort(key=lambda trial: trial[0])
    found = []
    for _, chosen in trials[:MOST_DEGREES]:
        for direction, choice in chosen.items():
            chosen[direction] = _fastest(choice, searches[direction])
        forecasts = {direction: searches[direction].simulate(choice) for direction, choice in chosen.items()}
        if all(forecast.peak_nbytes <= searches[d].limit_nbytes for d, forecast in forecasts.items()):
            found.append(Trial(family="startrail", choices=chosen, forecasts=forecasts, is_bound=True))
    return found


def _fastest(choice: Choice, search: PassSearch) -> Choice:
    """The fastest choice with this tile and degree, after every grouping of this one has been simulated."""
    for grouping in (None, *groupings(choice)):
        search.simulate(replace(choice, blocks_per_call=grouping))
    assignment = (choice.assignment.tile, choice.assignment.ulysses)
    same = [c for c in search.tried if (c.assignment.tile, c.assignment.ulysses) == assignment and not c.keep]
    return min(same, key=lambda c: search.tried[c].time_s)


def _least(candidates: list[Choice], search: PassSearch) -> tuple[float, Choice]:
    bounds = [
        (traffic(c, search.problem, search.topology, search.direction).bound_s, index)
        for index, c in enumerate(candidates)
    ]
    bound, index = min(bounds)
    return bound, search.grouped(candidates[index])
