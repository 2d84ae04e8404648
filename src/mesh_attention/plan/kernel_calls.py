"""Which kernel calls an attend step makes, by shape and mask, and the memory that they need. Calls nothing.

A call covers queries that are adjacent in their buffer and keys that are adjacent in theirs, and is either unmasked or
masked as a whole. Unmasked neighbours are joined; segments that the mask cuts through get one call for each pair. The
exception is a causal mask over the same positions on both sides, such as a zigzag shard's own block: one masked call
covers all of it. Cached keys, which all queries see, are attended apart from new ones: otherwise queries that see
different new keys would be different calls over the whole cache.

A program states only its buffers. A call's output, its gradients and a fused kernel's scratch live until they are added
to the sums; they are counted for cuDNN and flash. The interval kernel, which takes softcap, gradients into the LSE and
short documents, needs its results alone. Kernels that write out the scores take more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, NamedTuple

from mesh_attention.masks import BlockKind, Segment, causal
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.buffer_sizes import held_nbytes, shared_buffers
from mesh_attention.plan.steps import Attend, Direction, Effects, Item, Step

if TYPE_CHECKING:
    from mesh_attention.plan.plan import Plan

MANY_KEYS = 8
"""Keys that all queries see get calls of their own if they are at least this many times the other keys."""


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
        index: _calls(_slots(step.rows, buffer_of, matrix), _slots(step.cols, buffer_of, matrix), matrix)
        for index, step in enumerate(steps)
        if isinstance(step, Attend)
    }


class _Slot(NamedTuple):
    """A segment and its place in its buffer's order."""

    at: int
    segment: Segment


def _slots(items: tuple[Item, ...], buffer_of: dict[Item, tuple[Item, ...]], matrix: BlockMatrix) -> list[_Slot]:
    groups = {id(group): group for group in (buffer_of.get(member, (member,)) for member in items)}
    held, wanted = {item for group in groups.values() for item in group}, set(items)
    segments = sorted(((s, item) for item in held for s in matrix.positions(item)), key=lambda entry: entry[0].start)
    return [_Slot(index, segment) for index, (segment, item) in enumerate(segments) if item in wanted]


def _calls(rows: list[_Slot], cols: list[_Slot], matrix: BlockMatrix) -> tuple[KernelCall, ...]:
    if _is_plain_causal(rows, cols, matrix):
        return (_call(rows, cols, BlockKind.PARTIAL, is_plain_causal=True),)
    calls = []
    rows_of: dict[tuple[_Slot, ...], list[_Slot]] = {}  # for each unmasked run of keys, the queries that see all of it
    kinds_of = [{col: _kind(row, col, matrix) for col in cols} for row in rows]
    seen = _seen_by_all(kinds_of, cols)
    for row, kinds in zip(rows, kinds_of, strict=True):
        for col, kind in kinds.items():
            if kind is BlockKind.PARTIAL:
                calls.append(_call([row], [col], kind, is_plain_causal=_is_plain_causal([row], [col], matrix)))
        whole = [col for col, kind in kinds.items() if kind is BlockKind.FULL]
        for part in (whole[: len(seen)], whole[len(seen) :]):
            for run in _runs(part):
                rows_of.setdefault(run, []).append(row)
    calls += [_call(queries, run, BlockKind.FULL) for run in rows_of for queries in _runs(rows_of[run])]
    return tuple(calls)


def _seen_by_all(kinds_of: Sequence[Mapping[_Slot, BlockKind]], cols: list[_Slot]) -> list[_Slot]:
    """The first keys, which all queries see, if they are most of the keys: cached ones. They get calls of their own, of
    all queries. If they are fewer, or all, it is better to attend them together with the rest."""
    first = list(takewhile(lambda col: all(kinds[col] is BlockKind.FULL for kinds in kinds_of), cols))
    tokens, rest = (sum(len(slot.segment) for slot in part) for part in (first, cols[len(first) :]))
    return first if tokens >= MANY_KEYS * rest > 0 else []


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


def _call(
    rows: Iterable[_Slot], cols: Iterable[_Slot], kind: BlockKind, *, is_plain_causal: bool = False
) -> KernelCall:
    q, kv = (tuple(slot.segment for slot in side) for side in (rows, cols))
    return KernelCall(q, kv, kind, is_plain_causal=is_plain_causal)


# Memory


def peak_nbytes(
    plan: Plan,
    rank: int,
    steps: Sequence[Step],
    calls: Mapping[int, Sequence[KernelCall]],
    *,
    done: Sequence[Effects] | None = None,
) -> int:
    """The most bytes that one rank holds at once. `calls` are the program's, by step; `done` the effects, if known."""
    matrix = plan.matrix
    kept, has_kept = matrix.kept(plan.schedule.keep, rank), plan.direction == "backward"
    held = held_nbytes(steps, matrix, done=done, kept=kept, has_kept=has_kept)
    for index, nbytes in scratch_of_steps(plan, steps, calls).items():
        held[index] += nbytes
    return max(held, default=0)


def scratch_of_steps(plan: Plan, steps: Sequence[Step], calls: Mapping[int, Sequence[KernelCall]]) -> dict[int, int]:
    """The most bytes that a call of each attend takes. In forward they do not depend on the number of keys."""
    matrix, scratch = plan.matrix, {}
    for index, of_step in calls.items():
        needed = [scratch_nbytes(call, matrix, plan.direction) for call in of_step]
        # At home, dO is contiguous already; a part of its heads is not.
        is_at_home = any(item.form == "home" for item in getattr(steps[index], "grads", ()))
        if matrix.assignment.head_shares == 1 and is_at_home:
            needed = [total - _copied_nbytes(call, matrix) for total, call in zip(needed, of_step, strict=True)]
        scratch[index] = max(needed, default=0)
    return scratch


def _copied_nbytes(call: KernelCall, matrix: BlockMatrix) -> int:
    """Bytes of a contiguous copy of dO."""
    problem = matrix.problem
    heads = problem.heads // matrix.assignment.head_shares
    return problem.batch * sum(map(len, call.q)) * heads * problem.head_dim_v * problem.itemsize


def scratch_nbytes(call: KernelCall, matrix: BlockMatrix, direction: Direction) -> int:
    """Bytes of one call: its results, and the scratch of cuDNN or flash.

    Forward: output and LSE. Backward: the gradients, dQ in float32, contiguous dO and LSE, an output that stands in for
    O, and where queries share KV heads, the gradients of K and V for every query head.
    """
    problem, shares = matrix.problem, matrix.assignment.head_shares
    narrow, wide = problem.itemsize, problem.accumulator_itemsize
    qk, v = problem.head_dim_qk, problem.head_dim_v
    heads, kv_heads = problem.heads // shares, problem.kv_heads // shares
    q, kv = (problem.batch * sum(map(len, segments)) for segments in (call.q, call.kv))
    outputs = q * heads * (v * narrow + wide)
    if direction == "forward":
        return outputs
    spread_heads = heads if heads > kv_heads else 0
    gradients = q * heads * qk * (narrow + wide) + kv * (kv_heads + spread_heads) * (qk + v) * narrow
    return outputs + gradients + _copied_nbytes(call, matrix)
