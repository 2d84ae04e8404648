"""Plans of a decoded step: a few new queries over a cache that is spread over the ranks.

One layer of a step takes so little time that nothing can hide behind it, so its schedule is fixed. Each rank attends
all new queries to its own part of the past, which gives a partial of every row, and ranks merge their partials. Queries
are

    replicated      every rank runs the same tokens, has all queries, and wants all results
    sharded         each rank runs some of the sequences: q, k and v go to all ranks, partials back to their ranks

and partials of replicated queries are combined by

    all_gather      every rank sends its partials to all others, and merges all rows: one collective
    reduce_scatter  every rank merges a slice of the rows, and sends it to all others: two, of fewer bytes

Partials of sharded queries are combined by reduce_scatter: a rank merges the rows of its own sequences.

Where queries are replicated, a row is one head of one query: slices can then be equal even if there is one query.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, get_args

from mesh_attention.errors import ProblemError
from mesh_attention.plan.assignment import Assignment, Tile
from mesh_attention.plan.blocks import token_nbytes
from mesh_attention.plan.layout import Cached, Contiguous, Layout, Listed, Past, Replicated, Undivided
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.schedule import GroupMove, Meet, Move, Schedule
from mesh_attention.problem import Problem

Queries = Literal["replicated", "sharded"]
Combining = Literal["all_gather", "reduce_scatter"]
QUERIES: tuple[Queries, ...] = get_args(Queries)
COMBININGS: tuple[Combining, ...] = get_args(Combining)
MOST_DECODED = 16
"""The most new tokens of a sequence in one decoded step."""
ALL_GATHER_MOST_NBYTES = 256 * 1024
"""Without prices, partials are gathered up to this many received bytes: about what a link moves in the
latency of a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a layer's plan of a decoded step depends on: the new tokens of each sequence, and the layer's sizes."""

    new_tokens: tuple[int, ...]
    ranks: int
    heads: int
    kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    dtype: str

    @property
    def tokens(self) -> int:
        return sum(self.new_tokens)

    @property
    def is_ragged(self) -> bool:
        """True if sequences have different numbers of new tokens."""
        return len(set(self.new_tokens)) > 1

    @property
    def grid(self) -> tuple[int, int]:
        """Rows of queries, and queries in each: a row is a sequence, or in a ragged step a token."""
        return (self.tokens, 1) if self.is_ragged else (len(self.new_tokens), self.new_tokens[0])

    @property
    def sequences(self) -> tuple[range, ...]:
        """The sequences that each rank runs if queries are sharded."""
        return even(len(self.new_tokens), self.ranks)

    @property
    def runs(self) -> tuple[range, ...]:
        """The tokens that each rank runs if queries are sharded."""
        starts = [0, *accumulate(self.new_tokens)]
        return tuple(range(starts[own.start], starts[own.stop]) for own in self.sequences)

    def problem(self, queries: Queries) -> Problem:
        """The step as an attention problem over one position for each rank's part of the past."""
        problem = Problem(
            seq_q=self.tokens,
            seq_kv=self.ranks,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim_qk=self.head_dim_qk,
            head_dim_v=self.head_dim_v,
            ranks=self.ranks,
            dtype=self.dtype,
        )
        if queries == "sharded":
            return problem
        return replace(problem, seq_q=self.tokens * self.heads, heads=1, kv_heads=1)


def plan_decode(shape: StepShape, *, queries: Queries = "replicated", combining: Combining | None = None) -> Plan:
    """The plan of a layer; if `combining` is not given, what suits a machine whose prices are not known."""
    most = max(shape.new_tokens)
    if most > MOST_DECODED:
        expected = f"a decoded step takes at most {MOST_DECODED} new tokens of each sequence; a turn takes more"
        raise ProblemError(f"{most:,} new tokens of a sequence: {expected}")
    queries = "replicated" if shape.ranks == 1 else queries
    problem = shape.problem(queries)
    if combining is None:
        gathered = (problem.ranks - 1) * problem.seq_q * token_nbytes("o", problem)
        combining = "all_gather" if gathered <= ALL_GATHER_MOST_NBYTES else "reduce_scatter"
    everything = tuple(range(shape.ranks))
    attend = Meet(everything, (0,))
    gather, reduce, combine = (GroupMove(op, "o") for op in ("gather", "reduce", "combine"))
    layout: Layout
    moves: tuple[Move, ...]
    if shape.ranks == 1:
        layout, moves = Replicated(Undivided()), (attend,)
    elif queries == "sharded":
        layout = Listed(tuple((run,) if run else () for run in shape.runs))
        moves = GroupMove("gather", "q"), attend, reduce, combine
    elif combining == "reduce_scatter":
        layout, moves = Replicated(Contiguous()), (attend, reduce, combine, gather)
    else:
        layout, moves = Replicated(Undivided()), (attend, gather, combine)
    return Plan(
        method="decode",
        direction="forward",
        problem=problem,
        layout=Cached(layout, Past()),
        assignment=Assignment(Tile(shape.ranks, 1)),
        schedule=Schedule(moves=moves),
    )


def even(total: int, parts: int) -> tuple[range, ...]:
    """A range cut into parts that differ by at most one."""
    shards = (Contiguous().segments(part, seq_len=total, ranks=parts) for part in range(parts))
    return tuple(shard[0] if shard else range(0) for shard in shards)
