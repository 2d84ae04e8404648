"""The book of a cache: its sequences, who holds which of their tokens, and in which blocks. Plain data; no torch.

Layers with the same window keep the same tokens, so they share a *table*: the blocks of each sequence, in the order of
a rank's tokens. A rank's token i, counted from the first one that the table still has, is in ``blocks[i // size]``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from mesh_attention.errors import UsageError
from mesh_attention.plan.layout import Layout
from mesh_attention.serving.blocks import BlockPool
from mesh_attention.serving.shares import Shares

Window = int | None
"""How many tokens before its own a query sees; None for all of them."""


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
    tables: Mapping[Window, Table]
    min_length: int = 0
    """The shortest length that it can still be truncated to: its windows have dropped what shorter ones need."""


@dataclass
class Book:
    """All sequences of a cache. Changes are all or nothing: if blocks run out, nothing has changed.

    A sequence with windows can be truncated by at most `max_rollback` tokens.
    """

    ranks: int
    layout: Layout
    block_tokens: int
    pools: dict[Window, BlockPool]
    max_rollback: int = 0
    entries: dict[int, Entry] = field(default_factory=dict)
    copied: list[tuple[Window, int, int]] = field(default_factory=list)
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
        changed: dict[int, Entry] = {}
        undo: list[tuple[Window, list[int]]] = []
        copied: list[tuple[Window, int, int]] = []
        try:
            for number, tokens in new.items():
                changed[number] = self._grown(self.entry(number), tokens, is_decoded, undo, copied)
        except BaseException:
            for window, blocks in undo:
                self.pools[window].give_back(blocks)
            raise
        for number, entry in changed.items():
            self._give_back_dropped(self.entries[number], entry, copied)
            self.entries[number] = entry
        self.copied += copied

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

    def _grown(
        self,
        entry: Entry,
        tokens: int,
        is_decoded: bool,
        undo: list[tuple[Window, list[int]]],
        copied: list[tuple[Window, int, int]],
    ) -> Entry:
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
            tables[window] = self._grow_table(window, table, entry, counts, dropped, undo, copied)
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
        self, table: Table, after: Shares, window: Window, last: int, counts: tuple[int, ...]
    ) -> tuple[int, int]:
        """Blocks of which every rank's tokens are before what queries from position `last` on see, and the first
        position that they see."""
        cutoff = 0 if window is None else max(0, last - window - self.max_rollback)
        if not cutoff or self._blocks(counts) - table.dropped <= cutoff_blocks(last - cutoff, self.block_tokens):
            return table.dropped, cutoff
        before = min(after.before(rank, cutoff) for rank in range(self.ranks))
        return max(table.dropped, before // self.block_tokens), cutoff

    def _grow_table(
        self,
        window: Window,
        table: Table,
        entry: Entry,
        counts: tuple[int, ...],
        dropped: int,
        undo: list[tuple[Window, list[int]]],
        copied: list[tuple[Window, int, int]],
    ) -> Table:
        pool, size = self.pools[window], self.block_tokens
        blocks = list(table.blocks[dropped - table.dropped :])
        first_changed = min(entry.counts) // size - dropped  # all blocks before it are full on every rank
        shared = [at for at in range(max(0, first_changed), len(blocks)) if pool.users[blocks[at]] > 1]
        wanted = max(0, self._blocks(counts) - dropped - len(blocks))
        taken = pool.take(wanted + len(shared), after=blocks[-1] if blocks and not shared else None)
        undo.append((window, taken))
        for at, own in zip(shared, taken, strict=False):
            copied.append((window, blocks[at], own))
            blocks[at] = own
        return Table((*blocks, *taken[len(shared) :]), dropped)

    def _give_back_dropped(self, old: Entry, new: Entry, copied: list[tuple[Window, int, int]]) -> None:
        replaced = {(window, source) for window, source, _ in copied}
        for window, table in old.tables.items():
            kept = set(new.tables[window].blocks)
            gone = [block for block in table.blocks if block not in kept]
            assert all((window, block) in replaced or new.tables[window].dropped > table.dropped for block in gone)
            self.pools[window].give_back(gone)


def cutoff_blocks(tokens: int, block_tokens: int) -> int:
    """Blocks that a sequence may have before it is worth looking for some to drop."""
    return tokens // block_tokens + 1
