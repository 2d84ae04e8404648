"""Builds a schedule greedily, call by call: which blocks the next kernel call takes.

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

`Order` is a schedule as it is built: shards that have arrived, blocks that are done, and the clocks. `CountedOrder`
chooses calls by their number of blocks. Where costs state what a call takes, blocks need not be counted: see
`cost_based`.

Ring-Attention is the tile of one row; pass-Q the tile of one column. Nothing here knows their names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from copy import copy
from math import inf

from typing_extensions import Self

from mesh_attention.plan.assignment import Axis, Tile
from mesh_attention.plan.schedule import Fetch, Meet, Move, Return
from mesh_attention.plan.steps import AXIS_OF, INPUTS, OUTPUTS, Direction, Kind
from mesh_attention.planners.costs import Costs

Rectangle = tuple[int, int]
"""A rectangle as two sets of offsets: rows, columns. Sets are bit masks."""


class Order(ABC):
    """The moves so far, and the state they lead to. Times are in blocks.

    `own_row_weight` is how many blocks a column's block in this rank's own row counts as when fetches are compared. On
    each axis, at most `most_ahead` shards are fetched and not yet attended.
    """

    def __init__(
        self,
        tile: Tile,
        direction: Direction,
        costs: Costs,
        held_kinds: tuple[Kind, ...],
        *,
        own_row_weight: int,
        most_ahead: int,
    ) -> None:
        self.tile, self.costs = tile, costs
        self.own_row_weight, self.most_ahead = own_row_weight, most_ahead
        self.inputs: dict[Axis, tuple[Kind, ...]] = {
            axis: tuple(kind for kind in INPUTS[direction] if AXIS_OF[kind] == axis and kind not in held_kinds)
            for axis in ("row", "col")
        }
        self.fetch_cost = {axis: sum(map(costs.of, kinds)) for axis, kinds in self.inputs.items()}
        self.results: dict[Axis, Kind] = {AXIS_OF[kind]: kind for kind in OUTPUTS[direction]}
        self.sizes: dict[Axis, int] = {"row": tile.rows, "col": tile.cols}
        self.moves: list[Move] = []
        self.now = self.link_free = 0.0
        self.blocks_left = tile.rows * tile.cols
        self.all_cols = (1 << tile.cols) - 1
        self.done = [0] * tile.rows  # columns already attended, for each row
        self.left: dict[Axis, list[int]] = {"row": [tile.cols] * tile.rows, "col": [tile.rows] * tile.cols}
        self.next_return: dict[Axis, int] = dict.fromkeys(self.results, 1)  # in order: a ring of partials relies on it
        self.complete: list[Return] = []  # and not sent yet
        # Shards fetched, and of those the ones that have arrived: this rank's own, or all if none is to be fetched.
        self.fetched: dict[Axis, int] = {axis: 1 if kinds else self.sizes[axis] for axis, kinds in self.inputs.items()}
        self.here = dict(self.fetched)
        self.arrivals: list[tuple[float, Axis]] = []  # of shards that are in flight, in order
        self.touched: dict[Axis, int] = {axis: (1 << count) - 1 for axis, count in self.fetched.items()}

    def branch(self) -> Self:
        """An independent copy of the current state."""
        other = copy(self)
        other.moves, other.done, other.arrivals = self.moves[:], self.done[:], self.arrivals[:]
        other.left = {axis: counts[:] for axis, counts in self.left.items()}
        other.complete = self.complete[:]
        other.next_return, other.fetched, other.here = dict(self.next_return), dict(self.fetched), dict(self.here)
        return other

    @property
    def makespan(self) -> float:
        return max(self.now, self.link_free)

    def complete_all(self, limit: float = inf) -> float:
        """Make the moves that are left, except the returns of its own row and column. Returns the makespan in blocks,
        or infinity if it cannot stay below the limit."""
        while self.blocks_left:
            if self.now + self.blocks_left >= limit:
                return inf
            self.step(self.choose())
        self.post_returns()
        return self.makespan

    def step(self, call: Rectangle | None) -> None:
        """Make a call, with enough on the link to hide behind it; or wait for the next shard."""
        if call is None:
            self.fetch_something()
            self.post_returns()
            self.wait()
        else:
            self.fetch_behind(call)
            self.post_returns()  # after the fetches: compute waits for fetches, not for returns
            self.meet(call)

    @abstractmethod
    def choose(self) -> Rectangle | None:
        """The next call; None to wait for the next shard."""

    # The link

    def post_returns(self) -> None:
        """Send the partials of every row (and column) that is complete."""
        for result in self.complete:
            self._occupy_link(self.costs.of(result.kind))
        self.moves += self.complete
        self.complete = []

    def axes_left(self) -> list[Axis]:
        """Axes that have shards left to fetch; columns first, because ties go to KV."""
        axes: tuple[Axis, ...] = ("col", "row")
        return [axis for axis in axes if self.fetched[axis] < self.sizes[axis]]

    def fetch_something(self) -> None:
        """Make sure that something is on its way."""
        if not self.arrivals:
            self._fetch([axis for axis in self.axes_left() if self._is_open(axis)] or self.axes_left())

    def fetch_behind(self, call: Rectangle) -> None:
        """Give the link enough to do while `call` is computed."""
        until, touched = self.now + self.costs.of_call(*call), self.touched_after(call)
        while self.link_free < until:
            axes = [axis for axis in self.axes_left() if self._may_run_ahead(axis, touched[axis])]
            if not axes:
                return
            self._fetch(axes)

    def _may_run_ahead(self, axis: Axis, touched: int) -> bool:
        # One shard more if all that were fetched have arrived: else the link is idle while they wait.
        have_landed = self.fetched[axis] == self.here[axis]
        return self._is_open(axis) and self.fetched[axis] - touched.bit_count() < self.most_ahead + have_landed

    def _is_open(self, axis: Axis) -> bool:
        """False where a shard of this axis should not be fetched yet."""
        return True

    def _fetch(self, axes: list[Axis]) -> None:
        """Fetch the next row or the next column, whichever of these axes unlocks more blocks for its cost."""
        other_rows = self.fetched["row"] - 1
        unlocks: dict[Axis, int] = {"col": other_rows + self.own_row_weight, "row": self.fetched["col"]}
        axis = max(axes, key=lambda axis: unlocks[axis] / self.fetch_cost[axis])
        self.moves += [Fetch(kind, self.fetched[axis]) for kind in self.inputs[axis]]
        self.fetched[axis] += 1
        self.arrivals.append((self._occupy_link(self.fetch_cost[axis]), axis))

    def wait(self) -> None:
        """Advance the clock to the next arrival."""
        self.now = max(self.now, self.arrivals[0][0])
        self._land()

    def _occupy_link(self, cost: float) -> float:
        self.link_free = max(self.link_free, self.now) + cost
        return self.link_free

    def _land(self) -> None:
        while self.arrivals and self.arrivals[0][0] <= self.now:
            self.here[self.arrivals.pop(0)[1]] += 1

    # Compute

    @property
    def is_all_here(self) -> bool:
        return self.here == self.sizes

    def rows_here(self) -> list[int]:
        """Rows that have arrived. This rank's own row comes last: it is not sent, so no rank waits for it."""
        return [*range(1, self.here["row"]), 0]

    def meet(self, call: Rectangle) -> None:
        rows, cols = offsets_of(call[0]), offsets_of(call[1])
        for row in rows:
            self.done[row] |= call[1]
            self.left["row"][row] -= len(cols)
        for col in cols:
            self.left["col"][col] -= len(rows)
        self.blocks_left -= len(rows) * len(cols)
        self.touched = self.touched_after(call)
        self.now += self.costs.of_call(*call)
        self.moves.append(Meet(rows, cols))
        self._complete()
        self._land()

    def touched_after(self, call: Rectangle) -> dict[Axis, int]:
        return {"row": self.touched["row"] | call[0], "col": self.touched["col"] | call[1]}

    def _complete(self) -> None:
        for axis, kind in self.results.items():
            while (offset := self.next_return[axis]) < self.sizes[axis] and not self.left[axis][offset]:
                self.complete.append(Return(kind, offset))
                self.next_return[axis] += 1

    def next_to_complete(self, axis: Axis) -> tuple[int, float]:
        """Offset and worth. This rank's own row or column comes last: it is not sent, so no rank waits for it."""
        if axis not in self.results:
            return 0, -1.0
        offset = self.next_return[axis]
        if offset < self.sizes[axis]:
            return offset, self.costs.of(self.results[axis]) / self.left[axis][offset]
        return 0, 0.0 if self.left[axis][0] else -1.0


def mask_of(offsets: Iterable[int]) -> int:
    return sum([1 << offset for offset in offsets])


def offsets_of(mask: int) -> tuple[int, ...]:
    offsets = []
    while mask:
        offsets.append((mask & -mask).bit_length() - 1)
        mask &= mask - 1
    return tuple(offsets)


# Calls of a number of blocks


def counted_moves(
    tile: Tile, direction: Direction, costs: Costs, blocks_per_call: int, held_kinds: tuple[Kind, ...]
) -> tuple[Move, ...]:
    """Every move except the returns of a rank's own row and column. Calls have no price."""
    shortest, moves = inf, list[Move]()
    for weight in OWN_ROW_WEIGHTS:
        order = CountedOrder(tile, direction, costs, held_kinds, own_row_weight=weight, most_ahead=blocks_per_call)
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
    """A schedule in the making whose calls have at least `blocks_per_call` blocks. As many shards may be ahead."""

    @property
    def blocks_per_call(self) -> int:
        return self.most_ahead

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
