"""Scenes for the explorer page: a plan, and the main methods on the same problem, each forecast on a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd
from pathlib import Path

from mesh_attention.plan.assignment import Tile, divisors, tiles_of
from mesh_attention.plan.layout import Layout, TypicalTurn
from mesh_attention.plan.plan import Plan
from mesh_attention.planners.choice import Choice, default_layout
from mesh_attention.planners.costs import least_volume_tile
from mesh_attention.problem import Direction, Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.timeline import Timeline
from mesh_attention.topology import Topology
from mesh_attention.units import Progress, part_report
from mesh_attention_lab.comparison import sampled_ranks, single_block_plan, usual_ring_plan
from mesh_attention_lab.drawing.page import Scene, write_page
from mesh_attention_lab.drawing.trace import write_trace

OFFERED_RANKS = (4, 16, 64)
"""Numbers of ranks on the explorer page, besides the one that was asked for."""
MESH_TILES = 3
ALL_SPANS, SOME_SPANS = 16, 8
"""Spans of all ranks are kept up to this many ranks; of more ranks, those of a few."""
TRACE = "trace.json"


def method_name(plan: Plan) -> str:
    return f"ulysses+{plan.method}" if plan.assignment.ulysses_degree > 1 and plan.method != "ulysses" else plan.method


def scene_of(
    plans: Mapping[Direction, Plan],
    topology: Topology,
    *,
    report: Progress,
    measured: Mapping[Direction, Timeline] | None = None,
    method: str | None = None,
) -> Scene:
    """The plans with all their steps, simulated on the cluster."""
    spans_of = sampled_ranks(topology.ranks, all_up_to=ALL_SPANS, sample=SOME_SPANS)
    return Scene(
        method=method_name(next(iter(plans.values()))) if method is None else method,
        plans={direction: plan.unrolled() for direction, plan in plans.items()},
        forecasts={d: simulate(plan, topology, spans_of=spans_of, on_progress=report) for d, plan in plans.items()},
        measured=dict(measured or {}),
    )


def rival_scenes(
    problem: Problem,
    topology: Topology,
    *,
    layout: Layout | None,
    directions: Sequence[Direction],
    report: Progress,
) -> Iterator[Scene]:
    """Ring, attention2d, mesh on a few tiles, and ulysses+mesh, as far as they fit the problem; of a turn
    also pass-q."""
    choices = list(_choices(problem, layout or default_layout(problem)))
    for number, choice in enumerate(choices):
        plans = {direction: _plan(problem, topology, direction, choice) for direction in directions}
        prefix = f"{problem.ranks} ranks: "
        yield scene_of(plans, topology, report=part_report(report, number, len(choices), prefix))


def _plan(problem: Problem, topology: Topology, direction: Direction, choice: Choice) -> Plan:
    plan = single_block_plan(topology, problem, choice, direction)
    return usual_ring_plan(plan, topology) if plan.method == "ring" else plan


def _choices(problem: Problem, layout: Layout) -> Iterator[Choice]:
    """One tile for both passes: the one that moves the fewest bytes forward, and its neighbours."""
    yield Choice(method="ring", layout=layout)
    if layout == TypicalTurn():
        yield Choice(method="pass-q", layout=layout)
    grids = _tiles(problem, layout, degree=1)[:MESH_TILES]
    if grids:
        yield Choice(method="attention2d", tile=grids[0], layout=layout)
    for tile in sorted(grids, key=lambda tile: tile.rows):
        yield Choice(tile=tile, layout=layout)
    for degree in divisors(gcd(problem.ranks, problem.kv_heads))[:0:-1]:
        grid = _tiles(problem, layout, degree=degree)
        if grid:  # the largest degree that leaves one
            yield Choice(tile=grid[0], ulysses_degree=degree, layout=layout)
            return


def _tiles(problem: Problem, layout: Layout, *, degree: int) -> list[Tile]:
    """Tiles of several rows and columns, those nearest to the one that moves the fewest bytes first."""
    tiles = tiles_of(problem.ranks // degree)
    at = tiles.index(least_volume_tile(problem, layout, "forward", ulysses_degree=degree))
    grids = [tile for tile in tiles if tile.rows > 1 and tile.cols > 1]
    return sorted(grids, key=lambda tile: (abs(tiles.index(tile) - at), tile.rows))


def explorer_scenes(first: Sequence[Scene], topology: Topology, *, report: Progress) -> list[Scene]:
    """These scenes, and the main methods on the same problem, on this and other numbers of ranks."""
    plan = next(iter(first[0].plans.values()))
    problem, directions = plan.problem, first[0].directions
    tokens = min(problem.seq_q, problem.seq_kv)
    counts = [topology.ranks, *(n for n in OFFERED_RANKS if n != topology.ranks and n <= tokens)]
    scenes = {(scene.ranks, scene.method, scene.tile): scene for scene in first}
    for number, ranks in enumerate(counts):
        rescaled = replace(problem, ranks=ranks)
        cluster = topology.with_ranks(ranks)
        part = part_report(report, number, len(counts))
        rivals = rival_scenes(rescaled, cluster, layout=plan.layout, directions=directions, report=part)
        for scene in rivals:
            scenes.setdefault((scene.ranks, scene.method, scene.tile), scene)
    return list(scenes.values())


# Files


def write_explorer(
    page: Path,
    scenes: Sequence[Scene],
    *,
    traced: Sequence[Scene],
    title: str,
    notes: list[str],
    opening: Scene | None = None,
    lead: str = "",
) -> Path:
    """Write the page, and next to it a trace of some of its scenes; returns the path of the trace."""
    write_page(page, scenes, title=title, notes=notes, opening=opening, lead=lead)
    trace = page.with_name(TRACE)
    write_trace(trace, timelines_of(traced))
    return trace


def timelines_of(scenes: Sequence[Scene]) -> dict[str, Timeline]:
    """Every pass of every scene once, forecast and, where it ran, measured, by a name that tells them apart."""
    named: dict[str, Timeline] = {}
    for scene in scenes:
        for kind, timelines in (("forecast", scene.forecasts), ("measured", scene.measured)):
            for direction in scene.directions:
                if direction in timelines:
                    named.setdefault(f"{scene.method} {scene.tile} {direction}, {kind}", timelines[direction])
    return named
