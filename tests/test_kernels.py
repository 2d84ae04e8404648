"""Every kernel that runs on a CPU conforms, a broken one does not; and partials merge to what the whole gives."""

from __future__ import annotations

import logging

import pytest
import torch

from mesh_attention.kernels.base import Demand, Kernel
from mesh_attention.kernels.reference import PerDocument, ReferenceKernel
from mesh_attention.kernels.select import choose_kernel
from mesh_attention.kernels.torch_attention import CpuFlashKernel
from mesh_attention_lab.testing.kernel_conformance import CHECKS, Check, Setting, documents_stay_apart


def demand(softcap: float = 0.0, dv: int = 6, lse_gradient: bool = False, dtype: torch.dtype = torch.float64) -> Demand:
    return Demand(device="cpu", dtype=dtype, head_dim_qk=6, head_dim_v=dv, softcap=softcap, lse_gradient=lse_gradient)


KERNELS = {
    "cpu flash": CpuFlashKernel(),
    "reference": ReferenceKernel(),
    "reference in slices": ReferenceKernel(nbytes=4000),  # of a few rows
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("check", [*CHECKS, documents_stay_apart], ids=lambda check: check.__name__)
@pytest.mark.parametrize("kernel", list(map(PerDocument, KERNELS.values())), ids=KERNELS)
def test_conformance(kernel: Kernel, check: Check, dtype: torch.dtype) -> None:
    check(kernel, Setting(dtype=dtype))


def test_the_choice_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    choose_kernel.cache_clear()
    with caplog.at_level(logging.INFO, logger="mesh_attention"):
        assert choose_kernel(demand()).name == "cpu flash"
        assert choose_kernel(demand(softcap=2.0)).name == "reference"
        assert choose_kernel(demand(dv=4)).name == "reference"
    assert "not cpu flash: it has no softcap" in caplog.text
    assert "not cpu flash: it needs one head size, not 6 and 4" in caplog.text
