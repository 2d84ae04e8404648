"""Which kernel to use. Asked, not tried: a kernel that says why not is passed over, and the choice is logged once."""

from __future__ import annotations

import logging
from functools import lru_cache

from mesh_attention.kernels.base import Demand, Kernel
from mesh_attention.kernels.cpu import CpuFlashKernel
from mesh_attention.kernels.reference import ReferenceKernel

logger = logging.getLogger(__name__)

KERNELS: tuple[Kernel, ...] = (CpuFlashKernel(), ReferenceKernel())
"""Fastest first; the reference, which can do everything, last."""


@lru_cache(maxsize=128)
def choose_kernel(demand: Demand) -> Kernel:
    for kernel in KERNELS:
        reason = kernel.supports(demand)
        if reason is None:
            logger.info("attention kernel: %s, for %s", kernel.name, demand)
            return kernel
        logger.info("attention kernel: not %s: it %s", kernel.name, reason)
    raise AssertionError("the reference kernel supports everything")
