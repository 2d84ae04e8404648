"""`tune --chart`: time and exposed communication of the main methods against ranks, tokens or tiles. Draws nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from typing_extensions import assert_never

from mesh_attention.cli.progress import Report
from mesh_attention.cli.words import head_words, mask_words, name_with_ranks, token_words
from mesh_attention.drawing.charts import ChartPoint, ChartX
from mesh_attention.errors import MemoryLimitError, ParseError, UsageError
from mesh_attention.plan.assignment import tiles_of
from mesh_attention.plan.steps import Direction
from mesh_attention.planning.choice import Choice, default_layout
from mesh_attention.problem import Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Topology
from mesh_attention.tuning.candidates import shapes
from mesh_attention.tuning.result import Forecast, Tuning
from mesh_attention.tuning.search import groupings
from mesh_attention.tuning.traffic import plan_on, traffic

Axis = Literal["ranks", "seq", "tile"]
AXES: tuple[Axis, ...] = get_args(Axis)
MAIN_METHODS = ("ring", "ulysses", "attention2d", "usp", "mesh", "ulysses×mesh")
"""Drawn beside the one that is chosen; all of them would be lines upon lines."""
ORDERS = ("mesh", "attention2d")
FEWEST_RANKS, FEWEST_TOKENS = 8, 65536
TRIED_OF_A_TILE = 3
"""Placements, routes and groupings: the most promising ones of each tile are simulated."""
PRICED_RANKS = 8

TuneAt = Callable[[Problem, Topology, Report], Tuning]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Points, what they are points of, and where there are none because no plan fits into memory."""

    points: tuple[ChartPoint, ...]
    x: ChartX
    title: str
    left_out: tuple[str, ...]


def axis_from(text: str | None) -> Axis:
    for axis in AXES:
        if axis == text:
            return axis
    came = "--chart came without --against" if text is None else f"--against {text!r}"
    raise ParseError(f"{came}; expected --against {', '.join(AXES[:-1])} or {AXES[-1]}")


def check_axis(axis: Axis, problem: Problem) -> None:
    """Raise before any work is done for what cannot be varied."""
    if axis == "seq" and problem.mask.documents is not None:
        raise UsageError("--against seq: packed documents have one length; leave --documents out, or take another axis")


@dataclass(frozen=True, slots=True, kw_only=True)
class Charter:
    """Finds the points for a problem that was tuned; `tune_at` tunes others like it."""

    problem: Problem
    topology: Topology
    tuning: Tuning
    limit_nbytes: float
    tune_at: TuneAt
    report: Report

    def chart(self, axis: Axis) -> Chart:
        problem, topology = self.problem, self.topology
        rest = f"{head_words(problem)}, {mask_words(problem)}, {' and '.join(self.tuning.chosen.choices)}"
        cluster = name_with_ranks(topology)
        match axis:
            case "ranks":
                counts = doubled(FEWEST_RANKS, problem.ranks)
                cases = [(n, replace(problem, ranks=n), topology.with_ranks(n)) for n in counts]
                return self._along(cases, "ranks", f"{token_words(problem)}, {rest}, on {topology.name}")
            case "seq":
                cases = [(n, _with_tokens(problem, n), topology) for n in doubled(FEWEST_TOKENS, problem.seq_q)]
                return self._along(cases, "sequence length", f"{rest}, on {cluster}")
            case "tile":
                return self._along_tiles(f"{token_words(problem)}, {rest}, on {cluster}")
            case _:
                assert_never(axis)

    def _along(self, cases: Sequence[tuple[int, Problem, Topology]], x: ChartX, title: str) -> Chart:
        """A tuning at each."""
        points: list[ChartPoint] = []
        left_out: list[str] = []
        families = list(dict.fromkeys((*MAIN_METHODS, self.tuning.chosen.family)))
        for number, (at, problem, topology) in enumerate(cases):
            report = _share(self.report, f"{at:,} {x}", number, len(cases))
            try:
                tuning = self.tune_at(problem, topology, report)
            except MemoryLimitError:
                left_out.append(f"{at:,}")
                continue
            points += [
                ChartPoint(trial.family, at, trial.time_s, trial.exposed_s)
                for trial in tuning.trials
                if trial.family in families
            ]
        points.sort(key=lambda point: families.index(point.method))  # so that a method has its colour in every chart
        return Chart(points=tuple(points), x=x, title=title, left_out=tuple(left_out))

    def _along_tiles(self, title: str) -> Chart:
        """Every tile at the Ulysses degree that was chosen (for forward, if another for backward)."""
        chosen = self.tuning.chosen.choices
        first = next(iter(chosen.values()))
        degree = first.assignment.ulysses
        found = [
            choice
            for choice in shapes(self.problem, self.topology, layout=first.layout or default_layout(self.problem))
            if choice.assignment.ulysses == degree
        ]
        tiles = tiles_of(self.problem.ranks // degree)
        points: list[ChartPoint] = []
        left_out: list[str] = []
        for number, (tile, method) in enumerate((tile, method) for tile in tiles for method in ORDERS):
            self.report(f"simulating {method} {tile}", number / len(tiles) / len(ORDERS))
            same = [c for c in found if c.assignment.tile == tile and c.is_collective == (method == "attention2d")]
            forecasts = [self._fastest(same, direction) for direction in chosen]
            fitting = [f for f in forecasts if f is not None and f.peak_nbytes <= self.limit_nbytes]
            if len(fitting) == len(forecasts):
                time_s, exposed_s = sum(f.time_s for f in fitting), sum(f.exposed_s for f in fitting)
                points.append(ChartPoint(method, str(tile), time_s, exposed_s))
            elif same:
                left_out.append(f"{method} {tile}")
        if degree > 1:
            title += f", Ulysses degree {degree}"
        return Chart(points=tuple(points), x="tile", title=title, left_out=tuple(left_out))

    def _fastest(self, candidates: Sequence[Choice], direction: Direction) -> Forecast | None:
        problem, topology = self.problem, self.topology
        grouped = [replace(c, blocks_per_call=grouping) for c in candidates for grouping in groupings(c)]
        grouped.sort(key=lambda c: traffic(c, problem, topology, direction).promise_s)
        forecasts = []
        for choice in grouped[:TRIED_OF_A_TILE]:
            plan = plan_on(topology, problem, choice, direction)
            forecasts.append(Forecast.of(simulate(plan, topology, priced_ranks=PRICED_RANKS)))
        return min(forecasts, key=lambda forecast: forecast.time_s, default=None)


def doubled(fewest: int, most: int) -> list[int]:
    """From the fewest on, twice as many each time, and the most in the end; from 1 on where the most is not more."""
    numbers = [fewest if most > fewest else 1]
    while 2 * numbers[-1] < most:
        numbers.append(2 * numbers[-1])
    return numbers if numbers[-1] == most else [*numbers, most]


def _with_tokens(problem: Problem, tokens: int) -> Problem:
    """Keys and values in the same ratio."""
    return replace(problem, seq_q=tokens, seq_kv=max(1, problem.seq_kv * tokens // problem.seq_q))


def _share(report: Report, what: str, number: int, of: int) -> Report:
    return lambda doing, fraction: report(f"{what}: {doing}", (number + fraction) / of)
