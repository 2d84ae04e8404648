"""What a pass takes of the GPU over NCCL, beside what its plan states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mesh_attention import MeshAttention
from mesh_attention.plan.steps import DIRECTIONS
from nccl.attending import planners
from nccl.rig import DEVICE, Rig

TOKENS = 2048
"""Of each rank."""
PLANNERS = ("ring, routed", "pass-q", "mesh", "mesh, grouped", "mesh, kept", "attention2d", "ulysses", "ulysses x mesh")


def taken_and_stated(group: Any, options: dict[str, Any], waits: bool) -> list[tuple[int, int]]:
    """Bytes of each pass: the most that was allocated at once beyond what was there before, and what the plan states.

    With `waits`, the host waits for the device after each pass; without, passes are queued one behind the other.
    """
    attention = MeshAttention(group, **options)
    shape = (1, TOKENS, 16, 128)
    q, k, v, d_out = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    found = dict.fromkeys(DIRECTIONS, 0)
    for _ in range(4):
        before = _start(waits)
        out = attention(*leaves, causal=True)
        found["forward"] = _end(waits) - before
        before = _start(waits)
        gradients = torch.autograd.grad(out, leaves, d_out)
        found["backward"] = _end(waits) - before
        del out, gradients
    (engine,) = attention.engines.known.values()
    stated = {}
    for direction in DIRECTIONS:
        (compiled,) = engine.programs(direction)
        held = {id(of): of.nbytes for of in map(compiled.allocations.__getitem__, compiled.kept)}
        stated[direction] = compiled.device_nbytes - (sum(held.values()) if direction == "backward" else 0)
    torch.cuda.synchronize()
    return [(found[direction], stated[direction]) for direction in DIRECTIONS]


def _start(waits: bool) -> int:
    if waits:
        torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _end(waits: bool) -> int:
    if waits:
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.usefixtures("needs_cuda")
@pytest.mark.parametrize("waits", [True, False], ids=["waiting for each pass", "queueing passes"])
@pytest.mark.parametrize("ranks", [4, 8])
def test_memory_over_nccl_beside_the_plans_statement(rig: Rig, ranks: int, waits: bool) -> None:
    ratios = {}
    for name in PLANNERS:
        by_rank = rig.run(ranks, taken_and_stated, planners(ranks)[name], waits)
        for i, direction in enumerate(DIRECTIONS):
            taken, stated = max((passes[i] for passes in by_rank), key=lambda pair: pair[0] / pair[1])
            ratios[name, direction] = taken / stated
            print(
                f"{ranks} ranks, {name:16} {direction:8} {stated / 2**20:7.1f} MiB stated, {taken / 2**20:7.1f} taken"
            )
    assert max(ratios.values()) <= 2.0, ratios
