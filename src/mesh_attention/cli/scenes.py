"""Scenes for the explorer page: the main methods on one problem, each forecast on a cluster. Writes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd
from typing import Any, NamedTuple

from mesh_attention.cli.planned import plan_on, ring_like
from mesh_attention.cli.progress import Report
from mesh_attention.drawing.page import Scene
from mesh_attention.plan.assignment import Tile, divisors, tiles_of
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Direction
from mesh_attention.planning.choice import default_layout
from mesh_attention.planning.search import least_volume_tile
from mesh_attention.problem import Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.timeline import Timeline
from mesh_attention.topology import Topology

OFFERED_RANKS = (4, 16, 64)
"""For choice in the explorer, besides those that were asked for."""
ALL_SPANS, SOME_SPANS = 16, 8
"""Up to so many ranks, the spans of each are kept; of more ranks, those of a few."""


class Choice(NamedTuple):
    """A method as it is named, and what `make_plan` takes for it."""

    method: str
    options: dict[str, Any]


def method_name(plan: Plan) -> str:
    """As the field calls it; with Ulysses, both."""
    return f"ulysses × {plan.method}" if plan.assignment.ulysses > 1 and plan.method != "ulysses" else plan.method


def shown_ranks(ranks: int) -> tuple[int, ...]:
    """Whose spans are kept: all, or some from the first to the last, evenly spread."""
    if ranks <= ALL_SPANS:
        return tuple(range(ranks))
    return tuple(index * (ranks - 1) // (SOME_SPANS - 1) for index in range(SOME_SPANS))


def scene_of(
    plans: Mapping[Direction, Plan],
    topology: Topology,
    *,
    report: Report,
    measured: Mapping[Direction, Timeline] | None = None,
    method: str | None = None,
) -> Scene:
    """The plans, with their steps written out, and simulated on the cluster."""
    ranks = topology.ranks
    forecasts = {
        direction: simulate(plan, topology, spans_of=shown_ranks(ranks), on_progress=report)
        for direction, plan in plans.items()
    }
    written = {direction: plan.unrolled() for direction, plan in plans.items()}
    name = method_name(next(iter(plans.values()))) if method is None else method
    return Scene(method=name, plans=written, forecasts=forecasts, measured=dict(measured or {}))


def rival_scenes(
    problem: Problem,
    topology: Topology,
    *,
    layout: Layout | None,
    directions: Sequence[Direction],
    report: Report,
    tiles: int = 3,
) -> Iterator[Scene]:
    """Ring, attention2d, mesh on so many tiles, and ulysses × mesh, as far as they fit the problem."""
    choices = list(_choices(problem, layout, tiles=tiles))
    for number, choice in enumerate(choices):

        def told(doing: str, fraction: float, done: int = number) -> None:
            report(f"{problem.ranks} ranks: {doing}", (done + fraction) / len(choices))

        plans = {direction: _plan(problem, topology, direction, choice.options) for direction in directions}
        yield scene_of(plans, topology, report=told, method=choice.method)


def _plan(problem: Problem, topology: Topology, direction: Direction, options: dict[str, Any]) -> Plan:
    plan = plan_on(problem, topology, direction, options)
    return ring_like(plan, topology) if plan.method == "ring" else plan


def _choices(problem: Problem, layout: Layout | None, *, tiles: int) -> Iterator[Choice]:
    """One tile for both passes: the one that moves the least forward, and its neighbours."""
    common = {"layout": layout}
    yield Choice("ring", {"method": "ring", **common})
    found = _tiles(problem, layout, degree=1)[:tiles]
    if found:
        yield Choice("attention2d", {"method": "attention2d", "tile": found[0], **common})
    for tile in sorted(found, key=lambda tile: tile.rows):
        yield Choice("mesh", {"method": "mesh", "tile": tile, **common})
    for degree in divisors(gcd(problem.ranks, problem.kv_heads))[:0:-1]:
        grid = _tiles(problem, layout, degree=degree)
        if grid:  # the largest degree that leaves one
            yield Choice("ulysses × mesh", {"method": "mesh", "tile": grid[0], "ulysses_degree": degree, **common})
            return


def _tiles(problem: Problem, layout: Layout | None, *, degree: int) -> list[Tile]:
    """Nearest to the one that moves the least first; those of one row or one column are ring and pass-q."""
    tiles = tiles_of(problem.ranks // degree)
    chosen = default_layout(problem) if layout is None else layout
    at = tiles.index(least_volume_tile(problem, chosen, "forward", ulysses_degree=degree))
    grids = [tile for tile in tiles if tile.rows > 1 and tile.cols > 1]
    return sorted(grids, key=lambda tile: (abs(tiles.index(tile) - at), tile.rows))


def explorer_scenes(first: Sequence[Scene], topology: Topology, *, report: Report) -> list[Scene]:
    """The scenes that are there, and the main methods on the same problem at these and other numbers of ranks."""
    plan = next(iter(first[0].plans.values()))
    problem, directions = plan.problem, first[0].directions
    counts = [topology.ranks, *(n for n in OFFERED_RANKS if n != topology.ranks and _fits(problem, n))]
    scenes = list(first)
    for number, ranks in enumerate(counts):

        def told(doing: str, fraction: float, done: int = number) -> None:
            report(doing, (done + fraction) / len(counts))

        asked = replace(problem, ranks=ranks)
        found = rival_scenes(asked, topology.with_ranks(ranks), layout=plan.layout, directions=directions, report=told)
        scenes += [scene for scene in found if not any(_is_same(scene, other) for other in scenes)]
    return scenes


def _fits(problem: Problem, ranks: int) -> bool:
    return ranks <= min(problem.seq_q, problem.seq_kv)


def _is_same(one: Scene, other: Scene) -> bool:
    return (one.ranks, one.method, one.tile) == (other.ranks, other.method, other.tile)
