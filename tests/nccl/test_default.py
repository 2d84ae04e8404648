"""What a call gets that decides nothing: right results, and the same choice on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from mesh_attention import MeshAttention
from mesh_attention.plan.steps import DIRECTIONS
from nccl.attending import assert_right, case, made
from nccl.rig import Rig

CASES = {
    "causal": "bfloat16",
    "cross-causal-blind-rows": "float32",
    "multi-head": "bfloat16",
    "causal-documents-window": "float16",
}


def default_calls(group: Any) -> tuple[list[str], list[str]]:
    """What is wrong with the cases, and what was chosen for their passes."""
    attention, wrong, chosen = MeshAttention(group), [], []
    for name, dtype in CASES.items():
        wrong += made(attention, case(name, dtype)).wrong()
        *_, engine = attention.calls.engines.values()
        for direction in DIRECTIONS:
            plan = engine.programs(direction)[0].plan
            keep = f", keeps {' '.join(plan.schedule.keep)}" if plan.schedule.keep else ""
            chosen.append(f"{name} {direction}: {plan.method} {plan.assignment}{keep}")
    return wrong, chosen


@pytest.mark.parametrize("ranks", [3, 8])
def test_the_default_is_right_and_the_same_on_all_ranks(rig: Rig, ranks: int) -> None:
    wrong, chosen = zip(*rig.run(ranks, default_calls), strict=True)
    assert_right(list(wrong))
    assert all(one == chosen[0] for one in chosen), chosen
    rig.notes.append(f"chosen by default on {ranks} ranks for {chosen[0][0]}")
