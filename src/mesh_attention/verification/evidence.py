"""A plan taken apart for the rules: every rank's steps, their effects, both ends of every transfer, and who waits.

`stuck_ranks` runs the transfers of all programs without data, to find whether they get through, or the circle in which
they wait. The strictest transport is assumed. A rank's posts run one after the other, as they do on NCCL's one stream:
a post begins when the one before it is over, and is over when every transfer in it has begun at its other end. Whatever
else a rank waits for (an item that it reads, or a sent item that it frees) is part of an earlier post of its own, and a
whole post is waited for; so these waits add nothing. A transport that runs posts side by side, as Gloo does, waits for
less. A transfer without its other end waits for nothing here: the rule of matching reports it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mesh_attention.plan import steps
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import Program, turns
from mesh_attention.plan.steps import AXIS_OF, INPUTS, OUTPUTS, Item, Kind, effects, transfers


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
    """The identity of a transfer, which both ends must agree on. `call` is None for a plain send or receive.

    `ordinal` tells equal transfers apart: the first, the second, … that an end states.
    """

    source: int
    dest: int
    item: Item
    call: CollectiveId | None
    ordinal: int


class End(NamedTuple):
    """A transfer as one of its ends states it: the end's rank and step, and the item as the end names it."""

    transfer: Transfer
    rank: int
    step: int
    item: Item


class Evidence:
    """Programs, with the facts that several rules use computed once.

    `sends` and `recvs` are the ends of every transfer. `posts` are each rank's transfers as they are posted, a turn, a
    collective or an exchange at a time.
    """

    def __init__(self, plan: Plan, programs: Iterable[Program]) -> None:
        self.plan = plan
        self.matrix: BlockMatrix = plan.matrix
        self.programs: list[Program] = []
        self.effects: list[list[steps.Effects]] = []
        self.calls: list[dict[int, CollectiveId]] = []
        self.sends: dict[Transfer, End] = {}
        self.recvs: dict[Transfer, End] = {}
        self.ends: list[dict[int, list[End]]] = []
        for program in programs:
            self.programs.append(program)
            self.effects.append([effects(step) for step in program.steps])
            self.calls.append(_number_calls(program))
            self.ends.append(self._take_ends(program))

    def inputs(self, rank: int) -> set[Item]:
        """Items a rank starts with: the caller's tensors, and in backward the items that forward kept."""
        home = self._home(INPUTS[self.plan.direction], rank)
        if self.matrix.is_replicated:
            home |= {Item("q", shard, "home") for shard in range(self.plan.problem.ranks)}
        return home | self.kept(rank) if self.plan.direction == "backward" else home

    def outputs(self, rank: int) -> set[Item]:
        """Items a rank ends with: the caller's results, and in forward the kept items."""
        if self.matrix.is_over_cache:
            shards = range(self.plan.problem.ranks) if self.matrix.is_replicated else (rank,)
            return {Item("o", shard, "total") for shard in shards}
        home = self._home(OUTPUTS[self.plan.direction], rank)
        return home | self.kept(rank) if self.plan.direction == "forward" else home

    def _home(self, kinds: Iterable[Kind], rank: int) -> set[Item]:
        parts = self.plan.assignment.parts
        return {Item(kind, rank, "home", part=part) for kind in kinds for part in parts(AXIS_OF[kind])}

    def kept(self, rank: int) -> set[Item]:
        return {item for group in self.matrix.kept(self.plan.schedule.keep, rank) for item in group}

    def posts(self, rank: int) -> list[list[End]]:
        """The transfers of a rank in the order of posting, those that are posted together in one list."""
        turn_of = {at: turn.start for turn in turns(self.programs[rank].steps) for at in turn}
        posted: dict[int, list[End]] = {}
        for index, here in self.ends[rank].items():
            posted.setdefault(turn_of.get(index, index), []).extend(here)
        return list(posted.values())

    def _take_ends(self, program: Program) -> dict[int, list[End]]:
        """Both kinds of ends of one program, by step. A partial names its sender only where it has arrived."""
        rank, calls = program.rank, self.calls[program.rank]
        sent: Counter[Transfer] = Counter()
        received: Counter[Transfer] = Counter()
        ends: dict[int, list[End]] = {}
        for index, step in enumerate(program.steps):
            sends, recvs = transfers(step)
            if not sends and not recvs:
                continue
            call = calls.get(index)
            here = ends[index] = []
            for send in sends:
                transfer = Transfer(rank, send.dest, _unlabelled(send.item), call, 0)
                here.append(_noted(transfer, sent, self.sends, (rank, index, send.item)))
            for recv in recvs:
                transfer = Transfer(recv.source, rank, _unlabelled(recv.item), call, 0)
                here.append(_noted(transfer, received, self.recvs, (rank, index, recv.item)))
        return ends


def _unlabelled(item: Item) -> Item:
    """An item on its way: partials are told apart by their senders only where they arrived."""
    return item if item.form == "piece" else item._replace(source=None)


def _noted(
    transfer: Transfer, counts: Counter[Transfer], ends: dict[Transfer, End], where: tuple[int, int, Item]
) -> End:
    """An end, numbered and entered among the others of its kind."""
    numbered = transfer._replace(ordinal=counts[transfer]) if counts[transfer] else transfer
    counts[transfer] += 1
    end = ends[numbered] = End(numbered, *where)
    return end


def _number_calls(program: Program) -> dict[int, CollectiveId]:
    made: Counter[tuple[int, ...]] = Counter()
    calls = {}
    for index, step in enumerate(program.steps):
        if isinstance(step, steps.Collective | steps.Exchange):
            calls[index] = CollectiveId(step.group, made[step.group])
            made[step.group] += 1
    return calls


# Who waits for whom


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that cannot go on: the step whose transfer waits, and the rank it waits for."""

    rank: int
    step: int
    waits_for: int


def stuck_ranks(evidence: Evidence) -> list[Wait]:
    """The ranks that never get through. Each waits for another one of them."""
    ranks = range(len(evidence.programs))
    posts = [evidence.posts(rank) for rank in ranks]
    at = [-1 for _ in ranks]
    missing = [0 for _ in ranks]  # transfers of a rank's current post that have not begun at their other end
    begun_by: dict[Transfer, int] = {}  # transfers that have begun at one end
    going = list(ranks)
    while going:
        rank = going.pop()
        while not missing[rank] and at[rank] + 1 < len(posts[rank]):
            at[rank] += 1
            for transfer, *_ in posts[rank][at[rank]]:
                other = begun_by.pop(transfer, None)
                if other is not None:
                    missing[other] -= 1
                    going += [other] if not missing[other] and other != rank else []
                elif transfer in evidence.sends and transfer in evidence.recvs:
                    begun_by[transfer] = rank
                    missing[rank] += 1
    return [_wait(rank, posts[rank][at[rank]], begun_by) for rank in ranks if missing[rank]]


def _wait(rank: int, post: list[End], begun_by: dict[Transfer, int]) -> Wait:
    transfer, _, step, _ = next(end for end in post if begun_by.get(end.transfer) == rank)
    return Wait(rank, step, transfer.dest if transfer.source == rank else transfer.source)


def circles(stuck: list[Wait]) -> list[list[Wait]]:
    """The closed circles among waiting ranks; every stuck rank waits, directly or not, for one of them."""
    by_rank = {wait.rank: wait for wait in stuck}
    seen: set[int] = set()
    closed = []
    for start in by_rank:
        path: list[int] = []
        rank = start
        while rank in by_rank and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = by_rank[rank].waits_for
        if rank in path:
            closed.append([by_rank[member] for member in path[path.index(rank) :]])
    return closed
