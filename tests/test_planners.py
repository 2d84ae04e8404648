"""Plans from outside: whatever a planner returns is for this call and right, or refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import shared_pool

from mesh_attention import Contiguous, LocalGroup, MeshAttention, Plan, Problem, full, make_plan
from mesh_attention.errors import MeshAttentionError, ScheduleError
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.steps import Attend, Direction
from mesh_attention_lab.testing.wrappers import Counting

Planner = Callable[..., Any]
RANKS = 4


def call(planner: Planner, **options: Any) -> tuple[list[torch.Tensor], list[Counting]]:
    """The output for zigzag shards of a causal call, and the transports, which count what was sent."""
    group = LocalGroup(RANKS)
    comms = [Counting(group.comm(rank)) for rank in range(RANKS)]
    attention = MeshAttention(comms, planner=planner, layout="zigzag")
    shards = [attention.shard(torch.randn(1, 32, 4, 8, dtype=torch.float64, **options)) for _ in range(3)]
    return attention(*shards, causal=True), comms


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


@pytest.mark.parametrize(
    ("planner", "complaint"),
    [
        (for_another(layout=Contiguous()), "layout contiguous instead of zigzag"),
        (with_other_mask, "mask full instead of causal"),
        (for_another(dtype="bfloat16"), "dtype bfloat16 instead of float64"),
        (for_another(seq_kv=64), "seq_kv 64 instead of 32"),
        (for_another(direction="forward"), "direction forward instead of backward"),
        (lambda *given, **named: str(planned(*given, **named)), "returned str for forward; expected a Plan"),
        (without_an_attend, "the planner's plan is wrong: .* breaks the rules .*coverage"),
    ],
)
def test_a_plan_that_is_not_for_the_call_is_refused(planner: Planner, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        call(planner)


def test_nothing_is_sent_before_a_plan_is_refused() -> None:
    group = LocalGroup(RANKS)
    comms = [Counting(group.comm(rank)) for rank in range(RANKS)]
    attention = MeshAttention(comms, planner=with_other_mask)
    shards = [attention.shard(torch.randn(1, 32, 4, 8)) for _ in range(3)]
    with pytest.raises(ScheduleError):
        attention(*shards, causal=True)
    assert not any(comm.sent_nbytes for comm in comms)


def test_a_planner_that_plans_this_call_runs() -> None:
    outs, _ = call(planned)
    assert all(out.isfinite().all() for out in outs)


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
