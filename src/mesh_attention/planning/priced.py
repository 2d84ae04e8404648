"""The schedule by the price of calls: orders under several policies, and the best of them with every choice tried out.

Which policy is best depends on costs and tile, and making an order is cheap; so policies are changed one property at a
time, and a change that makes the order better is kept. Then the order is made once more, and at every step each
alternative is tried to the end under the same policy, and the one that ends earliest is taken.

The better of two orders has the lower price: its makespan, raised by `MEMORY_WORTH` times its share of the memory.
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
"""Another policy is taken only if its price is below this share of the best."""
MEMORY_WORTH = 0.05
"""Share by which an order may be longer if it saves as much memory as the whole tile takes."""
WORTH_TRYING_OUT = 0.995
"""The tried-out order is taken only if its price is below this share of the best: its calls have odd shapes, and costs
that are not modelled could undo a smaller gain."""
LONGEST_TRIED_OUT = 40
"""Rows plus columns of a tile. The number of steps to try out grows with about the cube of this."""
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
    """Every move except the returns of a rank's own row and column. `sizes` of shards are for the price of memory."""

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
    """Lists of policy changes, in the order they are tried; the best of each list is kept if it improves the order."""
    for _ in range(2):
        yield [{"own_row_worth": worth} for worth in (0, 1)]
        yield [{"window": window} for window in (None, *_windows(tile, direction))]
        yield [{"completing_worth": worth} for worth in (0.8, 0.9, 0.95, 0.97)]
        yield [{"large_while": ratio} for ratio in (None, 1.0, 2.0)]
        yield [{"early_worth": worth} for worth in (None, 0.8)]
        yield [{"least_worth": worth} for worth in (0.0, 0.8)]
        yield [{"most_ahead": ahead} for ahead in (4, 8, 16)]


def _windows(tile: Tile, direction: Direction) -> Iterator[tuple[Axis, int]]:
    """Windows to try in backward, where columns are returned as well as rows; in forward, a window only delays."""
    sides: tuple[tuple[Axis, int], ...] = (("col", tile.cols), ("row", tile.rows))
    for axis, size in sides if len(OUTPUTS[direction]) == 2 and min(tile.rows, tile.cols) >= 4 else ():
        for eighths in (3, 4):
            yield axis, max(2, size * eighths // 8)
