"""The greedy schedule: what to fetch next, what to attend meanwhile, what to return when.

The paper's Algorithm 2 (forward) and its row/column rule (backward), with real-valued costs and two clocks: one for
the link, one for compute, both in blocks. Whenever the link would fall idle it gets the transfer that unlocks the most
blocks for its price. Compute takes what has arrived, row by row, the own row last, so that rows complete and their
partials can leave. Once everything is here, backward completes rows and columns in turn.

The own row is wanted at the end, where it hides the last partials. If a column is fetched for its block in the own row,
that block is gone by then; if it is not, compute may have nothing to do until a row is here. Neither is best for all
costs: both orders are made, and the paper's, which counts the own row, gives way to one that is a hundredth shorter.

A row waits until `blocks_per_call` columns are pending for it, and rows that wait for the same columns meet them in one
rectangle: few large kernel calls instead of one a block. Rows whose columns are all here are completed one by one, or
as few at once as make a call. Smaller calls are made only while compute would wait for the link anyway. With 1, every
call is one block, as in the paper.

Ring-Attention is the tile of one row; pass-Q the tile of one column. Nothing here knows their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from mesh_attention.errors import ScheduleError
from mesh_attention.plan.assignment import Axis, Tile
from mesh_attention.plan.schedule import Fetch, Meet, Move, Return
from mesh_attention.plan.steps import AXIS_OF, INPUTS, OUTPUTS, Direction, Kind
from mesh_attention.planning.costs import Costs


def greedy_moves(
    tile: Tile, direction: Direction, *, costs: Costs, blocks_per_call: int = 1, have: tuple[Kind, ...] = ()
) -> tuple[Move, ...]:
    """The moves of one tile, from its own block to the last partial returned. Kinds it `have`s are not fetched."""
    if type(blocks_per_call) is not int or blocks_per_call < 1:
        raise ScheduleError(f"blocks_per_call={blocks_per_call!r}: expected a whole number of at least 1")
    if not isinstance(costs, Costs):
        raise ScheduleError(f"costs {costs!r}: expected Costs(...)")
    shortest, moves = float("inf"), []
    for own_row_worth in OWN_ROW_WORTHS:
        order = _Order(tile, direction, costs, blocks_per_call, have, own_row_worth)
        makespan = order.complete_all()
        if makespan < shortest * _WORTH_A_CHANGE:
            shortest, moves = makespan, order.moves
        if shortest <= tile.rows * tile.cols:
            break  # compute never waits: nothing is shorter
    return (*moves, *(Return(kind, 0) for kind in OUTPUTS[direction]))


OWN_ROW_WORTHS = (1, 0)
"""What a column's block in the own row counts for when fetches are weighed, in blocks. The paper's first."""

_WORTH_A_CHANGE = 0.99
"""What another order must be below to be taken instead: a smaller gain may be lost in what has no price here."""

_Call = tuple[int, int]
"""A rectangle as two sets of offsets: rows, columns. Sets are bit masks."""


class _Order:
    """The state of one schedule in the making."""

    def __init__(
        self,
        tile: Tile,
        direction: Direction,
        costs: Costs,
        blocks_per_call: int,
        have: tuple[Kind, ...],
        own_row_worth: int,
    ) -> None:
        self.tile, self.costs, self.blocks_per_call, self.own_row_worth = tile, costs, blocks_per_call, own_row_worth
        self.inputs: dict[Axis, tuple[Kind, ...]] = {
            axis: tuple(kind for kind in INPUTS[direction] if AXIS_OF[kind] == axis and kind not in have)
            for axis in ("row", "col")
        }
        self.fetch_cost = {axis: sum(map(costs.of, kinds)) for axis, kinds in self.inputs.items()}
        self.results: dict[Axis, Kind] = {AXIS_OF[kind]: kind for kind in OUTPUTS[direction]}
        self.moves: list[Move] = []
        self.now = self.link_free = 0.0
        self.all_cols = (1 << tile.cols) - 1
        self.done = [0] * tile.rows  # columns already attended, a row
        self.left: dict[Axis, list[int]] = {"row": [tile.cols] * tile.rows, "col": [tile.rows] * tile.cols}
        self.next_return: dict[Axis, int] = dict.fromkeys(self.results, 1)  # in order: a ring of partials relies on it
        self.complete: list[Return] = []  # and not sent yet
        # How many are here or on their way, and how many have arrived: the own one, or all if none is to be fetched.
        self.fetched: dict[Axis, int] = {axis: 1 if kinds else self._size(axis) for axis, kinds in self.inputs.items()}
        self.here = dict(self.fetched)
        self.arrivals: list[tuple[float, Axis]] = []  # of those on their way, in order
        self.touched: dict[Axis, int] = {axis: (1 << count) - 1 for axis, count in self.fetched.items()}

    def complete_all(self) -> float:
        """Makes the moves, all but the returns of the own row and column. The makespan, in blocks."""
        while any(self.left["row"]):
            call = self.next_call()
            if call is None:
                self.fetch_something()
                call = self.idle_call()
            else:
                self.fetch_behind(call)
            self.post_returns()  # after the fetches: compute waits for those, nobody for these
            if call is None:
                self.wait()
            else:
                self.meet(call)
        self.post_returns()
        return max(self.now, self.link_free)

    # The link

    def post_returns(self) -> None:
        """Send the partials of every row (and column) that is complete."""
        for result in self.complete:
            self._occupy_link(self.costs.of(result.kind))
        self.moves += self.complete
        self.complete = []

    def fetch_behind(self, call: _Call) -> None:
        """Give the link enough to do while `call` is computed, but run at most a call ahead of compute on each axis."""
        until = self.now + call[0].bit_count() * call[1].bit_count()
        touched = self._touched_after(call)
        while self.link_free < until:
            axes = [axis for axis in self._axes_left() if self._may_run_ahead(axis, touched[axis])]
            if not axes:
                return
            self._fetch(axes)

    def _may_run_ahead(self, axis: Axis, touched: int) -> bool:
        # One more than a call when all have landed: the link should not idle because they wait for their turn.
        landed = self.fetched[axis] == self.here[axis]
        return self.fetched[axis] - touched.bit_count() < self.blocks_per_call + landed

    def fetch_something(self) -> None:
        """No call is ready: make sure that something is on its way."""
        if not self.arrivals:
            self._fetch(self._axes_left())

    def wait(self) -> None:
        self.now = max(self.now, self.arrivals[0][0])
        self._land()

    def _axes_left(self) -> list[Axis]:
        """Where something is left to fetch; columns first: ties go to KV."""
        axes: tuple[Axis, ...] = ("col", "row")
        return [axis for axis in axes if self.fetched[axis] < self._size(axis)]

    def _fetch(self, axes: list[Axis]) -> None:
        """Fetch, of these, the row or the column that unlocks more blocks for its cost."""
        other_rows = self.fetched["row"] - 1
        unlocks: dict[Axis, int] = {"col": other_rows + self.own_row_worth, "row": self.fetched["col"]}
        axis = max(axes, key=lambda axis: unlocks[axis] / self.fetch_cost[axis])
        self.moves += [Fetch(kind, self.fetched[axis]) for kind in self.inputs[axis]]
        self.fetched[axis] += 1
        self.arrivals.append((self._occupy_link(self.fetch_cost[axis]), axis))

    def _occupy_link(self, cost: float) -> float:
        self.link_free = max(self.link_free, self.now) + cost
        return self.link_free

    def _land(self) -> None:
        while self.arrivals and self.arrivals[0][0] <= self.now:
            self.here[self.arrivals.pop(0)[1]] += 1

    # Compute

    def next_call(self) -> _Call | None:
        if self.here["row"] == self.tile.rows and self.here["col"] == self.tile.cols:
            return self._completing_call()
        if not self.done[0]:
            return (1, 1)  # the own block: needs nobody, and its mask makes it a call of its own anyway
        here = (1 << self.here["col"]) - 1
        for row in self._rows_here():
            pending = here & ~self.done[row]
            call = self._call_from(row, pending, here) if pending else None
            if call is not None:
                return call
        return None

    def idle_call(self) -> _Call | None:
        """While compute would wait for the link anyway, a call too small to be worth it costs nothing if it fits in."""
        here = (1 << self.here["col"]) - 1
        wait = self.arrivals[0][0] - self.now
        for row in self._rows_here():
            pending = here & ~self.done[row]
            if pending and pending.bit_count() <= wait:
                return 1 << row, pending
        return None

    def _rows_here(self) -> Iterable[int]:
        return chain(range(1, self.here["row"]), (0,))

    def _call_from(self, row: int, pending: int, here: int) -> _Call | None:
        """The call that a row can be part of now; None if it should wait for more."""
        if here == self.all_cols:
            return self._rows_completed_with(row, pending)
        if pending.bit_count() < self.blocks_per_call:
            return None
        alike = [r for r in self._rows_here() if here & ~self.done[r] == pending]
        return _mask(alike) if self.blocks_per_call > 1 else 1 << row, self._cut(pending)

    def _rows_completed_with(self, row: int, pending: int) -> _Call | None:
        """A row whose columns are all here: alone, so that its partial can leave at once, or as few as make a call."""
        wanted = -(-self.blocks_per_call // pending.bit_count())
        alike = [r for r in self._rows_here() if self.all_cols & ~self.done[r] == pending] if wanted > 1 else [row]
        if len(alike) < wanted and self.here["row"] < self.tile.rows:
            return None
        return _mask(alike[:wanted]), self._cut(pending)

    def _completing_call(self) -> _Call:
        """All is here: work on the next row or the next column, whichever frees more transfer for a block."""
        (row, row_worth), (col, col_worth) = self._next_to_complete("row"), self._next_to_complete("col")
        if col_worth > row_worth:
            rows = [r for r in range(self.tile.rows) if not self.done[r] >> col & 1]
            return self._cut(_mask(rows)), 1 << col
        call = self._rows_completed_with(row, self.all_cols & ~self.done[row])
        assert call is not None  # all rows are here, so none is waited for
        return call

    def _next_to_complete(self, axis: Axis) -> tuple[int, float]:
        """Offset and worth. The own row or column comes last: it leaves nowhere, so nobody waits for it."""
        if axis not in self.results:
            return 0, -1.0
        offset = self.next_return[axis]
        if offset < self._size(axis):
            return offset, self.costs.of(self.results[axis]) / self.left[axis][offset]
        return 0, 0.0 if self.left[axis][0] else -1.0

    def _cut(self, offsets: int) -> int:
        """The first of them if calls are to be blocks, else all."""
        return offsets & -offsets if self.blocks_per_call == 1 else offsets

    def meet(self, call: _Call) -> None:
        rows, cols = _offsets(call[0]), _offsets(call[1])
        for row in rows:
            self.done[row] |= call[1]
            self.left["row"][row] -= len(cols)
        for col in cols:
            self.left["col"][col] -= len(rows)
        self.touched = self._touched_after(call)
        self.now += len(rows) * len(cols)
        self.moves.append(Meet(rows, cols))
        self._complete()
        self._land()

    def _touched_after(self, call: _Call) -> dict[Axis, int]:
        return {"row": self.touched["row"] | call[0], "col": self.touched["col"] | call[1]}

    def _complete(self) -> None:
        for axis, kind in self.results.items():
            while (offset := self.next_return[axis]) < self._size(axis) and not self.left[axis][offset]:
                self.complete.append(Return(kind, offset))
                self.next_return[axis] += 1

    def _size(self, axis: Axis) -> int:
        return self.tile.rows if axis == "row" else self.tile.cols


def _mask(offsets: list[int]) -> int:
    return sum(1 << offset for offset in offsets)


def _offsets(mask: int) -> tuple[int, ...]:
    offsets = []
    while mask:
        offsets.append((mask & -mask).bit_length() - 1)
        mask &= mask - 1
    return tuple(offsets)
