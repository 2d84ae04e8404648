"""Which kernel and which merging to use.

Each is asked whether it supports the call, and none is tried: the first that gives no reason against it is used. The
choice is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch

from mesh_attention.kernels.base import DTYPES, Demand, Kernel, Merging
from mesh_attention.kernels.flash_attn import FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4, FlashAttnKernel
from mesh_attention.kernels.intervals import INTERVALS
from mesh_attention.kernels.merging import FusedMerging, TorchMerging
from mesh_attention.kernels.reference import REFERENCE, PerDocument
from mesh_attention.kernels.torch_attention import CpuFlashKernel, CudnnKernel, TorchFlashKernel
from mesh_attention.problem import Problem

logger = logging.getLogger(__name__)


class _Backend(Protocol):
    name: str

    def unsupported_reason(self, demand: Any, /) -> str | None: ...


Backend = TypeVar("Backend", bound=_Backend)

KERNELS: tuple[Kernel, ...] = (
    PerDocument(CpuFlashKernel()),
    FlashAttnKernel(FLASH_ATTN_3),
    CudnnKernel(),
    CudnnKernel(is_deterministic=True),
    FlashAttnKernel(FLASH_ATTN_4),
    FlashAttnKernel(FLASH_ATTN_2),
    TorchFlashKernel(),
    TorchFlashKernel(is_deterministic=True),
    INTERVALS,
    REFERENCE,
)
"""Kernels in the order they are asked; the reference, which can do everything, comes last.

flash-attn 3 has to be built by hand for Hopper, so an installed one is meant to be used. cuDNN comes with torch and is
twice as fast there as flash-attn 2, which is a separate package and, in an older version, part of torch. flash-attn 4
is for Blackwell. The Triton kernel takes what these do not: softcap, gradients into the LSE, two head sizes.
"""


MERGINGS: tuple[Merging, ...] = (FusedMerging(), TorchMerging())
"""Merging implementations, fastest first; torch's, which works anywhere, comes last."""


@lru_cache(maxsize=128)
def choose_kernel(demand: Demand) -> Kernel:
    return first_that_supports("attention kernel", KERNELS, demand)


def kernel_for(problem: Problem, device: torch.device) -> Kernel:
    """The kernel that attention with these heads and this dtype uses."""
    dtype, dims = DTYPES[problem.dtype], (problem.head_dim_qk, problem.head_dim_v)
    return choose_kernel(Demand(device=device.type, dtype=dtype, head_dim_qk=dims[0], head_dim_v=dims[1]))


@lru_cache(maxsize=128)
def choose_merging(device: torch.device) -> Merging:
    return first_that_supports("merging", MERGINGS, device)


def first_that_supports(what: str, ordered: Sequence[Backend], demand: Any) -> Backend:
    for backend in ordered:
        reason = backend.unsupported_reason(demand)
        if reason is None:
            logger.info("%s: %s, for %s", what, backend.name, demand)
            return backend
        logger.info("%s: not %s: it %s", what, backend.name, reason)
    raise AssertionError(f"the last {what} supports everything")
