"""What is compared, and what the plans say of it: plans alone, no torch, no clock."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from mesh_attention import Plan, Problem, Tile, causal, make_plan, rank_costs
from mesh_attention.plan.assignment import tiles_of
from mesh_attention.plan.layout import Layout, TypicalTurn, Zigzag
from mesh_attention.plan.steps import DIRECTIONS, Direction, transfers

Options = Mapping[str, Any]
"""Arguments of `MeshAttention` and of `make_plan`, such as {"method": "mesh", "tile": "4x4"}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank is told. Goes through JSON."""

    seq: int
    cached: int
    """Tokens before these whose keys and values the ranks hold already."""
    heads: int
    kv_heads: int
    head_dim: int
    backward: bool
    rounds: int
    calibration_s: float
    """How long one measurement of the calibration lasts."""
    timeout_s: float
    methods: Mapping[str, Options]

    def problem(self, ranks: int) -> Problem:
        return Problem(
            seq_q=self.seq,
            seq_kv=self.cached + self.seq,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim_qk=self.head_dim,
            head_dim_v=self.head_dim,
            ranks=ranks,
            mask=causal(),
            dtype="float32",
        )

    @property
    def directions(self) -> tuple[Direction, ...]:
        return DIRECTIONS if self.backward else DIRECTIONS[:1]


def layout_of(problem: Problem) -> Layout:
    return TypicalTurn() if problem.seq_kv > problem.seq_q else Zigzag()


def default_methods(problem: Problem, directions: Sequence[Direction]) -> dict[str, Options]:
    """Ring first. Tiles and Ulysses degrees are those that move the least; without KV heads to share, no Ulysses.

    The ring is the published one, from neighbour to neighbour: sending straight to who needs it, which is our default,
    moves as much by rank but far more by node where a node has several, and a slow baseline would flatter the others.
    """
    methods: dict[str, Options] = {
        "ring": {"method": "ring", "route": "ring", "partials": "ring"},
        "pass-q": {"method": "pass-q", "route": "ring", "partials": "ring"},
        "mesh": {"method": "mesh"},
        "attention2d": {"method": "attention2d"},
    }
    if problem.seq_kv == problem.seq_q:
        del methods["pass-q"]  # always slower than ring, then
    shared = gcd(problem.ranks, problem.kv_heads)
    degrees = [degree for degree in range(2, shared + 1) if shared % degree == 0]

    def volume(options: Options) -> int:
        return max(sent_nbytes(plans_of(problem, options, directions), ranks_per_node=1))

    if degrees:
        grids = [(degree, tile) for degree in degrees for tile in tiles_of(problem.ranks // degree)]
        # A tile of one row or column is a ring, and that is the next method.
        rectangles = [(degree, tile) for degree, tile in grids if min(tile.rows, tile.cols) > 1]
        products = [{"method": "mesh", "ulysses_degree": u, "tile": str(tile)} for u, tile in rectangles or grids]
        methods["ulysses-mesh"] = min(products, key=volume)
        methods["usp"] = min(({"method": "ring", "ulysses_degree": u} for u in degrees), key=volume)
    methods["all-gather"] = {"method": "attention2d", "tile": f"1x{problem.ranks}"}
    return methods


def choose_methods(words: Sequence[str], known: Mapping[str, Options]) -> dict[str, Options]:
    """Methods by name, or `name={"tile": "2x8", …}` for others."""
    chosen: dict[str, Options] = {}
    for word in words:
        name, is_new, text = word.partition("=")
        if not is_new and name not in known:
            raise ValueError(f'method {word!r}: expected one of {", ".join(known)}, or a name={{"tile": "2x8"}}')
        try:
            chosen[name] = json.loads(text) if is_new else known[name]
        except json.JSONDecodeError as error:
            raise ValueError(f"method {word!r}: its options are not JSON: {error}") from None
    return chosen


def plans_of(problem: Problem, options: Options, directions: Sequence[Direction]) -> list[Plan]:
    """Those that `MeshAttention` makes of the same options."""
    layout = layout_of(problem)
    return [make_plan(problem, direction=direction, layout=layout, **options) for direction in directions]


def sent_nbytes(plans: Sequence[Plan], *, ranks_per_node: int) -> list[int]:
    """Tensor bytes each node sends to other nodes in all of the plans together."""
    ranks = plans[0].problem.ranks
    totals = [0] * (ranks // ranks_per_node)
    for plan in plans:
        for rank in range(ranks):
            totals[rank // ranks_per_node] += _sent_abroad(plan, rank, ranks_per_node)
    return totals


def _sent_abroad(plan: Plan, rank: int, ranks_per_node: int) -> int:
    if ranks_per_node == 1:
        return rank_costs(plan, rank).sent_nbytes
    sends = (send for step in plan.program(rank).steps for send in transfers(step)[0])
    abroad = (send.item for send in sends if send.dest // ranks_per_node != rank // ranks_per_node)
    return sum(plan.matrix.nbytes(item).total for item in abroad)


def shape_of(plans: Sequence[Plan]) -> str:
    """The grid, as '4 × 2x2' under Ulysses degree 4; of both passes where they differ."""
    grids = [(plan.assignment.ulysses_degree, plan.assignment.tile) for plan in plans]
    return ", ".join(dict.fromkeys(_grid(ulysses, tile) for ulysses, tile in grids))


def _grid(ulysses: int, tile: Tile) -> str:
    return str(tile) if ulysses == 1 else f"{ulysses} × {tile}"
