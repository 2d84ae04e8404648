"""Lower bounds for any assignment: the fewest bytes a rank must receive, and the least it must compute.

A rank that computes x queries with y keys of one KV head has at most x·y pairs there, whatever the mask. It must
receive those x and y that are not at home there, and its partial results must reach their homes, which on average
receive as many. The bound is the minimum over all ways to cover 1/n of the pairs: over the KV heads used, x and y.
Nothing is replicated: a token's queries, keys and values are at home on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from mesh_attention.plan.steps import Direction
from mesh_attention.problem import Problem

MOST_TRIED = 4096
"""Numbers of heads that are tried. If there are more, these are spread evenly, and the bound is that of the samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Lower bounds for an average rank; `whole_heads_nbytes` if heads are not split, as in mesh and ring."""

    received_nbytes: float
    whole_heads_nbytes: float
    flops: float


def limits(problem: Problem, direction: Direction) -> Limits:
    """The fewest tensor bytes that an average rank receives, and its operations, if the work is even."""
    all_heads = problem.batch * problem.kv_heads
    fewest = max(1, all_heads // problem.ranks)
    whole_heads_nbytes = _least_nbytes(problem, direction, all_heads)
    tried = range(fewest, all_heads, 1 + (all_heads - fewest) // MOST_TRIED)
    return Limits(
        received_nbytes=min([whole_heads_nbytes, *(_least_nbytes(problem, direction, h) for h in tried)]),
        whole_heads_nbytes=whole_heads_nbytes,
        flops=problem.flops(direction) / problem.ranks,
    )


def _least_nbytes(problem: Problem, direction: Direction, heads: int) -> float:
    """The fewest bytes if a rank works on `heads` KV heads (of all batch entries), on a rectangle of pairs in each."""
    area = problem.pairs * problem.batch * problem.kv_heads / problem.ranks / heads
    row, col = _nbytes_per_token(problem, direction)
    home_q, home_kv = problem.seq_q / problem.ranks, problem.seq_kv / problem.ranks
    if not area:
        return 0.0

    def nbytes(x: float) -> float:
        x = min(max(x, area / problem.seq_kv), problem.seq_q)
        return max(0.0, x - home_q) * row + max(0.0, area / x - home_kv) * col

    # The minimum is inside, or where one side is exactly the tokens at home.
    return heads * min(map(nbytes, (sqrt(area * col / row), home_q, area / home_kv)))


def _nbytes_per_token(problem: Problem, direction: Direction) -> tuple[float, float]:
    """Bytes to send one query (with all query heads of its KV head) and one key, and to return their results."""
    group = problem.heads / problem.kv_heads
    qk, v = problem.head_dim_qk, problem.head_dim_v
    if direction == "forward":
        return problem.itemsize * group * (qk + v), float(problem.itemsize * (qk + v))
    return problem.itemsize * group * (2 * qk + v), float(problem.itemsize * 2 * (qk + v))
