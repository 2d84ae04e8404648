"""What a call gets that decides nothing: right results, and the same choice on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mesh_attention import MeshAttention
from mesh_attention.plan.steps import DIRECTIONS
from nccl.attending import Attended, assert_all_close
from nccl.rig import Rig

CASES = {
    "causal": torch.bfloat16,
    "cross-causal-blind-rows": torch.float32,
    "multi-head": torch.bfloat16,
    "causal-documents-window": torch.float16,
}


def default_calls(group: Any) -> tuple[dict[str, float], list[str]]:
    """The error of each case, in tolerances; and what was chosen for its passes."""
    attention, errors, chosen = MeshAttention(group), {}, []
    for name, dtype in CASES.items():
        errors[name] = Attended(attention, name, dtype).error()
        *_, engine = attention.calls.engines.values()
        for direction in DIRECTIONS:
            plan = engine.programs(direction)[0].plan
            keep = f", keeps {' '.join(plan.schedule.keep)}" if plan.schedule.keep else ""
            chosen.append(f"{name} {direction}: {plan.method} {plan.assignment}{keep}")
    return errors, chosen


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_the_default_is_right_and_the_same_on_all_ranks(rig: Rig, ranks: int) -> None:
    errors, chosen = zip(*rig.run(ranks, default_calls), strict=True)
    assert_all_close(list(errors))
    assert all(one == chosen[0] for one in chosen), chosen
    rig.notes.append(f"chosen by default on {ranks} ranks for {chosen[0][0]}")
