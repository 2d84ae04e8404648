"""Problems that differ only in detail, as one: the choice for a problem is made for its coarse form.

So a new length, or another batch of packed documents, needs no new choice, and the choice does not depend on what was
asked before: it is a function of the coarse problem. Lengths and windows are rounded to powers of √2 (times the number
of ranks), and documents count as a window that leaves about as many pairs.

A plan of the coarse problem is a plan of the problem after its problem is replaced: a schedule names offsets, never
tokens, and lowering leaves out what a mask makes unnecessary. Only a ring of inner rings needs every shard everywhere;
where the problem itself does not, shards and partials go directly.
"""

from __future__ import annotations

from dataclasses import replace
from math import log2

from mesh_attention.masks import Mask
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.plan import Plan
from mesh_attention.planning.mesh import has_inner_rings
from mesh_attention.problem import MOST, Problem
from mesh_attention.tuning.work import banded

STEPS_PER_DOUBLING = 2
LONGER = 2 ** (0.5 / STEPS_PER_DOUBLING)
"""A problem is at most this many times longer than its coarse form."""


def coarse(problem: Problem) -> Problem:
    """The problem that stands for all that are like this one."""
    mask = banded(problem)
    seq_q, seq_kv = (_length(tokens, problem.ranks) for tokens in (problem.seq_q, problem.seq_kv))
    reaches = {"left": mask.left, "right": mask.right}
    rounded = Mask(**{side: reach if not reach else _rounded(reach) for side, reach in reaches.items()})
    return replace(problem, seq_q=seq_q, seq_kv=seq_kv, mask=rounded.within(seq_q, seq_kv))


def _length(tokens: int, ranks: int) -> int:
    """A whole number of tokens for each rank, even so that each has an early and a late half."""
    rounded = 2 * ranks * _rounded(tokens / (2 * ranks))
    return rounded if rounded <= MOST else tokens


def _rounded(number: float) -> int:
    step = round(log2(max(1.0, number)) * STEPS_PER_DOUBLING)
    return round(2 ** (step / STEPS_PER_DOUBLING))


def plan_like(plan: Plan, problem: Problem) -> Plan:
    """The plan for another problem of as many ranks and heads, with direct routes if that one has no use for rings."""
    schedule = plan.schedule
    if "ring" in (schedule.route, schedule.partials) and has_inner_rings(plan.assignment):
        if not BlockMatrix(problem, plan.layout, plan.assignment).is_uniform:
            schedule = replace(schedule, route="direct", partials="direct")
    return replace(plan, problem=problem, schedule=schedule)
