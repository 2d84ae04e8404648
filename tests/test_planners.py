"""Plans from outside: whatever a planner returns is for this call and right, or refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import shared_pool

from mesh_attention import LocalGroup, MeshAttention, Plan, Problem, full, make_plan
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.steps import Attend, Direction
from mesh_attention_lab.testing.wrappers import Counting

Planner = Callable[..., Any]
RANKS = 4


def call(planner: Planner, **options: Any) -> list[torch.Tensor]:
    """The output for zigzag shards of a causal call. If it is refused, nothing has been sent by then."""
    group = LocalGroup(RANKS)
    comms = [Counting(group.comm(rank)) for rank in range(RANKS)]
    attention = MeshAttention(comms, planner=planner, layout="zigzag")
    shards = [attention.shard(torch.randn(1, 32, 4, 8, dtype=torch.float64, **options)) for _ in range(3)]
    try:
        return attention(*shards, causal=True)
    except MeshAttentionError:
        assert not any(comm.sent_nbytes for comm in comms)
        raise


# Planners; what is said of those that plan for another call is in tests/golden/python/plans.txt


def planned(problem: Problem, direction: Direction, layout: Layout) -> Plan:
    return make_plan(problem, tile=(2, 2), direction=direction, layout=layout)


def for_another(**changes: Any) -> Planner:
    """A planner that plans for a problem with changes, or for another direction or layout."""

    def planner(problem: Problem, **given: Any) -> Plan:
        fields = {name: value for name, value in changes.items() if name not in given}
        return planned(replace(problem, **fields), **{name: changes.get(name, value) for name, value in given.items()})

    return planner


with_other_mask = for_another(mask=full())


def without_an_attend(problem: Problem, direction: Direction, layout: Layout) -> Plan:
    plan = planned(problem, direction, layout).unrolled()
    assert plan.programs is not None
    first = plan.programs[0]
    last = max(index for index, step in enumerate(first.steps) if isinstance(step, Attend))
    fewer = replace(first, steps=first.steps[:last] + first.steps[last + 1 :])
    return plan.with_programs((fewer, *plan.programs[1:]))


def test_a_planner_that_plans_this_call_runs() -> None:
    assert all(out.isfinite().all() for out in call(planned))


def test_a_backward_plan_that_never_runs_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[Direction] = []
    monkeypatch.setattr("mesh_attention.api.verify", lambda plan: proved.append(plan.direction))
    call(planned)
    assert proved == ["forward"]
    call(planned, requires_grad=True)
    assert proved == ["forward", "forward", "backward"]


def refusal_of_one_planner(group: Any) -> str:
    """What this rank says if only rank 1 has a planner that plans for another mask."""
    planner = with_other_mask if dist.get_rank(group) == 1 else planned
    attention = MeshAttention(group, planner=planner)
    try:
        attention(*(torch.randn(1, 8, 4, 8) for _ in range(3)), causal=True)
    except MeshAttentionError as error:
        return str(error)
    return "nothing"


def test_every_rank_refuses_what_one_planner_gets_wrong() -> None:
    for said in shared_pool().run(RANKS, refusal_of_one_planner):
        assert "mask full instead of causal" in said
