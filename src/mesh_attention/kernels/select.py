"""Which kernel and which merging to use.

Asked, not tried: one that says why not is passed over, and the choice is logged once.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

from mesh_attention.kernels.base import Demand, Kernel
from mesh_attention.kernels.cpu import CpuFlashKernel
from mesh_attention.kernels.cuda import CudnnKernel, TorchFlashKernel
from mesh_attention.kernels.flash_attn import FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4, FlashAttnKernel
from mesh_attention.kernels.fused import FusedMerging
from mesh_attention.kernels.merge import Merging, TorchMerging
from mesh_attention.kernels.reference import ReferenceKernel
from mesh_attention.kernels.sliced import SlicedReferenceKernel

logger = logging.getLogger(__name__)

KERNELS: tuple[Kernel, ...] = (
    CpuFlashKernel(),
    FlashAttnKernel(FLASH_ATTN_3),
    CudnnKernel(),
    CudnnKernel(is_deterministic=True),
    FlashAttnKernel(FLASH_ATTN_4),
    FlashAttnKernel(FLASH_ATTN_2),
    TorchFlashKernel(),
    TorchFlashKernel(is_deterministic=True),
    SlicedReferenceKernel(),
    ReferenceKernel(),
)
"""In the order they are asked; the reference, which can do everything, last.

flash-attn 3 has to be built by hand for Hopper: who has it wants it. cuDNN comes with torch and is twice as fast there
as flash-attn 2, which is a package of its own and, older, a part of torch. flash-attn 4 is for Blackwell.
"""


@lru_cache(maxsize=128)
def choose_kernel(demand: Demand) -> Kernel:
    for kernel in KERNELS:
        reason = kernel.supports(demand)
        if reason is None:
            logger.info("attention kernel: %s, for %s", kernel.name, demand)
            return kernel
        logger.info("attention kernel: not %s: it %s", kernel.name, reason)
    raise AssertionError("the reference kernel supports everything")


MERGINGS: tuple[Merging, ...] = (FusedMerging(), TorchMerging())
"""Fastest first; torch's, which works anywhere, last."""


@lru_cache(maxsize=128)
def choose_merging(device: torch.device) -> Merging:
    for merging in MERGINGS:
        reason = merging.supports(device)
        if reason is None:
            logger.info("merging: %s, on %s", merging.name, device)
            return merging
        logger.info("merging: not %s: it %s", merging.name, reason)
    raise AssertionError("torch merges anywhere")
