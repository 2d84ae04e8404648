"""Who sends what to whom at a turn, for one place of the grid.

Both ends of a transfer call these functions and come to the same answer. A hop is (the other place, the shard).

Along a ring, the shard at offset k of a place is at offset k - 1 of the place before it: it travels home → successor →
… in rising offset, and is received at turn k. Partials travel the same way round: the place at offset 1 starts, each
adds its own, and after the last offset comes the home. Places that do not need the shard are not in its chain.
"""

from __future__ import annotations

from mesh_attention.plan.assignment import Axis
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.schedule import Route

Hop = tuple[int, int]


def fetch_hops_in(matrix: BlockMatrix, route: Route, axis: Axis, place: int, turn: int) -> list[Hop]:
    """What a place receives at a turn: at most the shard at that offset."""
    shard = matrix.assignment.peer(axis, place, turn)
    if not matrix.needs(axis, place, shard):
        return []
    if route == "direct":
        return [(shard, shard)]
    return [(_chain_before(matrix, axis, place, turn), shard)]


def fetch_hops_out(matrix: BlockMatrix, route: Route, axis: Axis, place: int, turn: int) -> list[Hop]:
    """What a place sends at a turn: what another place receives from it at that turn."""
    if route == "ring":
        return list(matrix.remember(("out", axis, place), lambda: _chain_hops(matrix, axis, place)).get(turn, ()))
    dest = matrix.assignment.peer(axis, place, -turn)
    return [(dest, place)] if matrix.needs(axis, dest, place) else []


def _chain_hops(matrix: BlockMatrix, axis: Axis, place: int) -> dict[int, list[Hop]]:
    """By turn, what a place passes on along the ring: each shard it holds, to the next place that needs it."""
    ring = matrix.assignment.group(axis, place)
    at, size = ring.index(place), len(ring)
    hops: dict[int, list[Hop]] = {}
    for offset in range(size):
        shard = ring[(at - offset) % size]
        if offset and not matrix.needs(axis, place, shard):
            continue
        for ahead in range(1, size - offset):
            dest = ring[(at + ahead) % size]
            if matrix.needs(axis, dest, shard):
                hops.setdefault(offset + ahead, []).append((dest, shard))
                break
    return hops


def partial_hops_in(matrix: BlockMatrix, route: Route, axis: Axis, place: int, turn: int) -> list[Hop]:
    """The partials that arrive at a place at a turn: those whose sender has them at that offset."""
    if route == "ring":
        return list(matrix.remember(("in", axis, place), lambda: _chain_partials(matrix, axis, place)).get(turn, ()))
    source = matrix.assignment.peer(axis, place, -turn)
    return [(source, place)] if matrix.needs(axis, source, place) else []


def _chain_partials(matrix: BlockMatrix, axis: Axis, place: int) -> dict[int, list[Hop]]:
    """By turn, the partials that arrive along the ring: of each shard it adds to, from the place before it."""
    ring = matrix.assignment.group(axis, place)
    at, size = ring.index(place), len(ring)
    hops: dict[int, list[Hop]] = {}
    for offset in range(1, size + 1):  # offset `size` is the own shard, at the end of its chain
        shard = ring[(at - offset) % size]
        if offset < size and not matrix.needs(axis, place, shard):
            continue
        for back in range(1, offset):
            source = ring[(at - back) % size]
            if matrix.needs(axis, source, shard):
                hops.setdefault(offset - back, []).append((source, shard))
                break
    return hops


def partial_dest(matrix: BlockMatrix, route: Route, axis: Axis, place: int, turn: int) -> int:
    """Where a place sends its partial of the shard at offset `turn`: home, or the next of the chain."""
    ring = matrix.assignment.group(axis, place)
    at, size = ring.index(place), len(ring)
    shard = ring[(at - turn) % size]
    if route == "ring":
        for ahead in range(1, size - turn):
            following = ring[(at + ahead) % size]
            if matrix.needs(axis, following, shard):
                return following
    return shard


def _chain_before(matrix: BlockMatrix, axis: Axis, place: int, turn: int) -> int:
    """The place that passes the shard at offset `turn` on to this one."""
    ring = matrix.assignment.group(axis, place)
    at, size = ring.index(place), len(ring)
    shard = ring[(at - turn) % size]
    for back in range(1, turn):
        previous = ring[(at - back) % size]
        if matrix.needs(axis, previous, shard):
            return previous
    return shard
