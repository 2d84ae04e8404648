"""Orders by the price of calls: legal, as long as they say, no worse than counting blocks, and within memory."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders.clocks import price_moves
from orders.test_orders import ring_makespan
from strategies import directions

from mesh_attention import Problem, Tile, causal, full, make_plan
from mesh_attention.clusters import cluster_named
from mesh_attention.masks import documents, window
from mesh_attention.plan.assignment import tiles_of
from mesh_attention.plan.schedule import Meet, Move, Return, Route
from mesh_attention.plan.steps import DIRECTIONS, KINDS, OUTPUTS, Direction, Kind
from mesh_attention.planners.choice import Choice
from mesh_attention.planners.cost_based import Policy, PolicyOrder
from mesh_attention.planners.costs import Costs
from mesh_attention.planners.make import gpu_costs, greedy_moves
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Link, Topology
from mesh_attention.tuning.bounds import costs_on, plan_on
from mesh_attention.verification.rules import check

PRICES = {name: st.floats(0.01, 2) for name in ("call", "row", "col")}
COSTS = st.builds(Costs, **{kind: st.floats(0.05, 12) for kind in KINDS}, **PRICES)
TILES = st.builds(Tile, st.integers(1, 7), st.integers(1, 7))
HAVE = st.sampled_from(((), ("q",), ("kv",), ("q", "kv")))
POLICIES = st.builds(
    Policy,
    own_row_weight=st.integers(0, 1),
    most_ahead=st.integers(1, 8),
    window=st.none() | st.tuples(st.sampled_from(("row", "col")), st.integers(1, 4)),
    completing_efficiency=st.floats(0.3, 1),
    large_while=st.none() | st.floats(0.5, 3),
    early_efficiency=st.none() | st.floats(0.3, 1),
    least_efficiency=st.floats(0, 1),
)


# The price of a call


# Orders


@given(TILES, directions(), COSTS, HAVE, POLICIES, st.booleans())
def test_an_order_is_legal_and_as_long_as_it_says_under_any_policy(
    tile: Tile, direction: Direction, costs: Costs, held_kinds: tuple[Kind, ...], policy: Policy, waits_its_turn: bool
) -> None:
    """After a wait for one more shard it may choose a call that does not need that shard: then it is shorter."""
    order = PolicyOrder(tile, direction, costs, held_kinds, policy, waits_its_turn=waits_its_turn)
    makespan = order.complete_all()
    whole = (*order.moves, *(Return(kind, 0) for kind in OUTPUTS[direction]))
    assert price_moves(whole, tile, direction, costs=costs, held_kinds=held_kinds).makespan <= makespan + 1e-6


@given(TILES, directions(), COSTS, POLICIES)
def test_what_is_tried_on_a_branch_leaves_the_order_alone(
    tile: Tile, direction: Direction, costs: Costs, policy: Policy
) -> None:
    def order() -> PolicyOrder:
        return PolicyOrder(tile, direction, costs, (), policy, waits_its_turn=False)

    alone, branched = order(), order()
    while branched.blocks_left:
        for call in branched.alternatives():
            tried = branched.branch()
            tried.step(call)
            tried.complete_all()
        branched.step(branched.choose())
    alone.complete_all()
    branched.post_returns()
    assert (branched.moves, branched.makespan) == (alone.moves, alone.makespan)


@given(TILES, directions(), COSTS, POLICIES)
def test_a_ring_costs_an_order_that_waits_its_turn_no_time(
    tile: Tile, direction: Direction, costs: Costs, policy: Policy
) -> None:
    """A rank passes on what it has, so along a ring compute stops at a fetch until the one before it is here."""
    order = PolicyOrder(tile, direction, costs, (), policy, waits_its_turn=True)
    makespan = order.complete_all()
    assert ring_makespan(tuple(order.moves), direction, costs) <= makespan + 1e-6


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tile", [Tile(4, 8), Tile(8, 8), Tile(2, 12), Tile(1, 16)], ids=str)
def test_no_number_of_blocks_a_call_is_much_better_than_the_price(tile: Tile, direction: Direction) -> None:
    """By their clocks, and by as much as less memory may be worth."""
    for link in (0.3, 1.5, 4.0):
        for call in (0.1, 0.7):
            costs = Costs(q=link, kv=link / 2, do=link, o=link, dq=link, dkv=link / 2, call=call, row=call, col=call)
            counted = min(
                _makespan(greedy_moves(tile, direction, costs=costs, blocks_per_call=blocks), tile, direction, costs)
                for blocks in (1, 2, 4, 8)
            )
            assert _makespan(greedy_moves(tile, direction, costs=costs), tile, direction, costs) <= 1.03 * counted


def _makespan(moves: tuple[Move, ...], tile: Tile, direction: Direction, costs: Costs) -> float:
    return price_moves(moves, tile, direction, costs=costs).makespan


def test_calls_grow_with_their_price() -> None:
    def calls(price: float) -> int:
        costs = Costs(q=0.5, kv=0.5, o=0.5, call=price, row=price)
        return sum(isinstance(move, Meet) for move in greedy_moves(Tile(8, 8), "forward", costs=costs))

    assert calls(0.01) > calls(0.5) > calls(5.0)


def test_a_number_of_blocks_that_is_given_is_kept_to() -> None:
    priced, free = Costs(q=0.5, call=0.5, row=0.2), Costs(q=0.5)
    for blocks_per_call in (1, 4):
        given_blocks = [
            greedy_moves(Tile(4, 4), "forward", costs=c, blocks_per_call=blocks_per_call) for c in (priced, free)
        ]
        assert given_blocks[0] == given_blocks[1]
    assert greedy_moves(Tile(4, 4), "forward", costs=free) == greedy_moves(
        Tile(4, 4), "forward", costs=free, blocks_per_call=1
    )


# Plans


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mask", [full(), causal(), window(9, 3), documents([0, 10, 37, 60])], ids=str)
@pytest.mark.parametrize("route", ["ring", "direct"])
def test_cost_based_plans_are_right(mask: object, route: Route, direction: Direction) -> None:
    for ranks in (6, 12):
        problem = Problem.self_attention(seq_len=60, heads=2, head_dim=4, ranks=ranks, mask=mask)  # type: ignore[arg-type]
        for tile in tiles_of(ranks):
            for layout in ("contiguous", "zigzag", "striped") if ranks == 6 else ("zigzag",):
                for link, keep in ((0.2, ()), (3.0, ("kv",))):
                    costs = Costs(q=link, kv=link, do=link, o=link, dq=link, dkv=link, call=0.3, row=0.2, col=0.1)
                    options = {"tile": tile, "layout": layout, "direction": direction, "costs": costs, "keep": keep}
                    assert check(make_plan(problem, route=route, partials=route, **options)) == ()  # type: ignore[arg-type]


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 4), st.integers(2, 4), st.integers(1, 2), directions(), COSTS)
def test_two_engines_agree_on_cost_based_plans(
    rows: int, cols: int, ulysses: int, direction: Direction, costs: Costs
) -> None:
    ranks = rows * cols * ulysses
    problem = Problem.self_attention(seq_len=64 * ranks, heads=4, head_dim=8, ranks=ranks, mask=causal())
    plan = make_plan(problem, tile=(rows, cols), ulysses_degree=ulysses, direction=direction, costs=costs)
    cluster = replace(cluster_named(f"h100x{ranks}"), ranks_per_node=1, nics_per_node=1)
    at_once, by_events = simulate(plan, cluster), simulate(plan.unrolled(), cluster)
    assert at_once.time_s == pytest.approx(by_events.time_s)


# What it is for


@pytest.mark.parametrize(
    ("tile", "kv_heads", "direction", "tflops"),
    [
        (Tile(16, 16), 32, "forward", 568),
        (Tile(16, 16), 32, "backward", 495),
        (Tile(4, 64), 8, "forward", 622),
        (Tile(16, 16), 8, "backward", 525),
    ],
)
def test_a_gpu_behind_a_50_gb_link_comes_near_its_kernel(
    tile: Tile, kv_heads: int, direction: Direction, tflops: float
) -> None:
    """One of 256 H200 at 1M tokens, by forecast. A worse schedule fails here."""
    link = Link(gb_per_s=50, latency_us=10)
    cluster: Topology = replace(cluster_named("h200x256"), ranks_per_node=1, nics_per_node=1, between=link, inside=link)
    problem = Problem.self_attention(
        seq_len=1 << 20, heads=32, kv_heads=kv_heads, head_dim=128, ranks=256, mask=causal(), dtype="bfloat16"
    )
    plan = plan_on(cluster, problem, Choice.of(tile=tile, layout="zigzag"), direction)
    timeline = simulate(plan, cluster, priced_ranks=3)
    assert timeline.flops / 256 / timeline.ranks[128].stop_s / 1e12 >= tflops


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("ulysses_degree", [1, 8])
def test_without_a_cluster_costs_are_those_of_the_cluster_gpu(direction: Direction, ulysses_degree: int) -> None:
    problem = Problem.self_attention(seq_len=1 << 20, heads=32, kv_heads=8, head_dim=128, ranks=256, mask=causal())
    choice = Choice.of(tile=(4, 64 // ulysses_degree), ulysses_degree=ulysses_degree, layout="zigzag")
    known = costs_on(cluster_named("gpux256"), problem, choice, direction)
    assert asdict(gpu_costs(problem, choice, direction)) == pytest.approx(asdict(known), rel=1e-9)


def test_without_a_cluster_a_gpu_has_prices_of_calls_too() -> None:
    """About those of the preset: a plan that nobody tuned is not made of single blocks."""
    problem = Problem.self_attention(seq_len=1 << 20, heads=32, kv_heads=8, head_dim=128, ranks=256, mask=causal())
    cluster = cluster_named("h200x256")
    for direction in DIRECTIONS:
        candidate = Choice.of(tile=(8, 32), layout="zigzag")
        ours = gpu_costs(problem, candidate, direction)
        theirs = costs_on(cluster, problem, candidate, direction)
        assert (ours.row, ours.col) == pytest.approx((theirs.row, theirs.col), rel=0.3)
        assert ours.call == pytest.approx(theirs.call, rel=0.7)
        plan = make_plan(problem, tile=(8, 32), direction=direction, costs=ours)
        assert sum(isinstance(move, Meet) for move in plan.schedule.moves) < 60
