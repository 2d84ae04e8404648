"""From a schedule to the program of one rank. Mechanical: every choice has been made in the schedule.

The mask removes moves that a rank has no use for. One relation decides it, `BlockMatrix.needs`, which every rank can
evaluate for every other rank, so both ends of a transfer leave it out together. Along a ring, a shard skips the ranks
that do not need it: each rank passes it straight to the next one that does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Literal

from typing_extensions import assert_never

from mesh_attention.plan import steps as ops
from mesh_attention.plan.assignment import Axis
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.buffer_sizes import held_nbytes, shared_buffers
from mesh_attention.plan.program import Program
from mesh_attention.plan.schedule import Fetch, GroupMove, Meet, Return, Route, Schedule
from mesh_attention.plan.steps import AXIS_OF, INPUTS, OUTPUTS, Direction, Form, Item, Kind, effects

Hop = tuple[int, int]
_ByOffset = Callable[[BlockMatrix, Axis, int, int], dict[int, list[Hop]]]
MEETS_THAT_HIDE = 2
"""Meets between posting partials that go straight home and waiting for them: one meet may be short, and several
partials leave at once. Along a ring, partials are waited for anyway, to be passed on."""


def lower(matrix: BlockMatrix, schedule: Schedule, direction: Direction, *, rank: int) -> Program:
    """The program of one rank, without building any other rank's."""
    steps = lowered_steps(matrix, schedule, direction, rank=rank)
    kept = matrix.kept(schedule.keep, rank)
    held = held_nbytes(steps, matrix, kept=kept, has_kept=direction == "backward")
    return Program(rank=rank, steps=steps, peak_nbytes=max(held, default=0))


def lowered_steps(matrix: BlockMatrix, schedule: Schedule, direction: Direction, *, rank: int) -> tuple[ops.Step, ...]:
    """The steps of one rank."""
    lowering = (_CacheLowering if matrix.is_over_cache else _Lowering)(matrix, schedule, direction, rank)
    for move in schedule.moves:
        match move:
            case Meet(rows, cols, wave):
                lowering.meet(rows, cols, wave)
            case Fetch(kind, offset, wave):
                lowering.fetch(kind, offset, wave)
            case Return(kind, offset, wave):
                lowering.return_partial(kind, offset, wave)
            case GroupMove(op, kind, wave):
                getattr(lowering, op)(kind, wave)
            case _:
                assert_never(move)
    kept, is_backward = matrix.kept(schedule.keep, rank), direction == "backward"
    kept_items = {item for group in kept for item in group}
    packed = lowering.steps
    if matrix.assignment.ulysses_degree == 1:
        parts = matrix.assignment.parts("row")
        own = {Item(kind, rank, part=part) for kind in INPUTS[direction] for part in parts}
        own -= kept_items if is_backward else set()
        packed = with_packs(packed, "home", own=own, kept=kept)
    elif "own" in schedule.keep:
        own = {item._replace(form="whole") for item in kept_items if item.form == "kept"}
        packed = with_packs(packed, "kept", own=own, kept=kept)
    hiding = MEETS_THAT_HIDE if schedule.partials == "direct" else 1
    stays = {item for item in kept_items if item.form == "kept"} if is_backward else kept_items
    return with_frees(packed, kept=stays, hiding=hiding)


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
        self.steps: list[ops.Step] = []
        self.meets = 0
        self.arrived: list[tuple[Item, int]] = []  # partials not merged yet, and the number of meets before each

    # Moves

    def fetch(self, kind: Kind, offset: int, wave: int) -> None:
        sends, recvs = self._hand_round(kind, self.schedule.route, offset, wave)
        # Receives first: a send may wait for its receive, a posted receive waits for nothing.
        self.steps += [*recvs, *sends]

    def meet(self, rows: tuple[int, ...], cols: tuple[int, ...], wave: int) -> None:
        """One attend for each set of rows that have the same live columns."""
        self.meets += 1
        peer, part = self.assignment.peer, self._part("row", wave)
        col_shards = sorted(peer("col", self.place, offset) for offset in cols)
        by_cols: dict[tuple[int, ...], list[int]] = {}
        for row in sorted(peer("row", self.place, offset) for offset in rows):
            live = tuple(col for col in col_shards if self.matrix.is_live(row, col, part))
            if live:
                by_cols.setdefault(live, []).append(row)
        for live, row_shards in by_cols.items():
            row_items = tuple([self._item("q", shard, wave) for shard in row_shards])
            grads = tuple([item._replace(kind="do") for item in row_items]) if self.direction == "backward" else ()
            self.steps.append(ops.Attend(row_items, tuple([self._item("kv", shard, wave) for shard in live]), grads))

    def return_partial(self, kind: Kind, offset: int, wave: int) -> None:
        own = self._item(kind, self.place, wave)
        if offset == 0:
            self._merge_arrived(own)
            self._finish_own(kind, wave)
            return
        axis, route = AXIS_OF[kind], self.schedule.partials
        around = (self.matrix, route, axis, self.place, own.part, offset)
        item = self._item(kind, self.assignment.peer(axis, self.place, offset), wave)
        if route == "ring":  # partials that arrived for this shard travel on with it
            self._merge_arrived(item)
        else:
            self._merge_arrived(own, meets_ago=MEETS_THAT_HIDE)
        contributes = self.matrix.needs(axis, self.place, item.shard, item.part)
        if contributes:
            self.steps.append(ops.Finish(item))
        arriving = [self._partial_from(kind, hop, wave) for hop in partial_hops_in(*around)]
        self.steps += arriving
        self.arrived += [(recv.item, self.meets) for recv in arriving]
        if contributes:
            self.steps.append(ops.Send(item, self._rank_of(partial_dest(*around))))

    def gather(self, kind: Kind, wave: int) -> None:
        sends: list[ops.Send] = []
        recvs: list[ops.Recv] = []
        for offset in self._offsets(kind):
            to_send, to_receive = self._hand_round(kind, "direct", offset, wave)
            sends += to_send
            recvs += to_receive
        self._collective("gather", kind, sends, recvs, wave)

    def reduce(self, kind: Kind, wave: int) -> None:
        """Send every partial home; this rank's own is finished by a return at offset 0."""
        sends: list[ops.Send] = []
        recvs: list[ops.Recv] = []
        axis = AXIS_OF[kind]
        for offset in self._offsets(kind):
            item = self._item(kind, self.assignment.peer(axis, self.place, offset), wave)
            if self.matrix.needs(axis, self.place, item.shard, item.part):
                self.steps.append(ops.Finish(item))
                sends.append(ops.Send(item, self._rank_of(item.shard)))
            hops = partial_hops_in(self.matrix, "direct", axis, self.place, item.part, offset)
            recvs += [self._partial_from(kind, hop, wave) for hop in hops]
        self._collective("reduce", kind, sends, recvs, wave)
        self.arrived += [(recv.item, self.meets) for recv in recvs]

    def exchange(self, kind: Kind, wave: int) -> None:
        """Inward, each rank gives its tokens and gets its heads; outward, it gives its heads and gets its tokens."""
        inward = kind in INPUTS[self.direction]
        if not self._is_exchanged(kind, wave):
            return
        group = tuple(self.assignment.ulysses_group(self.rank))
        # In the order of distances round the group: at each, every rank sends to one rank and receives from one.
        sends, recvs = [], []
        for distance in range(1, len(group)):
            dest, source = group[(self.head_slice + distance) % len(group)], group[self.head_slice - distance]
            sent_piece = self._piece(kind, *((self.rank, dest) if inward else (dest, self.rank)), wave)
            received_piece = self._piece(kind, *((source, self.rank) if inward else (self.rank, source)), wave)
            if sent_piece is not None:
                sends.append(ops.Send(sent_piece, dest))
            if received_piece is not None:
                recvs.append(ops.Recv(received_piece, source))
        home, whole = self._home(kind, wave), self._item(kind, self.place, wave)
        if inward and "own" in self.schedule.keep and kind in INPUTS["forward"] and kind not in self.schedule.keep:
            whole = whole._replace(form="kept")
        before, after = (home, whole) if inward else (whole, ops.staged(home))
        self.steps.append(ops.Exchange(before, after, group, tuple(sends), tuple(recvs)))

    def unpack(self, kind: Kind, wave: int) -> None:
        if self._is_exchanged(kind, wave):
            self.steps.append(ops.Unpack(self._item(kind, self.place, wave), self._home(kind, wave)))

    def _is_exchanged(self, kind: Kind, wave: int) -> bool:
        if kind in OUTPUTS[self.direction]:
            return self.matrix.has_shard(AXIS_OF[kind], self.place)
        return self.matrix.is_exchanged(kind, self.rank, self._part(AXIS_OF[kind], wave))

    def _piece(self, kind: Kind, tokens_of: int, heads_of: int, wave: int) -> Item | None:
        """The piece that travels between two ranks in a wave: None if the rank of these heads does not work on these
        tokens then, if no place uses them, or if there are none."""
        axis = AXIS_OF[kind]
        part = self.assignment.part(axis, heads_of, wave)
        if tokens_of not in self.assignment.members(axis, self.place, part):
            return None
        is_used = kind in OUTPUTS[self.direction] or self.matrix.is_wanted(axis, self.place, part)
        if not is_used or not self.matrix.has_tokens(kind, tokens_of):
            return None
        return Item(kind, tokens_of, "piece", self.assignment.head_slice(heads_of), part)

    # Parts of moves

    def _part(self, axis: Axis, wave: int) -> int:
        return self.assignment.part(axis, self.rank, wave)

    def _item(self, kind: Kind, shard: int, wave: int) -> Item:
        return Item(kind, shard, part=self._part(AXIS_OF[kind], wave))

    def _home(self, kind: Kind, wave: int) -> Item:
        return Item(kind, self.rank, "home", part=self.assignment.home_part(AXIS_OF[kind], wave))

    def _hand_round(self, kind: Kind, route: Route, offset: int, wave: int) -> tuple[list[ops.Send], list[ops.Recv]]:
        axis = AXIS_OF[kind]
        around = (self.matrix, route, axis, self.place, self._part(axis, wave), offset)
        sends = [
            ops.Send(self._item(kind, shard, wave), self._rank_of(dest)) for dest, shard in fetch_hops_out(*around)
        ]
        hops = fetch_hops_in(*around)
        return sends, [ops.Recv(self._item(kind, shard, wave), self._rank_of(source)) for source, shard in hops]

    def _rank_of(self, place: int) -> int:
        return self.assignment.rank(place, head_slice=self.head_slice)

    def _merge_arrived(self, total: Item, *, meets_ago: int = 0) -> None:
        """Merge the partials of an item that were posted at least `meets_ago` meets ago."""
        waiting = []
        for item, meets in self.arrived:
            if item._replace(source=None) == total and self.meets - meets >= meets_ago:
                self.steps.append(ops.Merge(item))
            else:
                waiting.append((item, meets))
        self.arrived = waiting

    def _finish_own(self, kind: Kind, wave: int) -> None:
        item = self._item(kind, self.place, wave)
        if self.matrix.has_shard(AXIS_OF[kind], self.place):
            if not self.matrix.is_wanted(AXIS_OF[kind], self.place, item.part):
                self.steps.append(ops.Clear(ops.running(item)))
            self.steps.append(ops.Finish(self._home(kind, wave) if self.assignment.ulysses_degree == 1 else item))

    def _collective(
        self, op: ops.CollectiveOp, kind: Kind, sends: list[ops.Send], recvs: list[ops.Recv], wave: int
    ) -> None:
        """Append a collective if any rank of the group has something to move; then the whole group takes part."""
        axis = AXIS_OF[kind]
        places, part = self.assignment.group(axis, self.place), self._part(axis, wave)
        if any(
            self.matrix.needs(axis, member, shard, part) for member in places for shard in places if member != shard
        ):
            group = tuple(self._rank_of(place) for place in places)
            self.steps.append(ops.Collective(op, group, tuple(sends), tuple(recvs)))

    def _partial_from(self, kind: Kind, hop: Hop, wave: int) -> ops.Recv:
        place, shard = hop
        source = self._rank_of(place)
        return ops.Recv(self._item(kind, shard, wave)._replace(source=source), source)

    def _offsets(self, kind: Kind) -> range:
        return range(1, len(self.assignment.group(AXIS_OF[kind], self.place)))


class _CacheLowering(_Lowering):
    """The steps of a pass over a cache: a rank attends once, with all rows, and results are merged all at once."""

    def __init__(self, matrix: BlockMatrix, schedule: Schedule, direction: Direction, rank: int) -> None:
        super().__init__(matrix, schedule, direction, rank)
        self.shards = [shard for shard in range(matrix.problem.ranks) if matrix.has_shard("row", shard)]
        self.own = [shard for shard in self.shards if shard == rank]
        self.gathered: list[int] = []  # the shards of which this rank has all partials
        self.is_combined = False

    def meet(self, rows: tuple[int, ...], cols: tuple[int, ...], wave: int) -> None:
        queries: Form = "home" if self.matrix.is_replicated else "whole"
        places = {self.assignment.peer("row", self.place, offset) for offset in rows}
        items = tuple([Item("q", shard, queries) for shard in self.shards if shard in places])
        partials = tuple([self._partial(item.shard) for item in items])
        self.steps.append(ops.Decode(items, Item("kv", self.rank, "home"), partials))

    def gather(self, kind: Kind, wave: int) -> None:
        """Every rank sends the others what it has: queries, partials of all rows, or once these are merged, results."""
        if kind == "o" and not self.is_combined:
            sends = [ops.Send(self._partial(shard), other) for other in self._others() for shard in self.shards]
            self._collective("gather", kind, sends, self._arriving(self.shards), wave)
            self.gathered = self.shards
            return
        form: Form = "total" if kind == "o" else "whole"
        sends = [ops.Send(Item(kind, shard, form), other) for other in self._others() for shard in self.own]
        recvs = [ops.Recv(Item(kind, other, form), other) for other in self._others(-1) if other in self.shards]
        self._collective("gather", kind, sends, recvs, wave)

    def reduce(self, kind: Kind, wave: int) -> None:
        sends = [ops.Send(self._partial(other), other) for other in self._others() if other in self.shards]
        self._collective("reduce", kind, sends, self._arriving(self.own), wave)
        self.gathered = self.own

    def combine(self, kind: Kind, wave: int) -> None:
        for shard in self.gathered:
            partials = tuple([Item(kind, shard, source=rank) for rank in range(self.matrix.problem.ranks)])
            if partials[self.rank] != self._partial(shard):  # its place among the others
                self.steps.append(ops.Pack(self._partial(shard), partials[self.rank]))
            self.steps.append(ops.Combine(partials, Item(kind, shard, "total")))
        self.is_combined = True

    def _partial(self, shard: int) -> Item:
        """This rank's own partial. If it is the only one, it is made in its place among those of other ranks; a rank
        without others has the whole result at once."""
        if self.matrix.problem.ranks == 1:
            return Item("o", shard, "total")
        return Item("o", shard, source=self.rank if len(self.shards) == 1 else None)

    def _others(self, direction: Literal[1, -1] = 1) -> list[int]:
        """The other ranks, the next one first, so that not all send to one; or in the order in which they send here."""
        ranks = self.matrix.problem.ranks
        return [(self.rank + direction * ahead) % ranks for ahead in range(1, ranks)]

    def _arriving(self, shards: Sequence[int]) -> list[ops.Recv]:
        return [ops.Recv(Item("o", shard, source=other), other) for other in self._others(-1) for shard in shards]


def with_packs(
    steps: Sequence[ops.Step], form: Form, *, own: set[Item], kept: Collection[tuple[Item, ...]] = ()
) -> list[ops.Step]:
    """The steps with the rank's own inputs packed before first use, where they travel, are kept or share a buffer.

    An input that is only attended by itself is read in its other form, with no copy.
    """
    packed = {send.item for step in steps for send in ops.transfers(step)[0]}
    packed.update(item for group in (*shared_buffers(steps), *kept) for item in group)
    at_home = {item: item._replace(form=form) for item in own - packed}
    waiting = own & packed
    result: list[ops.Step] = []
    for step in steps:
        for item in sorted(waiting.intersection(effects(step).reads)) if waiting else ():
            result.append(ops.Pack(item._replace(form=form), item))
            waiting.discard(item)
        result.append(_renamed(step, at_home) if at_home and isinstance(step, ops.Attend) else step)
    return result


def _renamed(step: ops.Attend, names: dict[Item, Item]) -> ops.Attend:
    rows, cols, grads = (tuple([names.get(i, i) for i in side]) for side in (step.rows, step.cols, step.grads))
    return ops.Attend(rows, cols, grads)


def with_frees(steps: Sequence[ops.Step], *, kept: Collection[Item] = (), hiding: int = 1) -> tuple[ops.Step, ...]:
    """The steps with every item freed after its last use, except the caller's tensors and kept items.

    An input that leaves in its last use is freed after the next attend, a partial after the next `hiding` ones: freeing
    waits until it has left, and by then there was something to hide behind.
    """
    last_use: dict[Item, int] = {}
    for index, step in enumerate(steps):
        done = effects(step)
        last_use.update(dict.fromkeys((*done.reads, *done.writes, *done.adds), index))
        for item in done.frees:
            del last_use[item]
    freed_after: dict[int, list[ops.Step]] = {}
    for item, index in last_use.items():
        if item.form not in ("home", "total") and item not in kept:
            freed_after.setdefault(_free_point(steps, index, hiding), []).append(ops.Free(item))
    return tuple(s for index, step in enumerate(steps) for s in (step, *freed_after.get(index, ())))


def _free_point(steps: Sequence[ops.Step], last_use: int, hiding: int) -> int:
    step = steps[last_use]
    leaving = ops.in_flight(step)[1]
    if not leaving:
        return last_use
    # A rank soon needs the input it receives in the turn in which it passes one on; the send is over by then.
    wanted = 1 if leaving[0].kind in ("q", "kv", "do") else hiding
    if isinstance(step, ops.Exchange):  # posted long before it is needed, perhaps; what it sends has left when it is
        readers = (at for at in range(last_use + 1, len(steps)) if step.after in effects(steps[at]).reads)
        last_use, wanted = next(readers, last_use), 1
    attends = (index for index in range(last_use, len(steps)) if isinstance(steps[index], ops.Attend))
    return next(islice(attends, wanted - 1, None), len(steps) - 1)


# Routes: who sends what to whom in a move, for one place of the grid. Both ends of a transfer call these functions
# and get the same answer. A hop is (the other place, the shard).
#
# Along a ring, the shard at offset k of a place is at offset k - 1 of the place before it: it travels home →
# successor → … in rising offset, and is received in the move of offset k. Partials travel the same way round: the
# place at offset 1 starts, each place adds its own, and the last one sends to the home. Places that do not need the
# shard are not in its chain.
#
# In a ring of inner rings (see `assignment`), a shard goes from inner ring to inner ring along the places where it
# enters, and from each of these around its inner ring. Links between inner rings carry it once, and early. This is
# LoongTrain's double ring.


def fetch_hops_in(matrix: BlockMatrix, route: Route, axis: Axis, place: int, part: int, offset: int) -> list[Hop]:
    """The shards that a place receives in the move of an offset: at most the one at that offset."""
    shard = matrix.assignment.peer(axis, place, offset)
    if not matrix.needs(axis, place, shard, part):
        return []
    if route == "direct":
        return [(shard, shard)]
    return [(_chain_before(matrix, axis, place, part, offset), shard)]


def fetch_hops_out(matrix: BlockMatrix, route: Route, axis: Axis, place: int, part: int, offset: int) -> list[Hop]:
    """The shards that a place sends in the move of an offset."""
    return _hops_at(matrix, route, axis, place, part, offset, _chain_hops)


def _hops_at(
    matrix: BlockMatrix, route: Route, axis: Axis, place: int, part: int, offset: int, along_ring: _ByOffset
) -> list[Hop]:
    """The hops of a place in a move: along the ring, or direct with the place that has its shard at that offset."""
    if route == "ring":
        key = along_ring.__name__, axis, place, part
        return list(matrix.remember(key, lambda: along_ring(matrix, axis, place, part)).get(offset, ()))
    other = matrix.assignment.peer(axis, place, -offset)
    return [(other, place)] if matrix.needs(axis, other, place, part) else []


def _chain_hops(matrix: BlockMatrix, axis: Axis, place: int, part: int) -> dict[int, list[Hop]]:
    """For each offset, the shards that a place passes on along the ring, each to the next places that need it."""
    hops: dict[int, list[Hop]] = {}
    for held in range(matrix.assignment.size(axis)):
        shard = matrix.assignment.peer(axis, place, held)
        if held and not matrix.needs(axis, place, shard, part):
            continue
        for offset in _next_offsets(matrix, axis, shard, part, held):
            hops.setdefault(offset, []).append((_ahead(matrix, axis, shard, offset), shard))
    return hops


def _next_offsets(matrix: BlockMatrix, axis: Axis, shard: int, part: int, offset: int) -> Iterator[int]:
    """The offsets at which a shard is received from the place at `offset`."""
    size, inner = matrix.assignment.size(axis), matrix.assignment.inner_size(axis)

    def first_in_ring(start: int, stop: int) -> int | None:
        needed = (k for k in range(start, stop) if matrix.needs(axis, _ahead(matrix, axis, shard, k), shard, part))
        return next(needed, None)

    ring_end = offset - offset % inner + inner
    following = first_in_ring(offset + 1, ring_end)
    if following is not None:
        yield following
    if offset % inner:
        return
    for start in range(ring_end, size, inner):
        entry = first_in_ring(start, start + inner)
        if entry is not None:
            yield entry
        if entry == start:  # this place passes the shard on to the following rings
            return


def _ahead(matrix: BlockMatrix, axis: Axis, shard: int, offset: int) -> int:
    """The place that has a shard at this offset."""
    return matrix.assignment.peer(axis, shard, -offset)


def partial_hops_in(matrix: BlockMatrix, route: Route, axis: Axis, place: int, part: int, offset: int) -> list[Hop]:
    """The partials that arrive at a place in a move: those whose sender has them at that offset."""
    return _hops_at(matrix, route, axis, place, part, offset, _chain_partials)


def _chain_partials(matrix: BlockMatrix, axis: Axis, place: int, part: int) -> dict[int, list[Hop]]:
    """For each offset, the partials that arrive along the ring, for each shard that the place adds to."""
    size = matrix.assignment.size(axis)
    hops: dict[int, list[Hop]] = {}
    for own in range(1, size + 1):  # offset `size` is its own shard, at the end of the chain
        shard = matrix.assignment.peer(axis, place, own)
        if own < size and not matrix.needs(axis, place, shard, part):
            continue
        for offset in range(own - 1, 0, -1):
            source = _ahead(matrix, axis, shard, offset)
            if matrix.needs(axis, source, shard, part):
                hops.setdefault(offset, []).append((source, shard))
                break
    return hops


def partial_dest(matrix: BlockMatrix, route: Route, axis: Axis, place: int, part: int, offset: int) -> int:
    """The place that gets the partial of the shard at `offset`: its home, or the next place of the chain."""
    shard = matrix.assignment.peer(axis, place, offset)
    if route == "ring":
        for later in range(offset + 1, matrix.assignment.size(axis)):
            following = _ahead(matrix, axis, shard, later)
            if matrix.needs(axis, following, shard, part):
                return following
    return shard


def _chain_before(matrix: BlockMatrix, axis: Axis, place: int, part: int, offset: int) -> int:
    """The place that passes the shard at `offset` on to this one."""
    inner = matrix.assignment.inner_size(axis)
    shard = matrix.assignment.peer(axis, place, offset)
    entry = offset - offset % inner
    for earlier in (*range(offset - 1, entry, -1), *range(entry if offset > entry else entry - inner, 0, -inner)):
        previous = _ahead(matrix, axis, shard, earlier)
        if matrix.needs(axis, previous, shard, part):
            return previous
    return shard
