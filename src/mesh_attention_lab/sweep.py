"""Times of the main methods against the number of ranks, the length of the sequence, or the tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from mesh_attention.errors import MemoryLimitError, UsageError
from mesh_attention.plan.assignment import tiles_of
from mesh_attention.planners.choice import default_layout
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.candidates import shapes
from mesh_attention.tuning.result import Trial, Tuning
from mesh_attention.units import Progress, part_report
from mesh_attention_lab.comparison import fastest
from mesh_attention_lab.drawing.charts import ChartPoint

SweepAxis = Literal["ranks", "seq", "tile"]
AXES: tuple[SweepAxis, ...] = get_args(SweepAxis)
MAIN_METHODS = ("ring", "ulysses", "attention2d", "usp", "mesh", "ulysses+mesh")
"""Methods in the chart besides the chosen one; all of them would be too many."""
OF_A_TILE = ("mesh", "attention2d")
FEWEST_RANKS, FEWEST_TOKENS = 8, 65536

TuneAt = Callable[[Problem, Topology, Progress], tuple[Tuning, bool]]
"""The tuning, and True if it was read from the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The points, and the values at which no plan fits into memory."""

    points: tuple[ChartPoint, ...]
    left_out: tuple[str, ...]


def check_axis(axis: SweepAxis, problem: Problem) -> None:
    if axis == "seq" and problem.mask.documents is not None:
        raise UsageError("packed documents fix the length; use ranks or tile instead of seq, or leave documents out")


def sweep(
    axis: SweepAxis, problem: Problem, topology: Topology, *, chosen: str, tune_at: TuneAt, report: Progress
) -> Sweep:
    """Tune variations of a problem, for which the `chosen` method was the best."""
    check_axis(axis, problem)
    points: list[ChartPoint] = []
    left_out: list[str] = []
    families = list(dict.fromkeys((*MAIN_METHODS, chosen)))
    cases = list(_cases(axis, problem, topology))
    for number, (at, varied, cluster) in enumerate(cases):
        try:
            tuning, _ = tune_at(varied, cluster, part_report(report, number, len(cases), f"{at:,}: "))
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


def sweep_tiles(problem: Problem, topology: Topology, *, chosen: Trial, memory_limit: float, report: Progress) -> Sweep:
    """Forecast every tile at the Ulysses degree of the `chosen` trial, that of forward if its passes differ."""
    first = next(iter(chosen.choices.values()))
    degree = first.assignment.ulysses_degree
    all_shapes = list(shapes(problem, topology, layout=first.layout or default_layout(problem)))
    cases = [(tile, method) for tile in tiles_of(problem.ranks // degree) for method in OF_A_TILE]
    points: list[ChartPoint] = []
    left_out: list[str] = []
    for number, (tile, method) in enumerate(cases):
        report(f"simulating {method} {tile}", number / len(cases))
        choices = [
            choice
            for choice in all_shapes
            if choice.assignment.ulysses_degree == degree
            and choice.tile == tile
            and choice.is_collective == (method == "attention2d")
        ]
        forecasts = [fastest(choices, problem, topology, direction) for direction in chosen.choices if choices]
        if forecasts and max(forecast.peak_nbytes for forecast in forecasts) <= memory_limit:
            time_s, exposed_s = sum(f.time_s for f in forecasts), sum(f.exposed_s for f in forecasts)
            points.append(ChartPoint(method=method, x=str(tile), time_s=time_s, exposed_s=exposed_s))
        elif forecasts:
            left_out.append(f"{method} {tile}")
    return Sweep(points=tuple(points), left_out=tuple(left_out))


def _cases(axis: SweepAxis, problem: Problem, topology: Topology) -> Iterator[tuple[int, Problem, Topology]]:
    """Numbers of ranks or of queries, with keys in the same ratio, and the problem and the cluster of each."""
    if axis == "ranks":
        for ranks in doubled(FEWEST_RANKS, problem.ranks):
            yield ranks, replace(problem, ranks=ranks), topology.with_ranks(ranks)
        return
    for tokens in doubled(FEWEST_TOKENS, problem.seq_q):
        seq_kv = max(1, problem.seq_kv * tokens // problem.seq_q)
        yield tokens, replace(problem, seq_q=tokens, seq_kv=seq_kv), topology


def doubled(fewest: int, most: int) -> list[int]:
    """Numbers from `fewest`, doubled each time, up to and including `most`; from 1 if `most` is not above `fewest`."""
    numbers = [fewest if most > fewest else 1]
    while 2 * numbers[-1] < most:
        numbers.append(2 * numbers[-1])
    return numbers if numbers[-1] == most else [*numbers, most]
