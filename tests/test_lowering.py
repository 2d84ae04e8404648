"""Where a program waits for what it has returned: not before it has had something to hide behind."""

from __future__ import annotations

import pytest

from mesh_attention import Problem, causal, full, make_plan
from mesh_attention.plan.lowering import MEETS_THAT_HIDE
from mesh_attention.plan.program import stops
from mesh_attention.plan.steps import DIRECTIONS, OUTPUTS, Attend, Direction, Finish, Free, Merge, Recv, Send, Step
from mesh_attention.planners.costs import Costs

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
