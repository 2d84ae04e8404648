"""The block matrix: facts about blocks and items that follow from problem, layout and assignment, cached."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from mesh_attention.masks import Segment
from mesh_attention.plan.assignment import Assignment, Axis
from mesh_attention.plan.layout import Layout, Past, Replicated, join
from mesh_attention.plan.steps import AXIS_OF, INPUTS, Direction, Item, Keep, Kind
from mesh_attention.problem import RUNNING_LSE_NBYTES, Problem

Value = TypeVar("Value")


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
        self._shards: dict[tuple[Axis, int, int], tuple[Segment, ...]] = {}
        self._live: dict[tuple[int, int, int], bool] = {}
        self._needs: dict[tuple[Axis, int, int, int], bool] = {}
        self._nbytes: dict[Item, Bytes] = {}
        self._remembered: dict[Hashable, Any] = {}

    @property
    def is_over_cache(self) -> bool:
        """True if keys and values are a cache's, of which this knows nothing; queries then bring their own."""
        return isinstance(self.layout.along("col", self.problem), Past)

    @property
    def is_replicated(self) -> bool:
        """True if every rank has all queries, and gets all results."""
        return isinstance(self.layout.along("row", self.problem), Replicated)

    def segments(self, axis: Axis, place: int, part: int = 0) -> tuple[Segment, ...]:
        """Positions of a place's query (row) or key/value (col) shard, or of a part of its rows: its ranks' shards,
        joined where they touch.

        Columns that meet parts of rows are not joined across them: so the mask cuts a part's own columns only.
        """
        key = (axis, place, part)
        if key not in self._shards:
            parts = self.assignment.parts("row") if self.assignment.cut == "rows" and axis == "col" else (part,)
            members = [self.assignment.members("row", place, row_part) for row_part in parts]
            joined = (join(s for rank in ranks for s in self.home_segments(axis, rank)) for ranks in members)
            self._shards[key] = tuple(sorted(chain.from_iterable(joined), key=lambda segment: segment.start))
        return self._shards[key]

    def has_shard(self, axis: Axis, place: int) -> bool:
        """True if a place has any tokens."""
        return any(self.segments(axis, place, part) for part in self.assignment.parts(axis))

    def positions(self, item: Item) -> tuple[Segment, ...]:
        """Positions of an item's tokens, in the order of its bytes."""
        axis = AXIS_OF[item.kind]
        if item.form in ("home", "piece", "staged"):
            return self.home_segments(axis, item.shard)
        return self.segments(axis, item.shard, item.part)

    def home_segments(self, axis: Axis, rank: int) -> tuple[Segment, ...]:
        """The positions one rank is home to."""
        segments = self._homes.get((axis, rank))
        if segments is None:
            tokens = self.problem.seq_q if axis == "row" else self.problem.seq_kv
            layout = self.layout.along(axis, self.problem)
            segments = self._homes[axis, rank] = layout.segments(rank, seq_len=tokens, ranks=self.problem.ranks)
        return segments

    def is_live(self, row: int, col: int, part: int = 0) -> bool:
        """True if the mask leaves any pair of the block, or of this part of its rows."""
        part = self._row_part(part)
        live = self._live.get((row, col, part))
        if live is None:
            mask, seq = self.problem.mask, {"seq_q": self.problem.seq_q, "seq_kv": self.problem.seq_kv}
            kv_segments = self.segments("col", col)
            live = any(not mask.is_empty(q, kv, **seq) for q in self.segments("row", row, part) for kv in kv_segments)
            self._live[row, col, part] = live
        return live

    def pairs(self, row: int, col: int, part: int = 0) -> int:
        """Number of (query, key) pairs that the mask leaves in a block, or in this part of its rows, for one head of
        one batch entry."""
        mask, seq = self.problem.mask, {"seq_q": self.problem.seq_q, "seq_kv": self.problem.seq_kv}
        kv_segments = self.segments("col", col)
        q_segments = self.segments("row", row, self._row_part(part))
        return sum(mask.pairs(q, kv, **seq) for q in q_segments for kv in kv_segments)

    def _row_part(self, part: int) -> int:
        """Parts that are cut from the heads have all rows."""
        return part if self.assignment.cut == "rows" else 0

    def needs(self, axis: Axis, place: int, shard: int, part: int = 0) -> bool:
        """True if `place` computes a block in row (or column) `shard`, or in this part of it: it then needs its inputs,
        and sends a partial result to its home."""
        part = self._row_part(part)
        key = (axis, place, shard, part)
        needed = self._needs.get(key)
        if needed is None:
            if axis == "row":
                needed = any(self.is_live(shard, col, part) for col in self.assignment.group("col", place))
            else:
                parts = range(self.assignment.waves if self.assignment.cut == "rows" else 1)
                rows = self.assignment.group("row", place)
                needed = any(self.is_live(row, shard, part) for row in rows for part in parts)
            self._needs[key] = needed
        return needed

    @property
    def is_uniform(self) -> bool:
        """True if the mask makes every rank need every shard of its groups: then all ranks run the same steps, with
        other peers.

        It holds for full masks, and for causal masks on layouts that spread positions; never for windows or documents.
        """
        assignment, mask = self.assignment, self.problem.mask
        if mask.documents is not None or mask.left is not None:
            return False
        return _is_uniform(self.problem, self.layout, assignment.ulysses_degree, len(assignment.members("row", 0, 0)))

    def kept(self, keep: tuple[Keep, ...], rank: int) -> tuple[tuple[Item, ...], ...]:
        """The items that a rank leaves in forward and has in backward.

        For each part of each kept kind, they are the shards that it gathers, including its own; or its own alone.
        """
        assignment, place = self.assignment, self.assignment.place(rank)
        groups: list[tuple[Item, ...]] = []
        for kind in INPUTS["forward"]:
            axis = AXIS_OF[kind]
            shards = assignment.group(axis, place) if kind in keep else (place,) if "own" in keep else ()
            for part in assignment.parts(axis) if shards else ():
                if kind in keep:
                    groups.append(tuple(Item(kind, s, part=part) for s in shards if self.needs(axis, place, s, part)))
                elif self.is_exchanged(kind, rank, part):
                    groups.append((Item(kind, place, "kept", part=part),))
        return tuple(groups)

    def is_exchanged(self, kind: Kind, rank: int, part: int) -> bool:
        """True if any rank of a Ulysses group uses an input: then all take part in its exchange."""
        axis, place = AXIS_OF[kind], self.assignment.place(rank)
        parts = self.assignment.parts(axis) if self.assignment.cut == "rows" else (part,)
        return any(self.is_wanted(axis, place, each) for each in parts)

    def is_wanted(self, axis: Axis, shard: int, part: int) -> bool:
        """True if any place attends this part of a shard."""
        return any(self.needs(axis, member, shard, part) for member in self.assignment.group(axis, shard))

    def remember(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """The value stored under this key, computed at the first call."""
        if key not in self._remembered:
            self._remembered[key] = compute()
        value: Value = self._remembered[key]
        return value

    def nbytes(self, item: Item) -> Bytes:
        """Bytes of an item in memory; running sums are wider than the items that travel."""
        size = self._nbytes.get(item)
        if size is None:
            size = self._nbytes[item] = self._measure(item)
        return size

    def _measure(self, item: Item) -> Bytes:
        problem, axis, assignment = self.problem, AXIS_OF[item.kind], self.assignment
        if item.form == "staged":
            pieces = assignment.staged_pieces(axis, item.part)
            piece = self.nbytes(item._replace(form="piece", source=0))
            return Bytes(pieces * piece.payload, pieces * piece.statistics)
        segments = self.positions(item)
        share = len(assignment.parts(axis)) if item.form == "home" else assignment.head_shares
        payload, statistics = elements_per_token(item.kind, problem)
        if item.kind == "q" and self.is_over_cache:
            payload += elements_per_token("kv", problem)[0]
        width = problem.accumulator_itemsize if item.form == "running" else problem.itemsize
        wide = RUNNING_LSE_NBYTES if item.form == "running" else problem.accumulator_itemsize
        tokens = problem.batch * sum(len(segment) for segment in segments)
        a_token = payload // share * width
        if statistics and item.form != "home":
            a_token += -a_token % wide  # statistics are read in place, so the next token must be aligned for them
        return Bytes(payload=tokens * a_token, statistics=tokens * (statistics // share) * wide)

    def runs(self, item: Item) -> int:
        """Number of pieces in which an item travels: one for each run of its tokens."""
        return len(self.positions(item))

    def has_tokens(self, kind: Kind, rank: int) -> bool:
        return bool(self.home_segments(AXIS_OF[kind], rank))

    def flops(self, row: int, col: int, direction: Direction, part: int = 0) -> int:
        """Floating-point operations of a part of a block on one rank, so for its share of the heads."""
        return self.problem.flops(direction, pairs=self.pairs(row, col, part)) // self.assignment.head_shares


@lru_cache(maxsize=32)
def block_matrix(problem: Problem, layout: Layout, assignment: Assignment) -> BlockMatrix:
    return BlockMatrix(problem, layout, assignment)


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


def token_nbytes(kind: Kind, problem: Problem) -> int:
    """Bytes of one token of one batch entry, over all heads, as it travels."""
    payload, statistics = elements_per_token(kind, problem)
    return payload * problem.itemsize + statistics * problem.accumulator_itemsize


# Every tile of a Ulysses degree has the same answer, and on many ranks it takes seconds.
@lru_cache(maxsize=256)
def _is_uniform(problem: Problem, layout: Layout, ulysses: int, queries_of: int) -> bool:
    """`BlockMatrix.is_uniform` for a mask with at most a right end. The first part of a place's queries is that of its
    first `queries_of` ranks."""
    q = _ends(layout.along("row", problem), problem.seq_q, problem.ranks)
    kv = _ends(layout.along("col", problem), problem.seq_kv, problem.ranks)
    if q is None or kv is None:
        return False
    if problem.mask.right is None:
        return True
    starts = range(0, problem.ranks, ulysses)
    last_query = min(max(last for _, last in q[start : start + queries_of]) for start in starts)
    first_key = max(min(first for first, _ in kv[start : start + ulysses]) for start in starts)
    return first_key <= last_query + problem.seq_kv - problem.seq_q + problem.mask.right


@lru_cache(maxsize=64)
def _ends(layout: Layout, tokens: int, ranks: int) -> tuple[tuple[int, int], ...] | None:
    """The first and the last position of every rank's shard; None if a rank has none."""
    shards = [layout.segments(rank, seq_len=tokens, ranks=ranks) for rank in range(ranks)]
    return tuple((min(s[0] for s in shard), max(s[-1] for s in shard)) for shard in shards) if all(shards) else None
