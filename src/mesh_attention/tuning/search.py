"""The search for one pass: candidates in the order of their bounds, simulated until no bound is below the best.

The result does not depend on measured time, so every rank of a group finds the same one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.steps import Direction
from mesh_attention.planners.choice import FAMILIES, Choice, Family
from mesh_attention.problem import Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Topology
from mesh_attention.tuning.bounds import Traffic, plan_on, traffic
from mesh_attention.tuning.candidates import complexity, waved
from mesh_attention.tuning.result import Forecast
from mesh_attention.units import Progress

MOST_TRANSFERS = 8192
"""Rows plus columns of a tile up to which plans are made: one rank's program takes seconds to build."""
MOST_BLOCKS_PER_CALL = 16
LONGEST_PRICED_FIRST, LONGEST_PRICED = 80, 512
"""Rows plus columns of a tile whose calls are cost-based at the first try, and at all: planning takes time that
grows with the cube of this."""
QUICK_RANKS = 224
"""Ranks simulated for a pass, summed over candidates, in a quick search in which no rank represents others."""
FIRST_OF_FAMILY = 2.0
"""The first of a family are tried with other groupings if they are at most this many times slower than the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How many candidates are simulated: per family, or of all families together if not `by_family`. Candidates run in
    order of promise. Until `least` of them fit into memory, estimates exclude none; until `at_least` fit, bounds
    exclude none, so that each rival is shown at its best. After that, a candidate runs only if its estimate is within a
    factor `worth_trying` of the best time, until `most` fit. The fastest `finalists`, and the first `firsts` of every
    family, are tried with up to `regroupings` larger and as many smaller groupings; then the fastest of `waved` Ulysses
    degrees in waves."""

    by_family: bool = True
    at_least: int = 3
    least: int = 12
    most: int = 48
    worth_trying: float = 1.1
    regroupings: int = 4
    finalists: int = 8
    firsts: int = 2
    waved: int = 4


def effort(ranks: int) -> Effort:
    """Search effort for a number of ranks: simulations of fewer ranks are faster, so more are made."""
    return Effort() if ranks <= 64 else Effort(least=5, most=16, worth_trying=1.03, regroupings=1)


EFFORT_ON_MANY_RANKS = Effort(
    at_least=0, least=1, most=4, worth_trying=1.02, regroupings=1, finalists=2, firsts=0, waved=2
)
"""Planning and pricing one rank's program takes up to seconds there."""


def quick_effort(ranks: int, *, is_uniform: bool) -> Effort:
    """Search effort for a call that waits for the answer. Where a mask leaves shards out, every rank is simulated."""
    most = 48 if ranks <= 16 else 32 if ranks <= 64 else 20
    if not is_uniform:
        most = max(1, min(most, QUICK_RANKS // ranks))
    return Effort(
        by_family=False,
        at_least=3,
        least=(most + 1) // 2,
        most=most,
        worth_trying=1.2,
        regroupings=1,
        finalists=3 if is_uniform else 0,
        firsts=0,
        waved=2 if is_uniform else 0,
    )


class PassSearch:
    """The search for one pass: its limits, and the forecasts found so far."""

    def __init__(
        self,
        problem: Problem,
        topology: Topology,
        direction: Direction,
        effort: Effort,
        memory_limit: float,
        report: Progress,
    ) -> None:
        self.problem, self.topology, self.direction = problem, topology, direction
        self.effort, self.memory_limit, self.report = effort, memory_limit, report
        self.tried: dict[Choice, Forecast] = {}

    def run(self, candidates: Sequence[Choice], *, priced_ranks: int, is_uniform: bool) -> None:
        """Simulate the candidates that may win, and the most promising of every family."""
        self.priced_ranks, self.is_uniform = priced_ranks, is_uniform
        shortest = min(c.assignment.tile.rows + c.assignment.tile.cols for c in candidates)
        self.longest = max(shortest, MOST_TRANSFERS if self.effort.at_least else LONGEST_PRICED)
        candidates = [self.grouped(choice) for choice in candidates]
        bounds = {c: traffic(c, self.problem, self.topology, self.direction) for c in candidates}
        for number, (what, part) in enumerate(self._parts(candidates, bounds)):
            self.report(f"trying {what}", 0.95 * number / len(FAMILIES))
            self._run_part(part, bounds)
        firsts = [choice for family in FAMILIES for choice in self.best(family)[: self.effort.firsts]]
        near = [choice for choice in firsts if self.tried[choice].time_s <= FIRST_OF_FAMILY * self.best_s]
        for base in (*self.best()[: self.effort.finalists], *near):
            self.report(f"regrouping {base.family}", 0.95)
            for choice in self._regrouped(base):
                self.simulate(choice)
        for base in filter(_is_priced, self._fastest_degrees()[: self.effort.waved]):
            self.report(f"waves of {base.family}", 0.98)
            for choice in waved(base, self.problem):
                self.simulate(choice)

    def _fastest_degrees(self) -> list[Choice]:
        """The fastest choice of every Ulysses degree, fastest first. Waves take less memory, so if nothing fits, of
        those that do not fit."""
        by_degree: dict[int, Choice] = {}
        for choice in sorted(self.best() or self.tried, key=lambda choice: self.tried[choice].time_s):
            by_degree.setdefault(choice.assignment.ulysses_degree, choice)
        return list(by_degree.values())

    def _parts(self, candidates: Sequence[Choice], bounds: dict[Choice, Traffic]) -> list[tuple[str, list[Choice]]]:
        """Candidates in the order they are tried: of every family, or of all together."""
        if not self.effort.by_family:
            # The best of every tile and the best of all by turns: estimates of one tile have the same errors.
            pairs = zip(_tiles_first(candidates, bounds), _by_estimate(candidates, bounds), strict=True)
            return [("all", list(dict.fromkeys(choice for pair in pairs for choice in pair)))]
        by_family = {family: [c for c in candidates if c.family == family] for family in FAMILIES}
        # Families with the lowest estimates go first: their times prune the rest.
        estimates = {f: min((bounds[c].estimate_s for c in choices), default=0.0) for f, choices in by_family.items()}
        families = sorted(FAMILIES, key=lambda family: estimates[family])
        return [(family, _tiles_first(by_family[family], bounds)) for family in families]

    def _run_part(self, candidates: Sequence[Choice], bounds: dict[Choice, Traffic]) -> None:
        """Simulate the first few that fit into memory, whatever their bound, then those that may be the fastest."""
        fitting = 0
        for choice in candidates:
            bound = bounds[choice]
            is_unlikely = fitting >= self.effort.least and bound.estimate_s > self.effort.worth_trying * self.best_s
            is_beaten = self.is_uniform and fitting >= self.effort.at_least and bound.bound_s >= self.best_s
            tile = choice.assignment.tile
            if is_unlikely or is_beaten or tile.rows + tile.cols > self.longest:
                continue
            forecast = self.simulate(_first_try(choice))
            fitting += self.fits(forecast)
            if fitting == self.effort.most:
                return

    def simulate(self, choice: Choice) -> Forecast:
        if choice not in self.tried:
            plan = plan_on(self.topology, self.problem, choice, self.direction)
            self.tried[choice] = Forecast.of(simulate(plan, self.topology, priced_ranks=self.priced_ranks))
        return self.tried[choice]

    def fits(self, forecast: Forecast) -> bool:
        return forecast.peak_nbytes <= self.memory_limit

    @property
    def best_s(self) -> float:
        return min((forecast.time_s for forecast in self.tried.values() if self.fits(forecast)), default=float("inf"))

    def best(self, family: Family | None = None) -> list[Choice]:
        """Tried choices that fit into memory, of one family or of all, fastest first."""
        fitting = [c for c, forecast in self.tried.items() if family in (None, c.family) and self.fits(forecast)]
        return sorted(fitting, key=lambda choice: (self.tried[choice].time_s, complexity(choice)))

    def grouped(self, choice: Choice) -> Choice:
        """The choice with the grouping of the lowest estimate."""
        choices = [replace(choice, blocks_per_call=grouping) for grouping in groupings(choice)]
        return min(choices, key=lambda c: traffic(c, self.problem, self.topology, self.direction).estimate_s)

    def _regrouped(self, choice: Choice) -> Iterator[Choice]:
        """The choice with cost-based calls, then, where a fixed size may be better, with nearby groupings."""
        if choice.is_collective:
            return
        if _is_priced(choice):
            yield replace(choice, blocks_per_call=None)
        sizes, reach = groupings(choice), self.effort.regroupings
        if choice.route == "ring" or reach > 1:
            at = sizes.index(choice.blocks_per_call or self.grouped(choice).blocks_per_call or 1)
            for grouping in sizes[max(0, at - reach) : at + reach + 1]:
                yield replace(choice, blocks_per_call=grouping)


def _is_priced(choice: Choice) -> bool:
    tile = choice.assignment.tile
    return tile.rows + tile.cols <= LONGEST_PRICED


def _first_try(choice: Choice) -> Choice:
    """The choice with cost-based calls, except on ring routes, where waits between shards have no price, and for
    tiles so long that planning takes longer than simulating."""
    tile, is_direct = choice.assignment.tile, not choice.is_collective and choice.route == "direct"
    is_quick = tile.rows + tile.cols <= LONGEST_PRICED_FIRST
    return replace(choice, blocks_per_call=None) if is_direct and is_quick else choice


def _by_estimate(candidates: Sequence[Choice], bounds: dict[Choice, Traffic]) -> list[Choice]:
    return sorted(candidates, key=lambda c: (bounds[c].estimate_s, complexity(c)))


def _tiles_first(candidates: Sequence[Choice], bounds: dict[Choice, Traffic]) -> list[Choice]:
    """Candidates by estimate, but the best of every tile, with and without collectives, before the second of any."""
    by_estimate = _by_estimate(candidates, bounds)
    seen: Counter[tuple[int, Tile, bool]] = Counter()
    place_in_tile = {}
    for choice in by_estimate:
        tile = (choice.assignment.ulysses_degree, choice.assignment.tile, choice.is_collective)
        seen[tile] += 1
        place_in_tile[choice] = seen[tile]
    return sorted(by_estimate, key=lambda choice: place_in_tile[choice])  # sorting keeps the order of equals


def groupings(choice: Choice) -> list[int | None]:
    """Powers of two up to the longer side of the tile; collectives have none."""
    if choice.is_collective:
        return [None]
    longer = max(choice.assignment.tile.rows, choice.assignment.tile.cols)
    return [1 << power for power in range(min(longer, MOST_BLOCKS_PER_CALL).bit_length())]
