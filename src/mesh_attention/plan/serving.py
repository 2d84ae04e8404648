"""Serving as data: the size of a KV cache on one rank, and a decoded step.

One layer of a decoded step attends a few new queries to a cache that is spread over all ranks. That takes so little
time that a schedule would not pay, so the program is fixed. Each rank attends the queries to its own tokens, which
gives a partial result for every *row* (a head of a query). Then ranks combine their partials. Queries are

    replicated      every rank runs the same tokens, has all queries, and wants all results
    sharded         each rank runs some of the sequences: q, k and v go to all ranks, partials back to their ranks

and partials of replicated queries are combined by

    all_gather      every rank sends all its partials to all others, and merges all rows: one exchange
    reduce_scatter  every rank merges a slice of the rows, and sends it to all others: two exchanges of fewer bytes

Partials of sharded queries are combined by reduce_scatter: a rank merges the rows of its own sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

from mesh_attention.problem import ITEMSIZE, Problem

# The cache


BLOCK_TOKENS = 64
"""Tokens of a block, unless a cache is made with another number."""


def blocks_of_rank(tokens: int, *, sequences: int, ranks: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Blocks of a rank for `tokens` tokens in all. Each sequence may leave one block partly empty."""
    return -(-tokens // (ranks * block_tokens)) + sequences


def layer_nbytes(blocks: int, *, token_nbytes: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Bytes of K and V of one layer on a rank. There is one block more, for tokens that the rank does not keep."""
    return (blocks + 1) * block_tokens * token_nbytes


def kv_token_nbytes(problem: Problem) -> int:
    """Bytes of K and V of one token in one layer."""
    return problem.kv_heads * (problem.head_dim_qk + problem.head_dim_v) * problem.itemsize


def cache_nbytes(problem: Problem, *, layers: int = 1) -> int:
    """Bytes of a cache on one rank that holds the keys and values of a problem in every layer of a model."""
    blocks = blocks_of_rank(problem.batch * problem.seq_kv, sequences=problem.batch, ranks=problem.ranks)
    return layers * layer_nbytes(blocks, token_nbytes=kv_token_nbytes(problem))


# A decoded step


Queries = Literal["replicated", "sharded"]
Combine = Literal["all_gather", "reduce_scatter"]
MOST_DECODED = 16
"""The most new tokens of a sequence in one decoded step."""
QUERIES: tuple[Queries, ...] = get_args(Queries)
COMBINES: tuple[Combine, ...] = get_args(Combine)


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """One decoded step of one layer: `new_tokens` of each of `sequences`, on `ranks`."""

    ranks: int
    sequences: int
    new_tokens: int
    heads: int
    kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    dtype: str
    queries: Queries = "replicated"
    combine: Combine = "reduce_scatter"

    @property
    def name(self) -> str:
        return self.queries if self.queries == "sharded" else f"{self.queries}, {self.combine}"

    @property
    def rows(self) -> int:
        return self.sequences * self.new_tokens * self.heads

    @property
    def row_nbytes(self) -> int:
        """Bytes of a partial that travels: an output, and its LSE, aligned."""
        itemsize = ITEMSIZE[self.dtype]
        wide = max(4, itemsize)
        payload = self.head_dim_v * itemsize
        return payload + -payload % wide + wide

    @property
    def token_nbytes(self) -> int:
        """Bytes of q, k and v of one new token, over all heads."""
        elements = self.heads * self.head_dim_qk + self.kv_heads * (self.head_dim_qk + self.head_dim_v)
        return elements * ITEMSIZE[self.dtype]

    @cached_property
    def slices(self) -> tuple[range, ...]:
        """The rows that each rank merges. If queries are sharded, those of its own sequences."""
        unit = self.rows // self.sequences if self.queries == "sharded" else 1
        return tuple(range(r.start * unit, r.stop * unit) for r in even(self.rows // unit, self.ranks))

    @cached_property
    def own(self) -> tuple[range, ...]:
        """The sequences that each rank runs."""
        everything = (range(self.sequences),) * self.ranks
        return even(self.sequences, self.ranks) if self.queries == "sharded" else everything

    @property
    def exchanges(self) -> int:
        """Exchanges between all ranks, one after the other."""
        return 0 if self.ranks == 1 else 1 if self.combine == "all_gather" else 2

    def exchanged_nbytes(self, exchange: int, source: int, dest: int) -> int:
        """Bytes that one rank sends to another in one of the exchanges."""
        if self.combine == "all_gather":
            return self.rows * self.row_nbytes
        if self.queries == "sharded" and exchange == 0:
            return len(self.own[source]) * self.new_tokens * self.token_nbytes
        is_merged = self.queries == "replicated" and exchange == 1
        return len(self.slices[source if is_merged else dest]) * self.row_nbytes

    def sent_nbytes(self, rank: int) -> int:
        """Bytes that a rank sends in all."""
        return sum(self.exchanged_nbytes(exchange, rank, other) for exchange, other in self._others(rank))

    def _others(self, rank: int) -> list[tuple[int, int]]:
        return [(exchange, other) for exchange in range(self.exchanges) for other in range(self.ranks) if other != rank]

    def __str__(self) -> str:
        partials = "send all partials to all ranks, merge all rows"
        if self.combine == "reduce_scatter":
            partials = "send each rank the partials of its slice, merge its own slice"
        steps = {
            "replicated": ["attend all queries to its own tokens", partials],
            "sharded": ["send q, k, v to all ranks", "attend all queries to its own tokens", partials],
        }[self.queries]
        if self.queries == "replicated" and self.combine == "reduce_scatter":
            steps.append("send the merged slice to all ranks")
        return "; ".join(steps if self.ranks > 1 else steps[:1])


def even(total: int, parts: int) -> tuple[range, ...]:
    """A range cut into parts that differ by at most one."""
    size, extra = divmod(total, parts)
    starts = [part * size + min(part, extra) for part in range(parts + 1)]
    return tuple(range(a, b) for a, b in pairwise(starts))


ALL_GATHER_MOST_NBYTES = 256 * 1024
"""Without prices, partials are gathered up to this many received bytes: about what a link moves in one exchange's
latency."""


def choose_combine(plan: DecodePlan) -> Combine:
    """How a plan combines partials on a machine whose prices are not known."""
    gathered = (plan.ranks - 1) * plan.rows * plan.row_nbytes
    return "all_gather" if plan.queries == "replicated" and gathered <= ALL_GATHER_MOST_NBYTES else "reduce_scatter"
