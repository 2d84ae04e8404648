"""CUDA graphs with NCCL's transfers in them: recorded on all ranks, replayed, for new shapes, and given back."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attending import planners, relative_error
from torch import Tensor

from mesh_attention import MeshAttention
from nccl.attending import DTYPES, assert_right, case, worst, wrong_with
from nccl.rig import DEVICE, Rig

pytestmark = pytest.mark.usefixtures("needs_cuda")
PLANNERS = ("ring, routed", "mesh, grouped", "attention2d", "ulysses")
LENGTHS = (64, 96, 64, 64, 96, 96)
"""Tokens of each rank in the calls of a test, one after the other: a pass is recorded when its shape comes again."""


def shards(group: Any, tokens: int, seed: int) -> list[Tensor]:
    """This rank's Q, K, V and dO."""
    generator = torch.Generator().manual_seed(8 * seed + dist.get_rank(group))
    return [torch.randn(1, tokens, 24, 64, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(4)]


def both_passes(attention: MeshAttention, given: list[Tensor]) -> list[Tensor]:
    *inputs, d_out = given
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = attention(*leaves, causal=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def differences(group: Any, options: dict[str, Any]) -> list[tuple[bool, float]]:
    """Replayed beside step by step: whether outputs are the same bits, and how far gradients are apart."""
    graphed, stepped = (MeshAttention(group, cuda_graphs=on, **options) for on in (True, False))
    found = []
    for seed, tokens in enumerate(LENGTHS):
        given = shards(group, tokens, seed)
        ours, due = both_passes(graphed, given), both_passes(stepped, given)
        apart = worst(relative_error(a, b) for a, b in zip(ours, due, strict=True))
        found.append((torch.equal(ours[0], due[0]), apart))
        if seed % 2:
            with torch.inference_mode():
                out = graphed(*given[:3], causal=True)
            assert torch.equal(out, ours[0])
    return found


@pytest.mark.parametrize(("ranks", "names"), [(3, ("mesh, grouped",)), (8, PLANNERS)])
def test_a_replayed_graph_gives_what_steps_give(rig: Rig, ranks: int, names: tuple[str, ...]) -> None:
    for name in names:
        for found in rig.run(ranks, differences, planners(ranks)[name]):
            assert all(same for same, _ in found), (name, found)
            assert worst(apart for _, apart in found) <= 2.0**-5, (name, found)  # dQ is added in no fixed order


def test_any_mask_can_be_recorded(rig: Rig) -> None:
    """Three times each: step by step, recorded, replayed. Ranks with unequal numbers of tokens, and with none."""
    names = ("softcap", "documents", "not-contiguous", "cross-causal", "shorter-than-the-ranks")
    calls = [case(name, DTYPES[i % len(DTYPES)]) for i, name in enumerate(names) for _ in range(3)]
    assert_right(rig.run(8, wrong_with, planners(8)["mesh"] | {"cuda_graphs": True}, calls))


def layers_in_turn(group: Any, options: dict[str, Any]) -> float:
    """Layers of one configuration, all forward before the first backward, and results that are kept."""
    graphed, stepped = (MeshAttention(group, cuda_graphs=on, **options) for on in (True, False))
    *inputs, d_out = shards(group, 64, 0)
    results = []
    for attention in (graphed, stepped):
        for _ in range(3):
            leaves = [t.detach().clone().requires_grad_() for t in inputs]
            x = leaves[0]
            outs = []
            for _ in range(3):
                x = attention(x, leaves[1], leaves[2], causal=True)
                outs.append(x)
            grads = torch.autograd.grad(x, leaves, d_out)
        results.append([*outs, *grads])
    return worst(relative_error(a.detach(), b.detach()) for a, b in zip(*results, strict=True))


def test_layers_share_graphs(rig: Rig) -> None:
    for name in ("ring, routed", "ulysses x mesh"):
        assert worst(rig.run(4, layers_in_turn, planners(4)[name])) <= 2.0**-5, name


def memory_after(group: Any, options: dict[str, Any], rounds: int) -> list[int]:
    """Bytes allocated after each round of: an attention with graphs of two shapes, used and deleted."""
    held = []
    for _ in range(rounds):
        attention = MeshAttention(group, cuda_graphs=True, **options)
        for tokens in (64, 512):
            for seed in range(3):
                both_passes(attention, shards(group, tokens, seed))
        torch.cuda.synchronize()
        during = torch.cuda.memory_allocated()
        del attention
        gc.collect()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
        assert held[-1] < during
    return held


def test_memory_of_graphs_is_given_back(rig: Rig) -> None:
    for held in rig.run(4, memory_after, planners(4)["mesh, grouped"], 3):
        assert len(set(held[1:])) == 1, held  # the first round sets up what this process keeps, such as workspaces
