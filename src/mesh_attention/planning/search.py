"""The tile that moves the least. Bytes only: what hides behind compute is not its question."""

from __future__ import annotations

from mesh_attention.plan.assignment import Assignment, Tile, tiles_of
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.steps import AXIS_OF, INPUTS, OUTPUTS, Direction, Item
from mesh_attention.problem import Problem

SAMPLED_PLACES = 16
"""How many places are looked at; masks and layouts are regular, and the first and last are among them."""


def least_volume_tile(problem: Problem, layout: Layout, direction: Direction, *, ulysses_degree: int = 1) -> Tile:
    """Of all tiles that fit, the one whose busiest rank receives the fewest bytes; ties go to fewer rows."""
    places = problem.ranks // ulysses_degree

    def volume(tile: Tile) -> int:
        matrix = BlockMatrix(problem, layout, Assignment(tile, ulysses_degree))
        return max(received_nbytes(matrix, place, direction) for place in _sample(places))

    return min(tiles_of(places), key=volume)


def received_nbytes(matrix: BlockMatrix, place: int, direction: Direction) -> int:
    """Tensor bytes that reach a place of the grid in one pass, for one slice of the heads, by whatever planner."""
    total = 0
    for kind in (*INPUTS[direction], *OUTPUTS[direction]):
        axis = AXIS_OF[kind]
        for other in matrix.assignment.group(axis, place):
            if other != place and kind in INPUTS[direction] and matrix.needs(axis, place, other):
                total += matrix.nbytes(Item(kind, other)).payload
            if other != place and kind in OUTPUTS[direction] and matrix.needs(axis, other, place):
                total += matrix.nbytes(Item(kind, place)).payload
    return total


def _sample(places: int) -> list[int]:
    count = min(places, SAMPLED_PLACES)
    return sorted({index * (places - 1) // max(1, count - 1) for index in range(count)})
