"""Builds a schedule greedily: which blocks the next kernel call takes.

The paper's Algorithm 2 (forward) and its row/column rule (backward), with real-valued costs and two clocks: one for
the link, one for compute, both in blocks. Whenever the link would fall idle it gets the transfer that unlocks the most
blocks for its price. Compute takes what has arrived, row by row, a rank's own row last, so that rows complete and their
partials can leave. Once all shards have arrived, backward completes rows and columns in turn.

A rank's own row is best computed last, to hide the last partials. If a column is fetched for its block in that row, the
block is done too early; if it is not, compute may be idle until another row arrives. Neither is best for all costs, so
both orders are made. The paper's order counts this row; the other must be 1 % shorter to replace it.

A row waits until `blocks_per_call` columns are pending for it, and rows that wait for the same columns meet them in one
rectangle: few large kernel calls instead of one per block. Rows whose columns have all arrived are completed one by
one, or as few at once as make a call. Smaller calls are made only while compute would wait for the link anyway. With 1,
every call is one block, as in the paper.

Where the price of a call is known, blocks need not be counted: see `priced`.

Ring-Attention is the tile of one row; pass-Q the tile of one column. Nothing here knows their names.
"""

from __future__ import annotations

from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.schedule import Move, Return, Route
from mesh_attention.plan.steps import OUTPUTS, Direction, Kind
from mesh_attention.planners.cost_based import priced_moves
from mesh_attention.planners.costs import Costs
from mesh_attention.planners.schedule_builder import ONE_SIZE, Order, Rectangle, Sizes, mask_of


def greedy_moves(
    tile: Tile,
    direction: Direction,
    *,
    costs: Costs,
    blocks_per_call: int | None = None,
    held_kinds: tuple[Kind, ...] = (),
    route: Route = "direct",
    sizes: Sizes = ONE_SIZE,
) -> tuple[Move, ...]:
    """The moves of one tile, from its own block to the last partial returned. Kinds in `held_kinds` are not fetched.

    If `blocks_per_call` is None, calls are cost-based: each is sized by its price, or is one block if `costs` has no
    call prices. If it is a number, call prices are ignored.
    """
    if blocks_per_call is None and costs.has_call_prices:
        moves = priced_moves(tile, direction, costs=costs, sizes=sizes, held_kinds=held_kinds, route=route)
    else:
        moves = _counted_moves(tile, direction, costs.without_call_prices(), blocks_per_call or 1, held_kinds)
    return (*moves, *(Return(kind, 0) for kind in OUTPUTS[direction]))


def _counted_moves(
    tile: Tile, direction: Direction, costs: Costs, blocks_per_call: int, held_kinds: tuple[Kind, ...]
) -> tuple[Move, ...]:
    shortest, moves = float("inf"), list[Move]()
    for own_row_weight in OWN_ROW_WEIGHTS:
        order = CountedOrder(tile, direction, costs, blocks_per_call, held_kinds, own_row_weight)
        makespan = order.complete_all()
        if makespan < shortest * _WORTH_A_CHANGE:
            shortest, moves = makespan, order.moves
        if shortest <= tile.rows * tile.cols:
            break  # compute never waits: nothing is shorter
    return tuple(moves)


OWN_ROW_WEIGHTS = (1, 0)
"""When fetches are compared, how many blocks a column's block in a rank's own row counts as; the paper's first."""

_WORTH_A_CHANGE = 0.99
"""Another order is taken only if its makespan is below this share of the best: costs that are not modelled could undo a
smaller gain."""


class CountedOrder(Order):
    """A schedule in the making whose calls have at least `blocks_per_call` blocks."""

    def __init__(
        self,
        tile: Tile,
        direction: Direction,
        costs: Costs,
        blocks_per_call: int,
        held_kinds: tuple[Kind, ...],
        own_row_weight: int,
    ) -> None:
        super().__init__(tile, direction, costs, held_kinds, own_row_weight=own_row_weight, most_ahead=blocks_per_call)
        self.blocks_per_call = blocks_per_call

    def choose(self) -> Rectangle | None:
        call = self._ready_call()
        if call is not None:
            return call
        self.fetch_something()
        return self._idle_call()

    def _ready_call(self) -> Rectangle | None:
        if self.is_all_here:
            return self._completing_call()
        if not self.done[0]:
            return (1, 1)  # its own block: needs no transfer, and its mask makes it a separate call anyway
        here = (1 << self.here["col"]) - 1
        for row in self.rows_here():
            pending = here & ~self.done[row]
            call = self._call_from(row, pending, here) if pending else None
            if call is not None:
                return call
        return None

    def _idle_call(self) -> Rectangle | None:
        """A small call that fits into the time that compute would wait for the link anyway; None if none fits."""
        here = (1 << self.here["col"]) - 1
        wait = self.arrivals[0][0] - self.now
        for row in self.rows_here():
            pending = here & ~self.done[row]
            if pending and pending.bit_count() <= wait:
                return 1 << row, pending
        return None

    def _call_from(self, row: int, pending: int, here: int) -> Rectangle | None:
        """The call that a row can be part of now; None if it should wait for more."""
        if here == self.all_cols:
            return self._rows_completed_with(row, pending)
        if pending.bit_count() < self.blocks_per_call:
            return None
        alike = [r for r in self.rows_here() if here & ~self.done[r] == pending]
        return mask_of(alike) if self.blocks_per_call > 1 else 1 << row, self._cut(pending)

    def _rows_completed_with(self, row: int, pending: int) -> Rectangle | None:
        """A row whose columns have all arrived: alone, so that its partial leaves at once, or as few as make a call."""
        wanted = -(-self.blocks_per_call // pending.bit_count())
        alike = [r for r in self.rows_here() if self.all_cols & ~self.done[r] == pending] if wanted > 1 else [row]
        if len(alike) < wanted and self.here["row"] < self.tile.rows:
            return None
        return mask_of(alike[:wanted]), self._cut(pending)

    def _completing_call(self) -> Rectangle:
        """The next call once all shards have arrived: for the row or column that releases more transfer per block."""
        (row, row_worth), (col, col_worth) = self.next_to_complete("row"), self.next_to_complete("col")
        if col_worth > row_worth:
            rows = [r for r in range(self.tile.rows) if not self.done[r] >> col & 1]
            return self._cut(mask_of(rows)), 1 << col
        call = self._rows_completed_with(row, self.all_cols & ~self.done[row])
        assert call is not None  # all rows have arrived, so none is waited for
        return call

    def _cut(self, offsets: int) -> int:
        """The first offset if every call is one block, otherwise all of them."""
        return offsets & -offsets if self.blocks_per_call == 1 else offsets
