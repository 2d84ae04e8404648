"""Who sends what to whom in a move, for one place of the grid.

Both ends of a transfer call these functions and get the same answer. A hop is (the other place, the shard).

Along a ring, the shard at offset k of a place is at offset k - 1 of the place before it: it travels home → successor →
… in rising offset, and is received in the move of offset k. Partials travel the same way round: the place at offset 1
starts, each place adds its own, and the last one sends to the home. Places that do not need the shard are not in its
chain.

In a ring of inner rings (see `assignment`), a shard goes from inner ring to inner ring along the places where it
enters, and from each of these around its inner ring. Links between inner rings carry it once, and early. This is
LoongTrain's double ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mesh_attention.plan.assignment import Axis
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.schedule import Route

Hop = tuple[int, int]
_ByOffset = Callable[[BlockMatrix, Axis, int, int], dict[int, list[Hop]]]


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
