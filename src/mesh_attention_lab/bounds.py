"""Lower bounds that no assignment can beat: seconds of compute, and bytes that an average rank receives."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from mesh_attention.plan.blocks import elements_per_token
from mesh_attention.plan.steps import AXIS_OF, INPUTS, OUTPUTS, Direction
from mesh_attention.problem import Problem
from mesh_attention.topology import Device

MOST_TRIED = 4096
"""Numbers of heads that are tried. If there are more, these are spread evenly, and the bound is that of the samples."""


def lower_bounds(problem: Problem, passes: Iterable[Direction], device: Device) -> tuple[float, float]:
    """Of all passes: seconds at the full kernel rate, and bytes if forward keeps nothing for backward."""
    seconds = {d: problem.flops(d) / problem.ranks / (device.rate(d).tflops * 1e12) for d in passes}
    return sum(seconds.values()), sum(least_received_nbytes(problem, direction) for direction in seconds)


def least_received_nbytes(problem: Problem, direction: Direction) -> float:
    """The fewest tensor bytes that an average rank receives, if the work is even.

    A rank that computes x queries with y keys of one KV head has at most x·y pairs there, whatever the mask. It must
    receive those x and y that are not at home there, and its partial results must reach their homes, which on average
    receive as many. The bound is the minimum over all ways to cover 1/n of the pairs: over the KV heads used, x and y.
    Nothing is replicated: a token's queries, keys and values are at home on one rank.
    """
    all_heads = problem.batch * problem.kv_heads
    fewest = max(1, all_heads // problem.ranks)
    tried = range(fewest, all_heads, 1 + (all_heads - fewest) // MOST_TRIED)
    return min(least_nbytes_on_heads(problem, direction, heads) for heads in (all_heads, *tried))


def least_nbytes_on_heads(problem: Problem, direction: Direction, heads: int) -> float:
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
    kinds = (*INPUTS[direction], *OUTPUTS[direction])
    row, col = (
        sum(elements_per_token(kind, problem)[0] for kind in kinds if AXIS_OF[kind] == axis) for axis in ("row", "col")
    )
    return problem.itemsize * row / problem.kv_heads, problem.itemsize * col / problem.kv_heads
