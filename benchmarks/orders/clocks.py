"""What a list of moves takes, in blocks, by the model the greedy order is made with: one link, one compute lane.

The moves are a program, walked in order by compute's clock. It starts at 0 with the own row and column here.

- A fetch is posted when compute gets to it: when the meet before it has ended. The link carries one transfer at a time,
  in posting order, so a fetch takes it from then on or after what was posted before, for its cost.
- A meet starts when compute gets to it and all that its rows and columns need has arrived. Each of its blocks takes 1,
  and besides there is the price of a call, by `Costs.of_call`.
- A return is posted when compute gets to it, and takes the link as a fetch does. What it sends must be complete. All
  ranks make the same moves, so what arrives for the own row takes the same slot.
- `return o 0` and its like end the own row or column. They come after its last meet and after the other returns of
  that kind, and take no time: merging is free here, as is everything that is not named.

It is over when compute has ended and the link is free. Not in the model: latency, memory, masks that make blocks
unequal, a link that carries two things at once, and ring routes, where a fetch also waits for the one before it on its
axis: that is what this rank passes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from typing_extensions import assert_never

from mesh_attention.errors import ScheduleError
from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.format import format_move
from mesh_attention.plan.schedule import Fetch, GroupMove, Meet, Move, Return
from mesh_attention.plan.steps import AXIS_OF, INPUTS, OUTPUTS, Direction, Kind
from mesh_attention.planners.costs import Costs
from mesh_attention.planners.greedy import mask_of


class Clocks(NamedTuple):
    """When compute has ended and when the link has."""

    compute: float
    link: float

    @property
    def makespan(self) -> float:
        return max(self.compute, self.link)


def price_moves(
    moves: tuple[Move, ...], tile: Tile, direction: Direction, *, costs: Costs, held_kinds: tuple[Kind, ...] = ()
) -> Clocks:
    """The clocks at the end of the moves of one tile. Refuses moves that are not a whole, legal schedule."""
    walk = _Walk(tile, direction, costs, held_kinds)
    for index, move in enumerate(moves):
        walk.at = index, move
        match move:
            case Fetch(kind, offset):
                walk.fetch(kind, offset)
            case Meet(rows, cols):
                walk.meet(rows, cols)
            case Return(kind, offset):
                walk.send_back(kind, offset)
            case GroupMove():
                raise walk.refusal("a collective has no price here; expected fetch, meet or return")
            case _:
                assert_never(move)
    walk.check_end()
    return Clocks(walk.now, walk.link_free)


class _Walk:
    """Where both clocks are after the moves so far."""

    def __init__(self, tile: Tile, direction: Direction, costs: Costs, held_kinds: tuple[Kind, ...]) -> None:
        self.tile, self.direction, self.costs = tile, direction, costs
        self.now = self.link_free = 0.0
        self.fetchable = tuple(kind for kind in INPUTS[direction] if kind not in held_kinds)
        self.arrival = {(kind, 0): 0.0 for kind in INPUTS[direction]}
        self.arrival |= {(kind, at): 0.0 for kind in INPUTS[direction] if kind in held_kinds for at in self._all(kind)}
        self.left = {(row, col) for row in range(tile.rows) for col in range(tile.cols)}
        self.returned: set[tuple[Kind, int]] = set()
        self.at: tuple[int, Move] | None = None

    def fetch(self, kind: Kind, offset: int) -> None:
        self._require(kind in self.fetchable, lambda: f"{kind} is not to be fetched")
        self._require(offset in self._all(kind), lambda: f"expected an offset below {len(self._all(kind))}")
        self._require((kind, offset) not in self.arrival, lambda: f"{kind} {offset} is here, or on its way")
        self.arrival[kind, offset] = self._occupy_link(kind)

    def meet(self, rows: tuple[int, ...], cols: tuple[int, ...]) -> None:
        blocks = {(row, col) for row in rows for col in cols}
        self._require(0 < len(blocks) == len(rows) * len(cols), lambda: "expected some rows and columns, each once")
        self._require(blocks <= self.left, lambda: f"blocks {sorted(blocks - self.left)} are not left to meet")
        needed = {(kind, at) for kind in INPUTS[self.direction] for at in (rows if AXIS_OF[kind] == "row" else cols)}
        missing = needed - self.arrival.keys()
        self._require(not missing, lambda: f"{_listed(missing)} not fetched before it")
        price = self.costs.of_call(mask_of(rows), mask_of(cols))
        self.now = max(self.now, *(self.arrival[item] for item in needed)) + price
        self.left -= blocks

    def send_back(self, kind: Kind, offset: int) -> None:
        self._require(kind in OUTPUTS[self.direction], lambda: f"{self.direction} does not return {kind}")
        self._require(offset in self._all(kind), lambda: f"expected an offset below {len(self._all(kind))}")
        self._require((kind, offset) not in self.returned, lambda: "returned before")
        coordinate = 0 if AXIS_OF[kind] == "row" else 1
        self._require(all(block[coordinate] != offset for block in self.left), lambda: "its blocks have not all met")
        if offset:
            self._occupy_link(kind)
        else:
            others = {(kind, at) for at in self._all(kind)[1:]} - self.returned
            self._require(not others, lambda: f"{_listed(others)} not returned before it")
        self.returned.add((kind, offset))

    def check_end(self) -> None:
        self.at = None
        owed = {(kind, at) for kind in OUTPUTS[self.direction] for at in self._all(kind)} - self.returned
        self._require(not owed, lambda: f"{_listed(owed)} not returned")

    def _occupy_link(self, kind: Kind) -> float:
        self.link_free = max(self.link_free, self.now) + self.costs.of(kind)
        return self.link_free

    def _all(self, kind: Kind) -> range:
        return range(self.tile.rows if AXIS_OF[kind] == "row" else self.tile.cols)

    def _require(self, holds: bool, otherwise: Callable[[], str]) -> None:
        if not holds:
            raise self.refusal(otherwise())

    def refusal(self, reason: str) -> ScheduleError:
        where = "at the end" if self.at is None else f"move {self.at[0]}, '{format_move(self.at[1])}'"
        return ScheduleError(f"{where}: {reason}")


def _listed(items: set[tuple[Kind, int]]) -> str:
    return ", ".join(f"{kind} {offset}" for kind, offset in sorted(items))
