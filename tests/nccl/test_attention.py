"""Planners, masks and dtypes on real NCCL: both passes, the LSE and its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.test_attention import LARGE

from mesh_attention import LocalGroup, MeshAttention
from nccl.attending import DTYPES, Attended, assert_all_close, cases_of, errors_of_cases, planners, worst
from nccl.rig import DEVICE, SIZES, Rig

EVERY = [(ranks, name) for ranks in SIZES for name in planners(ranks)]


@pytest.mark.parametrize(("ranks", "planner"), EVERY)
def test_every_planner_and_every_mask(rig: Rig, ranks: int, planner: str) -> None:
    assert_all_close(rig.run(ranks, errors_of_cases, planners(ranks)[planner], cases_of(ranks, planner), {}))


@pytest.mark.parametrize(("ranks", "layout"), [(3, "contiguous"), (4, "chunks"), (6, "striped")])
def test_every_layout(rig: Rig, ranks: int, layout: str) -> None:
    names = ("causal", "window", "cross-causal", "shorter-than-the-ranks")
    cases = list(zip(names, DTYPES, strict=True))
    assert_all_close(rig.run(ranks, errors_of_cases, planners(ranks)["mesh"] | {"layout": layout}, cases, {}))


# Large enough for the fast kernels


def large_tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 3072, 8, 128, generator=generator).to(dtype).to(DEVICE) for _ in range(4)]


def large_errors(group: Any, mask: str, dtype: torch.dtype, names: tuple[str, ...]) -> dict[str, float]:
    """The error of each planner as a multiple of the error of one kernel on one rank, the largest of both passes."""
    given = large_tensors(dtype)
    due = _both_passes(MeshAttention(LocalGroup(1).comm(0)), [t.double() for t in given], LARGE[mask])
    alone = _both_passes(MeshAttention(LocalGroup(1).comm(0)), given, LARGE[mask])
    single = [(ours.double() - theirs).square().mean().sqrt() for ours, theirs in zip(alone, due, strict=True)]
    found = {}
    for name in names:
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
    ("mask", "dtype", "names"),
    [
        ("causal", torch.bfloat16, ("ring, routed", "mesh, grouped", "attention2d", "ulysses x mesh")),
        ("window", torch.float16, ("mesh", "ulysses")),
        ("documents", torch.bfloat16, ("mesh, kept", "usp")),
    ],
    ids=["causal", "window", "documents"],
)
def test_eight_ranks_are_about_as_exact_as_one_kernel(
    rig: Rig, mask: str, dtype: torch.dtype, names: tuple[str, ...]
) -> None:
    for ratios in rig.run(8, large_errors, mask, dtype, names):
        assert worst(ratios.values()) <= 1.5, ratios


# The same bits


def differing(group: Any, ranks: int) -> list[str]:
    """The planners whose results of two runs are not the same bits."""
    found = []
    for i, (name, options) in enumerate(planners(ranks).items()):
        attention, degree = MeshAttention(group, **options), options.get("ulysses_degree", 1)
        runs = []
        for _ in range(2):
            dtype = (torch.bfloat16, torch.float32)[i % 2]
            ours = Attended(attention, "causal", dtype, degree=degree, deterministic=True)
            runs.append([ours.out, ours.lse, *ours.gradients()])
        if not all(torch.equal(a, b) for a, b in zip(*runs, strict=True)):
            found.append(name)
    return found


def test_deterministic_calls_give_the_same_bits(rig: Rig) -> None:
    assert rig.run(8, differing, 8) == [[]] * 8
