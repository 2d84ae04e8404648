"""Hypothesis strategies: any problem the library accepts, small enough to look at, and any plan for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from mesh_attention.masks import Mask, Segment, causal, documents, full, window
from mesh_attention.plan.assignment import CUTS, Tile, divisors, tiles_of
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.layout import LAYOUTS, Cached, Layout, Listed, TypicalTurn, shifted
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.schedule import KEEPABLE, ROUTES
from mesh_attention.plan.steps import KINDS, Direction, Keep
from mesh_attention.planners.choice import Choice
from mesh_attention.planners.costs import Costs
from mesh_attention.planners.make import has_inner_rings, make_plan
from mesh_attention.planners.over_cache import COMBININGS, QUERIES, StepShape, plan_decode
from mesh_attention.problem import ITEMSIZE, Problem


def masks(seq_q: int, seq_kv: int) -> st.SearchStrategy[Mask]:
    """Any combination of full, causal, window and documents that fits the lengths."""
    reach = st.integers(-1, max(seq_q, seq_kv))
    parts = st.tuples(
        st.sampled_from((full(), causal())),
        st.one_of(st.just(full()), st.builds(window, reach, reach)),
        st.one_of(st.just(full()), _document_masks(seq_q, seq_kv)),
    )
    return parts.map(lambda masks: masks[0] & masks[1] & masks[2])


@st.composite
def _document_masks(draw: st.DrawFn, seq_q: int, seq_kv: int) -> Mask:
    count = draw(st.integers(1, 4))
    if seq_q == seq_kv and draw(st.booleans()):
        return documents(_boundaries(draw, seq_q, count))
    return documents(_boundaries(draw, seq_q, count), _boundaries(draw, seq_kv, count))


def _boundaries(draw: st.DrawFn, length: int, count: int) -> list[int]:
    inner = draw(st.lists(st.integers(0, length), min_size=count - 1, max_size=count - 1))
    return [0, *sorted(inner), length]


@st.composite
def problems(draw: st.DrawFn, *, max_ranks: int = 12, max_tokens: int = 80) -> Problem:
    """Any lengths, ranks, heads, head sizes, dtype and mask; fewer tokens than ranks and cross attention among them."""
    seq_q = draw(st.integers(1, max_tokens))
    seq_kv = draw(st.one_of(st.just(seq_q), st.integers(1, max_tokens)))
    kv_heads = draw(st.integers(1, 4))
    return Problem(
        seq_q=seq_q,
        seq_kv=seq_kv,
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim_qk=draw(st.integers(1, 8)),
        head_dim_v=draw(st.integers(1, 8)),
        ranks=draw(st.integers(1, max_ranks)),
        batch=draw(st.integers(1, 2)),
        dtype=draw(st.sampled_from(sorted(ITEMSIZE))),
        mask=draw(masks(seq_q, seq_kv)),
    )


def layouts() -> st.SearchStrategy[Layout]:
    return st.sampled_from(tuple(LAYOUTS.values()))


@st.composite
def planned_layouts(draw: st.DrawFn, problem: Problem) -> Layout:
    """Any layout that a plan of the problem may have: also those of a cache that has grown by runs."""
    plain = draw(st.sampled_from((*LAYOUTS.values(), TypicalTurn(), None)))
    if plain is not None:
        return plain
    q, kv = (draw(listed(tokens, problem.ranks)) for tokens in (problem.seq_q, problem.seq_kv))
    return Cached(q, kv)


@st.composite
def listed(draw: st.DrawFn, tokens: int, ranks: int) -> Listed:
    """Runs of tokens, each on a layout of its own that begins with any rank."""
    cuts = sorted({0, tokens, *draw(st.lists(st.integers(0, tokens), max_size=2))})
    shards: list[tuple[Segment, ...]] = [()] * ranks
    for start, stop in pairwise(cuts):
        layout, first = draw(layouts()), draw(st.integers(0, ranks - 1))
        for rank in range(ranks):
            shard = layout.segments((rank - first) % ranks, seq_len=stop - start, ranks=ranks)
            shards[rank] += shifted(shard, start)
    return Listed(tuple(shards))


def directions() -> st.SearchStrategy[Direction]:
    return st.sampled_from(("forward", "backward"))


@st.composite
def plans(draw: st.DrawFn, *, max_ranks: int = 12, of_inputs: bool = False) -> Plan:
    """A plan for any problem, by any planner with any options; if `of_inputs`, on a layout that data is sharded by."""
    problem = draw(problems(max_ranks=max_ranks))
    layout = draw(layouts() if of_inputs else planned_layouts(problem))
    return draw(plans_of(problem, layout, draw(directions()), draw(st.sampled_from(KEEPABLE))))


@st.composite
def plans_of(
    draw: st.DrawFn, problem: Problem, layout: Layout, direction: Direction, keep: tuple[Keep, ...] = ()
) -> Plan:
    """A plan of one pass of this problem, by any planner with any options."""
    degrees = [u for u in range(1, problem.ranks + 1) if problem.ranks % u == 0 and problem.kv_heads % u == 0]
    degree = draw(st.sampled_from(degrees))
    tile = draw(st.sampled_from(tiles_of(problem.ranks // degree)))
    inner = Tile(*(draw(st.sampled_from(divisors(side))) for side in (tile.rows, tile.cols)))
    cut = draw(st.sampled_from(CUTS if degree > 1 else CUTS[:1]))
    waves = draw(st.sampled_from(divisors(problem.kv_heads // degree) if cut == "heads" else divisors(degree)[1:]))
    keep = tuple(kind for kind in keep if kind != "own") if degree == 1 else keep
    grid = Choice(tile=tile, ulysses_degree=degree, inner=inner, waves=waves, cut=cut)
    choice = replace(grid, layout=layout, keep=keep)
    if draw(st.booleans()):
        return make_plan(problem, replace(choice, method="attention2d"), direction=direction)
    route, partials = draw(st.sampled_from(ROUTES)), draw(st.sampled_from(ROUTES))
    choice = replace(choice, route=route, partials=partials, blocks_per_call=draw(st.integers(1, 6)))
    matrix = BlockMatrix(problem, layout, choice.assignment)
    if "ring" in (route, partials) and has_inner_rings(matrix.assignment) and not matrix.is_uniform:
        choice = replace(choice, inner=None)  # refused otherwise
    costs = Costs(**draw(st.fixed_dictionaries(dict.fromkeys(KINDS, st.floats(0.05, 20)))))
    return make_plan(problem, choice, direction=direction, costs=costs)


@st.composite
def step_shapes(draw: st.DrawFn, *, max_ranks: int = 12, dtypes: tuple[str, ...] = tuple(ITEMSIZE)) -> StepShape:
    """Any decoded step: ragged ones, and fewer sequences or rows than ranks, among them."""
    kv_heads = draw(st.integers(1, 3))
    most = draw(st.sampled_from((1, 5)))
    return StepShape(
        new_tokens=tuple(draw(st.lists(st.integers(1, most), min_size=1, max_size=6))),
        ranks=draw(st.integers(1, max_ranks)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim_qk=draw(st.integers(1, 8)),
        head_dim_v=draw(st.integers(1, 8)),
        dtype=draw(st.sampled_from(dtypes)),
    )


@st.composite
def decode_plans(draw: st.DrawFn, *, max_ranks: int = 12) -> Plan:
    queries, combining = draw(st.sampled_from(QUERIES)), draw(st.sampled_from((*COMBININGS, None)))
    return plan_decode(draw(step_shapes(max_ranks=max_ranks)), queries=queries, combining=combining)
