"""Buffers of a program, and the bytes that they hold.

Shards that one attend reads together share a buffer, sorted by position, so that the kernel reads them in one piece; so
do the running sums it adds to. Such a buffer exists from the first item written into it until the last one is freed.
Every other item has its own buffer. The caller's inputs do not count as held, but packed copies of them do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.steps import Attend, Effects, Item, Step, effects


def shared_buffers(steps: Iterable[Step], kept: Iterable[tuple[Item, ...]] = ()) -> tuple[tuple[Item, ...], ...]:
    """Groups of two or more items that must share a buffer, each sorted. Kept items share one buffer per kind."""
    leader: dict[Item, Item] = {}

    def find(item: Item) -> Item:
        while leader[item] != item:
            leader[item] = item = leader[leader[item]]
        return item

    sides = {side for step in steps if isinstance(step, Attend) for side in _sides(step)}
    for side in sorted(side for side in sides.union(kept) if len(side) > 1):
        for item in side:
            leader.setdefault(item, item)
            leader[find(item)] = find(side[0])
    groups: dict[Item, list[Item]] = {}
    for item in leader:
        groups.setdefault(find(item), []).append(item)
    return tuple(sorted(tuple(sorted(group)) for group in groups.values()))


def _sides(step: Attend) -> Iterator[tuple[Item, ...]]:
    """The groups of items that an attend reads, or adds to, in one piece."""
    yield from (step.rows, step.cols, step.grads)
    sums = effects(step).adds
    yield sums[: len(step.rows)]
    yield sums[len(step.rows) :]


def held_nbytes(
    steps: Sequence[Step],
    matrix: BlockMatrix,
    *,
    done: Sequence[Effects] | None = None,
    kept: tuple[tuple[Item, ...], ...] = (),
    has_kept: bool = False,
) -> list[int]:
    """Bytes held during each step, counting everything allocated during the call. `done` are the effects, if known.

    `has_kept` means that the kept items exist from the start, as in a backward plan.
    """
    done = list(map(effects, steps)) if done is None else done
    allocation_of = {item: group for group in shared_buffers(steps, kept) for item in group}
    allocation_of |= _results(done)
    held = {item for group in kept for item in group} if has_kept else set()
    in_use: dict[tuple[Item, ...], int] = {}
    for item in held:
        allocation = allocation_of.setdefault(item, (item,))
        in_use[allocation] = in_use.get(allocation, 0) + 1
    profile = []
    now = sum(_total(allocation, matrix) for allocation in in_use)
    for _, writes, adds, frees in done:
        for item in writes + adds:
            if item not in held:
                held.add(item)
                allocation = allocation_of.setdefault(item, (item,))
                if not in_use.get(allocation):
                    now += _total(allocation, matrix)
                in_use[allocation] = in_use.get(allocation, 0) + 1
        profile.append(now)
        for item in frees:
            if item in held:
                held.discard(item)
                allocation = allocation_of[item]
                in_use[allocation] -= 1
                if not in_use[allocation]:
                    now -= _total(allocation, matrix)
    return profile


def _results(done: Iterable[Effects]) -> dict[Item, tuple[Item, ...]]:
    """The caller's results: those of all waves are parts of one tensor."""
    by_kind: dict[str, list[Item]] = {}
    for effect in done:
        for item in effect.writes:
            if item.form == "home":
                by_kind.setdefault(item.kind, []).append(item)
    return {item: tuple(group) for group in by_kind.values() for item in group}


def _total(allocation: tuple[Item, ...], matrix: BlockMatrix) -> int:
    return sum(matrix.nbytes(item).total for item in allocation)
