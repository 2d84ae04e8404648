"""Assignments: which rank computes which blocks.

n = ulysses · rows · cols ranks. Each run of `ulysses` consecutive ranks trades heads for tokens and from then on acts
as one *place* of the grid, once for each slice of the heads; without Ulysses a place is a rank. Place p has grid row
p // rows and grid column p % rows. Its Q group is its grid row (`rows` consecutive places), its KV group is its grid
column (`cols` places, `rows` apart); its tile is the Q shards of its Q group × the KV shards of its KV group.

An *inner* tile says which places are neighbours, for clusters whose nodes hold several ranks: inner.rows members of a
Q group × inner.cols members of a KV group are consecutive places. Groups are then rings of rings: offsets count the
neighbours first, and go on to the next run of neighbours after them.

A pass may go in *waves*: a rank attends one part after another, and while it does, the next one's inputs arrive. Parts
are cut from the heads that a rank has. Or they are cut from the rows: the ranks of a Ulysses group make equal blocks,
and each part has the rows of one. In the first wave a rank works on the part with its own rows, then goes round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Any, Literal

from mesh_attention.errors import ParseError, TileError
from mesh_attention.problem import Problem, check_whole
from mesh_attention.units import brief

Axis = Literal["row", "col"]
"""The side of the tile an item belongs to: Q, O and dQ to a row, KV and dKV to a column."""
AXES: tuple[Axis, ...] = ("row", "col")
Cut = Literal["heads", "rows"]
CUTS: tuple[Cut, ...] = ("heads", "rows")


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
        if not all(side.isdecimal() and len(side) < 10 for side in (rows, cols)):
            raise ParseError(f"tile {brief(text)}: expected ROWSxCOLS, such as 4x8")
        return cls(int(rows), int(cols))


def as_tile(tile: Tile | tuple[int, int] | str) -> Tile:
    """A tile from any form a caller may use: a Tile, (4, 8) or "4x8"."""
    if isinstance(tile, Tile):
        return tile
    if isinstance(tile, str):
        return Tile.parse(tile)
    if isinstance(tile, tuple | list) and len(tile) == 2:
        return Tile(*tile)
    raise TileError(f"tile {brief(tile)}: expected (rows, columns), such as (4, 8)")


def tiles_of(places: int) -> tuple[Tile, ...]:
    """Every tile of that many places, fewest rows first."""
    return tuple(Tile(rows, places // rows) for rows in divisors(places))


def divisors(number: int) -> tuple[int, ...]:
    """The divisors of a number, smallest first."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


@dataclass(frozen=True, slots=True)
class Assignment:
    """A grid of tiles, times a Ulysses degree, in waves."""

    tile: Tile
    ulysses_degree: int = 1
    inner: Tile | None = None
    waves: int = 1
    cut: Cut = "heads"

    def __post_init__(self) -> None:
        inner, tile = self.inner, self.tile
        check_whole(TileError, waves=self.waves)
        if self.cut not in CUTS:
            raise TileError(f"cut={brief(self.cut)}: expected {' or '.join(CUTS)}")
        if self.waves == 1 and self.cut == "rows":
            raise TileError("cut='rows' needs waves=2 or more: one wave is not cut")
        if inner is None:
            return
        if tile.rows % inner.rows or tile.cols % inner.cols:
            raise TileError(
                f"inner tile {inner} does not divide the {tile} tile; its rows must divide {tile.rows} "
                f"({_divisors_text(tile.rows)}), its columns {tile.cols} ({_divisors_text(tile.cols)})"
            )
        if inner == Tile(tile.rows, 1):  # the order of places without an inner tile
            object.__setattr__(self, "inner", None)

    def __str__(self) -> str:
        """4x8; with Ulysses 2·4x8; with an inner tile 4x8 inner 2x4; 4x8 in 2 waves."""
        ulysses = f"{self.ulysses_degree}·" if self.ulysses_degree > 1 else ""
        inner = f" inner {self.inner}" if self.inner is not None else ""
        return f"{ulysses}{self.tile}{inner}" + (f" in {self.waves_text}" if self.waves > 1 else "")

    @property
    def waves_text(self) -> str:
        """4 waves; 2 waves of rows."""
        return f"{self.waves} wave{'s' * (self.waves > 1)}" + (" of rows" if self.cut == "rows" else "")

    @property
    def places(self) -> int:
        return self.tile.rows * self.tile.cols

    def place(self, rank: int) -> int:
        return rank // self.ulysses_degree

    def head_slice(self, rank: int) -> int:
        """Index of the slice of the heads that a rank computes, below `ulysses`."""
        return rank % self.ulysses_degree

    def rank(self, place: int, *, head_slice: int) -> int:
        return place * self.ulysses_degree + head_slice

    def ulysses_group(self, rank: int) -> range:
        start = self.place(rank) * self.ulysses_degree
        return range(start, start + self.ulysses_degree)

    @property
    def head_shares(self) -> int:
        """Shares into which the heads are divided. A whole item has one of them."""
        return self.ulysses_degree * (self.waves if self.cut == "heads" else 1)

    def parts(self, axis: Axis) -> range:
        """The parts of a shard: of its heads, or of its rows."""
        return range(self.waves if self.cut == "heads" or axis == "row" else 1)

    def part(self, axis: Axis, rank: int, wave: int) -> int:
        """The part that a rank works on in a wave."""
        if self.cut == "heads":
            return wave
        return (self.head_slice(rank) // self._block - wave) % self.waves if axis == "row" else 0

    def home_part(self, axis: Axis, wave: int) -> int:
        """The part number of the caller's tensors, and of what is staged for them, in a wave."""
        return wave if len(self.parts(axis)) > 1 else 0

    def members(self, axis: Axis, place: int, part: int) -> range:
        """The ranks whose tokens a part of a place's shard has."""
        start = place * self.ulysses_degree
        if self.cut == "heads" or axis == "col":
            return range(start, start + self.ulysses_degree)
        return range(start + part * self._block, start + (part + 1) * self._block)

    def staged_pieces(self, axis: Axis, wave: int) -> int:
        """Number of pieces of a rank's own tokens that an exchange sends, or brings back, in a wave."""
        if self.cut == "heads" or axis == "col":
            return self.ulysses_degree - 1
        return self._block - (wave == 0)

    @property
    def _block(self) -> int:
        return self.ulysses_degree // self.waves

    def group(self, axis: Axis, place: int) -> Sequence[int]:
        """The places that share a tile row (its Q group) or a tile column (its KV group), in order."""
        if self.inner is not None:
            return _members(self, axis, place)
        rows = self.tile.rows
        if axis == "row":
            return range(place - place % rows, place - place % rows + rows)
        return range(place % rows, self.places, rows)

    def size(self, axis: Axis) -> int:
        """Number of places in a Q group (row) or KV group (col)."""
        return self.tile.rows if axis == "row" else self.tile.cols

    def inner_size(self, axis: Axis) -> int:
        """Number of neighbours in a group: the length of the inner rings that make up its ring."""
        if self.inner is None:
            return self.tile.rows if axis == "row" else 1
        return self.inner.rows if axis == "row" else self.inner.cols

    def peer(self, axis: Axis, place: int, offset: int) -> int:
        """The place `offset` before this one in its group's ring; negative offsets look ahead.

        In a ring of inner rings of size w, offset k is k % w before it in the inner ring, k // w inner rings before.
        """
        if self.inner is None:  # a shortcut: the lines below give the same result
            rows, cols = self.tile.rows, self.tile.cols
            row, col = divmod(place, rows)
            return row * rows + (col - offset) % rows if axis == "row" else (row - offset) % cols * rows + col
        row, col = self.coordinates(place)
        if axis == "row":
            return self._place(row, _rotated(col, offset, self.tile.rows, self.inner_size(axis)))
        return self._place(_rotated(row, offset, self.tile.cols, self.inner_size(axis)), col)

    def peer_rank(self, axis: Axis | None, rank: Any, offset: int) -> Any:
        """The rank `offset` before this one in its group: that of an axis, or its Ulysses group if that is None. Takes
        arrays of ranks too."""
        place, head_slice = divmod(rank, self.ulysses_degree)
        if axis is None:
            return place * self.ulysses_degree + (head_slice - offset) % self.ulysses_degree
        return self.peer(axis, place, offset) * self.ulysses_degree + head_slice

    def offset_back(self, axis: Axis | None, offset: int) -> int:
        """The offset of this place as seen from the place at `offset`; of a rank in its Ulysses group, if the axis is
        None."""
        if axis is None:
            return -offset % self.ulysses_degree
        inner = self.inner_size(axis)
        rings, at = divmod(offset, inner)
        return -rings % (self.size(axis) // inner) * inner + -at % inner

    def coordinates(self, place: int) -> tuple[int, int]:
        """Grid row and grid column of a place."""
        if self.inner is None:
            return divmod(place, self.tile.rows)
        wide, high = self.inner.rows, self.inner.cols
        run, local = divmod(place, wide * high)
        (outer_row, outer_col), (row, col) = divmod(run, self.tile.rows // wide), divmod(local, wide)
        return outer_row * high + row, outer_col * wide + col

    def owner(self, row_shard: int, col_shard: int) -> int:
        """The place that computes a block: its Q group has the query shard, its KV group the key/value shard."""
        return self._place(self.coordinates(row_shard)[0], self.coordinates(col_shard)[1])

    def _place(self, row: int, col: int) -> int:
        if self.inner is None:
            return row * self.tile.rows + col
        wide, high = self.inner.rows, self.inner.cols
        (outer_row, row), (outer_col, col) = divmod(row, high), divmod(col, wide)
        return (outer_row * (self.tile.rows // wide) + outer_col) * wide * high + row * wide + col


def _rotated(index: int, offset: int, size: int, inner: int) -> int:
    """The member `offset` before the one at `index`, in a ring of inner rings."""
    (ring, at), (rings_back, back) = divmod(index, inner), divmod(abs(offset), inner)
    if offset < 0:
        rings_back, back = -rings_back, -back
    return (ring - rings_back) % (size // inner) * inner + (at - back) % inner


@lru_cache(maxsize=4096)
def _members(assignment: Assignment, axis: Axis, place: int) -> tuple[int, ...]:
    row, col = assignment.coordinates(place)
    tile = assignment.tile
    if axis == "row":
        return tuple(assignment._place(row, index) for index in range(tile.rows))
    return tuple(assignment._place(index, col) for index in range(tile.cols))


def check_assignment(assignment: Assignment, problem: Problem) -> None:
    """Raise when the assignment does not fit the ranks or the heads of a problem."""
    ulysses, tile = assignment.ulysses_degree, assignment.tile
    check_degree(ulysses, problem)
    check_waves(assignment.waves, assignment.cut, ulysses, problem)
    places = problem.ranks // ulysses
    if assignment.places != places:
        of = f"{problem.ranks} ranks" + (f" with Ulysses degree {ulysses}" if ulysses > 1 else "")
        fitting = " ".join(map(str, tiles_of(places)))
        raise TileError(f"{of} cannot form a {tile} tile; rows·cols must be {places}: {fitting}")


def check_degree(ulysses: int, problem: Problem) -> None:
    """Raise when a Ulysses degree does not fit the ranks or the KV heads of a problem."""
    if type(ulysses) is not int or ulysses < 1:
        raise TileError(f"Ulysses degree {brief(ulysses)}: expected a whole number of at least 1")
    for number, what in ((problem.ranks, "ranks"), (problem.kv_heads, "KV heads")):
        if number % ulysses:
            fitting = _divisors_text(number)
            raise TileError(f"Ulysses degree {ulysses} does not divide {number} {what}; degrees that do: {fitting}")


def check_waves(waves: int, cut: Cut, ulysses: int, problem: Problem) -> None:
    """Raise when the waves do not divide what they are cut from."""
    number = problem.kv_heads // ulysses if cut == "heads" else ulysses
    if number % waves == 0:
        return
    what = "KV heads that a rank attends" if cut == "heads" else "ranks of a Ulysses group"
    hint = "; or cut the rows of its Ulysses group" if cut == "heads" and ulysses % waves == 0 else ""
    fitting = _divisors_text(number)
    raise TileError(f"waves={waves} does not divide the number of {what}, {number}; use one of {fitting}{hint}")


def _divisors_text(number: int) -> str:
    return " ".join(map(str, divisors(number)))
