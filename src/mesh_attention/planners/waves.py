"""Waves: parts of a pass that follow each other through the same moves.

While a wave is attended, the inputs of the next one arrive and the results of the one before it leave. So a rank waits
only for the first inputs of the first wave and for the last results of the last one.

Two clocks, in blocks of compute, say what is over when: one for compute, one for the link. Behind every meet, the link
gets inputs of the next wave as long as it would be idle otherwise. Results are waited for when the link should be done
with them. The clocks are heuristics: errors cost speed, never correctness. Moves of a wave keep their order, except
that inputs come earlier and the end of a wave later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from typing_extensions import assert_never

from mesh_attention.plan.assignment import Assignment
from mesh_attention.plan.schedule import Fetch, GroupMove, Meet, Move, Return, Route
from mesh_attention.plan.steps import AXIS_OF, INPUTS, Direction, Kind
from mesh_attention.planners.costs import Costs
from mesh_attention.planners.greedy import mask_of


class Timed(NamedTuple):
    """Moves, and how long they take by the clocks, in blocks of one wave."""

    moves: tuple[Move, ...]
    makespan: float


def in_waves(
    waves: Sequence[Sequence[Move]], direction: Direction, *, assignment: Assignment, costs: Costs, route: Route
) -> Timed:
    """The moves of all waves in one order. `costs` are in blocks of one wave."""
    clocks = _Clocks(direction, assignment, costs, route)
    left = [deque(replace(move, wave=number) for move in moves) for number, moves in enumerate(waves)]
    for number, moves in enumerate(left):
        following = left[number + 1] if number + 1 < len(left) else deque[Move]()
        while moves:
            move = moves.popleft()
            if isinstance(move, Meet):
                clocks.meet(move, following)
            elif brings_input(move, direction) or (isinstance(move, Return) and move.offset) or _is_reduce(move):
                clocks.post(move)
            else:
                assert isinstance(move, Return | GroupMove)
                clocks.ends.append(move)
    clocks.end_all()
    return Timed(tuple(clocks.moves), max(clocks.now, clocks.link_free))


def brings_input(move: Move, direction: Direction) -> bool:
    return isinstance(move, Fetch) or (isinstance(move, GroupMove) and move.kind in INPUTS[direction])


def _is_reduce(move: Move) -> bool:
    return isinstance(move, GroupMove) and move.op == "reduce"


class _Clocks:
    """The moves so far, and when compute and the link are done with them."""

    def __init__(self, direction: Direction, assignment: Assignment, costs: Costs, route: Route) -> None:
        self.direction: Direction = direction
        self.inputs = INPUTS[direction]
        self.assignment, self.costs, self.route = assignment, costs, route
        self.moves: list[Move] = []
        self.now = self.link_free = 0.0
        self.arrivals: dict[tuple[Kind, int, int], float] = {}  # of inputs, by kind, offset and wave
        self.ends: list[Return | GroupMove] = []  # ends of waves that are not made yet
        self.gone: dict[tuple[Kind, int], float] = {}  # when the partials, or the exchanged result, of a wave are there

    def meet(self, move: Meet, following: deque[Move]) -> None:
        start = max(self.now, self._ready(move))
        self._end_what_is_over(start)
        end = start + self.costs.of_call(mask_of(move.rows), mask_of(move.cols))
        self.now = start
        while self.link_free < end:
            coming = next((later for later in following if brings_input(later, self.direction)), None)
            if coming is None or self._depends_on(coming) > start:
                break
            following.remove(coming)
            self.post(coming)
        self.moves.append(move)
        self.now = end

    def post(self, move: Move) -> None:
        self.moves.append(move)
        self.link_free = max(self.link_free, self.now) + self._cost(move)
        match move:
            case Fetch(kind, offset, wave):
                self.arrivals[kind, offset, wave] = self.link_free
            case GroupMove("gather", kind, wave):
                for offset in range(1, self.assignment.size(AXIS_OF[kind])):
                    self.arrivals[kind, offset, wave] = self.link_free
            case GroupMove("exchange", kind, wave) if kind in self.inputs:
                self.arrivals[kind, 0, wave] = self.link_free
            case Return(kind, _, wave) | GroupMove(_, kind, wave):
                self.gone[kind, wave] = self.link_free
            case Meet():
                raise AssertionError("a meet is not posted")
            case _:
                assert_never(move)

    def end_all(self) -> None:
        """Finish, exchange and unpack what is left, the earliest first."""
        while self.ends:
            self.now = max(self.now, min(map(self._over, self._next_ends())))
            self._end_what_is_over(self.now)

    def _end_what_is_over(self, time: float) -> None:
        """Finish, exchange and unpack results as long as that should not have to wait."""
        while ready := [move for move in self._next_ends() if self._over(move) <= time]:
            move = min(ready, key=self._over)
            self.ends.remove(move)
            if isinstance(move, GroupMove) and move.op == "exchange":
                self.post(move)
            else:
                self.moves.append(move)

    def _next_ends(self) -> list[Return | GroupMove]:
        """The next end of every kind; those of a kind stay in order."""
        return list({move.kind: move for move in reversed(self.ends)}.values())[::-1]

    def _over(self, move: Return | GroupMove) -> float:
        """When what an end waits for should be there."""
        is_exchange = isinstance(move, GroupMove) and move.op == "exchange"
        return 0.0 if is_exchange else self.gone.get((move.kind, move.wave), 0.0)

    def _ready(self, move: Meet) -> float:
        keys = [(kind, offset, move.wave) for kind in self.inputs for offset in move.side(AXIS_OF[kind])]
        return max((self.arrivals.get(key, 0.0) for key in keys), default=0.0)

    def _depends_on(self, move: Move) -> float:
        """When the rank has what it sends in an input move: its exchanged shard; along a ring, the one before."""
        if isinstance(move, GroupMove) and move.op == "exchange":
            return 0.0
        assert isinstance(move, Fetch | GroupMove)
        before = move.offset - 1 if isinstance(move, Fetch) and self.route == "ring" else 0
        return self.arrivals.get((move.kind, before, move.wave), 0.0)

    def _cost(self, move: Move) -> float:
        assert not isinstance(move, Meet)
        once = self.costs.of(move.kind)
        if not isinstance(move, GroupMove):
            return once
        if move.op == "exchange":
            return once * (1 - 1 / self.assignment.ulysses_degree)
        return once * (self.assignment.size(AXIS_OF[move.kind]) - 1)
