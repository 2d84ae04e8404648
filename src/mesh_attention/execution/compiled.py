"""Steps with every offset worked out. Pure: depends on the plan and the rank alone, so it is done once and kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mesh_attention.execution.buffers import Lot, Span
from mesh_attention.kernels.base import CallMask
from mesh_attention.masks import BlockKind, Segment
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.buffers import shared_buffers
from mesh_attention.plan.calls import KernelCall, kernel_calls
from mesh_attention.plan.memory import peak_nbytes
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import AXIS_OF, Attend, Finish, Item, Kind, Merge, Step, effects, running
from mesh_attention.plan.waits import stops


class Run(NamedTuple):
    """Tokens that lie in one piece in the buffer of some running sums, and in one piece on the other side.

    The other side is what a call gave, a partial that arrived, or where the finished sum goes. `item` is one of the
    sums; `is_first` says that nothing was added there before. Spans of None are everything.
    """

    item: Item
    inside: Span | None
    other: Span | None
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel call: which tokens of which buffers, under which mask, into which sums."""

    q: Item
    q_span: Span | None  # None: the whole buffer
    kv: Item
    kv_span: Span | None
    do: Item | None
    do_span: Span | None
    mask: CallMask
    rows: tuple[Run, ...]
    cols: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    """A step or a turn of posts, and all that the executor has to know of it.

    `arrivals` must be here before it, sends of `departures` must be over. `opens` are the running sums it is the first
    to add to, `runs` what a merge or a finish copies, `blanks` what is finished though nothing was added to it.
    """

    index: int
    step: Step
    arrivals: tuple[Item, ...]
    departures: tuple[Item, ...]
    opens: tuple[Item, ...] = ()
    calls: tuple[Call, ...] = ()
    runs: tuple[Run, ...] = ()
    blanks: tuple[Run, ...] = ()
    turn: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Compiled:
    """One rank's program, ready to walk. `device_nbytes` counts what calls give and need besides all buffers."""

    plan: Plan
    rank: int
    steps: tuple[Step, ...]
    instructions: tuple[Instruction, ...]
    lots: dict[Item, Lot]
    peak_nbytes: int
    device_nbytes: int
    kept: tuple[Item, ...]


def compile_program(plan: Plan, rank: int) -> Compiled:
    program, matrix = plan.program(rank), plan.matrix
    kept = matrix.kept(plan.schedule.keep, rank)
    calls = kernel_calls(program.steps, matrix, kept)
    compiling = _Compiling(matrix, _lots(program.steps, matrix, kept))
    instructions = []
    for stop in stops(program.steps):
        steps, index = program.steps[stop.span.start : stop.span.stop], stop.span.start
        details = compiling.step(steps[0], calls.get(index, ()))
        turn = steps if stop.is_turn else ()
        instructions.append(Instruction(index, steps[0], stop.arrivals, stop.departures, *details, turn))
    return Compiled(
        plan,
        rank,
        program.steps,
        tuple(instructions),
        compiling.lots,
        program.peak_nbytes,
        peak_nbytes(plan, rank, program.steps, calls),
        tuple(item for group in kept for item in group),
    )


def item_segments(item: Item, matrix: BlockMatrix) -> tuple[Segment, ...]:
    """The positions of an item's tokens, in the order they lie in."""
    axis = AXIS_OF[item.kind]
    if item.form in ("home", "piece"):
        return matrix.home_segments(axis, item.shard)
    return matrix.segments(axis, item.shard)


def lay_out(items: Iterable[Item], matrix: BlockMatrix) -> Lot:
    """Side by side, sorted by position."""
    items = tuple(items)
    segments = sorted(
        ((segment, item) for item in items for segment in item_segments(item, matrix)), key=lambda entry: entry[0].start
    )
    spans: dict[Item, list[Span]] = {item: [] for item in items}
    at = 0
    for segment, item in segments:
        spans[item].append(Span(at, at + len(segment)))
        at += len(segment)
    nbytes = sum(matrix.nbytes(item).total for item in items)
    return Lot(items, {item: tuple(runs) for item, runs in spans.items()}, at, nbytes)


def _lots(steps: tuple[Step, ...], matrix: BlockMatrix, kept: tuple[tuple[Item, ...], ...]) -> dict[Item, Lot]:
    lots = {item: lot for group in shared_buffers(steps, kept) for lot in (lay_out(group, matrix),) for item in group}
    for step in steps:
        done = effects(step)
        for item in (*done.reads, *done.writes, *done.adds):
            if item not in lots:
                lots[item] = lay_out((item,), matrix)
    return lots


class _Details(NamedTuple):
    """What an instruction has besides its step and its waits."""

    opens: tuple[Item, ...]
    calls: tuple[Call, ...] = ()
    runs: tuple[Run, ...] = ()
    blanks: tuple[Run, ...] = ()


class _Piece(NamedTuple):
    """One segment of a running sum, and where its tokens are on the other side."""

    total: Item
    ordinal: int
    other: Span


@dataclass
class _Compiling:
    """Walks the steps; knows which segments of which running sums hold something so far."""

    matrix: BlockMatrix
    lots: dict[Item, Lot]
    touched: dict[Item, set[int]] = field(default_factory=dict)
    owners: dict[tuple[Item, ...], dict[Segment, tuple[Item, int]]] = field(default_factory=dict)

    def step(self, step: Step, calls: Sequence[KernelCall]) -> _Details:
        opens = tuple(item for item in effects(step).adds if item not in self.touched)
        for item in opens:
            self.touched[item] = set()
        match step:
            case Attend():
                return _Details(opens, calls=tuple(self._call(call, step) for call in calls))
            case Merge(partial):
                return _Details(opens, runs=self._merged(partial))
            case Finish(item):
                runs, blanks = self._finished(item)
                return _Details(opens, runs=runs, blanks=blanks)
            case _:
                return _Details(opens)

    def _call(self, call: KernelCall, attend: Attend) -> Call:
        problem = self.matrix.problem
        q, q_span = self._span(call.q, attend.rows)
        kv, kv_span = self._span(call.kv, attend.cols)
        do, do_span = self._span(call.q, attend.grads) if attend.grads else (None, None)
        rows = self._touch(self._pieces(call.q, attend.rows, "dq" if attend.grads else "o"))
        cols = self._touch(self._pieces(call.kv, attend.cols, "dkv")) if attend.grads else ()
        form = "full" if call.kind is BlockKind.FULL else "causal" if call.is_plain_causal else "positions"
        mask = CallMask(form, problem.mask, call.q, call.kv, problem.seq_q, problem.seq_kv)  # type: ignore[arg-type]
        return Call(q, q_span, kv, kv_span, do, do_span, mask, rows, cols)

    def _span(self, segments: tuple[Segment, ...], items: tuple[Item, ...]) -> tuple[Item, Span | None]:
        """One side of a call: an item that lies in its buffer, and the span of the buffer."""
        (first, ordinal), (last, last_ordinal) = (self._owner(segments[at], items) for at in (0, -1))
        lot = self.lots[first]
        span = Span(lot.spans[first][ordinal].start, lot.spans[last][last_ordinal].stop)
        return first, _part(span, lot.tokens)

    def _owner(self, segment: Segment, items: tuple[Item, ...]) -> tuple[Item, int]:
        """Which of the items a segment belongs to, and the how manieth of its segments it is."""
        if items not in self.owners:
            self.owners[items] = {s: (i, at) for i in items for at, s in enumerate(item_segments(i, self.matrix))}
        return self.owners[items][segment]

    def _pieces(self, segments: tuple[Segment, ...], items: tuple[Item, ...], kind: Kind) -> list[_Piece]:
        """The sums that a call's tokens belong to."""
        pieces, at = [], 0
        for segment in segments:
            item, ordinal = self._owner(segment, items)
            pieces.append(_Piece(running(kind, item.shard), ordinal, Span(at, at + len(segment))))
            at += len(segment)
        return pieces

    def _merged(self, partial: Item) -> tuple[Run, ...]:
        total = running(partial.kind, partial.shard)
        return self._touch([_Piece(total, at, span) for at, span in enumerate(self.lots[partial].spans[partial])])

    def _finished(self, item: Item) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
        total = running(item.kind, item.shard)
        held = self.touched.pop(total)
        pieces = [_Piece(total, at, span) for at, span in enumerate(self.lots[item].spans[item])]
        untouched = [piece for piece in pieces if piece.ordinal not in held]
        return self._joined([(piece, False) for piece in pieces]), self._joined([(piece, True) for piece in untouched])

    def _touch(self, pieces: list[_Piece]) -> tuple[Run, ...]:
        flagged = [(piece, piece.ordinal not in self.touched[piece.total]) for piece in pieces]
        for piece in pieces:
            self.touched[piece.total].add(piece.ordinal)
        return self._joined(flagged)

    def _joined(self, flagged: list[tuple[_Piece, bool]]) -> tuple[Run, ...]:
        """Neighbours on both sides become one run."""
        runs: list[tuple[Item, Span, Span, bool]] = []
        for piece, is_first in flagged:
            item, inside, other = piece.total, self.lots[piece.total].spans[piece.total][piece.ordinal], piece.other
            if runs:
                before, inside_before, other_before, was_first = runs[-1]
                is_same_buffer = self.lots[before].items == self.lots[item].items
                is_next = inside_before.stop == inside.start and other_before.stop == other.start
                if is_same_buffer and is_next and was_first == is_first:
                    runs.pop()
                    inside, other = Span(inside_before.start, inside.stop), Span(other_before.start, other.stop)
            runs.append((item, inside, other, is_first))
        whole = sum(piece.other.stop - piece.other.start for piece, _ in flagged)
        return tuple(
            Run(item, _part(inside, self.lots[item].tokens), _part(other, whole), is_first)
            for item, inside, other, is_first in runs
        )


def _part(span: Span, tokens: int) -> Span | None:
    return None if span == (0, tokens) else span
