"""Times of the main methods along an axis: numbers of ranks, sequence lengths, or tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from typing_extensions import assert_never

from mesh_attention.errors import MemoryLimitError, UsageError
from mesh_attention.plan.assignment import tiles_of
from mesh_attention.planning.choice import Choice, default_layout
from mesh_attention.problem import Direction, Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Topology
from mesh_attention.tuning.candidates import shapes
from mesh_attention.tuning.result import Forecast, Tuning
from mesh_attention.tuning.search import groupings
from mesh_attention.tuning.traffic import plan_on, traffic
from mesh_attention.units import Report
from mesh_attention_lab.drawing.times import ChartPoint

SweepAxis = Literal["ranks", "seq", "tile"]
AXES: tuple[SweepAxis, ...] = get_args(SweepAxis)
MAIN_METHODS = ("ring", "ulysses", "attention2d", "usp", "mesh", "ulysses+mesh")
"""Methods in the chart besides the chosen one; all of them would be too many."""
OF_A_TILE = ("mesh", "attention2d")
FEWEST_RANKS, FEWEST_TOKENS = 8, 65536
TRIED_OF_A_TILE = 3
"""Placements, routes and groupings of each tile that are simulated, the most promising first."""
PRICED_RANKS = 8

TuneAt = Callable[[Problem, Topology, Report], Tuning]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The points, and the values at which no plan fits into memory."""

    points: tuple[ChartPoint, ...]
    left_out: tuple[str, ...]


def check_axis(axis: SweepAxis, problem: Problem) -> None:
    if axis == "seq" and problem.mask.documents is not None:
        raise UsageError("packed documents fix the length; use ranks or tile instead of seq, or leave documents out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeper:
    """Varies a problem that was tuned; `tune_at` tunes the variations."""

    problem: Problem
    topology: Topology
    tuning: Tuning
    memory_limit: float
    tune_at: TuneAt
    report: Report

    def along(self, axis: SweepAxis) -> Sweep:
        problem, topology = self.problem, self.topology
        check_axis(axis, problem)
        match axis:
            case "ranks":
                counts = doubled(FEWEST_RANKS, problem.ranks)
                return self._tunings([(n, replace(problem, ranks=n), topology.with_ranks(n)) for n in counts])
            case "seq":
                lengths = doubled(FEWEST_TOKENS, problem.seq_q)
                return self._tunings([(n, _with_tokens(problem, n), topology) for n in lengths])
            case "tile":
                return self._tiles()
            case _:
                assert_never(axis)

    def _tunings(self, cases: Sequence[tuple[int, Problem, Topology]]) -> Sweep:
        points: list[ChartPoint] = []
        left_out: list[str] = []
        families = list(dict.fromkeys((*MAIN_METHODS, self.tuning.chosen.family)))
        for number, (at, problem, topology) in enumerate(cases):
            try:
                tuning = self.tune_at(problem, topology, _share(self.report, f"{at:,}", number, len(cases)))
            except MemoryLimitError:
                left_out.append(f"{at:,}")
                continue
            points += [
                ChartPoint(method=trial.family, x=at, time_s=trial.time_s, exposed_s=trial.exposed_s)
                for trial in tuning.trials
                if trial.family in families
            ]
        points.sort(key=lambda point: families.index(point.method))  # a method has the same colour in every chart
        return Sweep(points=tuple(points), left_out=tuple(left_out))

    def _tiles(self) -> Sweep:
        """Every tile at the Ulysses degree that was chosen, for forward if the passes differ."""
        chosen = self.tuning.chosen.choices
        first = next(iter(chosen.values()))
        degree = first.assignment.ulysses_degree
        all_shapes = shapes(self.problem, self.topology, layout=first.layout or default_layout(self.problem))
        candidates = [choice for choice in all_shapes if choice.assignment.ulysses_degree == degree]
        tiles = tiles_of(self.problem.ranks // degree)
        points: list[ChartPoint] = []
        left_out: list[str] = []
        for number, (tile, method) in enumerate((tile, method) for tile in tiles for method in OF_A_TILE):
            self.report(f"simulating {method} {tile}", number / len(tiles) / len(OF_A_TILE))
            is_collective = method == "attention2d"
            same = [c for c in candidates if c.tile == tile and c.is_collective == is_collective]
            forecasts = [self._fastest(same, direction) for direction in chosen]
            fitting = [f for f in forecasts if f is not None and f.peak_nbytes <= self.memory_limit]
            if len(fitting) == len(forecasts):
                time_s, exposed_s = sum(f.time_s for f in fitting), sum(f.exposed_s for f in fitting)
                points.append(ChartPoint(method=method, x=str(tile), time_s=time_s, exposed_s=exposed_s))
            elif same:
                left_out.append(f"{method} {tile}")
        return Sweep(points=tuple(points), left_out=tuple(left_out))

    def _fastest(self, candidates: Sequence[Choice], direction: Direction) -> Forecast | None:
        problem, topology = self.problem, self.topology
        grouped = [replace(c, blocks_per_call=grouping) for c in candidates for grouping in groupings(c)]
        grouped.sort(key=lambda c: traffic(c, problem, topology, direction).estimate_s)
        plans = [plan_on(topology, problem, choice, direction) for choice in grouped[:TRIED_OF_A_TILE]]
        forecasts = [Forecast.of(simulate(plan, topology, priced_ranks=PRICED_RANKS)) for plan in plans]
        return min(forecasts, key=lambda forecast: forecast.time_s, default=None)


def doubled(fewest: int, most: int) -> list[int]:
    """Numbers from `fewest`, doubled each time, up to and including `most`; from 1 if `most` is not above `fewest`."""
    numbers = [fewest if most > fewest else 1]
    while 2 * numbers[-1] < most:
        numbers.append(2 * numbers[-1])
    return numbers if numbers[-1] == most else [*numbers, most]


def _with_tokens(problem: Problem, tokens: int) -> Problem:
    """The problem with this many queries, and keys in the same ratio."""
    return replace(problem, seq_q=tokens, seq_kv=max(1, problem.seq_kv * tokens // problem.seq_q))


def _share(report: Report, what: str, number: int, of: int) -> Report:
    return lambda doing, fraction: report(f"{what}: {doing}", (number + fraction) / of)
