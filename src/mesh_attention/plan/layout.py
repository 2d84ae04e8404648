"""Layouts: which rank is home to which token positions. Any length, any number of ranks.

Shards differ by at most one token, except with `Chunks`, whose cuts are torch's. A layout does not depend on tiles
or degrees: data is sharded once, and every plan for it reads the same shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import ClassVar, final

from mesh_attention.errors import ParseError, ProblemError
from mesh_attention.masks import Segment
from mesh_attention.units import brief


@dataclass(frozen=True, slots=True)
class Layout(ABC):
    """Which rank is home to which tokens."""

    name: ClassVar[str]

    def segments(self, rank: int, *, tokens: int, ranks: int) -> tuple[Segment, ...]:
        """The shard of one rank, in rising order of position; empty segments are left out."""
        if not 0 <= rank < ranks or tokens < 0:
            raise ProblemError(f"rank {rank} of {ranks}, {tokens} tokens: expected a rank from 0 to ranks - 1")
        return join(self._runs(rank, tokens, ranks))

    @abstractmethod
    def _runs(self, rank: int, tokens: int, ranks: int) -> tuple[Segment, ...]:
        """The shard of one rank; empty runs are allowed."""


@final
@dataclass(frozen=True, slots=True)
class Contiguous(Layout):
    """Rank r holds the r-th run of tokens."""

    name: ClassVar[str] = "contiguous"

    def _runs(self, rank: int, tokens: int, ranks: int) -> tuple[Segment, ...]:
        size, extra = divmod(tokens, ranks)
        start = rank * size + min(rank, extra)
        return (range(start, start + size + (rank < extra)),)


@final
@dataclass(frozen=True, slots=True)
class Zigzag(Layout):
    """Rank r holds the r-th run from the front and the r-th from the back: causal work is even."""

    name: ClassVar[str] = "zigzag"

    def _runs(self, rank: int, tokens: int, ranks: int) -> tuple[Segment, ...]:
        # Of the 2·ranks runs, the odd tokens go to the front runs first, then to the back runs from the end: each rank
        # gets one extra token before any rank gets two.
        size, extra = divmod(tokens, 2 * ranks)
        front_extra, back_extra = min(extra, ranks), max(0, extra - ranks)
        start = rank * size + min(rank, front_extra)
        stop = tokens - rank * size - min(rank, back_extra)
        early = range(start, start + size + (rank < front_extra))
        late = range(stop - size - (rank < back_extra), stop)
        return early, late


@final
@dataclass(frozen=True, slots=True)
class Striped(Layout):
    """Rank r holds the tokens r, r + ranks, r + 2·ranks, …"""

    name: ClassVar[str] = "striped"

    def _runs(self, rank: int, tokens: int, ranks: int) -> tuple[Segment, ...]:
        return (range(rank, tokens, ranks),)


@final
@dataclass(frozen=True, slots=True)
class Chunks(Layout):
    """Rank r holds the r-th of `torch.chunk`'s runs, as a DTensor does: equal ones, then a shorter one, then none."""

    name: ClassVar[str] = "chunks"

    def _runs(self, rank: int, tokens: int, ranks: int) -> tuple[Segment, ...]:
        size = -(-tokens // ranks)
        return (range(min(rank * size, tokens), min((rank + 1) * size, tokens)),)


LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (Contiguous(), Zigzag(), Striped(), Chunks())}


def layout_named(name: str) -> Layout:
    if name not in LAYOUTS:
        raise ParseError(f"layout {brief(name)}: expected one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


@lru_cache(maxsize=256)
def leaves_ranks_empty(layout: Layout, tokens: int, ranks: int) -> bool:
    """True if some rank is home to no token."""
    return not all(layout.segments(rank, tokens=tokens, ranks=ranks) for rank in range(ranks))


def position_ids(layout: Layout, rank: int, *, tokens: int, ranks: int) -> list[int]:
    """The position in the whole sequence of each token of one rank's shard."""
    return list(chain.from_iterable(layout.segments(rank, tokens=tokens, ranks=ranks)))


def permutation(layout: Layout, *, tokens: int, ranks: int) -> list[int]:
    """Position of each token when all shards are laid end to end: ``sharded[i] = whole[permutation[i]]``."""
    if ranks < 1:
        raise ProblemError(f"{ranks} ranks: expected at least 1")
    return [p for rank in range(ranks) for p in position_ids(layout, rank, tokens=tokens, ranks=ranks)]


def inverse_permutation(layout: Layout, *, tokens: int, ranks: int) -> list[int]:
    """Undoes `permutation`: ``whole[p] = sharded[inverse[p]]``."""
    inverse = [0] * tokens
    for index, position in enumerate(permutation(layout, tokens=tokens, ranks=ranks)):
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
