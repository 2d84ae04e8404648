"""Which buffers a program needs, and how many bytes they hold. Allocates nothing; also the size of a cache.

Shards that one attend reads together share a buffer, sorted by position, so that the kernel reads them in one piece; so
do the running sums it adds to; over a cache, so do the partials that are merged at once, and all results. Such a buffer
exists from the first item written into it until the last one is freed. Every other item has its own buffer. The
caller's inputs do not count as held, but packed copies of them do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.steps import Attend, Combine, Decode, Effects, Item, Step, effects


def shared_buffers(steps: Iterable[Step], kept: Iterable[tuple[Item, ...]] = ()) -> tuple[tuple[Item, ...], ...]:
    """Groups of two or more items that must share a buffer, each sorted. Kept items share one buffer per kind."""
    leader: dict[Item, Item] = {}

    def find(item: Item) -> Item:
        while leader[item] != item:
            leader[item] = item = leader[leader[item]]
        return item

    steps = tuple(steps)
    sides = {side for step in steps for side in _sides(step)}
    if any(isinstance(step, Decode) for step in steps):
        sides.add(tuple({item for step in steps for item in effects(step).writes if item.form == "total"}))
    for side in sorted((side for side in sides.union(kept) if len(side) > 1), key=lambda side: list(map(_order, side))):
        for item in side:
            leader.setdefault(item, item)
            leader[find(item)] = find(side[0])
    groups: dict[Item, list[Item]] = {}
    for item in leader:
        groups.setdefault(find(item), []).append(item)
    sorted_groups = (tuple(sorted(group, key=_order)) for group in groups.values())
    return tuple(sorted(sorted_groups, key=lambda group: list(map(_order, group))))


def _order(item: Item) -> tuple[object, ...]:
    """Items as they are sorted: a partial's source may be None."""
    return item._replace(source=-1 if item.source is None else item.source)


def _sides(step: Step) -> Iterator[tuple[Item, ...]]:
    """The groups of items that a step reads, writes or adds to in one piece."""
    match step:
        case Attend(rows, cols, grads):
            yield from (rows, cols, grads)
            sums = effects(step).adds
            yield sums[: len(rows)]
            yield sums[len(rows) :]
        case Decode(rows, _, partials):
            yield from (rows, partials)
        case Combine(partials, _):
            yield partials
        case _:
            pass


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


# The cache of a model, which plans over a cache do not count


BLOCK_TOKENS = 64
"""Tokens of a block, unless a cache is made with another number."""


def blocks_of_rank(tokens: int, *, sequences: int, ranks: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Blocks of a rank for `tokens` tokens in all. Each sequence may leave one block partly empty."""
    return -(-tokens // (ranks * block_tokens)) + sequences


def layer_nbytes(blocks: int, *, token_nbytes: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Bytes of K and V of one layer on a rank. There is one block more, for tokens that the rank does not keep."""
    return (blocks + 1) * block_tokens * token_nbytes
