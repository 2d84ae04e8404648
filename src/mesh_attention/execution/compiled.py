"""Programs compiled for the executor: steps with every offset worked out. Depends on plan and rank only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

from mesh_attention.execution.buffers import Allocation, Span, TokenSpan, paired, token_format
from mesh_attention.kernels.base import CallMask
from mesh_attention.masks import BlockKind, Segment
from mesh_attention.plan import steps as ops
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.buffer_sizes import held_nbytes, shared_buffers
from mesh_attention.plan.format import format_step
from mesh_attention.plan.kernel_calls import KernelCall, kernel_calls, scratch_of_steps
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import Stop, stops
from mesh_attention.plan.steps import AXIS_OF, Item, Kind, effects, running, transfers


class Stretch(NamedTuple):
    """Tokens that are consecutive both in the buffer of some running sums and on the other side.

    The other side is the result of a call, a partial that arrived, or the destination of a finished sum. `item` is one
    of the sums; `is_first` says that nothing was added there before. A span of None is everything.
    """

    item: Item
    inside: Span | None
    other: Span | None
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """One kernel call: which tokens of which buffers, under which mask, into which sums."""

    q: Item
    q_span: TokenSpan | None  # None: the whole buffer
    kv: Item
    kv_span: TokenSpan | None
    do: Item | None
    do_span: TokenSpan | None
    mask: CallMask
    rows: tuple[Stretch, ...]
    cols: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    """A step or a turn, and everything the executor needs to know about it.

    Receives of `arrivals` and sends of `departures` must be over before it. `opens` are the running sums that it is the
    first to add to, `stretches` are copied by a merge or a finish, `blanks` are finished although nothing was added.
    """

    index: int
    step: ops.Step
    arrivals: tuple[Item, ...]
    departures: tuple[Item, ...]
    opens: tuple[Item, ...] = ()
    calls: tuple[CompiledCall, ...] = ()
    stretches: tuple[Stretch, ...] = ()
    blanks: tuple[Stretch, ...] = ()
    turn: tuple[ops.Step, ...] = ()


class Exchanged(NamedTuple):
    """A piece of an exchange: its chunks in the buffer that it is sent from or received into.

    `at_home` is its place among the staged pieces; None for a piece of another rank's tokens, which is in the buffer of
    the whole item.
    """

    item: Item
    chunks: tuple[TokenSpan, ...]
    at_home: TokenSpan | None


@dataclass(frozen=True, slots=True)
class Compiled:
    """One rank's program, ready to walk."""

    plan: Plan
    rank: int
    steps: tuple[ops.Step, ...]
    instructions: tuple[Instruction, ...]
    allocations: dict[Item, Allocation]
    exchanged: dict[Item, tuple[Exchanged, ...]]
    """For the whole items of exchanges: the pieces that travel."""
    copied: dict[Item, tuple[tuple[Span, Span], ...]]
    """For what is packed, and for the whole items of exchanges: spans of this rank's tokens at home, and there."""
    kept: tuple[Item, ...]
    scratch: dict[int, int]
    """Bytes of scratch, beside the buffers, that the calls of each attend take."""

    @property
    def peak_nbytes(self) -> int:
        """The most bytes of buffers that the rank holds at once."""
        return max(self._held(), default=0)

    @property
    def device_nbytes(self) -> int:
        """The most bytes of buffers and scratch."""
        return max((nbytes + self.scratch.get(index, 0) for index, nbytes in enumerate(self._held())), default=0)

    def _held(self) -> list[int]:
        matrix, is_backward = self.plan.matrix, self.plan.direction == "backward"
        return held_nbytes(
            self.steps, matrix, kept=matrix.kept(self.plan.schedule.keep, self.rank), has_kept=is_backward
        )


def compile_program(plan: Plan, rank: int) -> Compiled:
    program, matrix = plan.steps(rank), plan.matrix
    kept = matrix.kept(plan.schedule.keep, rank)
    calls = kernel_calls(program, matrix, kept)
    compiling = _Compiling(program, matrix, _allocations(program, matrix, kept))
    instructions = tuple([compiling.instruction(stop, calls.get(stop.span.start, ())) for stop in stops(program)])
    return Compiled(
        plan,
        rank,
        program,
        instructions,
        compiling.allocations,
        *_moved(program, matrix, compiling.allocations, rank),
        tuple(item for group in kept for item in group),
        scratch_of_steps(plan, program, calls),
    )


def stretched(compiled: Compiled, plan: Plan) -> Compiled:
    """The same program for segments of keys of other lengths, as `plan` has them.

    Both plans have the same moves and queries, the mask leaves the same segments to the same queries, whole or in part,
    and items have as many segments: then the steps and calls are the same, and only spans and sizes differ.
    """
    steps, old, new = compiled.steps, compiled.plan.matrix, plan.matrix
    assert plan.direction == "forward"
    assert not compiled.kept
    changed = {
        a.items: lay_out(a.items, new) for a in compiled.allocations.values() if AXIS_OF[a.items[0].kind] == "col"
    }
    allocations = {item: changed.get(a.items, a) for item, a in compiled.allocations.items()}
    now: dict[tuple[tuple[Item, ...], Segment], tuple[Segment, TokenSpan]] = {}  # of segments in buffers
    for items, allocation in changed.items():
        for item in items:  # what is staged has one span, and no call reads it
            places = zip(old.positions(item), new.positions(item), allocation.spans[item], strict=False)
            now |= {(items, before): (after, span) for before, after, span in places}

    def call(known: CompiledCall) -> CompiledCall:
        items, problem = compiled.allocations[known.kv].items, plan.problem
        kv, spans = zip(*(now[items, segment] for segment in known.mask.kv), strict=True)
        span = None if known.kv_span is None else TokenSpan(spans[0].start, spans[-1].stop)
        mask = CallMask(known.mask.form, problem.mask, known.mask.q, kv, problem.seq_q, problem.seq_kv)
        return replace(known, kv_span=span, mask=mask)

    instructions = tuple(
        replace(known, calls=tuple(map(call, known.calls))) if known.calls else known for known in compiled.instructions
    )
    moved = _moved(steps, new, allocations, compiled.rank)
    return Compiled(plan, compiled.rank, steps, instructions, allocations, *moved, compiled.kept, compiled.scratch)


def peers_of(compiled: Compiled) -> tuple[set[int], set[int]]:
    """The ranks that a program sends to, and those it receives from."""
    ends = [transfers(step) for step in compiled.steps]
    dests = {send.dest for sends, _ in ends for send in sends}
    return dests, {recv.source for _, recvs in ends for recv in recvs}


def describe_post(compiled: Compiled, apart: bool, index: int) -> tuple[str, tuple[int, ...]]:
    """The step of the pass's post with this index, counted from 0, and the ranks at the other ends. `apart` says that
    what arrives and what leaves are posted one after the other."""
    posts: list[tuple[int, list[int]]] = []
    for stop in stops(compiled.steps):
        ends = [transfers(step) for step in compiled.steps[stop.span.start : stop.span.stop]]
        sources = [recv.source for _, recvs in ends for recv in recvs]
        dests = [send.dest for sends, _ in ends for send in sends]
        if apart:
            posts += [(stop.span.start, peers) for peers in (sources, dests) if peers]
        elif sources or dests:
            posts.append((stop.span.start, sources + dests))
    at, peers = posts[index]
    return f"step {at} '{format_step(compiled.steps[at])}'", tuple(dict.fromkeys(peers))


def lay_out(items: Iterable[Item], matrix: BlockMatrix) -> Allocation:
    """One allocation for all items, side by side, sorted by position."""
    items = tuple(items)
    segments = sorted(
        ((segment, item) for item in items for segment in matrix.positions(item)), key=lambda entry: entry[0].start
    )
    spans: dict[Item, list[TokenSpan]] = {item: [] for item in items}
    at = 0
    for segment, item in segments:
        spans[item].append(TokenSpan(at, at + len(segment)))
        at += len(segment)
    nbytes = sum(matrix.nbytes(item).total for item in items)
    if items[0].form == "staged":
        at *= matrix.assignment.staged_pieces(AXIS_OF[items[0].kind], items[0].part)
        spans = {items[0]: [TokenSpan(0, at)]}
    shares, is_running = matrix.assignment.head_shares, items[0].form == "running"
    fmt = token_format(items[0].kind, matrix.problem, shares, is_running, is_over_cache=matrix.is_over_cache)
    return Allocation(items, {item: tuple(of_item) for item, of_item in spans.items()}, at, nbytes, fmt)


def _allocations(
    steps: tuple[ops.Step, ...], matrix: BlockMatrix, kept: tuple[tuple[Item, ...], ...]
) -> dict[Item, Allocation]:
    allocations: dict[Item, Allocation] = {}
    for group in shared_buffers(steps, kept):
        allocations.update(dict.fromkeys(group, lay_out(group, matrix)))
    for step in steps:
        done = effects(step)
        for item in (*done.reads, *done.writes, *done.adds, *done.frees):
            if item not in allocations:
                allocations[item] = lay_out((item,), matrix)
    return allocations


Held = dict[tuple[Item, int], tuple[TokenSpan, ...]]
Moved = tuple[dict[Item, tuple[Exchanged, ...]], dict[Item, tuple[tuple[Span, Span], ...]]]


def _moved(steps: tuple[ops.Step, ...], matrix: BlockMatrix, allocations: dict[Item, Allocation], rank: int) -> Moved:
    """What a program exchanges, and what it copies."""
    held = _held_in_wholes(steps, matrix, allocations)
    return _exchanged(steps, matrix, held), _copied(steps, allocations, held, rank, matrix.problem.batch)


def _held_in_wholes(steps: tuple[ops.Step, ...], matrix: BlockMatrix, allocations: dict[Item, Allocation]) -> Held:
    """For each item that an exchange makes or takes apart: the spans of each rank's tokens in its buffer."""
    held: Held = {}
    for step in steps:
        if isinstance(step, ops.Exchange):
            whole = _whole(step)
            axis = AXIS_OF[whole.kind]
            spans = list(zip(matrix.positions(whole), allocations[whole].spans[whole], strict=True))
            for rank in matrix.assignment.members(axis, whole.shard, whole.part):
                held[whole, rank] = tuple(_spans_of(matrix.home_segments(axis, rank), spans))
    return held


def _exchanged(steps: tuple[ops.Step, ...], matrix: BlockMatrix, held: Held) -> dict[Item, tuple[Exchanged, ...]]:
    exchanged: dict[Item, tuple[Exchanged, ...]] = {}
    for step in steps:
        if isinstance(step, ops.Exchange):
            whole, at = _whole(step), 0
            ours, theirs = [send.item for send in step.sends], [recv.item for recv in step.recvs]
            if step.before is whole:
                ours, theirs = theirs, ours
            pieces = [Exchanged(item, held[whole, item.shard], None) for item in theirs]
            for item in ours:
                lengths = [len(segment) for segment in matrix.positions(item)]
                starts = [at + sum(lengths[:index]) for index in range(len(lengths) + 1)]
                chunks = tuple(TokenSpan(start, stop) for start, stop in pairwise(starts))
                pieces.append(Exchanged(item, chunks, TokenSpan(at, starts[-1])))
                at = starts[-1]
            exchanged[whole] = tuple(pieces)
    return exchanged


def _whole(step: ops.Exchange) -> Item:
    return step.after if step.before.form == "home" else step.before


def _copied(
    steps: tuple[ops.Step, ...],
    allocations: dict[Item, Allocation],
    held: Held,
    rank: int,
    batch: int,
) -> dict[Item, tuple[tuple[Span, Span], ...]]:
    copied: dict[Item, tuple[tuple[Span, Span], ...]] = {}
    for step in steps:
        if isinstance(step, ops.Pack):
            here, there = allocations[step.before].spans[step.before], allocations[step.after].spans[step.after]
            copied[step.after] = _pairs(here, there, batch)
    for (whole, owner), there in held.items():
        if owner == rank:
            lengths = [stop - start for start, stop in there]
            starts = [sum(lengths[:at]) for at in range(len(there))]
            here = tuple(TokenSpan(start, start + length) for start, length in zip(starts, lengths, strict=True))
            copied[whole] = _pairs(here, there, batch)
    return copied


def _pairs(here: Sequence[TokenSpan], there: Sequence[TokenSpan], batch: int) -> tuple[tuple[Span, Span], ...]:
    spans = [(None, one, other) for one, other in zip(here, there, strict=True)]
    return tuple((one, other) for _, one, other in paired(spans, batch))


def _spans_of(segments: Iterable[Segment], held: list[tuple[Segment, TokenSpan]]) -> Iterator[TokenSpan]:
    for segment in segments:
        outer, span = next((s, span) for s, span in held if s.step == segment.step and segment.start in s)
        start = span.start + outer.index(segment.start)
        yield TokenSpan(start, start + len(segment))


class _Part(NamedTuple):
    """One segment of a running sum, and where its tokens are on the other side."""

    total: Item
    ordinal: int
    other: TokenSpan


@dataclass
class _Compiling:
    """Compiles steps in order; `touched` has the segments of running sums that were added to so far."""

    steps: tuple[ops.Step, ...]
    matrix: BlockMatrix
    allocations: dict[Item, Allocation]
    touched: dict[Item, set[int]] = field(default_factory=dict)
    owners: dict[tuple[Item, ...], dict[Segment, tuple[Item, int]]] = field(default_factory=dict)

    def instruction(self, stop: Stop, calls: Sequence[KernelCall]) -> Instruction:
        steps, index = self.steps[stop.span.start : stop.span.stop], stop.span.start
        step, turn = steps[0], steps if stop.is_turn else ()
        opens = tuple(item for item in effects(step).adds if item not in self.touched)
        self.touched |= {item: set() for item in opens}
        compiled_calls: tuple[CompiledCall, ...] = ()
        stretches: tuple[Stretch, ...] = ()
        blanks: tuple[Stretch, ...] = ()
        match step:
            case ops.Attend():
                compiled_calls = tuple(self._call(call, step) for call in calls)
            case ops.Merge(partial):
                stretches = self._merged(partial)
            case ops.Finish(item):
                stretches, blanks = self._finished(item)
            case _:
                pass
        return Instruction(index, step, stop.arrivals, stop.departures, opens, compiled_calls, stretches, blanks, turn)

    def _call(self, call: KernelCall, attend: ops.Attend) -> CompiledCall:
        problem = self.matrix.problem
        q, q_span = self._span(call.q, attend.rows)
        kv, kv_span = self._span(call.kv, attend.cols)
        do, do_span = self._span(call.q, attend.grads) if attend.grads else (None, None)
        rows = self._touch(self._parts(call.q, attend.rows, "dq" if attend.grads else "o"))
        cols = self._touch(self._parts(call.kv, attend.cols, "dkv")) if attend.grads else ()
        form = "full" if call.kind is BlockKind.FULL else "causal" if call.is_plain_causal else "positions"
        mask = CallMask(form, problem.mask, call.q, call.kv, problem.seq_q, problem.seq_kv)  # type: ignore[arg-type]
        return CompiledCall(q, q_span, kv, kv_span, do, do_span, mask, rows, cols)

    def _span(self, segments: tuple[Segment, ...], items: tuple[Item, ...]) -> tuple[Item, TokenSpan | None]:
        """One side of a call: an item in its buffer, and the span of the buffer."""
        (first, ordinal), (last, last_ordinal) = (self._owner(segments[at], items) for at in (0, -1))
        allocation = self.allocations[first]
        span = TokenSpan(allocation.spans[first][ordinal].start, allocation.spans[last][last_ordinal].stop)
        return first, _unless_all(span, allocation.tokens)

    def _owner(self, segment: Segment, items: tuple[Item, ...]) -> tuple[Item, int]:
        """The item a segment belongs to, and its index among the item's segments."""
        if items not in self.owners:
            self.owners[items] = {s: (i, at) for i in items for at, s in enumerate(self.matrix.positions(i))}
        return self.owners[items][segment]

    def _parts(self, segments: tuple[Segment, ...], items: tuple[Item, ...], kind: Kind) -> list[_Part]:
        """The parts of running sums that the tokens of a call belong to."""
        parts, at = [], 0
        for segment in segments:
            item, ordinal = self._owner(segment, items)
            parts.append(_Part(running(item, kind), ordinal, TokenSpan(at, at + len(segment))))
            at += len(segment)
        return parts

    def _merged(self, partial: Item) -> tuple[Stretch, ...]:
        total = running(partial)
        return self._touch([_Part(total, at, span) for at, span in enumerate(self.allocations[partial].spans[partial])])

    def _finished(self, item: Item) -> tuple[tuple[Stretch, ...], tuple[Stretch, ...]]:
        total = running(item)
        held = self.touched.pop(total)
        parts = [_Part(total, at, span) for at, span in enumerate(self.allocations[item].spans[item])]
        untouched = [part for part in parts if part.ordinal not in held]
        return self._joined([(part, False) for part in parts]), self._joined([(part, True) for part in untouched])

    def _touch(self, parts: list[_Part]) -> tuple[Stretch, ...]:
        flagged = [(part, part.ordinal not in self.touched[part.total]) for part in parts]
        for part in parts:
            self.touched[part.total].add(part.ordinal)
        return self._joined(flagged)

    def _joined(self, flagged: list[tuple[_Part, bool]]) -> tuple[Stretch, ...]:
        """Join neighbours on both sides into one stretch."""
        joined: list[tuple[Item, TokenSpan, TokenSpan, bool]] = []
        for part, is_first in flagged:
            item, inside, other = part.total, self.allocations[part.total].spans[part.total][part.ordinal], part.other
            if joined:
                before, inside_before, other_before, was_first = joined[-1]
                is_same_buffer = self.allocations[before].items == self.allocations[item].items
                is_next = inside_before.stop == inside.start and other_before.stop == other.start
                if is_same_buffer and is_next and was_first == is_first:
                    joined.pop()
                    inside, other = (
                        TokenSpan(inside_before.start, inside.stop),
                        TokenSpan(other_before.start, other.stop),
                    )
            joined.append((item, inside, other, is_first))
        whole = sum(part.other.stop - part.other.start for part, _ in flagged)
        owner = {(self.allocations[item].items, inside.start): item for item, inside, _, _ in joined}
        spans = [((self.allocations[item].items, is_first), inside, other) for item, inside, other, is_first in joined]
        stretches = []
        for (items, is_first), ours, theirs in paired(spans, self.matrix.problem.batch):
            item = owner[items, ours.start]
            tokens = self.allocations[item].tokens
            stretches.append(Stretch(item, _unless_all(ours, tokens), _unless_all(theirs, whole), is_first))
        return tuple(stretches)


AnySpan = TypeVar("AnySpan", TokenSpan, Span)


def _unless_all(span: AnySpan, tokens: int) -> AnySpan | None:
    return None if span == (0, tokens) else span
