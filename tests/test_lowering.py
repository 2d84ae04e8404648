"""Programs wait for what they return when something hid it, and kernel calls cover what the mask lets through."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given, settings
from strategies import plans

from mesh_attention import Plan, Problem, causal, full, make_plan
from mesh_attention.masks import BlockKind
from mesh_attention.plan.kernel_calls import kernel_calls
from mesh_attention.plan.lowering import MEETS_THAT_HIDE
from mesh_attention.plan.program import stops
from mesh_attention.plan.steps import DIRECTIONS, OUTPUTS, Attend, Direction, Finish, Free, Merge, Recv, Send, Step
from mesh_attention.planners.costs import Costs
from mesh_attention_lab.testing.kernel_conformance import is_unmasked

LINK = Costs(q=0.3, kv=0.3, do=0.3, o=0.3, dq=0.3, dkv=0.3)


def steps_of(direction: Direction, mask: object, blocks_per_call: int) -> tuple[Step, ...]:
    problem = Problem.self_attention(seq_len=16 * 64, heads=2, head_dim=4, ranks=16, mask=mask)  # type: ignore[arg-type]
    options = {"tile": (4, 4), "layout": "striped", "blocks_per_call": blocks_per_call, "costs": LINK}
    return make_plan(problem, direction=direction, **options).program(5).steps  # type: ignore[arg-type]


CASES = [(d, mask, blocks) for d in DIRECTIONS for mask in (full(), causal()) for blocks in (1, 2, 4)]


@pytest.mark.parametrize(("direction", "mask", "blocks_per_call"), CASES)
def test_a_partial_is_merged_two_attends_after_its_turn_or_at_the_end(
    direction: Direction, mask: object, blocks_per_call: int
) -> None:
    steps = steps_of(direction, mask, blocks_per_call)
    posted = {step.item: index for index, step in enumerate(steps) if isinstance(step, Recv)}
    is_own_end = {
        kind: next(
            i for i, s in enumerate(steps) if isinstance(s, Finish) and s.item.kind == kind and s.item.shard == 5
        )
        for kind in OUTPUTS[direction]
    }
    merges = [(index, step.partial) for index, step in enumerate(steps) if isinstance(step, Merge)]
    assert merges
    for index, partial in merges:
        between = sum(isinstance(step, Attend) for step in steps[posted[partial] : index])
        in_between = [s for s in steps[index : is_own_end[partial.kind]] if not isinstance(s, Merge | Finish | Free)]
        assert between >= MEETS_THAT_HIDE or not in_between


@pytest.mark.parametrize(("direction", "mask", "blocks_per_call"), CASES)
def test_a_partial_that_was_sent_is_freed_two_attends_later_or_at_the_end(
    direction: Direction, mask: object, blocks_per_call: int
) -> None:
    steps = steps_of(direction, mask, blocks_per_call)
    sent = {step.item: index for index, step in enumerate(steps) if isinstance(step, Send)}
    waits = [stop for stop in stops(steps) if stop.departures]
    for stop in waits:
        for item in stop.departures:
            between = sum(isinstance(step, Attend) for step in steps[sent[item] : stop.span.start])
            wanted = MEETS_THAT_HIDE if item.kind in OUTPUTS[direction] else 1
            assert between >= wanted or not any(isinstance(s, Attend) for s in steps[stop.span.start :])


@given(plans(max_ranks=8))
@settings(max_examples=150)
def test_calls_cover_each_attended_pair_once(plan: Plan) -> None:
    program = plan.program(plan.problem.ranks // 2)
    seq = {"seq_q": plan.problem.seq_q, "seq_kv": plan.problem.seq_kv}
    for index, calls in kernel_calls(program.steps, plan.matrix).items():
        attend = program.steps[index]
        assert isinstance(attend, Attend)
        covered = Counter((x, y) for call in calls for x in chain(*call.q) for y in chain(*call.kv))
        assert max(covered.values()) == 1
        wanted = sum(plan.matrix.pairs(row.shard, col.shard, row.part) for row in attend.rows for col in attend.cols)
        assert sum(plan.problem.mask.pairs(q, kv, **seq) for c in calls for q in c.q for kv in c.kv) == wanted
        for call in calls:
            if call.is_plain_causal:
                q, kv = list(chain(*call.q)), list(chain(*call.kv))
                seen = [[is_unmasked(plan.problem.mask, x, y, *seq.values()) for y in kv] for x in q]
                assert seen == [[j <= i for j in range(len(kv))] for i in range(len(q))]
        unmasked = [call for call in calls if call.kind is BlockKind.FULL]
        for call in unmasked:
            assert all(plan.problem.mask.kind(q, kv, **seq) is BlockKind.FULL for q in call.q for kv in call.kv)
