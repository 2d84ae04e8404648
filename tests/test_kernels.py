"""Every kernel that runs on a CPU conforms, a broken one does not; and partials merge to what the whole gives."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh_attention import causal, documents, full, window
from mesh_attention.kernels.base import CallMask, Demand, Kernel
from mesh_attention.kernels.merging import TorchMerging
from mesh_attention.kernels.reference import ReferenceKernel
from mesh_attention.kernels.select import KERNELS, choose_kernel
from mesh_attention.kernels.torch_attention import CpuFlashKernel
from mesh_attention_lab.testing.kernel_conformance import CHECKS, Check, Setting, is_unmasked

MASKS = {
    "full": ("full", full(), range(9), range(7)),
    "causal": ("causal", causal(), range(8), range(8)),
    "window": ("positions", window(3, 1), range(4, 12), range(2, 11)),
    "documents": ("positions", causal() & documents([0, 5, 9, 16]), range(2, 12), range(9)),
    "strided": ("positions", causal(), range(1, 16, 3), range(2, 16, 3)),
    "blind": ("positions", window(1, 0), range(12), range(8, 11)),
}


def demand(softcap: float = 0.0, dv: int = 6, lse_gradient: bool = False, dtype: torch.dtype = torch.float64) -> Demand:
    return Demand(device="cpu", dtype=dtype, head_dim_qk=6, head_dim_v=dv, softcap=softcap, lse_gradient=lse_gradient)


IN_SLICES = ReferenceKernel(nbytes=4000)  # of a few rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kernel", [CpuFlashKernel(), ReferenceKernel(), IN_SLICES], ids=lambda kernel: kernel.name)
def test_conformance(kernel: Kernel, check: Check, dtype: torch.dtype) -> None:
    check(kernel, Setting(dtype=dtype))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("changes", [{}, {"softcap": 1.5}, {"dv": 4}, {"lse_gradient": True}], ids=str)
def test_a_refusal_reads_well_after_it(kernel: Kernel, changes: dict[str, Any]) -> None:
    reason = kernel.unsupported_reason(demand(**changes))
    assert reason is None or reason.split()[0] in ("needs", "has", "cannot", "runs")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4))
@settings(max_examples=50)
def test_partials_merge_to_the_whole(sizes: list[int]) -> None:
    torch.manual_seed(len(sizes))
    scores = [torch.randn(3, size, dtype=torch.float64) for size in sizes]
    values = [torch.randn(size, 2, dtype=torch.float64) for size in sizes]
    total, total_lse = torch.zeros(3, 2, dtype=torch.float64), torch.full((3,), -torch.inf, dtype=torch.float64)
    nothing = total_lse.clone()
    for s, v in zip(scores, values, strict=True):
        weights = torch.softmax(s, -1) if s.shape[1] else s
        TorchMerging().merge_output(total, total_lse, weights @ v, s.logsumexp(-1) if s.shape[1] else nothing)
    whole = torch.cat(scores, -1)
    expected = torch.softmax(whole, -1) @ torch.cat(values) if whole.shape[1] else torch.zeros(3, 2)
    torch.testing.assert_close(total, expected.double(), rtol=1e-13, atol=1e-14)
    assert not total.isnan().any()


def test_the_choice_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    choose_kernel.cache_clear()
    with caplog.at_level(logging.INFO, logger="mesh_attention"):
        assert choose_kernel(demand()).name == "cpu flash"
        assert choose_kernel(demand(softcap=2.0)).name == "reference"
        assert choose_kernel(demand(dv=4)).name == "reference"
    assert "not cpu flash: it has no softcap" in caplog.text
    assert "not cpu flash: it needs one head size, not 6 and 4" in caplog.text


def test_dense_masks_are_the_definition() -> None:
    for form, value, q_at, kv_at in MASKS.values():
        if form != "full":
            call = CallMask(form, value, (q_at,), (kv_at,), 16, 16)  # type: ignore[arg-type]
            seen = [[is_unmasked(value, x, y, 16, 16) for y in kv_at] for x in q_at]
            assert call.dense(torch.device("cpu")).tolist() == seen
