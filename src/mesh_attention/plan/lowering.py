"""From a schedule to the program of one rank. Mechanical: every choice has been made in the schedule.

The mask removes moves that a rank has no use for. One relation decides it, `BlockMatrix.needs`, which every rank can
evaluate for every other rank, so both ends of a transfer leave it out together. Along a ring, a shard skips the ranks
that do not need it: each rank passes it straight to the next one that does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Literal

from typing_extensions import assert_never

from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.buffers import held_nbytes, shared_buffers
from mesh_attention.plan.program import Program
from mesh_attention.plan.routes import Hop, fetch_hops_in, fetch_hops_out, partial_dest, partial_hops_in
from mesh_attention.plan.schedule import Fetch, Meet, Return, Route, Schedule, Together
from mesh_attention.plan.steps import (
    AXIS_OF,
    INPUTS,
    Attend,
    Clear,
    Collective,
    Direction,
    Exchange,
    Finish,
    Free,
    Item,
    Kind,
    Merge,
    Pack,
    Recv,
    Send,
    Step,
    effects,
    running,
    transfers,
)

MEETS_THAT_HIDE = 2
"""Meets between posting partials that go straight home and waiting for them: one meet may be short, and several
partials leave at once. Along a ring, partials are waited for anyway, to be passed on."""


def lower(matrix: BlockMatrix, schedule: Schedule, direction: Direction, *, rank: int) -> Program:
    """The program of one rank, without building any other rank's."""
    steps = lowered_steps(matrix, schedule, direction, rank=rank)
    kept = matrix.kept(schedule.keep, rank)
    held = held_nbytes(steps, matrix, kept=kept, has_kept=direction == "backward")
    return Program(rank=rank, steps=steps, peak_nbytes=max(held, default=0))


def lowered_steps(matrix: BlockMatrix, schedule: Schedule, direction: Direction, *, rank: int) -> tuple[Step, ...]:
    """The steps of one rank."""
    lowering = _Lowering(matrix, schedule, direction, rank)
    for move in schedule.moves:
        match move:
            case Meet(rows, cols):
                lowering.meet(rows, cols)
            case Fetch(kind, offset):
                lowering.fetch(kind, offset)
            case Return(kind, offset):
                lowering.return_partial(kind, offset)
            case Together(op, kind):
                {"gather": lowering.gather, "reduce": lowering.reduce, "exchange": lowering.exchange}[op](kind)
            case _:
                assert_never(move)
    kept, is_backward = matrix.kept(schedule.keep, rank), direction == "backward"
    kept_items = {item for group in kept for item in group}
    packed = lowering.steps
    if matrix.assignment.ulysses == 1:
        own = {Item(kind, rank) for kind in INPUTS[direction]} - (kept_items if is_backward else set())
        packed = with_packs(packed, own=own, kept=kept)
    hiding = MEETS_THAT_HIDE if schedule.partials == "direct" else 1
    return with_frees(packed, kept=set() if is_backward else kept_items, hiding=hiding)


class _Lowering:
    """The steps of one rank so far, without frees."""

    def __init__(self, matrix: BlockMatrix, schedule: Schedule, direction: Direction, rank: int) -> None:
        self.matrix = matrix
        self.assignment = matrix.assignment
        self.schedule = schedule
        self.direction = direction
        self.rank = rank
        self.place = matrix.assignment.place(rank)
        self.head_slice = matrix.assignment.head_slice(rank)
        self.steps: list[Step] = []
        self.meets = 0
        self.arrived: list[tuple[Item, int]] = []  # partials not merged yet, and the number of meets before each

    # Moves

    def fetch(self, kind: Kind, offset: int) -> None:
        sends, recvs = self._hand_round(kind, self.schedule.route, offset)
        # Receives first: a send may wait for its receive, a posted receive waits for nothing.
        self.steps += [*recvs, *sends]

    def meet(self, rows: tuple[int, ...], cols: tuple[int, ...]) -> None:
        """One attend for each set of rows that have the same live columns."""
        self.meets += 1
        peer = self.assignment.peer
        col_shards = sorted(peer("col", self.place, offset) for offset in cols)
        by_cols: dict[tuple[int, ...], list[int]] = {}
        for row in sorted(peer("row", self.place, offset) for offset in rows):
            live = tuple(col for col in col_shards if self.matrix.is_live(row, col))
            if live:
                by_cols.setdefault(live, []).append(row)
        for live, row_shards in by_cols.items():
            row_items = tuple([Item("q", shard) for shard in row_shards])
            grads = tuple([Item("do", shard) for shard in row_shards]) if self.direction == "backward" else ()
            self.steps.append(Attend(row_items, tuple([Item("kv", shard) for shard in live]), grads))

    def return_partial(self, kind: Kind, offset: int) -> None:
        if offset == 0:
            self._merge_arrived(kind, self.place)
            self._finish_own(kind)
            return
        axis, route = AXIS_OF[kind], self.schedule.partials
        around = (self.matrix, route, axis, self.place, offset)
        shard = self.assignment.peer(axis, self.place, offset)
        if route == "ring":  # partials that arrived for this shard travel on with it
            self._merge_arrived(kind, shard)
        else:
            self._merge_arrived(kind, self.place, meets_ago=MEETS_THAT_HIDE)
        contributes = self.matrix.needs(axis, self.place, shard)
        if contributes:
            self.steps.append(Finish(Item(kind, shard)))
        arriving = [self._partial_from(kind, hop) for hop in partial_hops_in(*around)]
        self.steps += arriving
        self.arrived += [(recv.item, self.meets) for recv in arriving]
        if contributes:
            self.steps.append(Send(Item(kind, shard), self._rank_of(partial_dest(*around))))

    def gather(self, kind: Kind) -> None:
        sends: list[Send] = []
        recvs: list[Recv] = []
        for offset in self._offsets(kind):
            given, taken = self._hand_round(kind, "direct", offset)
            sends += given
            recvs += taken
        self._collective("gather", kind, sends, recvs)

    def reduce(self, kind: Kind) -> None:
        sends: list[Send] = []
        recvs: list[Recv] = []
        for offset in self._offsets(kind):
            shard = self.assignment.peer(AXIS_OF[kind], self.place, offset)
            if self.matrix.needs(AXIS_OF[kind], self.place, shard):
                self.steps.append(Finish(Item(kind, shard)))
                sends.append(Send(Item(kind, shard), self._rank_of(shard)))
            hops = partial_hops_in(self.matrix, "direct", AXIS_OF[kind], self.place, offset)
            recvs += [self._partial_from(kind, hop) for hop in hops]
        self._collective("reduce", kind, sends, recvs)
        self.arrived += [(recv.item, self.meets) for recv in recvs]
        self._merge_arrived(kind, self.place)
        self._finish_own(kind)

    def exchange(self, kind: Kind) -> None:
        axis, inward = AXIS_OF[kind], kind in INPUTS[self.direction]
        if not self.matrix.segments(axis, self.place) or (inward and not self._is_wanted(kind)):
            return
        group = tuple(self.assignment.ulysses_group(self.rank))
        # Inward, each rank gives its tokens and gets its heads; outward, it gives its heads and gets its tokens. In the
        # order of distances round the group: at every distance each rank sends to one rank and receives from one.
        sends, recvs = [], []
        for distance in range(1, len(group)):
            dest, source = group[(self.head_slice + distance) % len(group)], group[self.head_slice - distance]
            given = self._piece(kind, *((self.rank, dest) if inward else (dest, self.rank)))
            taken = self._piece(kind, *((source, self.rank) if inward else (self.rank, source)))
            if self.matrix.has_tokens(kind, given.shard):
                sends.append(Send(given, dest))
            if self.matrix.has_tokens(kind, taken.shard):
                recvs.append(Recv(taken, source))
        home, whole = Item(kind, self.rank, "home"), Item(kind, self.place)
        before, after = (home, whole) if inward else (whole, home)
        self.steps.append(Exchange(before, after, group, tuple(sends), tuple(recvs)))

    def _piece(self, kind: Kind, tokens_of: int, heads_of: int) -> Item:
        return Item(kind, tokens_of, "piece", self.assignment.head_slice(heads_of))

    # Parts of moves

    def _hand_round(self, kind: Kind, route: Route, offset: int) -> tuple[list[Send], list[Recv]]:
        around = (self.matrix, route, AXIS_OF[kind], self.place, offset)
        sends = [Send(Item(kind, shard), self._rank_of(dest)) for dest, shard in fetch_hops_out(*around)]
        recvs = [Recv(Item(kind, shard), self._rank_of(source)) for source, shard in fetch_hops_in(*around)]
        return sends, recvs

    def _rank_of(self, place: int) -> int:
        return self.assignment.rank(place, head_slice=self.head_slice)

    def _merge_arrived(self, kind: Kind, shard: int, *, meets_ago: int = 0) -> None:
        """Merge the partials that were posted at least `meets_ago` meets ago."""
        waiting = []
        for item, meets in self.arrived:
            if (item.kind, item.shard) == (kind, shard) and self.meets - meets >= meets_ago:
                self.steps.append(Merge(item))
            else:
                waiting.append((item, meets))
        self.arrived = waiting

    def _finish_own(self, kind: Kind) -> None:
        if self.matrix.segments(AXIS_OF[kind], self.place):
            if not self._is_wanted(kind):
                self.steps.append(Clear(running(kind, self.place)))
            self.steps.append(Finish(Item(kind, self.place, "home" if self.assignment.ulysses == 1 else "whole")))

    def _is_wanted(self, kind: Kind) -> bool:
        """True if any place attends this place's own shard."""
        axis = AXIS_OF[kind]
        return any(self.matrix.needs(axis, member, self.place) for member in self.assignment.group(axis, self.place))

    def _collective(self, op: Literal["gather", "reduce"], kind: Kind, sends: list[Send], recvs: list[Recv]) -> None:
        """Append a collective if any rank of the group has something to move; then the whole group takes part."""
        axis = AXIS_OF[kind]
        places = self.assignment.group(axis, self.place)
        if any(self.matrix.needs(axis, member, shard) for member in places for shard in places if member != shard):
            group = tuple(self._rank_of(place) for place in places)
            self.steps.append(Collective(op, group, tuple(sends), tuple(recvs)))

    def _partial_from(self, kind: Kind, hop: Hop) -> Recv:
        place, shard = hop
        source = self._rank_of(place)
        return Recv(Item(kind, shard, source=source), source)

    def _offsets(self, kind: Kind) -> range:
        return range(1, len(self.assignment.group(AXIS_OF[kind], self.place)))


def with_packs(steps: Sequence[Step], *, own: set[Item], kept: Collection[tuple[Item, ...]] = ()) -> list[Step]:
    """The steps with the rank's own inputs packed before first use, where they travel, are kept or share a buffer.

    An input that is only attended by itself is read from the caller's tensors, with no copy.
    """
    packed = {send.item for step in steps for send in transfers(step)[0]}
    packed.update(item for group in (*shared_buffers(steps), *kept) for item in group)
    at_home = {item: item._replace(form="home") for item in own - packed}
    waiting = own & packed
    result: list[Step] = []
    for step in steps:
        for item in sorted(waiting.intersection(effects(step).reads)) if waiting else ():
            result.append(Pack(item._replace(form="home"), item))
            waiting.discard(item)
        result.append(_renamed(step, at_home) if at_home and isinstance(step, Attend) else step)
    return result


def _renamed(step: Attend, names: dict[Item, Item]) -> Attend:
    rows, cols, grads = (tuple([names.get(i, i) for i in side]) for side in (step.rows, step.cols, step.grads))
    return Attend(rows, cols, grads)


def with_frees(steps: Sequence[Step], *, kept: Collection[Item] = (), hiding: int = 1) -> tuple[Step, ...]:
    """The steps with every item freed after its last use, except the caller's tensors and kept items.

    An input whose last use is a send is freed after the next attend, a partial after the next `hiding` ones: freeing
    waits for the send, and by then it has had something to hide behind.
    """
    last_use: dict[Item, int] = {}
    for index, step in enumerate(steps):
        done = effects(step)
        last_use.update(dict.fromkeys((*done.reads, *done.writes, *done.adds), index))
        for item in done.frees:
            del last_use[item]
    freed_after: dict[int, list[Step]] = {}
    for item, index in last_use.items():
        if item.form != "home" and item not in kept:
            freed_after.setdefault(_free_point(steps, index, hiding), []).append(Free(item))
    return tuple(s for index, step in enumerate(steps) for s in (step, *freed_after.get(index, ())))


def _free_point(steps: Sequence[Step], last_use: int, hiding: int) -> int:
    step = steps[last_use]
    if not isinstance(step, Send):
        return last_use
    # A rank soon needs the input it receives in the turn in which it passes one on; the send is over by then.
    wanted = 1 if step.item.kind in ("q", "kv", "do") else hiding
    attends = (index for index in range(last_use, len(steps)) if isinstance(steps[index], Attend))
    return next(islice(attends, wanted - 1, None), len(steps) - 1)
