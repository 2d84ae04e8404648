"""Planners, masks and dtypes on real NCCL: both passes, the LSE and its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attending import CASES, both_passes, error_ratios, planners, wholes_of, widened
from gpu.test_attention import LARGE

from mesh_attention import MeshAttention
from nccl.attending import DTYPES, EVERY, assert_right, case, cases_of, worst, wrong_with
from nccl.rig import DEVICE, Rig


@pytest.mark.parametrize(("ranks", "planner"), EVERY)
def test_every_planner_and_every_mask(rig: Rig, ranks: int, planner: str) -> None:
    calls = list(cases_of(ranks, planner).values())
    assert_right(rig.run(ranks, wrong_with, planners(ranks)[planner], calls))


def test_every_case_is_met() -> None:
    assert len({name for ranks, planner in EVERY if ranks == 8 for name in cases_of(ranks, planner)}) == len(CASES)


@pytest.mark.parametrize(("ranks", "layout"), [(3, "contiguous"), (4, "chunks"), (3, "striped")])
def test_every_layout(rig: Rig, ranks: int, layout: str) -> None:
    names = ("causal", "window", "cross-causal", "shorter-than-the-ranks")
    calls = [case(name, dtype) for name, dtype in zip(names, DTYPES, strict=True)]
    assert_right(rig.run(ranks, wrong_with, planners(ranks)["mesh"] | {"layout": layout}, calls))


# Large enough for the fast kernels


def large_ratios(group: Any, mask: str, dtype: torch.dtype, names: tuple[str, ...]) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(1, 3072, 8, 128, generator=generator).to(DEVICE, dtype) for _ in range(4)]
    layout = {} if mask in ("causal", "full") else {"layout": "contiguous"}
    given = [(name, MeshAttention(group, **planners(8)[name], **layout)) for name in names]
    return error_ratios(given, wholes, **LARGE[mask])


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
    for ratios in rig.run(8, large_ratios, mask, dtype, names):
        assert worst(ratios.values()) <= 1.5, ratios


# The same bits


def differing(group: Any) -> list[str]:
    """The planners whose results of two runs are not the same bits."""
    found = []
    for i, (name, options) in enumerate(planners(8).items()):
        call = widened(case("causal", ("bfloat16", "float32")[i % 2]), options)
        attention, wholes = MeshAttention(group, **options), wholes_of(call, DEVICE)[:4]
        runs = [both_passes(attention, wholes, **call.arguments | {"return_lse": False, "deterministic": True})
                for _ in range(2)]  # fmt: skip
        if not all(torch.equal(a, b) for a, b in zip(*runs, strict=True)):
            found.append(name)
    return found


def test_deterministic_calls_give_the_same_bits(rig: Rig) -> None:
    assert rig.run(8, differing) == [[]] * 8
