"""A schedule as it is built: shards that have arrived, blocks that are done, and clocks for compute and for the link.

The orders that build on this, `greedy` and `priced`, choose the next call. `held_share` says how much memory the
moves of an order hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from math import inf

from typing_extensions import Self

from mesh_attention.plan.assignment import AXES, Axis, Tile
from mesh_attention.plan.schedule import Fetch, Meet, Move, Return
from mesh_attention.plan.steps import AXIS_OF, INPUTS, KINDS, OUTPUTS, Direction, Kind
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


# Memory

Sizes = tuple[tuple[Kind, float], ...]
"""Size of a shard of each kind, in any unit."""
ONE_SIZE: Sizes = tuple((kind, 1.0) for kind in KINDS)
SUM_WIDTH = 2
"""Size of a running sum (float32) relative to the 16-bit item that travels."""


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
    """The peak of what is held plus what a call needs, as `plan.calls` counts it."""
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
