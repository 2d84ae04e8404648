"""Every planner with every mask, in every dtype, on real NCCL: both passes, the LSE and its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import CASES
from gpu.test_attention import LARGE

from mesh_attention import LocalGroup, MeshAttention
from nccl.attending import DTYPES, Attended, assert_all_close, errors_of_cases, planners, worst
from nccl.rig import DEVICE, SIZES, Rig

EVERY = [(ranks, name) for ranks in SIZES for name in planners(ranks)]


@pytest.mark.parametrize(("ranks", "planner"), EVERY)
def test_every_planner_with_every_mask(rig: Rig, ranks: int, planner: str) -> None:
    """Uneven shards and ranks without tokens among them. Over the planners, each mask meets every dtype."""
    first = list(planners(ranks)).index(planner)
    cases = [(case.name, DTYPES[(first + i) % len(DTYPES)]) for i, case in enumerate(CASES)]
    assert_all_close(rig.run(ranks, errors_of_cases, planners(ranks)[planner], cases, {}))


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("layout", ["contiguous", "striped", "chunks"])
def test_every_layout(rig: Rig, layout: str, ranks: int) -> None:
    names = ("causal", "window", "causal-documents-window", "cross-causal", "shorter-than-the-ranks")
    cases = [(name, DTYPES[i % len(DTYPES)]) for i, name in enumerate(names)]
    assert_all_close(rig.run(ranks, errors_of_cases, {"layout": layout}, cases, {}))


# Large enough for the fast kernels


def large_tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 3072, 8, 128, generator=generator).to(dtype).to(DEVICE) for _ in range(4)]


def large_errors(group: Any, mask: str, dtype: torch.dtype) -> dict[str, float]:
    """The error of each planner as a multiple of the error of one kernel on one rank, the largest of both passes."""
    given = large_tensors(dtype)
    due = _both_passes(MeshAttention(LocalGroup(1).comm(0)), [t.double() for t in given], LARGE[mask])
    alone = _both_passes(MeshAttention(LocalGroup(1).comm(0)), given, LARGE[mask])
    single = [(ours.double() - theirs).square().mean().sqrt() for ours, theirs in zip(alone, due, strict=True)]
    found = {}
    for name in ("default", "ring, routed", "mesh, grouped", "attention2d", "ulysses x mesh"):
        layout = {} if mask in ("causal", "full") else {"layout": "contiguous"}
        attention = MeshAttention(group, **planners(8)[name], **layout)
        shards = [attention.shard(t) for t in given]
        ours = [attention.unshard(t) for t in _both_passes(attention, shards, LARGE[mask])]
        errors = [(a.double() - b).square().mean().sqrt() for a, b in zip(ours, due, strict=True)]
        found[name] = worst(float(error / one) for error, one in zip(errors, single, strict=True))
    return found


def _both_passes(attention: MeshAttention, given: list[torch.Tensor], call: dict[str, Any]) -> list[torch.Tensor]:
    *inputs, d_out = given
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = attention(*leaves, **call)
    return [out.detach(), *torch.autograd.grad((out * d_out).sum(), leaves)]


@pytest.mark.usefixtures("needs_cuda")
@pytest.mark.parametrize(
    ("mask", "dtype"), [(mask, torch.bfloat16) for mask in LARGE] + [("causal", torch.float16)], ids=str
)
def test_eight_ranks_are_about_as_exact_as_one_kernel(rig: Rig, mask: str, dtype: torch.dtype) -> None:
    for ratios in rig.run(8, large_errors, mask, dtype):
        assert worst(ratios.values()) <= 1.5, ratios


# The same bits


def bits_of(group: Any, options: dict[str, Any], dtype: torch.dtype) -> bool:
    """True if two runs give the same bits."""
    attention, degree = MeshAttention(group, **options), options.get("ulysses_degree", 1)
    runs = []
    for _ in range(2):
        ours = Attended(attention, "causal", dtype, degree=degree, deterministic=True)
        runs.append([ours.out, ours.lse, *ours.gradients()])
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("ranks", [3, 8])
def test_deterministic_calls_give_the_same_bits(rig: Rig, ranks: int) -> None:
    for name, options in planners(ranks).items():
        for dtype in (torch.bfloat16, torch.float32):
            assert all(rig.run(ranks, bits_of, options, dtype)), name
