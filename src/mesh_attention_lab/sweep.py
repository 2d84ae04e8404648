"""Times of the main methods against the number of ranks, the length of the sequence, or the tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mesh_attention.errors import MemoryLimitError
from mesh_attention.plan.assignment import tiles_of
from mesh_attention.planners.choice import default_layout
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.candidates import shapes
from mesh_attention.tuning.result import Trial, Tuning
from mesh_attention.units import GIB, Progress, part_report
from mesh_attention_lab.comparison import fastest
from mesh_attention_lab.drawing.charts import ChartAxis, ChartPoint

MAIN_METHODS = ("ring", "ulysses", "attention2d", "usp", "mesh", "ulysses+mesh")
"""Methods in the chart besides the chosen one; all of them would be too many."""
FEWEST_RANKS, FEWEST_TOKENS = 8, 65536
TuneAt = Callable[[Problem, Topology, Progress], tuple[Tuning, bool]]
"""The tuning, and True if it was read from the cache."""
Sweep = tuple[list[ChartPoint], list[str]]
"""The points, and the values at which no plan fits into memory."""


def sweep_sizes(
    axis: ChartAxis, problem: Problem, topology: Topology, *, chosen: Trial, tune_at: TuneAt, report: Progress
) -> Sweep:
    """Tune the problem on fewer ranks, or with fewer tokens and the same ratio of keys to queries."""
    points, left_out, of_ranks = [], [], axis == "ranks"
    sizes = doubled(FEWEST_RANKS, problem.ranks) if of_ranks else doubled(FEWEST_TOKENS, problem.seq_q)
    for number, at in enumerate(sizes):
        seq_kv = max(1, problem.seq_kv * at // problem.seq_q)
        varied = replace(problem, ranks=at) if of_ranks else replace(problem, seq_q=at, seq_kv=seq_kv)
        cluster = topology.with_ranks(varied.ranks)
        try:
            tuning, _ = tune_at(varied, cluster, part_report(report, number, len(sizes), f"{at:,}: "))
        except MemoryLimitError:
            left_out.append(f"{at:,}")
            continue
        points += [ChartPoint(trial.family, at, trial.time_s, trial.exposed_s) for trial in tuning.trials]
    families = list(dict.fromkeys((*MAIN_METHODS, chosen.family)))
    drawn = [point for point in points if point.method in families]
    return sorted(drawn, key=lambda point: families.index(point.method)), left_out  # in one order, for the colours


def sweep_tiles(problem: Problem, topology: Topology, *, chosen: Trial, limit: float | None, report: Progress) -> Sweep:
    """Forecast every tile at the Ulysses degree of the chosen trial, that of forward if its passes differ."""
    first = next(iter(chosen.choices.values()))
    degree, points, left_out = first.assignment.ulysses_degree, [], []
    everything = list(shapes(problem, topology, layout=first.layout or default_layout(problem)))
    candidates = [choice for choice in everything if choice.assignment.ulysses_degree == degree]
    tiles, limit = tiles_of(problem.ranks // degree), limit or topology.device.memory_gib * GIB
    for number, tile in enumerate(tiles):
        at = f"{degree}·{tile}" if degree > 1 else str(tile)
        report(f"simulating tile {tile}", number / len(tiles))
        for method in ("mesh", "attention2d"):
            choices = [c for c in candidates if c.tile == tile and c.is_collective == (method == "attention2d")]
            if choices:
                forecasts = {direction: fastest(choices, problem, topology, direction) for direction in chosen.choices}
                trial = Trial(family=method, choices={}, forecasts=forecasts)
                if trial.peak_nbytes <= limit:
                    points.append(ChartPoint(method, at, trial.time_s, trial.exposed_s))
                else:
                    left_out.append(f"{method} {at}")
    return points, left_out


def doubled(fewest: int, most: int) -> list[int]:
    """Numbers from `fewest`, doubled each time, up to and including `most`; from 1 if `most` is not above `fewest`."""
    numbers = [fewest if most > fewest else 1]
    while 2 * numbers[-1] < most:
        numbers.append(2 * numbers[-1])
    return numbers if numbers[-1] == most else [*numbers, most]
