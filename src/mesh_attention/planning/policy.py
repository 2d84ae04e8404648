"""Orders by the price of calls, each under one policy.

While compute waits for the link, any call is as good as none. Later there is more to attend than time for it, and then
a call should be large: it costs a launch, and adding up its partial results costs memory traffic for every row (and,
backward, every column) it touches. So rows that wait for the same columns meet them in one rectangle, and of all such
rectangles the one comes first whose price is mostly blocks. The rows with fewer columns pending wait, and gather more.
Once all is here, rows and columns are completed in turn, as few at a time as make a call that is worth its price.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from mesh_attention.plan.assignment import Axis, Tile
from mesh_attention.plan.steps import Direction, Kind
from mesh_attention.planning.costs import Costs
from mesh_attention.planning.order import Call, Order, mask_of

LARGE = 0.98
"""The worth from which a call need not be larger: what it gives takes memory until it is added to the sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How an order decides. A call's worth is the share of its price that is blocks.

    own_row_worth   what a column's block in the own row counts for when fetches are weighed
    ahead           shards that may be on their way, or here and not attended yet, on each axis
    window          of this axis, so many at most are here and not complete: a panel after the other, in less memory
    completing      the worth of a call that completes rows or columns: as few as reach it
    hurry           large calls while what is left to compute is more than so many times what is left to return
    enough          as few rows as reach this worth meet before all columns are here; None: as many as there are
    patience        a call of less worth is made only if it fits into the time until the next shard is here
    """

    own_row_worth: int = 1
    ahead: int = 4
    window: tuple[Axis, int] | None = None
    completing: float = 0.95
    hurry: float | None = None
    enough: float | None = None
    patience: float = 0.0


class PolicyOrder(Order):
    """A schedule in the making. With `waits_its_turn`, a shard is fetched when the one before it on its axis is here:
    along a ring it comes from a rank that must have it first."""

    def __init__(
        self,
        tile: Tile,
        direction: Direction,
        costs: Costs,
        have: tuple[Kind, ...],
        policy: Policy,
        *,
        waits_its_turn: bool,
    ) -> None:
        super().__init__(tile, direction, costs, have)
        self.policy, self.waits_its_turn = policy, waits_its_turn
        self.worths: dict[Call, float] = {}  # shared by all branches

    def branch(self) -> PolicyOrder:
        return cast("PolicyOrder", super().branch())

    def complete_all(self, limit: float = float("inf")) -> float:
        """Makes the moves that are left, all but the returns of the own row and column. The makespan, in blocks; given
        up as infinite when it cannot stay below the limit."""
        while self.blocks_left:
            if self.now + self.blocks_left >= limit:
                return float("inf")
            self.step(self.choose())
        self.post_returns()
        return self.makespan

    def step(self, call: Call | None) -> None:
        """Make a call, with enough on the link to hide behind it; or wait for the next shard."""
        if call is None:
            self.fetch_something()
            self.post_returns()
            self.wait()
        else:
            self.fetch_behind(call)
            self.post_returns()  # after the fetches: compute waits for those, nobody for these
            self.meet(call)

    # The link

    def fetch_something(self) -> None:
        if not self.arrivals:
            axes = [axis for axis in self.axes_left() if self._is_open(axis)] or self.axes_left()
            self.fetch(axes, own_row_worth=self.policy.own_row_worth)

    def fetch_behind(self, call: Call) -> None:
        until, touched = self.now + self.costs.of_call(*call), self.touched_after(call)
        while self.link_free < until:
            axes = [axis for axis in self.axes_left() if self._may_run_ahead(axis, touched[axis])]
            if not axes:
                return
            self.fetch(axes, own_row_worth=self.policy.own_row_worth)

    def _may_run_ahead(self, axis: Axis, touched: int) -> bool:
        have_landed = self.fetched[axis] == self.here[axis]
        if not self._is_open(axis) or (self.waits_its_turn and not have_landed):
            return False
        return self.fetched[axis] - touched.bit_count() < self.policy.ahead + have_landed

    def _is_open(self, axis: Axis) -> bool:
        window = self.policy.window
        return window is None or window[0] != axis or self.fetched[axis] - self.left[axis].count(0) < window[1]

    # Compute

    def choose(self) -> Call | None:
        if not self.done[0]:
            return (1, 1)  # the own block: needs nobody, and its mask makes it a call of its own anyway
        if self.is_all_here:
            return self._completing_call()
        best, own = self._best_call(), self._own_row_call()
        if best is not None and self.worth(best) >= self.policy.patience:
            return best
        self.fetch_something()
        wait = self.arrivals[0][0] - self.now
        for call in (best, own):
            if call is not None and self.costs.of_call(*call) <= wait:
                return call
        is_worth_it = best is None and own is not None and self.worth(own) >= self.policy.patience
        return own if is_worth_it else None

    def _best_call(self) -> Call | None:
        """Of the rows that wait for the same columns. The own row is left for the end, to hide the last partials."""
        has_all_cols, policy = self.here["col"] == self.tile.cols, self.policy
        enough = policy.completing if has_all_cols else policy.enough
        found: list[tuple[bool, float, Call]] = []
        for pending, rows in self.rows_by_pending().items():
            others = rows if policy.window else [row for row in rows if row]
            if others:
                call = self._few(others, pending, LARGE if enough is None else enough)
                is_enough = enough is not None and self.worth(call) >= enough
                found.append((is_enough, pending.bit_count() if is_enough else self.worth(call), call))
        return max(found, key=lambda one: one[:2])[2] if found else None

    def _own_row_call(self) -> Call | None:
        pending = ((1 << self.here["col"]) - 1) & ~self.done[0]
        return (1, pending) if pending else None

    def _completing_call(self) -> Call:
        """All is here: work on the next row or the next column, whichever frees more transfer for a block."""
        (row, row_worth), (col, col_worth) = self.next_to_complete("row"), self.next_to_complete("col")
        wanted = self._completing_worth()
        if col_worth > row_worth:
            rows, cols = next((rows, cols) for rows, cols in self.cols_by_pending().items() if col in cols)
            return self._few([c for c in cols if c >= col], rows, wanted, are_cols=True)
        pending = self._pending(row)
        alike = [r for r in range(row, self.tile.rows) if r == row or (row and self._pending(r) == pending)]
        return self._few(alike, pending, wanted)

    def _pending(self, row: int) -> int:
        return self.all_cols & ~self.done[row]

    def _completing_worth(self) -> float:
        if self.policy.hurry is None:
            return self.policy.completing
        to_return = sum(
            self.costs.of(kind) * (self.sizes[axis] - self.next_return[axis]) for axis, kind in self.results.items()
        )
        return LARGE if self.blocks_left > self.policy.hurry * to_return else self.policy.completing

    def _few(self, offsets: list[int], others: int, wanted: float, *, are_cols: bool = False) -> Call:
        """The call of as few of these as are worth what is wanted, or of all. They meet the same others."""
        chosen = 0
        for offset in offsets:
            chosen |= 1 << offset
            call = (others, chosen) if are_cols else (chosen, others)
            if self.worth(call) >= wanted:
                break
        return call

    # What there is to choose from

    def rows_by_pending(self) -> dict[int, list[int]]:
        """By the columns that are here and not met yet, the rows that wait for them."""
        here, found = (1 << self.here["col"]) - 1, dict[int, list[int]]()
        for row in self.rows_here():
            pending = here & ~self.done[row]
            if pending:
                found.setdefault(pending, []).append(row)
        return found

    def cols_by_pending(self) -> dict[int, list[int]]:
        """By the rows that have not met them, the columns; all must be here."""
        found: dict[int, list[int]] = {}
        for col in range(self.tile.cols):
            rows = mask_of([row for row in range(self.tile.rows) if not self.done[row] >> col & 1])
            if rows:
                found.setdefault(rows, []).append(col)
        return found

    def alternatives(self) -> list[Call | None]:
        """What could be done instead of what the policy chooses; None is to wait."""
        found: list[Call | None] = [] if self.is_all_here else [None]
        for pending, rows in self.rows_by_pending().items():
            found += [(mask_of(rows[:count]), pending) for count in _some_counts(len(rows))]
        if self.is_all_here and "col" in self.results:
            for pending, cols in self.cols_by_pending().items():
                found += [(pending, mask_of(cols[:count])) for count in _some_counts(len(cols))]
        return list(dict.fromkeys(found))

    def worth(self, call: Call) -> float:
        worth = self.worths.get(call)
        if worth is None:
            worth = self.worths[call] = call[0].bit_count() * call[1].bit_count() / self.costs.of_call(*call)
        return worth


def _some_counts(count: int) -> list[int]:
    return sorted({1, min(2, count), max(1, count // 2), max(1, count - 1), count})
