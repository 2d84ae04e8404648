"""Candidates: everything there is to choose about a plan, and which choices make sense for a problem on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from mesh_attention.plan.assignment import Assignment, Tile, divisors, tiles_of
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.layout import layout_named
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.schedule import Route
from mesh_attention.plan.steps import Direction, Kind
from mesh_attention.planning.costs import Costs
from mesh_attention.planning.entries import has_inner_rings
from mesh_attention.planning.registry import make_plan
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology

Order = Literal["greedy", "collective"]
"""Point-to-point transfers in a greedy order, or collectives without overlap."""
Family = Literal[
    "ring",
    "all-gather",
    "pass-q",
    "ulysses",
    "double ring",
    "usp",
    "startrail",
    "attention2d",
    "mesh",
    "ulysses×attention2d",
    "ulysses×mesh",
]
FAMILIES: tuple[Family, ...] = (
    "ring",
    "all-gather",
    "pass-q",
    "ulysses",
    "attention2d",
    "mesh",
    "usp",
    "double ring",
    "ulysses×attention2d",
    "ulysses×mesh",
)
"""Simplest first: near-ties go to the simpler. StarTrail is not among them: it has no plan of its own, see `rivals`."""

BY_PRICE = 1 << 16
"""Where grouping by price stands among the numbers of blocks a call: it is the least simple."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to plan a problem. Grouping and routes mean nothing to collectives, and then have these defaults.

    With `blocks_per_call` None, calls are as large as is worth their price on the cluster.
    """

    order: Order
    assignment: Assignment
    layout: str
    route: Route = "direct"
    partials: Route = "direct"
    blocks_per_call: int | None = 1
    keep: tuple[Kind, ...] = ()

    @property
    def family(self) -> Family:
        """What the field calls it."""
        tile, ulysses = self.assignment.tile, self.assignment.ulysses
        if tile == Tile(1, 1):
            return "ulysses"
        if self.order == "collective":
            if tile.rows == 1 and ulysses == 1:
                return "all-gather"
            return "attention2d" if ulysses == 1 else "ulysses×attention2d"
        if tile.rows == 1 and 1 < self.assignment.inner_size("col") < tile.cols and self.route == "ring":
            return "double ring"
        if ulysses > 1:
            return "usp" if tile.rows == 1 else "ulysses×mesh"
        return "ring" if tile.rows == 1 else "pass-q" if tile.cols == 1 else "mesh"

    @property
    def options(self) -> dict[str, Any]:
        """What `make_plan` takes."""
        assignment = self.assignment
        options: dict[str, Any] = {"tile": assignment.tile, "ulysses_degree": assignment.ulysses, "layout": self.layout}
        options |= {"inner": assignment.inner, "keep": self.keep}
        if self.order == "collective":
            return options | {"method": "attention2d"}
        rows, cols = assignment.tile.rows, assignment.tile.cols
        method = "ring" if rows == 1 else "pass-q" if cols == 1 else "mesh"
        options |= {"method": method, "route": self.route, "partials": self.partials}
        return options if self.blocks_per_call is None else options | {"blocks_per_call": self.blocks_per_call}

    def plan(self, problem: Problem, direction: Direction, costs: Costs | None = None) -> Plan:
        """`costs` order a greedy schedule; collectives have none."""
        given: dict[str, Any] = {} if self.order == "collective" else {"costs": costs}
        return make_plan(problem, direction=direction, **self.options, **given)

    @property
    def complexity(self) -> tuple[tuple[int, ...], str]:
        """Of two that are about as fast, the one that compares lower is the simpler. No two compare equal."""
        numbers = (
            FAMILIES.index(self.family),
            len(self.keep),
            int(self.assignment.inner is not None),
            int(self.route != self.partials),
            self.assignment.ulysses,
            self.assignment.tile.rows,
            self.blocks_per_call or BY_PRICE,
        )
        return numbers, f"{self.order} {self.layout} {self}"

    def __str__(self) -> str:
        parts = [self.family, str(self.assignment)]
        if self.order == "greedy":
            same = self.route if self.route == self.partials else f"{self.route}/{self.partials}"
            parts += [same, f"{self.blocks_per_call} a call" if self.blocks_per_call else "by price"]
        if self.keep:
            parts.append(f"keep {'+'.join(self.keep)}")
        return " ".join(parts)


def shapes(problem: Problem, topology: Topology, *, layout: str) -> Iterator[Candidate]:
    """Every degree, tile, placement and route that makes sense, with the grouping left at 1."""
    for ulysses in divisors(problem.ranks):
        if problem.kv_heads % ulysses:
            continue
        for tile in tiles_of(problem.ranks // ulysses):
            matrix = BlockMatrix(problem, layout_named(layout), Assignment(tile, ulysses))
            routes = _routes(problem)
            yield from _of_tile(tile, ulysses, layout, topology, routes if matrix.is_uniform else routes[:1], routes)


def _of_tile(
    tile: Tile,
    ulysses: int,
    layout: str,
    topology: Topology,
    through_inner_rings: Routes,
    routes: Routes,
) -> Iterator[Candidate]:
    whole = Candidate(order="collective", assignment=Assignment(tile, ulysses), layout=layout)
    yield whole
    if tile == Tile(1, 1):
        return
    for inner in placements(tile, ulysses, topology):
        if inner is not None:
            yield replace(whole, assignment=Assignment(tile, ulysses, inner))
        assignment = Assignment(tile, ulysses, inner)
        for route, partials in through_inner_rings if has_inner_rings(assignment) else routes:
            yield replace(whole, order="greedy", assignment=assignment, route=route, partials=partials)


Routes = tuple[tuple[Route, Route], ...]
ROUTE_PAIRS: Routes = (("direct", "direct"), ("ring", "ring"), ("ring", "direct"))


def _routes(problem: Problem) -> Routes:
    """In 16 bits partials do not go round a ring: rounded once a hop, they lose twice what one kernel does."""
    return tuple(pair for pair in ROUTE_PAIRS if problem.itemsize > 2 or pair[1] == "direct")


def placements(tile: Tile, ulysses: int, topology: Topology) -> list[Tile | None]:
    """Inner tiles that fill a node, after the Ulysses groups; without one if nodes hold one place or are but one."""
    places = topology.ranks_per_node // ulysses
    if topology.nodes == 1 or places < 2 or topology.ranks_per_node % ulysses:
        return [None]
    found: list[Tile | None] = [None]
    for rows in divisors(places):
        inner = Tile(rows, places // rows)
        if tile.rows % inner.rows == 0 and tile.cols % inner.cols == 0:
            normal = Assignment(tile, ulysses, inner).inner
            if normal not in found:
                found.append(normal)
    return found
