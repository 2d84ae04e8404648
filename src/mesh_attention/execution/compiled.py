"""Steps with every offset worked out. Pure: depends on the plan and the rank alone, so it is done once and kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mesh_attention.execution.buffers import Lot, Span
from mesh_attention.kernels.base import CallMask
from mesh_attention.masks import BlockKind, Segment
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.buffers import shared_buffers
from mesh_attention.plan.calls import KernelCall, kernel_calls
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import AXIS_OF, Attend, Item, Step, effects
from mesh_attention.plan.waits import stops


class Piece(NamedTuple):
    """A run of a call's queries (or keys), and where it lies in its running sum."""

    total: Item
    inside: Span | None  # None: all of it
    of_call: Span | None


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
    rows: tuple[Piece, ...]
    cols: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    """A step or a turn of posts, what must have arrived before it, whose sends must be over, and its kernel calls."""

    index: int
    step: Step
    arrivals: tuple[Item, ...]
    departures: tuple[Item, ...]
    calls: tuple[Call, ...] = ()
    turn: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Compiled:
    """One rank's program, ready to walk."""

    plan: Plan
    rank: int
    steps: tuple[Step, ...]
    instructions: tuple[Instruction, ...]
    lots: dict[Item, Lot]
    peak_nbytes: int
    kept: tuple[Item, ...]


def compile_program(plan: Plan, rank: int) -> Compiled:
    program, matrix = plan.program(rank), plan.matrix
    kept = matrix.kept(plan.schedule.keep, rank)
    lots = _lots(program.steps, matrix, kept)
    calls = kernel_calls(program.steps, matrix, kept)
    instructions = []
    for stop in stops(program.steps):
        steps, index = program.steps[stop.span.start : stop.span.stop], stop.span.start
        step = steps[0]
        worked_out = tuple(_call(call, step, lots, matrix) for call in calls.get(index, ()) if isinstance(step, Attend))
        turn = steps if stop.is_turn else ()
        instructions.append(Instruction(index, step, stop.arrivals, stop.departures, worked_out, turn))
    kept_items = tuple(item for group in kept for item in group)
    return Compiled(plan, rank, program.steps, tuple(instructions), lots, program.peak_nbytes, kept_items)


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


def _call(call: KernelCall, attend: Attend, lots: dict[Item, Lot], matrix: BlockMatrix) -> Call:
    problem = matrix.problem
    owner = {s: row for row in attend.rows for s in item_segments(row, matrix)}
    kv_owner = {s: col for col in attend.cols for s in item_segments(col, matrix)}
    q, q_span, rows = _side(call.q, owner, lots, matrix, "dq" if attend.grads else "o")
    kv, kv_span, cols = _side(call.kv, kv_owner, lots, matrix, "dkv")
    form = "full" if call.kind is BlockKind.FULL else "causal" if call.is_plain_causal else "positions"
    mask = CallMask(form, problem.mask, call.q, call.kv, problem.seq_q, problem.seq_kv)  # type: ignore[arg-type]
    do, do_span = None, None
    if attend.grads:
        grad_owner = {s: grad for grad in attend.grads for s in item_segments(grad, matrix)}
        do, do_span, _ = _side(call.q, grad_owner, lots, matrix, "dq")
    return Call(q, q_span, kv, kv_span, do, do_span, mask, rows, cols if attend.grads else ())


def _side(
    segments: tuple[Segment, ...], owner: dict[Segment, Item], lots: dict[Item, Lot], matrix: BlockMatrix, kind: str
) -> tuple[Item, Span | None, tuple[Piece, ...]]:
    """One side of a call: an item that lies in its buffer, the span of the buffer, and the sums its runs belong to."""
    pieces = []
    spans = []
    at, length = 0, sum(map(len, segments))
    for segment in segments:
        item = owner[segment]
        ordinal = item_segments(item, matrix).index(segment)
        spans.append(lots[item].spans[item][ordinal])
        total = Item(kind, item.shard, "running")  # type: ignore[arg-type]
        sum_lot = lay_out((total,), matrix)
        inside = sum_lot.spans[total][ordinal]
        pieces.append(Piece(total, _part(inside, sum_lot.tokens), _part(Span(at, at + len(segment)), length)))
        at += len(segment)
    first = owner[segments[0]]
    return first, _part(Span(spans[0].start, spans[-1].stop), lots[first].tokens), tuple(pieces)


def _part(span: Span, tokens: int) -> Span | None:
    return None if span == (0, tokens) else span
