"""Prices of schedules, the shortest one there is, and how near the greedy order comes to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import directions

from mesh_attention import Tile
from mesh_attention.plan.parse import parse_move
from mesh_attention.plan.schedule import Fetch, Meet, Move, Return
from mesh_attention.plan.steps import AXIS_OF, INPUTS, KINDS, OUTPUTS, Direction, Kind
from mesh_attention.planners.costs import Costs
from mesh_attention.planners.greedy import OWN_ROW_WEIGHTS, CountedOrder, mask_of
from mesh_attention.planners.make import greedy_moves
from orders.clocks import price_moves
from orders.optimum import optimal_moves

COSTS = st.builds(Costs, **{kind: st.floats(0.05, 12) for kind in KINDS})
SMALL_TILES = st.builds(Tile, st.integers(1, 3), st.integers(1, 3))
HAVE = st.sampled_from(((), ("q",), ("kv",), ("q", "kv")))
NOISE = 1e-9


def moves(text: str) -> tuple[Move, ...]:
    return tuple(parse_move(line) for line in text.split(" · "))


def makespan(schedule: tuple[Move, ...], tile: Tile, direction: Direction, costs: Costs) -> float:
    return price_moves(schedule, tile, direction, costs=costs).makespan


# Prices worked out by hand

BEHIND = "fetch kv 1 · meet 0 x 0 · meet 0 x 1 · return o 0"
AFTER = "meet 0 x 0 · fetch kv 1 · meet 0 x 1 · return o 0"
TWO_ROWS = "fetch q 1 · fetch kv 1 · meet 0 x 0 · meet 1 x 0 · meet 1 x 1 · return o 1 · meet 0 x 1 · return o 0"
GRADIENTS = (
    "fetch q 1 · fetch do 1 · meet 0 x 0 · fetch kv 1 · meet 1 x 0 · meet 1 x 1 · return dq 1 · meet 0 x 1 · "
    "return dkv 1 · return dq 0 · return dkv 0"
)


# The shortest schedule


@given(SMALL_TILES, directions(), COSTS)
def test_nothing_is_shorter_than_its_compute_or_its_transfers(tile: Tile, direction: Direction, costs: Costs) -> None:
    transfers = sum(
        costs.of(kind) * ((tile.rows if AXIS_OF[kind] == "row" else tile.cols) - 1)
        for kind in (*INPUTS[direction], *OUTPUTS[direction])
    )
    for schedule in (greedy_moves(tile, direction, costs=costs), optimal_moves(tile, direction, costs=costs)):
        clocks = price_moves(schedule, tile, direction, costs=costs)
        assert clocks.compute >= tile.rows * tile.cols
        assert clocks.link >= transfers - NOISE


@given(SMALL_TILES, directions(), COSTS, st.integers(1, 4))
def test_greedy_is_never_shorter_than_the_shortest(
    tile: Tile, direction: Direction, costs: Costs, blocks_per_call: int
) -> None:
    shortest = makespan(optimal_moves(tile, direction, costs=costs), tile, direction, costs)
    greedy = greedy_moves(tile, direction, costs=costs, blocks_per_call=blocks_per_call)
    assert makespan(greedy, tile, direction, costs) >= shortest - NOISE


@pytest.mark.parametrize(
    ("tile", "direction"),
    [
        (Tile(1, 3), "forward"),
        (Tile(3, 1), "forward"),
        (Tile(2, 2), "forward"),
        (Tile(3, 2), "forward"),
        (Tile(2, 3), "forward"),
        (Tile(1, 4), "backward"),
        (Tile(3, 1), "backward"),
        (Tile(2, 2), "backward"),
    ],
)
@given(costs=COSTS)
@settings(max_examples=5)
def test_no_order_of_the_moves_is_shorter_than_the_shortest(tile: Tile, direction: Direction, costs: Costs) -> None:
    """Whatever is fetched, met and returned first: none of the orders that the search leaves out is better."""
    shortest = makespan(optimal_moves(tile, direction, costs=costs), tile, direction, costs)
    assert shortest == pytest.approx(shortest_of_all_orders(tile, direction, costs), abs=NOISE)


def shortest_of_all_orders(tile: Tile, direction: Direction, costs: Costs) -> float:
    """Every order of single fetches, blocks and returns, without the searcher's arguments."""
    sizes = {kind: tile.rows if AXIS_OF[kind] == "row" else tile.cols for kind in KINDS}
    fetches = [(kind, at) for kind in INPUTS[direction] for at in range(1, sizes[kind])]
    returns = [(kind, at) for kind in OUTPUTS[direction] for at in range(1, sizes[kind])]
    blocks = [(row, col) for row in range(tile.rows) for col in range(tile.cols)]
    best, seen = float("inf"), set()
    start = (
        0.0,
        0.0,
        frozenset(((kind, 0), 0.0) for kind in INPUTS[direction]),
        frozenset([*fetches, *returns, *blocks]),
    )
    stack = [start]
    while stack:
        state = stack.pop()
        now, link_free, arrivals, left = state
        if state in seen or max(now, link_free) >= best:
            continue
        seen.add(state)
        if not left:
            best = max(now, link_free)
        stack += _one_move_later(now, link_free, dict(arrivals), left, direction, costs)
    return best


Left = frozenset[tuple[Kind | int, int]]
State = tuple[float, float, frozenset[tuple[tuple[Kind, int], float]], Left]


def _one_move_later(
    now: float,
    link_free: float,
    arrivals: dict[tuple[Kind, int], float],
    left: Left,
    direction: Direction,
    costs: Costs,
) -> Iterator[State]:
    blocks = [move for move in left if isinstance(move[0], int)]
    for move in left:
        kind, offset = move
        rest, here = left - {move}, frozenset(arrivals.items())
        if isinstance(kind, int):
            needed = [(k, kind if AXIS_OF[k] == "row" else offset) for k in INPUTS[direction]]
            if all(item in arrivals for item in needed):
                yield max(now, *(arrivals[item] for item in needed)) + 1, link_free, here, rest
        elif kind in INPUTS[direction]:
            arrival = max(now, link_free) + costs.of(kind)
            yield now, arrival, frozenset((arrivals | {(kind, offset): arrival}).items()), rest
        elif all(block[0 if AXIS_OF[kind] == "row" else 1] != offset for block in blocks):
            yield now, max(now, link_free) + costs.of(kind), here, rest


def test_the_own_row_is_kept_for_the_end() -> None:
    """By hand: Q first. O leaves at 3, while compute still has a block; with KV first, it would leave at 4."""
    costs = Costs(q=1.0, kv=0.5, o=1.0)
    schedule = optimal_moves(Tile(2, 2), "forward", costs=costs)
    assert schedule == moves(TWO_ROWS)
    assert makespan(schedule, Tile(2, 2), "forward", costs) == 4.0


@given(SMALL_TILES, directions(), COSTS, HAVE)
@settings(max_examples=50)
def test_what_a_rank_has_is_not_fetched_and_never_makes_it_slower(
    tile: Tile, direction: Direction, costs: Costs, held_kinds: tuple[Kind, ...]
) -> None:
    schedule = optimal_moves(tile, direction, costs=costs, held_kinds=held_kinds)
    assert not [move for move in schedule if isinstance(move, Fetch) and move.kind in held_kinds]
    shortest = price_moves(schedule, tile, direction, costs=costs, held_kinds=held_kinds).makespan
    assert shortest <= makespan(optimal_moves(tile, direction, costs=costs), tile, direction, costs) + NOISE


@given(SMALL_TILES, directions(), COSTS)
@settings(max_examples=50)
def test_the_shortest_returns_by_rising_offset_as_a_ring_of_partials_needs(
    tile: Tile, direction: Direction, costs: Costs
) -> None:
    schedule = optimal_moves(tile, direction, costs=costs)
    for kind in OUTPUTS[direction]:
        offsets = [move.offset for move in schedule if isinstance(move, Return) and move.kind == kind]
        assert offsets == [*range(1, tile.rows if AXIS_OF[kind] == "row" else tile.cols), 0]


# How near the greedy order comes

TILES = [Tile(rows, cols) for rows in range(1, 5) for cols in range(1, 5) if rows * cols < 16]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_greedy_is_within_a_hundredth_of_the_shortest_on_average(direction: Direction) -> None:
    """See benchmarks/how_good_is_the_greedy.py for more costs; a change that loses what was won fails here."""
    ratios = []
    for tile in TILES:
        for cost in (0.3, 1.0, 1.8, 4.0):
            costs = Costs(q=cost, kv=cost / 2, do=cost, o=cost, dq=cost, dkv=cost / 2)
            shortest = makespan(optimal_moves(tile, direction, costs=costs), tile, direction, costs)
            ratios.append(makespan(greedy_moves(tile, direction, costs=costs), tile, direction, costs) / shortest)
    assert sum(ratios) / len(ratios) < 1.01
    assert max(ratios) < 1.11


@given(st.builds(Tile, st.integers(1, 7), st.integers(1, 7)), directions(), COSTS, st.integers(1, 5), HAVE)
def test_the_greedy_order_knows_its_own_price(
    tile: Tile, direction: Direction, costs: Costs, blocks_per_call: int, held_kinds: tuple[Kind, ...]
) -> None:
    """It chooses between orders by the clocks it keeps while it makes them. With large calls these may be late: after
    a wait for one more shard it may choose a call that does not need that shard."""
    for weight in OWN_ROW_WEIGHTS:
        order = CountedOrder(tile, direction, costs, held_kinds, own_row_weight=weight, most_ahead=blocks_per_call)
        kept = order.complete_all()
        whole = (*order.moves, *(Return(kind, 0) for kind in OUTPUTS[direction]))
        price = price_moves(whole, tile, direction, costs=costs, held_kinds=held_kinds).makespan
        assert price == pytest.approx(kept) if blocks_per_call == 1 else price <= kept + NOISE


@given(st.builds(Tile, st.integers(1, 9), st.integers(1, 9)), directions(), COSTS)
def test_nobody_fetches_what_its_ring_neighbour_has_not_got_yet(tile: Tile, direction: Direction, costs: Costs) -> None:
    """With blocks as calls, a fetch is never posted before the one before it on its axis has arrived: passed on along a
    ring, it costs no wait. So the price is the same when every fetch waits for that."""
    schedule = greedy_moves(tile, direction, costs=costs)
    assert ring_makespan(schedule, direction, costs) == pytest.approx(makespan(schedule, tile, direction, costs))


def ring_makespan(schedule: tuple[Move, ...], direction: Direction, costs: Costs) -> float:
    now = link_free = 0.0
    arrivals: dict[tuple[Kind, int], float] = {}
    for move in schedule:
        match move:
            case Fetch(kind, offset):
                now = max(now, arrivals.get((kind, offset - 1), 0.0))
                link_free = arrivals[kind, offset] = max(now, link_free) + costs.of(kind)
            case Meet(rows, cols):
                needed = [(kind, at) for kind in INPUTS[direction] for at in (rows if AXIS_OF[kind] == "row" else cols)]
                price = costs.of_call(mask_of(rows), mask_of(cols))
                now = max(now, *(arrivals.get(item, 0.0) for item in needed)) + price
            case Return(kind, offset) if offset:
                link_free = max(now, link_free) + costs.of(kind)
    return max(now, link_free)
