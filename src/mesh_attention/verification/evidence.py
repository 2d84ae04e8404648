"""A plan taken apart for the rules: every rank's steps, their effects, and the identity of every transfer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import Program
from mesh_attention.plan.steps import (
    INPUTS,
    OUTPUTS,
    Collective,
    Effects,
    Exchange,
    Item,
    Recv,
    Send,
    Step,
    effects,
    transfers,
)
from mesh_attention.plan.waits import turns


@dataclass(frozen=True, slots=True)
class Breach:
    """A rule broken at a step of a rank; `step` is None if a step is missing."""

    rule: str
    rank: int
    step: int | None
    message: str


class CollectiveId(NamedTuple):
    """One collective of one group: the ordinal-th that a rank makes with that group."""

    group: tuple[int, ...]
    ordinal: int


class Transfer(NamedTuple):
    """The identity of a transfer, which both ends must agree on. `call` is None for a plain send or receive."""

    source: int
    dest: int
    item: Item
    call: CollectiveId | None


class Sighting(NamedTuple):
    """A transfer as one end states it."""

    transfer: Transfer
    rank: int
    step: int


class Evidence:
    """Programs, with the facts that several rules use computed once."""

    def __init__(self, plan: Plan, programs: Iterable[Program]) -> None:
        self.plan = plan
        self.matrix: BlockMatrix = plan.matrix
        self.programs: list[Program] = []
        self.effects: list[list[Effects]] = []
        self.calls: list[dict[int, CollectiveId]] = []
        self.turns: list[dict[int, range]] = []
        for program in programs:
            self.programs.append(program)
            self.effects.append([effects(step) for step in program.steps])
            self.calls.append(_number_calls(program))
            self.turns.append({turn.start: turn for turn in turns(program.steps)})
        self.sends = Counter(sighting.transfer for sighting in self._sightings(Send))
        self.recvs = Counter(sighting.transfer for sighting in self._sightings(Recv))

    def inputs(self, rank: int) -> set[Item]:
        """Items a rank starts with: the caller's tensors, and in backward the items that forward kept."""
        home = {Item(kind, rank, "home") for kind in INPUTS[self.plan.direction]}
        return home | self.kept(rank) if self.plan.direction == "backward" else home

    def outputs(self, rank: int) -> set[Item]:
        """Items a rank ends with: the caller's results, and in forward the kept items."""
        home = {Item(kind, rank, "home") for kind in OUTPUTS[self.plan.direction]}
        return home | self.kept(rank) if self.plan.direction == "forward" else home

    def kept(self, rank: int) -> set[Item]:
        return {item for group in self.matrix.kept(self.plan.schedule.keep, rank) for item in group}

    def send_sightings(self) -> Iterator[Sighting]:
        return self._sightings(Send)

    def recv_sightings(self) -> Iterator[Sighting]:
        return self._sightings(Recv)

    def transfer(self, rank: int, step: int, end: Send | Recv) -> Transfer:
        """The transfer that one end of it states. A partial names its sender only where it has arrived."""
        call = self.calls[rank].get(step)
        if isinstance(end, Send):
            return Transfer(rank, end.dest, end.item, call)
        item = end.item if end.item.form == "piece" else end.item._replace(source=None)
        return Transfer(end.source, rank, item, call)

    def _sightings(self, side: type[Send] | type[Recv]) -> Iterator[Sighting]:
        for program in self.programs:
            for index, step in enumerate(program.steps):
                sends, recvs = transfers(step)
                for end in sends if side is Send else recvs:
                    yield Sighting(self.transfer(program.rank, index, end), program.rank, index)


def _number_calls(program: Program) -> dict[int, CollectiveId]:
    made: Counter[tuple[int, ...]] = Counter()
    calls = {}
    for index, step in enumerate(program.steps):
        if isinstance(step, Collective | Exchange):
            calls[index] = CollectiveId(step.group, made[step.group])
            made[step.group] += 1
    return calls


def op_of(step: Step) -> str:
    """The operation of a collective, which all members of its group must agree on."""
    match step:
        case Collective(op, _, _, _):
            return op
        case Exchange(before, _, _, _, _):
            return f"exchange {before.kind}"
        case _:
            return ""
