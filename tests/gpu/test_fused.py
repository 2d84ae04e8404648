"""Fused merging and row sums as a GPU runs them: the conformance suite, sizes that count, and what a launch costs.

Every case is a compilation or two, about half a second each; so cases are few, and most of them meet few checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import merging_conformance
import pytest
import torch
from merging_conformance import CHECKS, ROW_CHECKS, TYPICAL, Case, Check, Place, RowCheck
from torch import Tensor

from gpu.launches import count_launches
from mesh_attention.kernels import merging as merging_module
from mesh_attention.kernels.merging import FusedMerging, TorchMerging
from mesh_attention.kernels.select import choose_merging

CUDA = torch.device("cuda")
HEADS, DIM = 32, 128

_DENSE = (Place((0, 2, 1, 3), (0,) * 4, (0,) * 4), Place((0, 1, 2, 3), (0,) * 4, (0,) * 4))
_ODD = (Place((3, 1, 0, 2), (1, 0, 2, 1), (0, 1, 1, 2)), Place((2, 0, 1, 3), (0, 0, 0, 1), (0, 1, 0, 2)))
_ODD_STATISTICS = (Place((2, 0, 1), (0, 1, 0), (1, 2, 0)), Place((1, 2, 0), (1, 0, 1), (0, 0, 2)))

CASES = {
    "typical": TYPICAL,
    "no token": replace(TYPICAL, tokens=0),
    "one token": replace(TYPICAL, tokens=1, batch=1, heads=1),
    "many heads": replace(TYPICAL, heads=32, tokens=65, blind="no row"),
    "dim 80": replace(TYPICAL, dim=80, outputs=_DENSE, narrow=torch.float16),
    "dim 64": replace(TYPICAL, dim=64, heads=8, narrow=torch.float32),
    "dim 192": replace(TYPICAL, dim=192, heads=3, blind="all rows"),
    "dim 256": replace(TYPICAL, dim=256, outputs=_DENSE, seed=2, blind="all rows"),
    "dim 3": replace(TYPICAL, dim=3, tokens=300, outputs=_ODD, statistics=_ODD_STATISTICS),
    "odd strides": replace(TYPICAL, outputs=_ODD, statistics=_ODD_STATISTICS, narrow=torch.float16),
    "float64": replace(TYPICAL, wide=torch.float64, narrow=torch.float64),
    "float64 of float32": replace(TYPICAL, wide=torch.float64, narrow=torch.float32, outputs=_ODD, dim=80),
}


ALL_CHECKS = ("typical", "one token", "odd strides", "float64")
"""The cases that meet all checks; others meet one for each kernel."""
ONE_EACH = (
    merging_conformance.partials_are_folded_in_by_their_weights,
    merging_conformance.copies_are_rounded_to_nearest_even,
    merging_conformance.gradients_are_added_with_one_rounding,
    merging_conformance.delta_is_the_sum_over_a_row,
    merging_conformance.a_stand_in_has_the_same_delta,
)


def pairs(checks: Sequence[Any]) -> list[Any]:
    """A check and a case each."""
    found = [(check, name) for check in checks for name in CASES if name in ALL_CHECKS or check in ONE_EACH]
    return [pytest.param(check, CASES[name], id=f"{check.__name__}-{name}") for check, name in found]


@pytest.mark.parametrize(("check", "case"), pairs(CHECKS))
def test_merging(check: Check, case: Case) -> None:
    check(FusedMerging(), CUDA, case)


@pytest.mark.parametrize(("check", "case"), pairs(ROW_CHECKS))
def test_rows(check: RowCheck, case: Case) -> None:
    check(merging_module, CUDA, case)


def test_fused_is_chosen_on_a_gpu() -> None:
    assert choose_merging(torch.device("cuda", 0)).name == "triton"
    do, delta = torch.randn(1, 2, 5, 16, device=CUDA), torch.randn(1, 2, 5, device=CUDA)
    assert count_launches(lambda: merging_module.stand_in_rows(do, delta, delta)) == 1
    assert count_launches(lambda: merging_module.row_delta(do, do, wide=torch.float32)) == 1
    assert (
        merging_module.stand_in_rows(do, delta, delta)[0].transpose(1, 2).is_contiguous()
    )  # as attention kernels want it


def running(tokens: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    """An output in float32 and its LSE in float64, in records as the executor has them."""
    raw = torch.randn(tokens, batch, HEADS * (DIM + 2), device=CUDA)
    output = raw[..., 2 * HEADS :].view(tokens, batch, HEADS, DIM).permute(1, 2, 0, 3)
    return output, raw.view(torch.float64)[..., :HEADS].permute(1, 2, 0).normal_()


def arriving(tokens: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    """As cuDNN gives them."""
    partial = torch.randn(batch, tokens, HEADS, DIM, device=CUDA, dtype=torch.bfloat16).transpose(1, 2)
    return partial, torch.randn(batch, HEADS, tokens, device=CUDA)


def test_every_operation_is_one_launch() -> None:
    merging = FusedMerging()
    total, part = running(64), arriving(64)
    dest = torch.empty_like(part[0])
    assert count_launches(lambda: merging.start_output(*total, *part)) == 1
    assert count_launches(lambda: merging.merge_output(*total, *part)) == 1
    assert count_launches(lambda: merging.add(total[0], part[0])) == 1
    assert count_launches(lambda: merging.copy(dest, total[0])) == 1
    assert count_launches(lambda: merging.copy(total[1], part[1])) == 1


def test_large_merges_are_exact_and_give_the_same_bits_every_time() -> None:
    """A race between warps over the LSE would show here, in some runs."""
    total, part = running(8192), arriving(8192)
    due = tuple(each.clone() for each in total)
    TorchMerging().merge_output(*due, *part)
    results = []
    for _ in range(20):
        ours = tuple(
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=CUDA).copy_(each) for each in total
        )
        FusedMerging().merge_output(*ours, *part)
        results.append(ours)
    for output, lse in results[1:]:
        assert torch.equal(output, results[0][0])
        assert torch.equal(lse, results[0][1])
    torch.testing.assert_close(results[0][0], due[0], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(results[0][1], due[1], rtol=1e-6, atol=1e-6)


def test_another_number_of_tokens_is_not_another_compilation() -> None:
    from mesh_attention.kernels import merging_kernels

    merging = FusedMerging()

    def compiled() -> int:
        return sum(len(caches[0]) for caches in merging_kernels.merge_rows.device_caches.values())

    merging.merge_output(*running(16), *arriving(16))
    before = compiled()
    for tokens, batch in ((1, 1), (17, 2), (1000, 3), (4096, 1)):
        merging.merge_output(*running(tokens, batch), *arriving(tokens, batch))
    assert compiled() == before


def test_offsets_are_64_bits_wide() -> None:
    """A view whose last element lies 2.4 billion elements from its first, along tokens and along heads."""
    raw = torch.zeros(2_400_000_000, dtype=torch.bfloat16, device=CUDA)
    for strides in ((0, 128, 24_000_000, 1), (0, 750_000_000, 128, 1)):
        shape = (1, 4, 100, DIM) if strides[1] == 128 else (1, 4, 1000, DIM)
        dest, source = raw.as_strided(shape, strides), torch.randn(shape, device=CUDA)
        FusedMerging().copy(dest, source)
        assert torch.equal(dest, source.bfloat16())
        due = source + dest.float()
        FusedMerging().add(source, dest)
        assert torch.equal(source, due)
        dest.zero_()
    assert not raw.any()


def test_launches_go_to_the_current_stream() -> None:
    total, part = running(4096), arriving(4096)
    due = total[0] + part[0].float()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        FusedMerging().add(total[0], part[0])
        after = stream.record_event()
    after.synchronize()
    assert torch.equal(total[0], due)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_tensors_need_not_be_on_the_current_device() -> None:
    with torch.cuda.device(1):
        total, part = torch.zeros(1, 2, 3, 16, device="cuda:1"), torch.ones(1, 2, 3, 16, device="cuda:1")
    with torch.cuda.device(0):
        FusedMerging().add(total, part)
    assert torch.equal(total, part)
