"""Problems that differ only in detail, as one: the choice for a problem is made for its coarse form.

So a new length, or another batch of packed documents, needs no new choice. Lengths and windows are rounded to powers of
√2 (times the number of ranks). Documents, which differ from batch to batch, become typical ones: uneven, and with about
as many pairs, to a power of 4.

A plan of the coarse problem is a plan of the problem after its problem is replaced: a schedule names offsets, never
tokens, and lowering leaves out what a mask makes unnecessary. Only a ring of inner rings needs every shard everywhere;
where the problem itself does not, shards and partials go directly.

Under a mask that is local beside the length of the sequence, a rank deals with near ranks only, and a part of the
cluster with its part of the sequence takes as long as the whole. Such a problem is tuned on a part, and the choice is
`widened`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf, log, log2

from mesh_attention.masks import Mask, documents
from mesh_attention.plan.assignment import Tile, divisors
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.planners.choice import Choice
from mesh_attention.planners.make import has_inner_rings
from mesh_attention.problem import MOST, Problem
from mesh_attention.topology import Topology

STEPS_PER_DOUBLING = 2
SHORTEST = 64
"""Typical documents are at least this part of a rank's tokens: shorter ones stay within a rank anyway."""
GOLDEN = (5**0.5 - 1) / 2
PART_OF_REACHES = 4
"""Reaches of a mask that a part of the sequence must have."""
MOST_SHORTENED = 2 ** (0.5 / STEPS_PER_DOUBLING)
"""A problem is at most this many times longer than its coarse form."""


def coarse(problem: Problem) -> Problem:
    """The representative of all problems that are like this one."""
    mask = problem.mask
    seq_q, seq_kv = (_length(tokens, problem.ranks) for tokens in (problem.seq_q, problem.seq_kv))
    left, right = (reach if not reach else _rounded(reach) for reach in (mask.left, mask.right))
    rounded = Mask(left=left, right=right)
    if mask.documents is not None:
        seen = problem.pairs / problem.seq_q * (1 if mask.right is None else 2)
        kv = _typical(seen, seq_kv, problem.ranks)
        rounded &= documents([cut * seq_q // seq_kv for cut in kv], kv)
    return replace(problem, seq_q=seq_q, seq_kv=seq_kv, mask=rounded.within(seq_q, seq_kv))


def _typical(seen: float, tokens: int, ranks: int) -> list[int]:
    """Boundaries of documents in which a token is, on average, in one of `seen` tokens: lengths are spread as those of
    independent cuts, in a fixed pseudo-random order. Those far shorter than a rank's tokens are made a little longer.
    """
    mean = max(_rounded(seen / 2, doublings=2), tokens // (ranks * SHORTEST), 1)
    cuts = [0]
    while cuts[-1] < tokens:
        share = len(cuts) * GOLDEN % 1
        cuts.append(min(tokens, cuts[-1] + max(1, round(-mean * log(1 - share)))))
    return cuts


def _length(tokens: int, ranks: int) -> int:
    """A whole number of tokens for each rank, even so that each has an early and a late half."""
    rounded = 2 * ranks * _rounded(tokens / (2 * ranks))
    return rounded if rounded <= MOST else tokens


def _rounded(number: float, doublings: float = 1 / STEPS_PER_DOUBLING) -> int:
    return round(2 ** (round(log2(max(1.0, number)) / doublings) * doublings))


def part_of(problem: Problem, topology: Topology) -> tuple[Problem, Topology]:
    """The fewest ranks, in whole nodes and at least two of them, on which a local mask takes as long as on all."""
    if problem.seq_q != problem.seq_kv:
        return problem, topology
    reach = PART_OF_REACHES * _reach(problem.mask)
    for ranks in divisors(problem.ranks):
        tokens = problem.seq_q // problem.ranks * ranks
        if ranks % topology.ranks_per_node == 0 and ranks >= 2 * topology.ranks_per_node and tokens >= reach:
            part = replace(problem, ranks=ranks, seq_q=tokens, seq_kv=tokens, mask=_cut(problem.mask, tokens))
            return part, topology.with_ranks(ranks)
    return problem, topology


def _reach(mask: Mask) -> float:
    """The most tokens between a query and a key that it sees."""
    docs = mask.documents
    longest = inf if docs is None else max(b - a for a, b in pairwise(docs.q))
    return min(longest, inf if mask.left is None or mask.right is None else mask.left + mask.right)


def _cut(mask: Mask, tokens: int) -> Mask:
    if mask.documents is None:
        return mask
    return replace(mask, documents=None) & documents([*(cut for cut in mask.documents.q if cut < tokens), tokens])


def can_be_widened(choice: Choice) -> bool:
    """True if more columns leave the order of its transfers as it is. With several rows, rows and columns are fetched
    in turn, and a longer row changes whose turn it is."""
    return choice.is_collective or choice.assignment.tile.rows == 1


def widened(choice: Choice, ranks: int) -> Choice:
    """The choice for more ranks: its tile gets more columns."""
    assignment = choice.assignment
    cols = ranks // (assignment.ulysses_degree * assignment.tile.rows)
    return choice if cols == assignment.tile.cols else replace(choice, tile=Tile(assignment.tile.rows, cols))


def retargeted(plan: Plan, problem: Problem, layout: Layout) -> Plan:
    """The plan, for another problem of as many ranks and heads, with direct routes if that one has no use for rings."""
    schedule = plan.schedule
    has_rings = "ring" in (schedule.route, schedule.partials) and has_inner_rings(plan.assignment)
    if has_rings and not BlockMatrix(problem, layout, plan.assignment).is_uniform:
        schedule = replace(schedule, route="direct", partials="direct")
    return replace(plan, problem=problem, layout=layout, schedule=schedule)
