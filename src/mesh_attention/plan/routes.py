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
    needs = matrix.needs
    if route == "direct":
        dest = matrix.assignment.peer(axis, place, -turn)
        return [(dest, place)] if needs(axis, dest, place) else []
    ring = matrix.assignment.group(axis, place)
    at, size = ring.index(place), len(ring)
    hops = []
    for ahead in range(1, turn + 1):
        dest, shard = ring[(at + ahead) % size], ring[(at + ahead - turn) % size]
        has_it = shard == place or needs(axis, place, shard)
        if has_it and needs(axis, dest, shard) and _chain_before(matrix, axis, dest, turn) == place:
            hops.append((dest, shard))
    return hops


def partial_hops_in(matrix: BlockMatrix, route: Route, axis: Axis, place: int, turn: int) -> list[Hop]:
    """The partials that arrive at a place at a turn: those whose sender has them at that offset."""
    needs = matrix.needs
    if route == "direct":
        source = matrix.assignment.peer(axis, place, -turn)
        return [(source, place)] if needs(axis, source, place) else []
    ring = matrix.assignment.group(axis, place)
    at, size = ring.index(place), len(ring)
    hops = []
    for offset in range(turn + 1, size + 1):  # offset `size` is the own shard, at the end of its chain
        source, shard = ring[(at - offset + turn) % size], ring[(at - offset) % size]
        takes_it = shard == place or needs(axis, place, shard)
        if takes_it and needs(axis, source, shard) and partial_dest(matrix, route, axis, source, turn) == place:
            hops.append((source, shard))
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
