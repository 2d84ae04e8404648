"""The shortest schedule of a small tile, by search: what the greedy order is measured against.

Shortest by `clocks`, over all legal schedules, however far they run ahead. Some orders are fixed, at no loss:

- *A block a call.* A rectangle waits for the last of its inputs; its blocks, one by one, are never later.
- *Fetches and returns by rising offset; of two rows, the lower offset first in every column; of two columns, in every
  row.* Let x < y, so that x arrives first. Where y meets a column before x does, let them change places: x then has
  the earlier slot of every column and y the later, both are here in time, and x is complete before either was. The own
  row (and, backward, the own column) is exempt: it is here first, but leaves nowhere and so is wanted last.
- *What a row fetches is fetched in one go.* It needs all of it.
- *A fetch is posted as soon as the transfers before it are.* It waits for nothing else.

What is left is how to interleave blocks and transfers. States with the same work behind them are compared by their
clocks; only those that no other beats in all of them are followed, the least lower bound first (A*). Tiles of a dozen
blocks take a few hundredths of a second, 6x6 some ten seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, TypeVar

from mesh_attention.plan.assignment import Axis, Tile
from mesh_attention.plan.schedule import Fetch, Meet, Move, Return
from mesh_attention.plan.steps import AXIS_OF, INPUTS, OUTPUTS, Direction, Kind
from mesh_attention.planners.costs import Costs


def optimal_moves(
    tile: Tile, direction: Direction, *, costs: Costs, held_kinds: tuple[Kind, ...] = ()
) -> tuple[Move, ...]:
    """Moves of the least makespan there is. Takes exponential time."""
    search = _Search(tile, direction, costs, held_kinds)
    reached: dict[_Work, list[tuple[float, ...]]] = {}
    found = count()
    heap = [(0.0, 0, next(found), search.start())]
    while True:
        bound, _, _, state = heappop(heap)
        if search.is_end(state.work):
            return (*_moves_to(state), *(Return(kind, 0) for kind in OUTPUTS[direction]))
        rivals, clocks = reached.setdefault(state.work, []), state.clocks
        if any(all(theirs <= ours for theirs, ours in zip(rival, clocks, strict=True)) for rival in rivals):
            continue
        rivals.append(clocks)
        for after in search.successors(state):
            # Of equal bounds, the state with the most work behind it, then the one found first.
            heappush(heap, (max(bound, search.lower_bound(after)), -after.work.size, next(found), after))


_AXES: tuple[Axis, Axis] = ("row", "col")
_Pair = tuple[int, int]
"""Of rows and of columns."""


class _Work(NamedTuple):
    """What has been done: blocks met, as a bit mask; rows and columns here or on their way; the last ones returned."""

    met: int
    fetched: _Pair
    returned: _Pair

    @property
    def size(self) -> int:
        return self.met.bit_count() + sum(self.fetched) + sum(self.returned)


class _State(NamedTuple):
    """Work and its clocks. An arrival before `now` is written as `now`: it makes no difference any more."""

    work: _Work
    now: float
    link_free: float
    arrivals: tuple[tuple[float, ...], tuple[float, ...]]
    moves: tuple[Move, ...]
    before: _State | None

    @property
    def clocks(self) -> tuple[float, ...]:
        return (self.now, self.link_free, *self.arrivals[0], *self.arrivals[1])


class _Search:
    """What the states of one tile lead to, and how little time the rest can take."""

    def __init__(self, tile: Tile, direction: Direction, costs: Costs, held_kinds: tuple[Kind, ...]) -> None:
        self.sizes: _Pair = (tile.rows, tile.cols)
        fetched = [kind for kind in INPUTS[direction] if kind not in held_kinds]
        self.inputs = [tuple(kind for kind in fetched if AXIS_OF[kind] == axis) for axis in _AXES]
        self.results = [next((k for k in OUTPUTS[direction] if AXIS_OF[k] == axis), None) for axis in _AXES]
        self.fetch_cost = [sum(map(costs.of, kinds)) for kinds in self.inputs]
        self.return_cost = [costs.of(kind) if kind else 0.0 for kind in self.results]
        by_row = [[1 << (row * tile.cols + col) for col in range(tile.cols)] for row in range(tile.rows)]
        self.block = by_row
        self.blocks = [[sum(line) for line in by_row], [sum(line) for line in zip(*by_row, strict=True)]]
        self.all_blocks = sum(self.blocks[0])

    def start(self) -> _State:
        here = [1 if kinds else size for kinds, size in zip(self.inputs, self.sizes, strict=True)]
        work = _Work(0, (here[0], here[1]), (0, 0))
        return _State(work, 0.0, 0.0, ((0.0,) * here[0], (0.0,) * here[1]), (), None)

    def is_end(self, work: _Work) -> bool:
        return work.met == self.all_blocks and not any(self._to_return(work, axis) for axis in (0, 1))

    def _to_return(self, work: _Work, axis: int) -> range:
        return range(work.returned[axis] + 1, self.sizes[axis]) if self.results[axis] else range(0)

    # What can come next

    def successors(self, state: _State) -> Iterator[_State]:
        for axis in (0, 1):
            yield from self._fetch(state, axis)
            yield from self._return(state, axis)
        yield from self._meets(state)

    def _fetch(self, state: _State, axis: int) -> Iterator[_State]:
        offset = state.work.fetched[axis]
        if offset < self.sizes[axis]:
            arrival = state.link_free + self.fetch_cost[axis]
            yield state._replace(
                work=state.work._replace(fetched=_with(state.work.fetched, axis, offset + 1)),
                link_free=arrival,
                arrivals=_with(state.arrivals, axis, (*state.arrivals[axis], max(state.now, arrival))),
                moves=tuple(Fetch(kind, offset) for kind in self.inputs[axis]),
                before=state,
            )

    def _return(self, state: _State, axis: int) -> Iterator[_State]:
        kind = self.results[axis]
        for offset in self._to_return(state.work, axis)[:1]:
            if kind and not self.blocks[axis][offset] & ~state.work.met:
                yield state._replace(
                    work=state.work._replace(returned=_with(state.work.returned, axis, offset)),
                    link_free=max(state.link_free, state.now) + self.return_cost[axis],
                    moves=(Return(kind, offset),),
                    before=state,
                )

    def _meets(self, state: _State) -> Iterator[_State]:
        met = state.work.met
        for row, row_arrival in enumerate(state.arrivals[0]):
            for col, col_arrival in enumerate(state.arrivals[1]):
                if met & self.block[row][col] or not self._is_next(met, row, col):
                    continue
                now = max(row_arrival, col_arrival) + 1  # arrivals are not before state.now
                rows, cols = (tuple([max(now, arrival) for arrival in arrivals]) for arrivals in state.arrivals)
                work = state.work._replace(met=met | self.block[row][col])
                yield _State(work, now, state.link_free, (rows, cols), (Meet((row,), (col,)),), state)

    def _is_next(self, met: int, row: int, col: int) -> bool:
        """Whether the blocks that come before it in its column and in its row have met."""
        above = row == 0 or (row == 1 and self.results[0]) or met & self.block[row - 1][col]
        left = col == 0 or (col == 1 and self.results[1]) or met & self.block[row][col - 1]
        return bool(above and left)

    # How little time the rest can take

    def lower_bound(self, state: _State) -> float:
        work, now = state.work, state.now
        left = self.all_blocks & ~work.met
        bounds: list[float] = [now + left.bit_count()]
        must_leave, last_to_leave, returning = 0, list[float](), 0.0
        for axis in (0, 1):
            cost, offsets, blocks = self.return_cost[axis], self._to_return(work, axis), 0
            for offset in offsets:
                blocks += (left & self.blocks[axis][offset]).bit_count()
                must_leave |= self.blocks[axis][offset]
                # It leaves after its blocks and those of the ones before it; then the ones after it leave.
                bounds.append(now + blocks + cost * (self.sizes[axis] - offset))
            last_to_leave += [cost] if offsets else []
            returning += cost * len(offsets)
        # The very last to leave does so after the blocks of all that leave.
        bounds.append(now + (left & must_leave).bit_count() + min(last_to_leave, default=0.0))
        fetched = state.link_free + sum(cost * n for cost, n in zip(self.fetch_cost, self._to_fetch(work), strict=True))
        bounds += [fetched + returning, fetched + self._after_fetches(work)]
        return max(bounds)

    def _to_fetch(self, work: _Work) -> _Pair:
        return self.sizes[0] - work.fetched[0], self.sizes[1] - work.fetched[1]

    def _after_fetches(self, work: _Work) -> float:
        """The least that comes after the last fetch, a row or a column: its blocks, then a return."""
        rows, cols = self.sizes
        rows_left, cols_left = self._to_fetch(work)
        after = [cols + self.return_cost[0]] if rows_left else []
        if cols_left and self.results[1]:
            after.append(rows + self.return_cost[1])
        elif cols_left:  # forward: the own row's block may come after the others', while the last partial travels
            after.append(max(rows, rows - 1 + self.return_cost[0]) if rows > 1 else 1)
        return min(after, default=0.0)


_T = TypeVar("_T")


def _with(pair: tuple[_T, _T], axis: int, value: _T) -> tuple[_T, _T]:
    return (value, pair[1]) if axis == 0 else (pair[0], value)


def _moves_to(state: _State) -> list[Move]:
    """The moves that lead to a state, each fetch straight after the transfer before it."""
    path: list[tuple[Move, ...]] = []
    at: _State | None = state
    while at is not None:
        path.append(at.moves)
        at = at.before
    moves: list[Move] = []
    after_transfers = 0
    for step in reversed(path):
        match step:
            case (Fetch(), *_):
                moves[after_transfers:after_transfers] = step
                after_transfers += len(step)
            case (Return(),):
                moves += step
                after_transfers = len(moves)
            case _:
                moves += step
    return moves
