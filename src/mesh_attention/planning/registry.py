"""Planners by name, and `make_plan`, which fills in what was left open and refuses what a method does not have."""

from __future__ import annotations

from typing import Literal, get_args

from mesh_attention.errors import ScheduleError, TileError
from mesh_attention.plan.assignment import Assignment, Tile, as_tile, check_assignment, check_degree
from mesh_attention.plan.layout import Contiguous, Layout, Zigzag, layout_named
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.schedule import Route
from mesh_attention.plan.steps import DIRECTIONS, Direction, Kind
from mesh_attention.planning.attention2d import plan_attention2d
from mesh_attention.planning.costs import Costs
from mesh_attention.planning.mesh import plan_mesh
from mesh_attention.planning.search import least_volume_tile
from mesh_attention.problem import Problem

Method = Literal["mesh", "ring", "pass-q", "attention2d", "ulysses"]
METHODS: tuple[Method, ...] = get_args(Method)
COLLECTIVE_METHODS: tuple[Method, ...] = ("attention2d", "ulysses")
"""Those without an order of their own, and so without costs."""


def make_plan(
    problem: Problem,
    *,
    method: Method = "mesh",
    tile: Tile | tuple[int, int] | str | None = None,
    layout: Layout | str | None = None,
    direction: Direction = "forward",
    ulysses_degree: int | None = None,
    inner: Tile | tuple[int, int] | str | None = None,
    route: Route | None = None,
    partials: Route | None = None,
    blocks_per_call: int | None = None,
    costs: Costs | None = None,
    keep: tuple[Kind, ...] = (),
) -> Plan:
    """A plan by the named method. Left open: the tile that moves the least, the layout that suits the mask.

    `inner` says which places are neighbours (see `plan.assignment`): the part of the grid that one node holds.
    `keep` names what forward leaves gathered for backward: ("kv",), ("q",) or ("q", "kv"), on one tile for both.
    `route`, `partials`, `blocks_per_call` and `costs` shape a greedy schedule; attention2d has none and refuses them.
    Without `blocks_per_call`, costs that have the price of a call decide how large each is; else a call is a block.
    """
    if method not in METHODS:
        raise ScheduleError(f"method {method!r}: expected one of {', '.join(METHODS)}")
    if direction not in DIRECTIONS:
        raise ScheduleError(f"direction {direction!r}: expected {' or '.join(DIRECTIONS)}")
    layout = layout_named(layout) if isinstance(layout, str) else default_layout(problem) if layout is None else layout
    degree = _degree(problem, method, ulysses_degree)
    check_degree(degree, problem)
    # What is kept must suit both passes, so both take forward's tile.
    tile = _tile(problem, method, tile, layout, "forward" if keep else direction, degree)
    inner = None if inner is None else as_tile(inner)
    given = {"route": route, "partials": partials, "blocks_per_call": blocks_per_call, "costs": costs}
    surplus = [name for name, value in given.items() if value is not None]
    if surplus and method in COLLECTIVE_METHODS:
        raise ScheduleError(f"{method} uses collectives and has no {', '.join(surplus)}; leave it out or use mesh")
    if method == "attention2d":
        return plan_attention2d(
            problem, tile=tile, layout=layout, direction=direction, ulysses_degree=degree, inner=inner, keep=keep
        )
    return plan_mesh(
        problem,
        tile=tile,
        layout=layout,
        direction=direction,
        ulysses_degree=degree,
        inner=inner,
        route="direct" if route is None else route,
        partials="direct" if partials is None else partials,
        blocks_per_call=blocks_per_call,
        costs=costs,
        keep=keep,
        method=method,
    )


def default_layout(problem: Problem) -> Layout:
    """Zigzag where a mask makes later tokens see more; otherwise contiguous, which keeps windows local."""
    mask = problem.mask
    return Zigzag() if mask.right is not None and mask.left is None else Contiguous()


def _degree(problem: Problem, method: Method, degree: int | None) -> int:
    if method != "ulysses":
        return 1 if degree is None else degree
    if degree not in (None, problem.ranks):
        raise TileError(
            f"method ulysses spreads heads over all {problem.ranks} ranks, but a degree of {degree} came; "
            "leave it out, or use another method with that ulysses_degree"
        )
    return problem.ranks


def _tile(
    problem: Problem,
    method: Method,
    tile: Tile | tuple[int, int] | str | None,
    layout: Layout,
    direction: Direction,
    degree: int,
) -> Tile:
    places = problem.ranks // degree
    fixed = {"ring": Tile(1, places), "pass-q": Tile(places, 1), "ulysses": Tile(1, 1)}.get(method)
    wanted = None if tile is None else as_tile(tile)
    if fixed is not None:
        if wanted not in (None, fixed):
            raise TileError(f"method {method} is the {fixed} tile here, but {wanted} came; leave it out or use mesh")
        return fixed
    if wanted is not None:
        check_assignment(Assignment(wanted, degree), problem)
        return wanted
    return least_volume_tile(problem, layout, direction, ulysses_degree=degree)
