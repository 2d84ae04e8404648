"""Runs all programs without data, to find an order in which they can run, or the circle in which they wait.

A strict reading of the steps: the posts of a turn are made together, when the items its sends read are present; a send
waits until its receive is posted; a read waits until the item has been sent, and everything else received in the same
turn (posts made together end together); a collective waits until the whole group has reached it. A transfer without its
other end waits for nothing here: another rule reports it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from mesh_attention.plan.steps import Item, Recv, Send
from mesh_attention.verification.evidence import CollectiveId, Evidence, Transfer


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that cannot go on: the step it is at, and the rank it waits for."""

    rank: int
    step: int
    waits_for: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The steps in an order that respects every wait, and the ranks that got stuck in a circle.

    Past a circle, the order continues as if one of its waits had ended, so that the other rules can still be checked.
    """

    order: list[tuple[int, int]]
    stuck: list[Wait]


def run_programs(evidence: Evidence) -> Outcome:
    rendezvous = _Rendezvous(evidence)
    for rank in range(len(evidence.programs)):
        rendezvous.advance(rank)
    stuck = rendezvous.stuck()
    rendezvous.run_on()
    return Outcome(rendezvous.order, stuck)


Event = tuple[str, Transfer | CollectiveId]


@dataclass(slots=True)
class _Rendezvous:
    evidence: Evidence
    order: list[tuple[int, int]] = field(default_factory=list)
    cursor: dict[int, int] = field(default_factory=dict)
    blocked: dict[int, tuple[Event, int]] = field(default_factory=dict)  # the items a rank waits for, and their sources
    waiting: dict[Event, list[int]] = field(default_factory=lambda: defaultdict(list))
    posted: Counter[Transfer] = field(default_factory=Counter)
    sent: Counter[Transfer] = field(default_factory=Counter)
    arriving: dict[tuple[int, Item], list[tuple[Transfer, int]]] = field(default_factory=dict)
    joined: dict[CollectiveId, set[int]] = field(default_factory=lambda: defaultdict(set))
    members: dict[CollectiveId, set[int]] = field(default_factory=lambda: defaultdict(set))
    excused: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for rank, calls in enumerate(self.evidence.calls):
            for call in calls.values():
                self.members[call].add(rank)

    def advance(self, rank: int) -> None:
        """Run a rank, and every rank it wakes, as far as possible."""
        awake = [rank]
        while awake:
            rank = awake.pop()
            steps = self.evidence.programs[rank].steps
            index = self.cursor.get(rank, 0)
            while index < len(steps):
                obstacle = self._obstacle(rank, index, awake)
                if obstacle is not None:
                    self.blocked[rank] = obstacle
                    self.waiting[obstacle[0]].append(rank)
                    break
                self.order.append((rank, index))
                self._carry_out(rank, index, awake)
                index += 1
            self.cursor[rank] = index

    def stuck(self) -> list[Wait]:
        return [Wait(rank, self.cursor[rank], source) for rank, (_, source) in sorted(self.blocked.items())]

    def run_on(self) -> None:
        """Release waiting ranks one by one, starting with those that do not wait for data."""
        while self.blocked:
            rank = min(self.blocked, key=lambda rank: (self.blocked[rank][0][0] == "sent", rank))
            event, _ = self.blocked.pop(rank)
            self.waiting[event].remove(rank)
            self.excused.add((rank, self.cursor[rank]))
            self.advance(rank)

    def _obstacle(self, rank: int, index: int, awake: list[int]) -> tuple[Event, int] | None:
        """The items the next step of a rank still waits for, and their sources."""
        if (rank, index) in self.excused:
            return None
        effects = self.evidence.effects[rank]
        for item in [item for at in self.evidence.turns[rank].get(index, (index,)) for item in effects[at].reads]:
            for transfer, nth in self.arriving.get((rank, item), ()):
                if self.sent[transfer] < nth <= self.evidence.sends[transfer]:
                    return ("sent", transfer), transfer.source
            self.arriving.pop((rank, item), None)
        step = self.evidence.programs[rank].steps[index]
        if isinstance(step, Send):
            transfer = self.evidence.transfer(rank, index, step)
            if self.posted[transfer] <= self.sent[transfer] < self.evidence.recvs[transfer]:
                return ("posted", transfer), transfer.dest
        call = self.evidence.calls[rank].get(index)
        if call is not None:
            self.joined[call].add(rank)
            absent = self.members[call] - self.joined[call]
            if absent:
                return ("joined", call), min(absent)
            self._wake(("joined", call), awake)
        return None

    def _carry_out(self, rank: int, index: int, awake: list[int]) -> None:
        steps = self.evidence.programs[rank].steps
        together: list[tuple[Transfer, int]] = []
        for at in self.evidence.turns[rank].get(index, ()):
            if isinstance(post := steps[at], Recv):
                transfer = self.evidence.transfer(rank, at, post)
                self.posted[transfer] += 1
                together.append((transfer, self.posted[transfer]))
                self.arriving[rank, post.item] = together
                self._wake(("posted", transfer), awake)
        step = steps[index]
        if isinstance(step, Send):
            transfer = self.evidence.transfer(rank, index, step)
            self.sent[transfer] += 1
            self._wake(("sent", transfer), awake)

    def _wake(self, event: Event, awake: list[int]) -> None:
        for rank in self.waiting.pop(event, ()):
            del self.blocked[rank]
            awake.append(rank)


def circles(stuck: list[Wait]) -> list[list[Wait]]:
    """The closed circles among waiting ranks; every stuck rank waits, directly or not, for one of them."""
    by_rank = {wait.rank: wait for wait in stuck}
    seen: set[int] = set()
    found = []
    for start in by_rank:
        path: list[int] = []
        rank = start
        while rank in by_rank and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = by_rank[rank].waits_for
        if rank in path:
            found.append([by_rank[member] for member in path[path.index(rank) :]])
    return found
