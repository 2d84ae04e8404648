"""The schedule by the price of calls: orders under several policies, and the best of them with every choice tried out.

Which policy is best depends on costs and tile, and making an order is cheap; so policies are changed one property at a
time, and a change that makes the order better is kept. Then the order is made once more, and at every step each thing
that could be done instead is tried to the end under the same policy. Whatever ends earlier is done.

An order is better that is shorter, memory considered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from mesh_attention.plan.assignment import Axis, Tile
from mesh_attention.plan.schedule import Move, Route
from mesh_attention.plan.steps import OUTPUTS, Direction, Kind
from mesh_attention.planning.costs import Costs
from mesh_attention.planning.holding import ONE_SIZE, Sizes, held_share
from mesh_attention.planning.policy import Policy, PolicyOrder

Make = Callable[[Policy], PolicyOrder]
Price = Callable[[PolicyOrder], float]
WORTH_A_CHANGE = 0.999
"""What another policy must be below to be taken instead."""
MEMORY_WORTH = 0.05
"""By how much an order may be longer that needs less memory by all that the tile has."""
WORTH_TRYING_OUT = 0.995
"""What the order with its choices tried out must be below: its calls are odd shapes, and a smaller gain may be lost in
what has no price here."""
LONGEST_TRIED_OUT = 40
"""Rows and columns of a tile together. Trying out takes about as many steps as the cube of that."""
NOISE = 1e-6


@lru_cache(maxsize=256)
def priced_moves(
    tile: Tile,
    direction: Direction,
    *,
    costs: Costs,
    sizes: Sizes = ONE_SIZE,
    have: tuple[Kind, ...] = (),
    route: Route = "direct",
) -> tuple[Move, ...]:
    """All moves but the returns of the own row and column. `sizes` are those of a shard, for memory."""

    def order_by(policy: Policy) -> PolicyOrder:
        return PolicyOrder(tile, direction, costs, have, policy, waits_its_turn=route == "ring")

    def price(order: PolicyOrder) -> float:
        return order.makespan * (1 + MEMORY_WORTH * held_share(order.moves, direction, sizes=sizes))

    best = _best_order(order_by, price, tile, direction)
    if min(tile.rows, tile.cols) > 1 and tile.rows + tile.cols <= LONGEST_TRIED_OUT:
        tried_out = _tried_out(order_by(best.policy), best.makespan)
        if price(tried_out) < price(best) * WORTH_TRYING_OUT:
            best = tried_out
    return tuple(best.moves)


def _best_order(order_by: Make, price: Price, tile: Tile, direction: Direction) -> PolicyOrder:
    best = order_by(Policy())
    best.complete_all()
    lowest, tried = price(best), {best.policy}
    for changes in _changes(tile, direction):
        policies = [replace(best.policy, **change) for change in changes]
        for policy in policies:
            if policy in tried:
                continue
            tried.add(policy)
            order = order_by(policy)
            if order.complete_all(lowest) < lowest and price(order) < lowest * WORTH_A_CHANGE:
                best, lowest = order, price(order)
    return best


def _tried_out(order: PolicyOrder, shortest: float) -> PolicyOrder:
    """The order, completed. It ends at `shortest` if every choice is left to its policy, or earlier."""
    while order.blocks_left:
        better = []
        for call in order.alternatives():
            tried = order.branch()
            tried.step(call)
            makespan = tried.complete_all(shortest - NOISE)
            if makespan < shortest - NOISE:
                shortest, better = makespan, [call]
        order.step(better[0] if better else order.choose())
    order.post_returns()
    return order


def _changes(tile: Tile, direction: Direction) -> Iterator[list[dict[str, Any]]]:
    """Of a policy, in the order in which they are tried; of each list the best is kept, if any."""
    for _ in range(2):
        yield [{"own_row_worth": worth} for worth in (0, 1)]
        yield [{"window": window} for window in (None, *_windows(tile, direction))]
        yield [{"completing": completing} for completing in (0.8, 0.9, 0.95, 0.97)]
        yield [{"hurry": hurry} for hurry in (None, 1.0, 2.0)]
        yield [{"enough": enough} for enough in (None, 0.8)]
        yield [{"patience": patience} for patience in (0.0, 0.8)]
        yield [{"ahead": ahead} for ahead in (4, 8, 16)]


def _windows(tile: Tile, direction: Direction) -> Iterator[tuple[Axis, int]]:
    """Where columns leave as well as rows; forward, a window only delays."""
    sides: tuple[tuple[Axis, int], ...] = (("col", tile.cols), ("row", tile.rows))
    for axis, size in sides if len(OUTPUTS[direction]) == 2 and min(tile.rows, tile.cols) >= 4 else ():
        for eighths in (3, 4):
            yield axis, max(2, size * eighths // 8)
