"""Layouts: which rank is home to which token positions. Any length, any number of ranks.

Shards differ by at most one token, except with `Chunks`, whose cuts are torch's, and with `Listed`, which states every
shard. A layout does not depend on tiles or degrees: data is sharded once, and every plan for it reads the same shards.

A *segment* is a run of positions with a start, a stop and a stride, as a Python `range`; a shard has one or more.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar, final

from mesh_attention.errors import ParseError, ProblemError
from mesh_attention.masks import Segment
from mesh_attention.plan.assignment import Axis
from mesh_attention.problem import Problem
from mesh_attention.units import brief, count


@dataclass(frozen=True, slots=True)
class Layout(ABC):
    """Which rank is home to which tokens."""

    name: ClassVar[str]

    def segments(self, rank: int, *, seq_len: int, ranks: int) -> tuple[Segment, ...]:
        """The shard of one rank, in rising order of position; empty segments are left out."""
        if not 0 <= rank < ranks or seq_len < 0:
            raise ProblemError(f"rank {rank} of {ranks}, {seq_len} tokens: expected a rank from 0 to ranks - 1")
        return join(self._runs(rank, seq_len, ranks))

    def along(self, axis: Axis, problem: Problem) -> Layout:
        """The layout of a problem's queries (row), or of its keys and values (col)."""
        return self

    @property
    def text(self) -> str:
        """Text that `parse_layout` reads back."""
        return self.name

    @abstractmethod
    def _runs(self, rank: int, seq_len: int, ranks: int) -> tuple[Segment, ...]:
        """The shard of one rank; empty runs are allowed."""


@final
@dataclass(frozen=True, slots=True)
class Contiguous(Layout):
    """Rank r holds the r-th run of tokens."""

    name: ClassVar[str] = "contiguous"

    def _runs(self, rank: int, seq_len: int, ranks: int) -> tuple[Segment, ...]:
        size, extra = divmod(seq_len, ranks)
        start = rank * size + min(rank, extra)
        return (range(start, start + size + (rank < extra)),)


@final
@dataclass(frozen=True, slots=True)
class Zigzag(Layout):
    """Rank r holds the r-th run from the front and the r-th from the back: causal work is even."""

    name: ClassVar[str] = "zigzag"

    def _runs(self, rank: int, seq_len: int, ranks: int) -> tuple[Segment, ...]:
        # Of the 2·ranks runs, the odd tokens go to the front runs first, then to the back runs from the end: each rank
        # gets one extra token before any rank gets two.
        size, extra = divmod(seq_len, 2 * ranks)
        front_extra, back_extra = min(extra, ranks), max(0, extra - ranks)
        start = rank * size + min(rank, front_extra)
        stop = seq_len - rank * size - min(rank, back_extra)
        early = range(start, start + size + (rank < front_extra))
        late = range(stop - size - (rank < back_extra), stop)
        return early, late


@final
@dataclass(frozen=True, slots=True)
class Striped(Layout):
    """Rank r holds the tokens r, r + ranks, r + 2·ranks, …"""

    name: ClassVar[str] = "striped"

    def _runs(self, rank: int, seq_len: int, ranks: int) -> tuple[Segment, ...]:
        return (range(rank, seq_len, ranks),)


@final
@dataclass(frozen=True, slots=True)
class Chunks(Layout):
    """Rank r holds the r-th of `torch.chunk`'s runs, as a DTensor does: equal ones, then a shorter one, then none."""

    name: ClassVar[str] = "chunks"

    def _runs(self, rank: int, seq_len: int, ranks: int) -> tuple[Segment, ...]:
        size = -(-seq_len // ranks)
        return (range(min(rank * size, seq_len), min((rank + 1) * size, seq_len)),)


@final
@dataclass(frozen=True, slots=True)
class Listed(Layout):
    """Each rank's shard as a list of segments, in rising order: what a cache has become by appending to it."""

    shards: tuple[tuple[Segment, ...], ...]
    seq_len: int = field(init=False, compare=False, repr=False)
    _hash: int = field(init=False, compare=False, repr=False)
    name: ClassVar[str] = "listed"

    def __post_init__(self) -> None:
        segments = [segment for shard in self.shards for segment in shard]
        seq_len = sum(map(len, segments))
        object.__setattr__(self, "seq_len", seq_len)
        object.__setattr__(self, "_hash", hash(self.shards))  # hashed at every lookup of a plan, and slow to compute
        seen = bytearray(seq_len) if seq_len <= MOST_LISTED else bytearray()
        for segment in segments:
            if not segment or segment.step < 1 or segment[0] < 0 or segment[-1] >= len(seen):
                raise ProblemError(
                    f"segment {segment} of a listed layout of {count(seq_len, 'token')}: expected rising positions "
                    f"from 0 to {seq_len - 1}, of at most {MOST_LISTED:,} tokens"
                )
            seen[segment.start : segment[-1] + 1 : segment.step] = b"\1" * len(segment)
        if 0 in seen:  # much faster than `all`
            raise ProblemError(
                f"position {seen.index(0)} is in no shard of a listed layout of {count(seq_len, 'token')}; expected "
                "every position once"
            )

    def __hash__(self) -> int:
        return self._hash

    @property
    def text(self) -> str:
        ends = [[f"{s.start}:{s[-1] + 1}" + f":{s.step}" * (s.step != 1) for s in shard] for shard in self.shards]
        return f"listed({'|'.join(map('+'.join, ends))})"

    def _runs(self, rank: int, seq_len: int, ranks: int) -> tuple[Segment, ...]:
        if (seq_len, ranks) != (self.seq_len, len(self.shards)):
            raise ProblemError(
                f"{count(seq_len, 'token')} on {count(ranks, 'rank')}: this listed layout was built "
                f"for {count(self.seq_len, 'token')} on {count(len(self.shards), 'rank')}"
            )
        return self.shards[rank]


@final
@dataclass(frozen=True, slots=True)
class Cached(Layout):
    """New queries on one layout, and on another the keys and values of a cache, of which the new ones are the last."""

    q: Layout
    kv: Layout
    name: ClassVar[str] = "cached"

    def along(self, axis: Axis, problem: Problem) -> Layout:
        return self.q if axis == "row" else self.kv

    @property
    def text(self) -> str:
        return f"cached({self.q.text}/{self.kv.text})"

    def _runs(self, rank: int, seq_len: int, ranks: int) -> tuple[Segment, ...]:
        raise ProblemError("a cached layout has two sides; ask layout.along(axis, problem) for segments")


@final
@dataclass(frozen=True, slots=True)
class Past(Layout):
    """The tokens of a cache, of which a plan knows neither the number nor who holds which: one position for each rank
    stands for all that it holds. A plan on it is right for every way to spread a past over the ranks."""

    name: ClassVar[str] = "past"

    def _runs(self, rank: int, seq_len: int, ranks: int) -> tuple[Segment, ...]:
        if seq_len != ranks:
            raise ProblemError(f"seq_kv={seq_len} on layout past: expected one position for each of the {ranks} ranks")
        return (range(rank, rank + 1),)


@final
@dataclass(frozen=True, slots=True)
class Undivided(Layout):
    """Rank 0 holds everything."""

    name: ClassVar[str] = "undivided"

    def _runs(self, rank: int, seq_len: int, ranks: int) -> tuple[Segment, ...]:
        return (range(seq_len),) if rank == 0 else ()


@final
@dataclass(frozen=True, slots=True)
class Replicated(Layout):
    """Every rank holds all tokens, and gets all results. `shards` says whose results are merged together."""

    shards: Layout
    name: ClassVar[str] = "replicated"

    @property
    def text(self) -> str:
        return f"replicated({self.shards.text})"

    def _runs(self, rank: int, seq_len: int, ranks: int) -> tuple[Segment, ...]:
        return self.shards.segments(rank, seq_len=seq_len, ranks=ranks)


@final
@dataclass(frozen=True, slots=True)
class TypicalTurn(Layout):
    """A typical turn of a conversation: new tokens in zigzag, and before their keys and values, those of an earlier
    prompt in zigzag. For plans and forecasts; a cache states its own shards (`Cached`)."""

    name: ClassVar[str] = "turn"

    def along(self, axis: Axis, problem: Problem) -> Layout:
        return Zigzag() if axis == "row" else _After(max(0, problem.seq_kv - problem.seq_q))

    def _runs(self, rank: int, seq_len: int, ranks: int) -> tuple[Segment, ...]:
        raise ProblemError("layout turn has two sides; ask layout.along(axis, problem) for segments")


@final
@dataclass(frozen=True, slots=True)
class _After(Layout):
    """Cached tokens in zigzag, then the rest in zigzag."""

    cached: int
    name: ClassVar[str] = "turn"

    def _runs(self, rank: int, seq_len: int, ranks: int) -> tuple[Segment, ...]:
        early = Zigzag().segments(rank, seq_len=self.cached, ranks=ranks)
        late = Zigzag().segments(rank, seq_len=seq_len - self.cached, ranks=ranks)
        return *early, *shifted(late, self.cached)


MOST_LISTED = 1 << 30
"""The most tokens of a listed layout: it is checked position by position."""
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (Contiguous(), Zigzag(), Striped(), Chunks())}
"""Layouts that data can be sharded by."""
PLANNED_LAYOUTS: dict[str, Layout] = {**LAYOUTS, TypicalTurn.name: TypicalTurn()}


def layout_named(name: str) -> Layout:
    if name not in PLANNED_LAYOUTS:
        raise ParseError(f"layout {brief(name)}: expected one of {', '.join(PLANNED_LAYOUTS)}")
    return PLANNED_LAYOUTS[name]


def parse_layout(text: str) -> Layout:
    """A layout from its `text`."""
    if sides := re.fullmatch(r"cached\(([^/]*)/([^/]*)\)", text):
        return Cached(parse_layout(sides[1]), parse_layout(sides[2]))
    if shards := re.fullmatch(r"replicated\((.*)\)", text):
        return Replicated(parse_layout(shards[1]))
    if text in (Past.name, Undivided.name):
        return Past() if text == Past.name else Undivided()
    if shards := re.fullmatch(r"listed\(([^()]*)\)", text):
        return Listed(tuple(tuple(map(_parse_segment, filter(None, s.split("+")))) for s in shards[1].split("|")))
    return layout_named(text)


def _parse_segment(text: str) -> Segment:
    bounds = re.fullmatch(r"(\d{1,12}):(\d{1,12})(?::([1-9]\d{0,11}))?", text)
    if bounds is None:
        raise ParseError(f"segment {brief(text)}: expected START:STOP or START:STOP:STEP")
    return range(int(bounds[1]), int(bounds[2]), int(bounds[3] or 1))


def position_ids(layout: Layout, rank: int, *, seq_len: int, ranks: int) -> list[int]:
    """The position in the whole sequence of each token of one rank's shard."""
    return list(chain.from_iterable(layout.segments(rank, seq_len=seq_len, ranks=ranks)))


def permutation(layout: Layout, *, seq_len: int, ranks: int) -> list[int]:
    """Position of each token when all shards are laid end to end: ``sharded[i] = whole[permutation[i]]``."""
    if ranks < 1:
        raise ProblemError(f"{ranks} ranks: expected at least 1")
    return [p for rank in range(ranks) for p in position_ids(layout, rank, seq_len=seq_len, ranks=ranks)]


def inverse_permutation(layout: Layout, *, seq_len: int, ranks: int) -> list[int]:
    """Undoes `permutation`: ``whole[p] = sharded[inverse[p]]``."""
    inverse = [0] * seq_len
    for index, position in enumerate(permutation(layout, seq_len=seq_len, ranks=ranks)):
        inverse[position] = index
    return inverse


def join(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Segments in rising order of start, with adjacent runs joined."""
    joined: list[Segment] = []
    for segment in sorted((s for s in segments if s), key=lambda s: s.start):
        last = joined[-1] if joined else None
        if last is not None and last.step == segment.step == 1 and last.stop == segment.start:
            joined[-1] = range(last.start, segment.stop)
        else:
            joined.append(segment)
    return tuple(joined)


def shifted(segments: Iterable[Segment], by: int) -> tuple[Segment, ...]:
    """The segments with `by` added to every position."""
    return tuple(range(s.start + by, s.stop + by, s.step) for s in segments)
