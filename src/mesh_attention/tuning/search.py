"""The search for one pass: candidates in the order of their bounds, simulated until no bound is below the best.

The result does not depend on measured time, so every rank of a group finds the same one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.steps import Direction
from mesh_attention.planning.choice import FAMILIES, Choice, Family
from mesh_attention.problem import Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Topology
from mesh_attention.tuning.candidates import complexity
from mesh_attention.tuning.result import Forecast
from mesh_attention.tuning.traffic import Traffic, plan_on, traffic

Report = Callable[[str, float], None]
MOST_BLOCKS_PER_CALL = 16
AT_LEAST = 3
"""Shapes of a family that are simulated even if their bounds exclude them, so that each rival is shown at its best."""
FINALISTS = 8
"""The fastest shapes of a pass that are tried with other groupings, besides the first `FIRSTS` of every family that are
at most `FIRST_OF_FAMILY` times slower than the best."""
FIRSTS = 2
LONGEST_PRICED_FIRST = 80
"""Rows plus columns of a tile."""
FIRST_OF_FAMILY = 2.0


@dataclass(frozen=True, slots=True)
class Tried:
    """A choice that was simulated."""

    choice: Choice
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class Effort:
    """How much of a family is simulated: the `least` most promising, and up to `most` of those whose estimate is within
    a factor `worth_trying` of the best time so far; with the calls of `priced_ranks` ranks priced. Finalists are tried
    with up to `regroupings` larger and as many smaller groupings."""

    priced_ranks: int
    least: int
    most: int
    worth_trying: float
    regroupings: int


def effort(ranks: int) -> Effort:
    """Search effort for a number of ranks: simulations of fewer ranks are faster, so more are made."""
    if ranks <= 64:
        return Effort(priced_ranks=4, least=12, most=48, worth_trying=1.1, regroupings=4)
    return Effort(priced_ranks=2, least=5, most=16, worth_trying=1.03, regroupings=1)


class PassSearch:
    """The search for one pass: its limits, and the forecasts found so far."""

    def __init__(
        self, problem: Problem, topology: Topology, direction: Direction, limit_nbytes: float, report: Report
    ) -> None:
        self.problem, self.topology, self.direction = problem, topology, direction
        self.limit_nbytes, self.report = limit_nbytes, report
        self.tried: dict[Choice, Forecast] = {}
        self.effort = effort(problem.ranks)

    def run(self, candidates: Sequence[Choice], *, priced_ranks: int, is_uniform: bool) -> None:
        """Simulate the candidates that may win, and the most promising of every family."""
        self.priced_ranks, self.is_uniform = priced_ranks, is_uniform
        candidates = [self.grouped(choice) for choice in candidates]
        bounds = {c: traffic(c, self.problem, self.topology, self.direction) for c in candidates}
        by_family = {family: [c for c in candidates if c.family == family] for family in FAMILIES}
        # Families with the lowest estimates go first: their times prune the rest.
        estimates = {f: min((bounds[c].estimate_s for c in found), default=0.0) for f, found in by_family.items()}
        for number, family in enumerate(sorted(FAMILIES, key=lambda family: estimates[family])):
            self.report(f"trying {family}", 0.95 * number / len(FAMILIES))
            self._run_family(_tiles_first(by_family[family], bounds), bounds)
        firsts = [tried for family in FAMILIES for tried in self.best(family)[:FIRSTS]]
        near = [tried for tried in firsts if tried.forecast.time_s <= FIRST_OF_FAMILY * self.best_s]
        for tried in (*self.best()[:FINALISTS], *near):
            self.report(f"regrouping {tried.choice.family}", 0.95)
            for choice in self._regrouped(tried.choice):
                self.simulate(choice)

    def _run_family(self, candidates: Sequence[Choice], bounds: dict[Choice, Traffic]) -> None:
        """Simulate the first few that fit into memory, whatever their bound, then those that may be the fastest."""
        fitting = 0
        for choice in candidates:
            bound = bounds[choice]
            is_unlikely = fitting >= self.effort.least and bound.estimate_s > self.effort.worth_trying * self.best_s
            is_beaten = self.is_uniform and fitting >= AT_LEAST and bound.bound_s >= self.best_s
            if is_unlikely or is_beaten:
                continue
            forecast = self.simulate(_first_try(choice))
            fitting += forecast.peak_nbytes <= self.limit_nbytes
            if fitting == self.effort.most:
                return

    def simulate(self, choice: Choice) -> Forecast:
        if choice not in self.tried:
            plan = plan_on(self.topology, self.problem, choice, self.direction)
            self.tried[choice] = Forecast.of(simulate(plan, self.topology, priced_ranks=self.priced_ranks))
        return self.tried[choice]

    @property
    def best_s(self) -> float:
        return min((tried.forecast.time_s for tried in self.best()), default=float("inf"))

    def best(self, family: Family | None = None) -> list[Tried]:
        """Tried choices that fit into memory, of one family or of all, fastest first."""
        found = [Tried(c, forecast) for c, forecast in self.tried.items() if family in (None, c.family)]
        fitting = [tried for tried in found if tried.forecast.peak_nbytes <= self.limit_nbytes]
        return sorted(fitting, key=lambda tried: (tried.forecast.time_s, complexity(tried.choice)))

    def grouped(self, choice: Choice) -> Choice:
        """The choice with the grouping of the lowest estimate."""
        found = [replace(choice, blocks_per_call=grouping) for grouping in groupings(choice)]
        return min(found, key=lambda c: traffic(c, self.problem, self.topology, self.direction).estimate_s)

    def _regrouped(self, choice: Choice) -> Iterator[Choice]:
        """The choice with calls sized by price, then, where a fixed size may be better, with nearby groupings."""
        if choice.is_collective:
            return
        yield replace(choice, blocks_per_call=None)
        found, reach = groupings(choice), self.effort.regroupings
        if choice.route == "ring" or reach > 1:
            at = found.index(choice.blocks_per_call or self.grouped(choice).blocks_per_call or 1)
            for grouping in found[max(0, at - reach) : at + reach + 1]:
                yield replace(choice, blocks_per_call=grouping)


def _first_try(choice: Choice) -> Choice:
    """The choice with calls sized by price, except on ring routes, where waits between shards have no price, and for
    tiles so long that planning takes longer than simulating."""
    tile, is_direct = choice.assignment.tile, not choice.is_collective and choice.route == "direct"
    is_quick = tile.rows + tile.cols <= LONGEST_PRICED_FIRST
    return replace(choice, blocks_per_call=None) if is_direct and is_quick else choice


def _tiles_first(candidates: Sequence[Choice], bounds: dict[Choice, Traffic]) -> list[Choice]:
    """Candidates by estimate, but the best of every tile before the second best of any."""
    by_estimate = sorted(candidates, key=lambda c: (bounds[c].estimate_s, complexity(c)))
    seen: Counter[tuple[int, Tile]] = Counter()
    place_in_tile = {}
    for choice in by_estimate:
        tile = (choice.assignment.ulysses, choice.assignment.tile)
        seen[tile] += 1
        place_in_tile[choice] = seen[tile]
    return sorted(by_estimate, key=lambda choice: place_in_tile[choice])  # sorting keeps the order of equals


def groupings(choice: Choice) -> list[int | None]:
    """Powers of two up to the longer side of the tile; collectives have none."""
    if choice.is_collective:
        return [None]
    longer = max(choice.assignment.tile.rows, choice.assignment.tile.cols)
    return [1 << power for power in range(min(longer, MOST_BLOCKS_PER_CALL).bit_length())]
