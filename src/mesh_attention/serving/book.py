"""The book of a cache: its sequences, who holds which of their tokens, and in which blocks. Plain data; no torch.

Layers with the same window keep the same tokens, so they share a *table*: the blocks of each sequence, in the order of
a rank's tokens. A rank's token i, counted from the first one that the table still has, is in ``blocks[i // size]``.

A sequence grows by runs: a prompt, a chunk or a turn on the layout of its queries, or tokens that were decoded, which
go round the ranks one by one. Each run begins with the rank that holds the fewest tokens, so that ranks never differ by
more than a token unless the sequence is truncated. A rank stores its tokens in rising order of position.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from mesh_attention.errors import CacheFullError, UsageError
from mesh_attention.masks import Segment
from mesh_attention.plan.layout import Layout, Striped, join, shifted
from mesh_attention.units import count

WindowSize = int | None
"""How many tokens before its own a query sees; None for all of them."""


# Shares: the positions that each rank holds


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
        segments = self.layout.segments((rank - self.first) % ranks, seq_len=self.tokens, ranks=ranks)
        if self.kept < self.tokens:
            segments = clip(segments, 0, self.kept)
        return shifted(segments, self.start)


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

    def appended(self, tokens: int, layout: Layout, counts: Sequence[int]) -> Shares:
        """The shares after a chunk or a turn, which begins with the rank that has the fewest tokens."""
        first = min(range(self.ranks), key=lambda rank: counts[rank])
        run = Run(start=self.length, tokens=tokens, kept=tokens, layout=layout, first=first)
        return replace(self, runs=(*self.runs, run))

    def decoded(self, tokens: int, counts: Sequence[int]) -> Shares:
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


# Blocks


class BlockPool:
    """Numbers of blocks, the parts of a cache's memory. A block that sequences share is free again when the last of
    them gives it back.

    All ranks give out the same blocks, as many as the rank with the most tokens needs, so that all of them run out of
    memory at the same call.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.users = [0] * size
        self.free = size

    def take(self, number: int, *, after: int | None = None) -> list[int]:
        """Free blocks, in a row if possible: right after block `after`, or else in the first gap large enough."""
        if not number:
            return []
        if number > self.free:
            raise CacheFullError(
                f"the cache has {count(self.free, 'free block')} of {self.size:,} and needs {number:,} more; remove a "
                "sequence, or make room with cache.reserve(tokens, sequences)"
            )
        blocks = self._row(number, after) or [block for block in range(self.size) if not self.users[block]][:number]
        for block in blocks:
            self.users[block] = 1
        self.free -= number
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Let one more sequence use these blocks."""
        for block in blocks:
            self.users[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self.users[block] -= 1
            self.free += not self.users[block]

    def recount(self, used: Iterable[Sequence[int]]) -> None:
        """Recount how many sequences use each block."""
        users = Counter(chain.from_iterable(used))
        self.users = [users[block] for block in range(self.size)]
        self.free = self.users.count(0)

    def grow(self, size: int) -> None:
        self.free += size - self.size
        self.users += [0] * (size - self.size)
        self.size = size

    def _row(self, number: int, after: int | None) -> list[int]:
        gaps = (b for b in range(self.size) if not self.users[b] and (b == 0 or self.users[b - 1]))
        for start in chain([] if after is None else [after + 1], gaps):
            if start + number <= self.size and not any(self.users[start : start + number]):
                return list(range(start, start + number))
        return []


@dataclass(frozen=True, slots=True)
class Table:
    """The blocks of one sequence, without the first `dropped` ones, which no query can see any more."""

    blocks: tuple[int, ...] = ()
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One sequence: who holds what, each rank's number of tokens, and a table for every window."""

    shares: Shares
    counts: tuple[int, ...]
    tables: Mapping[WindowSize, Table]
    min_length: int = 0
    """The shortest length that it can still be truncated to: its windows have dropped what shorter ones need."""


# The book


@dataclass
class Book:
    """All sequences of a cache. Changes are all or nothing: if blocks run out, nothing has changed.

    A sequence with windows can be truncated by at most `max_rollback` tokens.
    """

    ranks: int
    layout: Layout
    block_tokens: int
    pools: dict[WindowSize, BlockPool]
    max_rollback: int = 0
    entries: dict[int, Entry] = field(default_factory=dict)
    copied: list[tuple[WindowSize, int, int]] = field(default_factory=list)
    """Blocks to copy before the next write: window, from, to."""
    _next: int = 0

    def new(self) -> int:
        number, self._next = self._next, self._next + 1
        empty = {window: Table() for window in self.pools}
        self.entries[number] = Entry(Shares(self.ranks), (0,) * self.ranks, empty)
        return number

    def entry(self, number: object) -> Entry:
        if not isinstance(number, Hashable) or number not in self.entries:
            known = ", ".join(map(str, self.entries)) or "none"
            raise UsageError(f"sequence {number!r} is not in the cache; sequences: {known}")
        return self.entries[number]

    def extend(self, new: Mapping[int, int], *, is_decoded: bool) -> None:
        """Append tokens to sequences: on the layout, or round the ranks."""
        try:
            changed = {n: self._grown(self.entry(n), tokens, is_decoded) for n, tokens in new.items()}
        except BaseException:
            for window, pool in self.pools.items():  # give back what was taken for nothing
                pool.recount(entry.tables[window].blocks for entry in self.entries.values())
            raise
        for number, entry in changed.items():
            for window, table in self.entries[number].tables.items():
                self._replace(window, table, entry.tables[window])
            self.entries[number] = entry

    def remove(self, number: int) -> None:
        for window, table in self.entry(number).tables.items():
            self.pools[window].give_back(list(table.blocks))
        del self.entries[number]

    def fork(self, number: int) -> int:
        """A copy of a sequence that shares its blocks, until one of the two appends to them."""
        entry, copy = self.entry(number), self.new()
        for window, table in entry.tables.items():
            self.pools[window].share(list(table.blocks))
        self.entries[copy] = entry
        return copy

    def truncate(self, number: int, length: int) -> None:
        entry = self.entry(number)
        if not entry.min_length <= length <= entry.shares.length:
            why = "; its windows have dropped what fewer tokens would need: make the cache with a larger max_rollback="
            raise UsageError(
                f"sequence {number} cannot be truncated to {length} tokens: expected {entry.min_length} to "
                f"{entry.shares.length}{why if entry.min_length else ''}"
            )
        shares = entry.shares.truncate(length)
        counts = tuple(shares.counts())
        tables = {}
        for window, table in entry.tables.items():
            kept = max(0, self._blocks(counts) - table.dropped)
            self.pools[window].give_back(list(table.blocks[kept:]))
            tables[window] = replace(table, blocks=table.blocks[:kept])
        self.entries[number] = replace(entry, shares=shares, counts=counts, tables=tables)

    # Growing

    def _blocks(self, counts: Iterable[int]) -> int:
        return -(-max(counts) // self.block_tokens)

    def _grown(self, entry: Entry, tokens: int, is_decoded: bool) -> Entry:
        before = entry.shares
        if is_decoded:
            after = before.decoded(tokens, entry.counts)
        else:
            after = before.appended(tokens, self.layout, entry.counts)
        counts = self._counts(entry, after, tokens, is_decoded)
        tables, min_length = {}, entry.min_length
        for window, table in entry.tables.items():
            # Decoded tokens are stored before they attend; a chunk's own are stored if a later query sees them.
            last = before.length if is_decoded else after.length
            dropped, cutoff = self._dropped(table, after, window, last, counts)
            min_length = max(min_length, 0 if not dropped or window is None else cutoff + window)
            tables[window] = self._grow_table(window, table, entry, counts, dropped)
        return Entry(after, counts, tables, min_length)

    def _counts(self, entry: Entry, after: Shares, tokens: int, is_decoded: bool) -> tuple[int, ...]:
        counts, run = list(entry.counts), after.runs[-1]
        if not is_decoded:
            new = (sum(map(len, run.segments(rank, self.ranks))) for rank in range(self.ranks))
            return tuple(held + more for held, more in zip(counts, new, strict=True))
        for position in range(after.length - tokens, after.length):
            counts[(run.first + position - run.start) % self.ranks] += 1
        return tuple(counts)

    def _dropped(
        self, table: Table, after: Shares, window: WindowSize, last: int, counts: tuple[int, ...]
    ) -> tuple[int, int]:
        """How many leading blocks can be dropped, because no query from position `last` on sees a token of them on any
        rank; and the first position that those queries see."""
        cutoff = 0 if window is None else max(0, last - window - self.max_rollback)
        few = (last - cutoff) // self.block_tokens + 1  # blocks that a sequence may have before some can be dropped
        if not cutoff or self._blocks(counts) - table.dropped <= few:
            return table.dropped, cutoff
        before = min(after.before(rank, cutoff) for rank in range(self.ranks))
        return max(table.dropped, before // self.block_tokens), cutoff

    def _grow_table(
        self, window: WindowSize, table: Table, entry: Entry, counts: tuple[int, ...], dropped: int
    ) -> Table:
        pool, size = self.pools[window], self.block_tokens
        blocks = list(table.blocks[dropped - table.dropped :])
        first_changed = min(entry.counts) // size - dropped  # all blocks before it are full on every rank
        shared = [at for at in range(max(0, first_changed), len(blocks)) if pool.users[blocks[at]] > 1]
        wanted = max(0, self._blocks(counts) - dropped - len(blocks))
        new = pool.take(wanted + len(shared), after=blocks[-1] if blocks and not shared else None)
        for at, own in zip(shared, new, strict=False):
            blocks[at] = own
        return Table((*blocks, *new[len(shared) :]), dropped)

    def _replace(self, window: WindowSize, old: Table, new: Table) -> None:
        """Give back the blocks that a sequence no longer uses. One in whose place it has another was shared."""
        dropped = new.dropped - old.dropped
        pairs = [(a, b) for a, b in zip(old.blocks[dropped:], new.blocks, strict=False) if a != b]
        self.copied += [(window, source, dest) for source, dest in pairs]
        self.pools[window].give_back([*old.blocks[:dropped], *(source for source, _ in pairs)])
