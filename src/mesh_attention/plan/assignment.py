"""Assignments: which rank computes which blocks.

n = ulysses · rows · cols ranks. Each run of `ulysses` consecutive ranks trades heads for tokens and from then on acts
as one *place* of the grid, once for each slice of the heads; without Ulysses a place is a rank. Place p has grid row
p // rows and grid column p % rows. Its Q group is its grid row (`rows` consecutive places), its KV group its grid
column (`cols` places, `rows` apart); its tile is the Q shards of its Q group × the KV shards of its KV group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mesh_attention.errors import ParseError, TileError
from mesh_attention.problem import Problem

Axis = Literal["row", "col"]
"""Which side of the tile something belongs to: Q, O, dQ to a row; KV, dKV to a column."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The rectangle of blocks a rank computes: `rows` query shards × `cols` key/value shards."""

    rows: int
    cols: int

    def __post_init__(self) -> None:
        if type(self.rows) is not int or type(self.cols) is not int or self.rows < 1 or self.cols < 1:
            raise TileError(f"tile {self}: rows and columns must be whole numbers of at least 1")

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"

    @classmethod
    def parse(cls, text: str) -> Tile:
        rows, _, cols = text.lower().replace("×", "x").partition("x")
        if not (rows.isdecimal() and cols.isdecimal()):
            raise ParseError(f"tile {text!r}: expected ROWSxCOLS, such as 4x8")
        return cls(int(rows), int(cols))


def as_tile(tile: Tile | tuple[int, int] | str) -> Tile:
    """A tile from what a caller may write: a Tile, (4, 8) or "4x8"."""
    if isinstance(tile, Tile):
        return tile
    if isinstance(tile, str):
        return Tile.parse(tile)
    if isinstance(tile, tuple | list) and len(tile) == 2:
        return Tile(*tile)
    raise TileError(f"tile {tile!r}: expected (rows, columns), such as (4, 8)")


def tiles_of(places: int) -> tuple[Tile, ...]:
    """Every tile that fits, fewest rows first."""
    return tuple(Tile(rows, places // rows) for rows in range(1, places + 1) if places % rows == 0)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A grid of tiles, times a Ulysses degree."""

    tile: Tile
    ulysses: int = 1

    @property
    def places(self) -> int:
        return self.tile.rows * self.tile.cols

    def place(self, rank: int) -> int:
        return rank // self.ulysses

    def head_slice(self, rank: int) -> int:
        """Which of the `ulysses` slices of the heads a rank computes."""
        return rank % self.ulysses

    def rank(self, place: int, *, head_slice: int) -> int:
        return place * self.ulysses + head_slice

    def ulysses_group(self, rank: int) -> range:
        start = self.place(rank) * self.ulysses
        return range(start, start + self.ulysses)

    def group(self, axis: Axis, place: int) -> range:
        """The places that share a tile row (its Q group) or a tile column (its KV group), in ring order."""
        rows = self.tile.rows
        if axis == "row":
            return range(place - place % rows, place - place % rows + rows)
        return range(place % rows, self.places, rows)

    def peer(self, axis: Axis, place: int, offset: int) -> int:
        """The place `offset` before this one in its group's ring; negative offsets look ahead."""
        rows, cols = self.tile.rows, self.tile.cols
        row, col = divmod(place, rows)
        if axis == "row":
            return row * rows + (col - offset) % rows
        return (row - offset) % cols * rows + col


def check_assignment(assignment: Assignment, problem: Problem) -> None:
    """Raise when the assignment does not fit the ranks or the heads of a problem."""
    ulysses, tile = assignment.ulysses, assignment.tile
    check_degree(ulysses, problem)
    places = problem.ranks // ulysses
    if assignment.places != places:
        of = f"{problem.ranks} ranks" + (f" with Ulysses degree {ulysses}" if ulysses > 1 else "")
        fitting = " ".join(map(str, tiles_of(places)))
        raise TileError(f"{of} cannot form a {tile} tile; rows·cols must be {places}: {fitting}")


def check_degree(ulysses: int, problem: Problem) -> None:
    """Raise when a Ulysses degree does not fit the ranks or the KV heads of a problem."""
    if type(ulysses) is not int or ulysses < 1:
        raise TileError(f"Ulysses degree {ulysses!r}: expected a whole number of at least 1")
    for number, what in ((problem.ranks, "ranks"), (problem.kv_heads, "KV heads")):
        if number % ulysses:
            fitting = _divisors_text(number)
            raise TileError(f"Ulysses degree {ulysses} does not divide {number} {what}; degrees that do: {fitting}")


def _divisors_text(number: int) -> str:
    return " ".join(str(tile.rows) for tile in tiles_of(number))
