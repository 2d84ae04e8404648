"""Blocks: the parts that a cache's memory is given out in. Plain data; no torch.

All ranks give out the same blocks, as many as the rank with the most tokens needs, so that all of them run out of
memory at the same call.
"""

from __future__ import annotations

from itertools import chain

from mesh_attention.errors import CacheFullError
from mesh_attention.units import count


class BlockPool:
    """Numbers of blocks. A block that sequences share is free again when the last of them gives it back."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.users = [0] * size
        self.free = size

    def take(self, number: int, *, after: int | None = None) -> list[int]:
        """Free blocks, in a row if possible: behind block `after`, or else in the first gap that is large enough."""
        if not number:
            return []
        if number > self.free:
            raise CacheFullError(
                f"the cache has {count(self.free, 'free block')} of {self.size:,} and needs {number:,} more; remove a "
                "sequence, or make room with cache.reserve(tokens, sequences)"
            )
        found = self._row(number, after) or [block for block in range(self.size) if not self.users[block]][:number]
        for block in found:
            self.users[block] = 1
        self.free -= number
        return found

    def share(self, blocks: list[int]) -> None:
        """Let one more sequence use these blocks."""
        for block in blocks:
            self.users[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self.users[block] -= 1
            self.free += not self.users[block]

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
