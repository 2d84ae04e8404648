"""The block matrix: facts about blocks and items that follow from problem, layout and assignment, cached."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from mesh_attention.masks import BlockKind, Segment
from mesh_attention.plan.assignment import Assignment, Axis
from mesh_attention.plan.layout import Layout, join, leaves_ranks_empty
from mesh_attention.plan.steps import AXIS_OF, Direction, Item, Kind
from mesh_attention.problem import RUNNING_LSE_NBYTES, Problem

Found = TypeVar("Found")


class Bytes(NamedTuple):
    """Bytes of tensors, and of the per-row statistics (LSE, delta) that go with them."""

    payload: int
    statistics: int

    @property
    def total(self) -> int:
        return self.payload + self.statistics


class BlockMatrix:
    """Query shards × key/value shards of the grid's places. Get one from `block_matrix`."""

    def __init__(self, problem: Problem, layout: Layout, assignment: Assignment) -> None:
        self.problem = problem
        self.layout = layout
        self.assignment = assignment
        self._homes: dict[tuple[Axis, int], tuple[Segment, ...]] = {}
        self._shards: dict[tuple[Axis, int], tuple[Segment, ...]] = {}
        self._live: dict[tuple[int, int], bool] = {}
        self._needs: dict[tuple[Axis, int, int], bool] = {}
        self._nbytes: dict[Item, Bytes] = {}
        self._remembered: dict[Hashable, Any] = {}

    def segments(self, axis: Axis, place: int) -> tuple[Segment, ...]:
        """Positions of a place's query (row) or key/value (col) shard: its ranks' shards, joined where they touch."""
        key = (axis, place)
        if key not in self._shards:
            first = place * self.assignment.ulysses
            members = range(first, first + self.assignment.ulysses)
            self._shards[key] = join(s for rank in members for s in self.home_segments(axis, rank))
        return self._shards[key]

    def home_segments(self, axis: Axis, rank: int) -> tuple[Segment, ...]:
        """The positions one rank is home to."""
        found = self._homes.get((axis, rank))
        if found is None:
            tokens = self.problem.seq_q if axis == "row" else self.problem.seq_kv
            layout = self.layout.along(axis, self.problem)
            found = self._homes[axis, rank] = layout.segments(rank, tokens=tokens, ranks=self.problem.ranks)
        return found

    def is_live(self, row: int, col: int) -> bool:
        """True if the mask leaves any pair of the block."""
        live = self._live.get((row, col))
        if live is None:
            mask, seq = self.problem.mask, {"seq_q": self.problem.seq_q, "seq_kv": self.problem.seq_kv}
            kv_segments = self.segments("col", col)
            live = any(not mask.is_empty(q, kv, **seq) for q in self.segments("row", row) for kv in kv_segments)
            self._live[row, col] = live
        return live

    def pairs(self, row: int, col: int) -> int:
        """Number of (query, key) pairs that the mask leaves in a block, for one head of one batch entry."""
        mask, seq = self.problem.mask, {"seq_q": self.problem.seq_q, "seq_kv": self.problem.seq_kv}
        kv_segments = self.segments("col", col)
        return sum(mask.pairs(q, kv, **seq) for q in self.segments("row", row) for kv in kv_segments)

    def kind(self, row: int, col: int) -> BlockKind:
        pairs = self.pairs(row, col)
        if pairs == 0:
            return BlockKind.EMPTY
        whole = _count(self.segments("row", row)) * _count(self.segments("col", col))
        return BlockKind.FULL if pairs == whole else BlockKind.PARTIAL

    def needs(self, axis: Axis, place: int, shard: int) -> bool:
        """True if `place` computes a block in row (or column) `shard`: it then needs that shard's inputs, and sends
        a partial result to that shard's home."""
        key = (axis, place, shard)
        needed = self._needs.get(key)
        if needed is None:
            if axis == "row":
                needed = any(self.is_live(shard, col) for col in self.assignment.group("col", place))
            else:
                needed = any(self.is_live(row, shard) for row in self.assignment.group("row", place))
            self._needs[key] = needed
        return needed

    @property
    def is_uniform(self) -> bool:
        """True if the mask makes every rank need every shard of its groups: then all ranks run the same steps, with
        other peers.

        It holds for full masks, and for causal masks on layouts that spread positions; never for windows or documents.
        """
        problem, mask = self.problem, self.problem.mask
        if mask.documents is not None or mask.left is not None:
            return False
        sides: tuple[tuple[Axis, int], ...] = (("row", problem.seq_q), ("col", problem.seq_kv))
        if any(leaves_ranks_empty(self.layout.along(axis, problem), n, problem.ranks) for axis, n in sides):
            return False
        if mask.right is None:
            return True
        places = range(self.assignment.places)
        last_queries = min(max(s[-1] for s in self.segments("row", place)) for place in places)
        first_keys = max(min(s[0] for s in self.segments("col", place)) for place in places)
        return first_keys <= last_queries + problem.seq_kv - problem.seq_q + mask.right

    def kept(self, keep: tuple[Kind, ...], rank: int) -> tuple[tuple[Item, ...], ...]:
        """For each kept kind, the shards that a rank gathers in forward and has in backward, including its own."""
        place = self.assignment.place(rank)
        return tuple(
            tuple(
                Item(kind, s)
                for s in self.assignment.group(AXIS_OF[kind], place)
                if self.needs(AXIS_OF[kind], place, s)
            )
            for kind in keep
        )

    def remember(self, key: Hashable, work_out: Callable[[], Found]) -> Found:
        """The value stored under this key, computed at the first call."""
        if key not in self._remembered:
            self._remembered[key] = work_out()
        found: Found = self._remembered[key]
        return found

    def nbytes(self, item: Item) -> Bytes:
        """Bytes of an item in memory; running sums are wider than the items that travel."""
        size = self._nbytes.get(item)
        if size is None:
            size = self._nbytes[item] = self._measure(item)
        return size

    def _measure(self, item: Item) -> Bytes:
        problem, axis = self.problem, AXIS_OF[item.kind]
        at_home = item.form in ("home", "piece")
        segments = self.home_segments(axis, item.shard) if at_home else self.segments(axis, item.shard)
        share = 1 if item.form == "home" else self.assignment.ulysses
        payload, statistics = elements_per_token(item.kind, problem)
        width = problem.accumulator_itemsize if item.form == "running" else problem.itemsize
        wide = RUNNING_LSE_NBYTES if item.form == "running" else problem.accumulator_itemsize
        tokens = problem.batch * _count(segments)
        a_token = payload // share * width
        if statistics and item.form != "home":
            a_token += -a_token % wide  # statistics are read in place, so the next token must be aligned for them
        return Bytes(payload=tokens * a_token, statistics=tokens * (statistics // share) * wide)

    def runs(self, item: Item) -> int:
        """Number of pieces in which an item travels: one for each run of its tokens."""
        axis = AXIS_OF[item.kind]
        return len(self.home_segments(axis, item.shard) if item.form == "piece" else self.segments(axis, item.shard))

    def has_tokens(self, kind: Kind, rank: int) -> bool:
        return bool(self.home_segments(AXIS_OF[kind], rank))

    def flops(self, row: int, col: int, direction: Direction) -> int:
        """Floating-point operations of a block on one rank, so under Ulysses for its slice of the heads."""
        return self.problem.flops(direction, pairs=self.pairs(row, col)) // self.assignment.ulysses


@lru_cache(maxsize=32)
def block_matrix(problem: Problem, layout: Layout, assignment: Assignment) -> BlockMatrix:
    return BlockMatrix(problem, layout, assignment)


def _count(segments: tuple[Segment, ...]) -> int:
    return sum(len(s) for s in segments)


def elements_per_token(kind: Kind, problem: Problem) -> tuple[int, int]:
    """Elements of one token, over all heads: those of tensors, and those of statistics."""
    heads, kv_heads = problem.heads, problem.kv_heads
    qk, v = problem.head_dim_qk, problem.head_dim_v
    sizes: dict[Kind, tuple[int, int]] = {
        "q": (heads * qk, 0),
        "kv": (kv_heads * (qk + v), 0),
        "do": (heads * v, 2 * heads),
        "o": (heads * v, heads),
        "dq": (heads * qk, 0),
        "dkv": (kv_heads * (qk + v), 0),
    }
    return sizes[kind]
