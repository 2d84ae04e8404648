"""Kernel calls: how one attend is cut into rectangles that a kernel takes whole.

A buffer holds its shards' segments sorted by position. A call covers queries that are adjacent in their buffer and keys
that are adjacent in theirs, and is either unmasked or masked as a whole. Unmasked neighbours are joined; segments that
the mask cuts through get one call for each pair. The exception is a causal mask over the same positions on both sides,
such as a zigzag shard's own block: one masked call covers all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from mesh_attention.masks import BlockKind, Segment, causal
from mesh_attention.plan.assignment import Axis
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.buffers import shared_buffers
from mesh_attention.plan.steps import Attend, Item, Step


@dataclass(frozen=True, slots=True)
class KernelCall:
    """Positions of the queries and the keys of one call, and which part of it the mask leaves.

    `is_plain_causal`: query i sees the keys up to i, counted within the call.
    """

    q: tuple[Segment, ...]
    kv: tuple[Segment, ...]
    kind: BlockKind
    is_plain_causal: bool = False


def kernel_calls(
    steps: Iterable[Step], matrix: BlockMatrix, kept: tuple[tuple[Item, ...], ...] = ()
) -> dict[int, tuple[KernelCall, ...]]:
    """The calls of each attend of a program, by the attend's index."""
    steps = tuple(steps)
    buffer_of = {item: group for group in shared_buffers(steps, kept) for item in group}
    return {
        index: _calls(_slots(step.rows, "row", buffer_of, matrix), _slots(step.cols, "col", buffer_of, matrix), matrix)
        for index, step in enumerate(steps)
        if isinstance(step, Attend)
    }


class _Slot(NamedTuple):
    """A segment and its place in its buffer's order."""

    at: int
    segment: Segment


def _slots(
    items: tuple[Item, ...], axis: Axis, buffer_of: dict[Item, tuple[Item, ...]], matrix: BlockMatrix
) -> list[_Slot]:
    wanted = {item.shard for item in items}
    shards = {item.shard for member in items for item in buffer_of.get(member, (member,))}
    segments = sorted(((s, shard) for shard in shards for s in matrix.segments(axis, shard)), key=lambda e: e[0].start)
    return [_Slot(index, segment) for index, (segment, shard) in enumerate(segments) if shard in wanted]


def _calls(rows: list[_Slot], cols: list[_Slot], matrix: BlockMatrix) -> tuple[KernelCall, ...]:
    if _is_plain_causal(rows, cols, matrix):
        q, kv = (tuple(slot.segment for slot in side) for side in (rows, cols))
        return (KernelCall(q, kv, BlockKind.PARTIAL, is_plain_causal=True),)
    calls = []
    rows_of: dict[tuple[_Slot, ...], list[_Slot]] = {}  # for each unmasked run of keys, the queries that see all of it
    for row in rows:
        kinds = {col: _kind(row, col, matrix) for col in cols}
        calls += [_call([row], [col], kind) for col, kind in kinds.items() if kind is BlockKind.PARTIAL]
        for run in _runs(col for col, kind in kinds.items() if kind is BlockKind.FULL):
            rows_of.setdefault(run, []).append(row)
    calls += [_call(queries, run, BlockKind.FULL) for run in rows_of for queries in _runs(rows_of[run])]
    return tuple(calls)


def _is_plain_causal(rows: list[_Slot], cols: list[_Slot], matrix: BlockMatrix) -> bool:
    """True if both sides have the same rising positions, adjacent in both buffers: causal by position is then causal
    by index."""
    problem = matrix.problem
    if problem.mask != causal() or problem.seq_q != problem.seq_kv:
        return False
    q, kv = ([slot.segment for slot in side] for side in (rows, cols))
    rising = all(a[-1] < b[0] for a, b in pairwise(q))
    return q == kv and rising and len(list(_runs(rows))) == len(list(_runs(cols))) == 1


def _kind(row: _Slot, col: _Slot, matrix: BlockMatrix) -> BlockKind:
    problem = matrix.problem
    return problem.mask.kind(row.segment, col.segment, seq_q=problem.seq_q, seq_kv=problem.seq_kv)


def _runs(slots: Iterable[_Slot]) -> Iterator[tuple[_Slot, ...]]:
    """The segments, cut into runs that are adjacent in the buffer."""
    run: tuple[_Slot, ...] = ()
    for slot in slots:
        if run and slot.at != run[-1].at + 1:
            yield run
            run = ()
        run += (slot,)
    if run:
        yield run


def _call(rows: Iterable[_Slot], cols: Iterable[_Slot], kind: BlockKind) -> KernelCall:
    return KernelCall(tuple(slot.segment for slot in rows), tuple(slot.segment for slot in cols), kind)
