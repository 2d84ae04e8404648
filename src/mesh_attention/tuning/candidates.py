"""Candidates: the choices that make sense for a problem on a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mesh_attention.plan.assignment import Assignment, Tile, divisors, tiles_of
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.schedule import Route
from mesh_attention.plan.steps import Direction
from mesh_attention.planners.choice import FAMILIES, Choice, Family, Method, default_layout
from mesh_attention.planners.costs import received_by_tile
from mesh_attention.planners.make import has_inner_rings
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology

COST_BASED_RANK = 1 << 16
"""Rank of cost-based calls among the numbers of blocks per call: they are the least simple."""
WAVES = (2, 4)
MOST_RANKS_IN_ROWS = 64
"""Waves of rows are not uniform, so every rank is simulated; on more ranks that takes seconds."""
MOST_TILES = 16
"""Tiles, of all Ulysses degrees, that are considered on many ranks: those that move the fewest bytes."""
Complexity = tuple[int | str, ...]


def complexity(choice: Choice) -> Complexity:
    """A key by which the simpler of two choices compares lower. No two choices compare equal."""
    assignment = choice.assignment
    return (
        FAMILIES.index(choice.family),
        len(set(choice.keep) - {"own"}),
        choice.waves,
        int(choice.inner is not None),
        int(choice.route != choice.partials),
        assignment.ulysses_degree,
        assignment.tile.rows,
        choice.blocks_per_call or COST_BASED_RANK,
        str(choice),
    )


def shapes(problem: Problem, topology: Topology, *, layout: Layout) -> Iterator[Choice]:
    """Every degree, tile, placement and route that makes sense, with the grouping left at 1."""
    # In 16 bits partials do not go round a ring: rounding at every hop doubles the error.
    routes = tuple(pair for pair in ROUTE_PAIRS if problem.itemsize > 2 or pair[1] == "direct")
    for ulysses in divisors(problem.ranks):
        if problem.kv_heads % ulysses:
            continue
        for tile in tiles_of(problem.ranks // ulysses):
            yield from _of_tile(BlockMatrix(problem, layout, Assignment(tile, ulysses)), topology, routes)


def _of_tile(matrix: BlockMatrix, topology: Topology, routes: Routes) -> Iterator[Choice]:
    tile, ulysses = matrix.assignment.tile, matrix.assignment.ulysses_degree
    whole = Choice(method="attention2d", tile=tile, ulysses_degree=ulysses, layout=matrix.layout)
    yield whole
    if tile == Tile(1, 1):
        return
    method: Method = "ring" if tile.rows == 1 else "pass-q" if tile.cols == 1 else "mesh"
    for inner in placements(tile, ulysses, topology):
        if inner is not None:
            yield replace(whole, inner=inner)
        greedy = replace(whole, method=method, inner=inner, blocks_per_call=1)
        may_go_round = matrix.is_uniform or not has_inner_rings(greedy.assignment)
        for route, partials in routes if may_go_round else routes[:1]:
            yield replace(greedy, route=route, partials=partials)


def of_fewest_bytes(candidates: Sequence[Choice], problem: Problem, directions: Sequence[Direction]) -> list[Choice]:
    """The candidates of the tiles that move the fewest bytes over these passes. Those of every other family come last,
    one of each, so that something can be said of it."""
    nbytes: Counter[tuple[int, Tile]] = Counter()
    for ulysses in dict.fromkeys(choice.assignment.ulysses_degree for choice in candidates):
        layout = candidates[0].layout or default_layout(problem)
        for direction in directions:
            for tile, received in received_by_tile(problem, layout, direction, ulysses).items():
                nbytes[ulysses, tile] += round(received)
    by_nbytes = sorted(candidates, key=lambda c: nbytes[c.assignment.ulysses_degree, c.assignment.tile])
    tiles = list(dict.fromkeys((c.assignment.ulysses_degree, c.assignment.tile) for c in by_nbytes))[:MOST_TILES]
    kept = [c for c in by_nbytes if (c.assignment.ulysses_degree, c.assignment.tile) in tiles]
    first: dict[Family, Choice] = {}
    for choice in by_nbytes:
        first.setdefault(choice.family, choice)
    return list(dict.fromkeys([*kept, *first.values()]))


def waved(choice: Choice, problem: Problem) -> Iterator[Choice]:
    """The choice in several waves: of heads where a rank has several, otherwise of the rows of its Ulysses group."""
    heads, ulysses = problem.kv_heads // choice.assignment.ulysses_degree, choice.assignment.ulysses_degree
    cost_based = replace(choice, blocks_per_call=None)
    for waves in WAVES:
        if heads % waves == 0:
            yield replace(cost_based, waves=waves)
    if heads % WAVES[0] and ulysses % WAVES[0] == 0 and problem.ranks <= MOST_RANKS_IN_ROWS:
        yield replace(cost_based, waves=WAVES[0], cut="rows")


Routes = tuple[tuple[Route, Route], ...]
ROUTE_PAIRS: Routes = (("direct", "direct"), ("ring", "ring"), ("ring", "direct"))


def placements(tile: Tile, ulysses: int, topology: Topology) -> list[Tile | None]:
    """None, then every inner tile that fills a node; only None unless there are several nodes of several places."""
    places = topology.ranks_per_node // ulysses
    if topology.nodes == 1 or places < 2 or topology.ranks_per_node % ulysses:
        return [None]
    tiles: list[Tile | None] = [None]
    for rows in divisors(places):
        inner = Tile(rows, places // rows)
        if tile.rows % inner.rows == 0 and tile.cols % inner.cols == 0:
            normal = Assignment(tile, ulysses, inner).inner
            if normal not in tiles:
                tiles.append(normal)
    return tiles
