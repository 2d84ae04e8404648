"""Cost-based orders: made under several policies, then the best of them with every choice tried out.

While compute waits for the link, any call is better than none. Later, compute is the limit, and then a call should be
large: it costs a launch, and adding up its partial results costs memory traffic for every row (and, backward, every
column) it touches. So rows that wait for the same columns meet them in one rectangle, and of all such rectangles the
one with the largest share of blocks in its price comes first. Rows with fewer pending columns wait for more. Once all
shards have arrived, rows and columns are completed in turn, as few at a time as make a worthwhile call.

Which policy is best depends on costs and tile, and making an order is cheap; so policies are changed one property at a
time, and a change that makes the order better is kept. Then the order is made once more, and at every step each
alternative is tried to the end under the same policy, and the one that ends earliest is taken.

The better of two orders has the lower price: its makespan, raised by `MEMORY_WORTH` times its share of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from mesh_attention.plan.assignment import AXES, Axis, Tile
from mesh_attention.plan.schedule import Fetch, Meet, Move, Route
from mesh_attention.plan.steps import AXIS_OF, INPUTS, KINDS, OUTPUTS, Direction, Kind
from mesh_attention.planners.costs import Costs
from mesh_attention.planners.greedy import Order, Rectangle, mask_of

LARGE_CALL_EFFICIENCY = 0.98
"""A call of this efficiency need not be larger: its results take memory until they are added to the sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Rules by which an order decides. A call's efficiency is the share of its price that is blocks.

    own_row_weight         blocks that a column's block in this rank's own row counts as when fetches are compared
    most_ahead             on each axis, at most this many shards are fetched and not yet attended
    window                 (axis, n): at most n shards of this axis are fetched and not complete, which saves memory
    completing_efficiency  a call that completes rows or columns takes the fewest that reach this efficiency
    large_while            such calls must be large while the blocks left exceed this many times the returns' cost
    early_efficiency       before all columns have arrived, a call takes the fewest rows that reach this efficiency;
                           None: a large call, of `LARGE_CALL_EFFICIENCY`
    least_efficiency       a call of less efficiency is made only if it ends before the next shard arrives
    """

    own_row_weight: int = 1
    most_ahead: int = 4
    window: tuple[Axis, int] | None = None
    completing_efficiency: float = 0.95
    large_while: float | None = None
    early_efficiency: float | None = None
    least_efficiency: float = 0.0


class PolicyOrder(Order):
    """A schedule in the making. If `waits_its_turn`, a shard is fetched when the one before it on its axis has arrived:
    along a ring, the neighbour that sends it must receive it first."""

    def __init__(
        self,
        tile: Tile,
        direction: Direction,
        costs: Costs,
        held_kinds: tuple[Kind, ...],
        policy: Policy,
        *,
        waits_its_turn: bool,
    ) -> None:
        super().__init__(
            tile, direction, costs, held_kinds, own_row_weight=policy.own_row_weight, most_ahead=policy.most_ahead
        )
        self.policy, self.waits_its_turn = policy, waits_its_turn
        self.efficiencies: dict[Rectangle, float] = {}  # shared by all branches

    def _is_open(self, axis: Axis) -> bool:
        if self.waits_its_turn and self.fetched[axis] > self.here[axis]:
            return False
        window = self.policy.window
        return window is None or window[0] != axis or self.fetched[axis] - self.left[axis].count(0) < window[1]

    def choose(self) -> Rectangle | None:
        if not self.done[0]:
            return (1, 1)  # its own block: needs no transfer, and its mask makes it a separate call anyway
        if self.is_all_here:
            return self._completing_call()
        best, pending = self._best_call(), ((1 << self.here["col"]) - 1) & ~self.done[0]
        own = (1, pending) if pending else None
        if best is not None and self.efficiency(best) >= self.policy.least_efficiency:
            return best
        self.fetch_something()
        wait = self.arrivals[0][0] - self.now
        for call in (best, own):
            if call is not None and self.costs.of_call(*call) <= wait:
                return call
        is_efficient = best is None and own is not None and self.efficiency(own) >= self.policy.least_efficiency
        return own if is_efficient else None

    def _best_call(self) -> Rectangle | None:
        """The best call of rows that wait for the same columns, without its own row, which hides the last partials."""
        has_all_cols, policy = self.here["col"] == self.tile.cols, self.policy
        enough = policy.completing_efficiency if has_all_cols else policy.early_efficiency
        calls: list[tuple[bool, float, Rectangle]] = []
        for pending, rows in self.rows_by_pending().items():
            others = rows if policy.window else [row for row in rows if row]
            if others:
                call = self._few(others, pending, LARGE_CALL_EFFICIENCY if enough is None else enough)
                is_enough = enough is not None and self.efficiency(call) >= enough
                calls.append((is_enough, pending.bit_count() if is_enough else self.efficiency(call), call))
        return max(calls, key=lambda ranked: ranked[:2])[2] if calls else None

    def _completing_call(self) -> Rectangle:
        """The next call once all shards have arrived: for the row or column that releases more transfer per block."""
        (row, row_worth), (col, col_worth) = self.next_to_complete("row"), self.next_to_complete("col")
        wanted = self._completing_efficiency()
        if col_worth > row_worth:
            rows, cols = next((rows, cols) for rows, cols in self.cols_by_pending().items() if col in cols)
            return self._few([c for c in cols if c >= col], rows, wanted, are_cols=True)
        pending = self._pending(row)
        alike = [r for r in range(row, self.tile.rows) if r == row or (row and self._pending(r) == pending)]
        return self._few(alike, pending, wanted)

    def _pending(self, row: int) -> int:
        return self.all_cols & ~self.done[row]

    def _completing_efficiency(self) -> float:
        if self.policy.large_while is None:
            return self.policy.completing_efficiency
        to_return = sum(
            self.costs.of(kind) * (self.sizes[axis] - self.next_return[axis]) for axis, kind in self.results.items()
        )
        must_be_large = self.blocks_left > self.policy.large_while * to_return
        return LARGE_CALL_EFFICIENCY if must_be_large else self.policy.completing_efficiency

    def _few(self, offsets: list[int], others: int, wanted: float, *, are_cols: bool = False) -> Rectangle:
        """The call of the fewest of these offsets that reaches the wanted efficiency, or of all, with `others`."""
        chosen = 0
        for offset in offsets:
            chosen |= 1 << offset
            call = (others, chosen) if are_cols else (chosen, others)
            if self.efficiency(call) >= wanted:
                break
        return call

    # Possible calls

    def rows_by_pending(self) -> dict[int, list[int]]:
        """Rows, grouped by the columns that have arrived and that they have not met yet."""
        here, by_pending = (1 << self.here["col"]) - 1, dict[int, list[int]]()
        for row in self.rows_here():
            pending = here & ~self.done[row]
            if pending:
                by_pending.setdefault(pending, []).append(row)
        return by_pending

    def cols_by_pending(self) -> dict[int, list[int]]:
        """Columns, grouped by the rows that have not met them yet. All shards must have arrived."""
        by_pending: dict[int, list[int]] = {}
        for col in range(self.tile.cols):
            rows = mask_of([row for row in range(self.tile.rows) if not self.done[row] >> col & 1])
            if rows:
                by_pending.setdefault(rows, []).append(col)
        return by_pending

    def alternatives(self) -> list[Rectangle | None]:
        """Other calls than the one that the policy chooses; None means to wait."""
        calls: list[Rectangle | None] = [] if self.is_all_here else [None]
        for pending, rows in self.rows_by_pending().items():
            calls += [(mask_of(rows[:count]), pending) for count in _some_counts(len(rows))]
        if self.is_all_here and "col" in self.results:
            for pending, cols in self.cols_by_pending().items():
                calls += [(pending, mask_of(cols[:count])) for count in _some_counts(len(cols))]
        return list(dict.fromkeys(calls))

    def efficiency(self, call: Rectangle) -> float:
        efficiency = self.efficiencies.get(call)
        if efficiency is None:
            efficiency = self.efficiencies[call] = call[0].bit_count() * call[1].bit_count() / self.costs.of_call(*call)
        return efficiency


def _some_counts(count: int) -> list[int]:
    return sorted({1, min(2, count), max(1, count // 2), max(1, count - 1), count})


# The search

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
Sizes = tuple[tuple[Kind, float], ...]
"""Size of a shard of each kind, in any unit."""
ONE_SIZE: Sizes = tuple((kind, 1.0) for kind in KINDS)
SUM_WIDTH = 2
"""Size of a running sum (float32) relative to the 16-bit item that travels."""


@lru_cache(maxsize=256)
def cost_based_moves(
    tile: Tile,
    direction: Direction,
    *,
    costs: Costs,
    sizes: Sizes = ONE_SIZE,
    held_kinds: tuple[Kind, ...] = (),
    route: Route = "direct",
) -> tuple[Move, ...]:
    """Every move except the returns of a rank's own row and column. `sizes` of shards are for the price of memory."""

    def order_by(policy: Policy) -> PolicyOrder:
        return PolicyOrder(tile, direction, costs, held_kinds, policy, waits_its_turn=route == "ring")

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
        yield [{"own_row_weight": weight} for weight in (0, 1)]
        yield [{"window": window} for window in (None, *_windows(tile, direction))]
        yield [{"completing_efficiency": share} for share in (0.8, 0.9, 0.95, 0.97)]
        yield [{"large_while": ratio} for ratio in (None, 1.0, 2.0)]
        yield [{"early_efficiency": share} for share in (None, 0.8)]
        yield [{"least_efficiency": share} for share in (0.0, 0.8)]
        yield [{"most_ahead": ahead} for ahead in (4, 8, 16)]


def _windows(tile: Tile, direction: Direction) -> Iterator[tuple[Axis, int]]:
    """Windows to try in backward, where columns are returned as well as rows; in forward, a window only delays."""
    sides: tuple[tuple[Axis, int], ...] = (("col", tile.cols), ("row", tile.rows))
    for axis, size in sides if len(OUTPUTS[direction]) == 2 and min(tile.rows, tile.cols) >= 4 else ():
        for eighths in (3, 4):
            yield axis, max(2, size * eighths // 8)


# Memory


def held_share(moves: Sequence[Move], direction: Direction, *, sizes: Sizes) -> float:
    """Peak memory of a list of moves, divided by the memory of the inputs and running sums of all rows and columns.

    It follows the rules of `plan.buffer_sizes`, in offsets. Rows that meet in one call share a buffer, from the fetch
    of the first until the last is complete; their running sums share one from the first meet on. The same holds for
    columns. The results of a call count while it runs. Partials that are being sent do not count.
    """
    change = [0.0] * (len(moves) + 1)  # in what is held, at each move
    size = dict(sizes)
    whole = 0.0
    for axis in AXES:
        inputs = sum(size[kind] for kind in INPUTS[direction] if AXIS_OF[kind] == axis)
        sums = SUM_WIDTH * sum(size[kind] for kind in OUTPUTS[direction] if AXIS_OF[kind] == axis)
        fetched, met, last = _times(moves, axis)
        for group in _groups(moves, axis):
            stop = max(last[offset] for offset in group)
            change[min(fetched.get(offset, 0) for offset in group)] += len(group) * inputs
            change[min(met[offset] for offset in group)] += len(group) * sums
            change[stop + 1] -= len(group) * (inputs + sums)
            whole += len(group) * (inputs + sums)
    return _peak(moves, change, direction, size) / whole


def _times(moves: Sequence[Move], axis: Axis) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """For each offset, the moves at which it is fetched, meets first and meets last."""
    fetched: dict[int, int] = {}
    met: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, move in enumerate(moves):
        if isinstance(move, Fetch) and AXIS_OF[move.kind] == axis:
            fetched.setdefault(move.offset, index)
        elif isinstance(move, Meet):
            for offset in move.side(axis):
                met.setdefault(offset, index)
                last[offset] = index
    return fetched, met, last


def _groups(moves: Iterable[Move], axis: Axis) -> list[set[int]]:
    """Offsets that share a buffer."""
    group_of: dict[int, set[int]] = {}
    sides = [move.side(axis) for move in moves if isinstance(move, Meet)]
    for side in dict.fromkeys(sides):
        known = {id(group): group for group in (group_of.get(offset) for offset in side) if group is not None}
        joined = set(side).union(*known.values())
        group_of.update(dict.fromkeys(joined, joined))
    return list({id(group): group for group in group_of.values()}.values())


def _peak(moves: Sequence[Move], change: Sequence[float], direction: Direction, size: Mapping[Kind, float]) -> float:
    """The peak of what is held plus what a call needs, as `plan.kernel_calls` counts it."""
    row, col = size["o"], 0.0
    if direction == "backward":
        every_head = size["q"] + size["o"]  # of K and V, where queries share their heads
        row, col = 3 * size["dq"] + 2 * size["o"], size["dkv"] + (every_head if every_head > size["dkv"] else 0.0)
    held = peak = 0.0
    for move, difference in zip(moves, change, strict=False):
        held += difference
        if isinstance(move, Meet):
            peak = max(peak, held + len(move.rows) * row + len(move.cols) * col)
    return peak
