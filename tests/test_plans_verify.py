"""Every planner's plans keep every rule: exhaustively for small n, then for problems that Hypothesis draws."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from subprocess import check_output

import pytest
from _pytest.mark import ParameterSet
from hypothesis import given, settings
from strategies import decode_plans, plans, step_shapes

from mesh_attention import (
    Plan,
    Problem,
    causal,
    cluster_named,
    documents,
    full,
    make_plan,
    parse_plan,
    window,
)
from mesh_attention.errors import ScheduleError
from mesh_attention.masks import Mask
from mesh_attention.plan.assignment import Assignment, Tile, divisors, tiles_of
from mesh_attention.plan.blocks import BlockMatrix, token_nbytes
from mesh_attention.plan.layout import LAYOUTS, Layout
from mesh_attention.plan.plan import rank_costs
from mesh_attention.plan.steps import Direction, transfers
from mesh_attention.planners.over_cache import COMBININGS, StepShape, plan_decode
from mesh_attention.verification.rules import check, format_breaches
from mesh_attention_lab.decode_simulator import simulate_decode

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
# Every g meets every route, and both single blocks and rectangles, over the three.
VARIANTS = {1: ("ring", "ring", 1), 4: ("direct", "direct", 1), 8: ("ring", "direct", 3)}


def assert_right(plan: Plan) -> None:
    breaches = check(plan)
    assert not breaches, format_breaches(plan, breaches)


def masks_for(tokens: int) -> list[object]:
    return [full(), causal(), window(tokens // 5, 1), documents([0, tokens // 3, tokens // 3 + 1, tokens])]


BALANCED = [layout for layout in LAYOUTS.values() if layout.name != "chunks"]
"""Shards differ by at most one token. Chunks, which do not, are met once here, and in plans that are drawn."""
EXHAUSTIVE = 8
"""Up to this many ranks every mask meets every layout in every tile; beyond, one layout in each, taken in turn."""


def layouts_in_turn(ranks: int, turn: int) -> list[Layout]:
    return BALANCED if ranks <= EXHAUSTIVE else [BALANCED[turn % len(BALANCED)]]


def marked(cases: Iterable[tuple[int, ...]]) -> list[ParameterSet]:
    """Cases of more ranks than `EXHAUSTIVE` are slow; a case begins with its ranks."""
    return [pytest.param(*case, marks=[pytest.mark.slow] if case[0] > EXHAUSTIVE else []) for case in cases]


@pytest.mark.parametrize(
    ("ranks", "group_size"),
    marked([*product((*range(1, 11), 12, 15, 16), (1,)), *product((2, 3, 6, 8, 12), (4, 8))]),
)
def test_every_small_plan_is_right(ranks: int, group_size: int) -> None:
    route, partials, blocks_per_call = VARIANTS[group_size]
    tokens = 5 * ranks + 3
    for number, mask in enumerate(masks_for(tokens)):
        problem = Problem.self_attention(
            seq_len=tokens, heads=8, kv_heads=8 // group_size, head_dim=4, ranks=ranks, mask=mask
        )
        for turn, tile in enumerate(tiles_of(ranks), start=number + ranks):
            is_each = group_size == 1 and ranks <= EXHAUSTIVE
            for layout in LAYOUTS.values() if is_each else layouts_in_turn(ranks, turn):
                for direction in DIRECTIONS:
                    common = {"tile": tile, "layout": layout, "direction": direction}
                    greedy = {"route": route, "partials": partials, "blocks_per_call": blocks_per_call}
                    assert_right(make_plan(problem, **common, **greedy))
                    assert_right(make_plan(problem, method="attention2d", **common))


@pytest.mark.parametrize("ranks", marked([(4,), (6,), (8,), (12,), (16,)]))
def test_every_small_ulysses_product_is_right(ranks: int) -> None:
    tokens = 3 * ranks + 1
    for degree in (u for u in (2, 4, 8) if ranks % u == 0):
        for number, mask in enumerate(masks_for(tokens)):
            problem = Problem.self_attention(seq_len=tokens, heads=16, kv_heads=8, head_dim=2, ranks=ranks, mask=mask)
            for turn, tile in enumerate(tiles_of(ranks // degree), start=number + degree):
                for layout in layouts_in_turn(ranks, turn):
                    for direction in DIRECTIONS:
                        common = {"tile": tile, "layout": layout, "direction": direction, "ulysses_degree": degree}
                        assert_right(make_plan(problem, route="ring", blocks_per_call=2, **common))
                        assert_right(make_plan(problem, method="attention2d", **common))


@pytest.mark.parametrize("mask", [full(), causal(), window(3, 1)], ids=str)
@pytest.mark.parametrize(("ranks", "tokens"), [(4, 5), (6, 8), (8, 11)])
def test_plans_over_empty_shards_are_right(ranks: int, tokens: int, mask: Mask) -> None:
    """`torch.chunk` leaves the last ranks without tokens, in all rings and inner rings that pass by them."""
    problem = Problem.self_attention(seq_len=tokens, heads=2, head_dim=2, ranks=ranks, mask=mask)
    made = refused = 0
    for tile in tiles_of(ranks):
        for inner in (Tile(rows, cols) for rows in divisors(tile.rows) for cols in divisors(tile.cols)):
            for direction, routes in product(DIRECTIONS, ("ring", "direct")):
                options = {"tile": tile, "inner": inner, "route": routes, "partials": routes, "layout": "chunks"}
                try:
                    plan = make_plan(problem, direction=direction, **options)
                except ScheduleError as error:
                    assert "use direct routes" in str(error)  # noqa: PT017
                    refused += 1
                    continue
                assert_right(plan)
                made += 1
    assert made > refused > 0


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_uniform_means_that_every_rank_needs_every_shard(layout: Layout) -> None:
    found = set()
    for ranks, more, mask in product(range(1, 9), (-1, 0, 1, 3), (full(), causal())):
        problem = Problem.self_attention(seq_len=max(1, ranks + more), heads=2, head_dim=2, ranks=ranks, mask=mask)
        for tile in tiles_of(ranks):
            matrix = BlockMatrix(problem, layout, Assignment(tile))
            shards = [
                (axis, place, shard)
                for axis in ("row", "col")
                for place in range(ranks)
                for shard in matrix.assignment.group(axis, place)
            ]
            found.add(matrix.is_uniform)
            assert matrix.is_uniform <= all(matrix.needs(*shard) for shard in shards), (problem, tile)
    assert found == {True, False}


@given(plans())
@settings(max_examples=200)
def test_any_plan_is_right(plan: Plan) -> None:
    assert_right(plan)


@pytest.mark.slow
@given(plans(max_ranks=40))
@settings(max_examples=40)
def test_any_larger_plan_is_right(plan: Plan) -> None:
    assert_right(plan)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("ranks", "tile", "blocks_per_call"), [(36, (6, 6), 4), (12, (1, 12), 6), (24, (4, 6), 5)])
def test_many_fetches_in_a_row_along_a_ring_make_no_circle(
    ranks: int, tile: tuple[int, int], blocks_per_call: int, direction: Direction
) -> None:
    problem = Problem.self_attention(
        seq_len=4096 * ranks, heads=32, kv_heads=8, head_dim=128, ranks=ranks, mask=causal()
    )
    options = {"tile": tile, "direction": direction, "blocks_per_call": blocks_per_call}
    for partials in ("ring", "direct"):
        assert_right(make_plan(problem, route="ring", partials=partials, **options))


@given(decode_plans())
@settings(max_examples=200)
def test_any_plan_of_a_decoded_step_is_right(plan: Plan) -> None:
    assert_right(plan)
    unrolled = plan.unrolled()
    assert parse_plan(str(plan)) == plan
    assert parse_plan(str(unrolled)) == unrolled
    assert_right(unrolled)
    for program in plan.all_programs():
        sends = [send for step in program.steps for send in transfers(step)[0]]
        assert rank_costs(plan, program.rank).sent_nbytes == sum(plan.matrix.nbytes(send.item).total for send in sends)


@given(decode_plans(max_ranks=8))
@settings(max_examples=40)
def test_a_forecast_of_a_decoded_step_attends_and_then_exchanges(plan: Plan) -> None:
    ranks = plan.problem.ranks
    timeline = simulate_decode(plan, replace(cluster_named("h100x8"), ranks=ranks), attend_s=1e-3)
    assert timeline.time_s >= 1e-3
    assert (timeline.time_s == 1e-3) == (ranks == 1)


@given(step_shapes())
def test_each_way_to_combine_sends_the_bytes_it_is_known_by(shape: StepShape) -> None:
    """Gathered, all partials go to all ranks; reduced, each to its rank, and results to all ranks."""
    sent = {}
    for combining in COMBININGS:
        plan = plan_decode(shape, combining=combining)
        sent[combining] = sum(rank_costs(plan, rank).sent_nbytes for rank in range(shape.ranks))
    row = token_nbytes("o", plan.problem)
    row += -row % plan.problem.accumulator_itemsize  # the LSE of the next row is read in place
    everything = (shape.ranks - 1) * plan.problem.seq_q * row
    assert sent == {"all_gather": shape.ranks * everything, "reduce_scatter": 2 * everything}


def test_every_process_makes_the_same_plan_of_a_step() -> None:
    made = """
from mesh_attention.planners.over_cache import StepShape, plan_decode
sizes = {"ranks": 4, "heads": 4, "kv_heads": 2, "head_dim_qk": 8, "head_dim_v": 8, "dtype": "bfloat16"}
for how in ({}, {"combining": "reduce_scatter"}, {"queries": "sharded"}):
    print(plan_decode(StepShape(new_tokens=(1, 3, 1), **sizes), **how).unrolled().digest)
"""
    run = [sys.executable, "-c", made]
    printed = {check_output(run, env={**os.environ, "PYTHONHASHSEED": seed}) for seed in ("1", "2", "3")}
    assert len(printed) == 1
