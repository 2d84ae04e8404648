"""Shares: which positions of a cached sequence each rank holds. Plain data, the same on every rank; no torch.

A sequence grows by runs: a prompt, a chunk or a turn on the layout of its queries, or tokens that were decoded, which
go round the ranks one by one. Each run begins with the rank that holds the fewest tokens, so that ranks never differ by
more than a token unless the sequence is truncated. A rank stores its tokens in rising order of position.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mesh_attention.masks import Segment
from mesh_attention.plan.layout import Layout, Striped, join, shifted


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Tokens that were appended together. Rank `first` has the shard that the layout gives to rank 0, and so on.

    Only the first `kept` tokens are left, if the sequence was truncated.
    """

    start: int
    tokens: int
    kept: int
    layout: Layout
    first: int

    def segments(self, rank: int, ranks: int) -> tuple[Segment, ...]:
        found = self.layout.segments((rank - self.first) % ranks, tokens=self.tokens, ranks=ranks)
        if self.kept < self.tokens:
            found = clip(found, 0, self.kept)
        return shifted(found, self.start)


@dataclass(frozen=True, slots=True)
class Shares:
    """The runs of one sequence."""

    ranks: int
    runs: tuple[Run, ...] = ()

    @property
    def length(self) -> int:
        return self.runs[-1].start + self.runs[-1].kept if self.runs else 0

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """The positions that a rank holds, in rising order, which is also the order in its memory."""
        return join(segment for run in self.runs for segment in run.segments(rank, self.ranks))

    def counts(self) -> list[int]:
        """The number of tokens of each rank."""
        return [sum(map(len, self.segments(rank))) for rank in range(self.ranks)]

    def before(self, rank: int, position: int) -> int:
        """The number of a rank's tokens before a position."""
        return sum(map(len, clip(self.segments(rank), 0, position)))

    def appended(self, tokens: int, layout: Layout, counts: Sequence[int] | None = None) -> Shares:
        """The shares after a chunk or a turn, which begins with the rank that has the fewest tokens.

        `counts` are those of the ranks, if they are known.
        """
        counts = self.counts() if counts is None else counts
        first = min(range(self.ranks), key=lambda rank: counts[rank])
        run = Run(start=self.length, tokens=tokens, kept=tokens, layout=layout, first=first)
        return replace(self, runs=(*self.runs, run))

    def decoded(self, tokens: int, counts: Sequence[int] | None = None) -> Shares:
        """The shares after tokens that go round the ranks, where the last ones left off."""
        last = self.runs[-1] if self.runs else None
        if last is None or last.layout != Striped():
            return self.appended(tokens, Striped(), counts)
        more = last.kept + tokens  # who gets a token does not depend on how many follow
        return replace(self, runs=(*self.runs[:-1], replace(last, tokens=more, kept=more)))

    def truncate(self, length: int) -> Shares:
        """The shares of the first `length` tokens."""
        runs = [replace(run, kept=min(run.kept, length - run.start)) for run in self.runs if run.start < length]
        return replace(self, runs=tuple(runs))


def clip(segments: tuple[Segment, ...], low: int, high: int) -> tuple[Segment, ...]:
    """The parts of segments from `low` up to, but not including, `high`."""
    parts = (s[bisect_left(s, low) : bisect_left(s, high)] for s in segments)
    return tuple(part for part in parts if part)
