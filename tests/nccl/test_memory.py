"""What a pass takes of the GPU over NCCL, beside what its plan states."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from attending import planners

from mesh_attention import MeshAttention
from mesh_attention.plan.steps import DIRECTIONS
from nccl.rig import DEVICE, Rig

TOKENS = 2048
"""Of each rank."""
PLANNERS = ("ring, routed", "mesh", "mesh, kept", "attention2d", "ulysses", "ulysses x mesh")
HOSTS = {"the host waits for each pass": True, "the host runs ahead": False}
ROOM = 3 * 2**20
"""Bytes that a pass may allocate beyond those stated: of a block, torch's allocator splits off no less than a MiB."""
WAITING = 3.0
"""How many times the stated bytes it may hold, with what NCCL still reads while the host runs ahead of the device."""


class Taken(NamedTuple):
    """Bytes of one pass on one rank, beyond what was there before it."""

    stated: int
    allocated: int
    held: int
    """Allocated, or given back and not yet free because another stream may use it."""


def passes_of(group: Any, options: dict[str, Any]) -> dict[str, list[Taken]]:
    """Forward and backward, by whether the host waits for the device after each pass."""
    attention = MeshAttention(group, **options)
    return {how: _passes(attention, waits=waits) for how, waits in HOSTS.items()}


def _passes(attention: MeshAttention, *, waits: bool) -> list[Taken]:
    q, k, v, d_out = (torch.randn(1, TOKENS, 16, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    torch.cuda.synchronize()
    for _ in range(4):
        before = _start(waits)
        out = attention(*leaves, causal=True)
        forward = _since(before, waits)
        before = _start(waits)
        gradients = torch.autograd.grad(out, leaves, d_out)
        backward = _since(before, waits)
        del out, gradients
    (engine,) = attention.calls.engines.values()
    found = []
    for direction, (allocated, held) in zip(DIRECTIONS, (forward, backward), strict=True):
        (compiled,) = engine.programs(direction)
        kept = {id(of): of.nbytes for of in map(compiled.allocations.__getitem__, compiled.kept)}
        stated = compiled.device_nbytes - (sum(kept.values()) if direction == "backward" else 0)
        found.append(Taken(stated, allocated, held))
    torch.cuda.synchronize()
    return found


def _start(waits: bool) -> dict[str, int]:
    if waits:
        torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_stats()


def _since(before: dict[str, int], waits: bool) -> tuple[int, int]:
    if waits:
        torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    return tuple(  # type: ignore[return-value]
        after[f"{kind}_bytes.all.peak"] - before[f"{kind}_bytes.all.current"] for kind in ("allocated", "active")
    )


@pytest.mark.usefixtures("needs_cuda")
def test_memory_over_nccl_beside_the_plans_statement(rig: Rig) -> None:
    ranks, wrong = 8, []
    by_planner = {name: rig.run(ranks, passes_of, planners(ranks)[name]) for name in PLANNERS}
    for how in HOSTS:
        rig.notes.append(f"memory of a pass on {ranks} ranks in MiB, {how}; held beside stated:")
        for name, by_rank in by_planner.items():
            for direction, *taken in zip(DIRECTIONS, *(one[how] for one in by_rank), strict=True):
                worst = max(taken, key=lambda one: one.held / one.stated)
                ratio = worst.held / worst.stated
                mib = ", ".join(f"{field} {nbytes / 2**20:6.1f}" for field, nbytes in worst._asdict().items())
                rig.notes.append(f"  {name:14}, {direction:8}: {mib}; {ratio:.2f}")
                if any(one.allocated > one.stated + ROOM or one.held > WAITING * one.stated for one in taken):
                    wrong.append((how, name, direction, taken))
    assert not wrong
