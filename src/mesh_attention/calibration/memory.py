"""The time of large and small merges, and the memory of a rank."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from mesh_attention.calibration.effort import THOROUGH, Effort
from mesh_attention.calibration.fit import MemoryTimes
from mesh_attention.calibration.timing import time_call
from mesh_attention.comm.base import Comm
from mesh_attention.execution.buffers import Buffer, token_format
from mesh_attention.kernels.select import choose_merging
from mesh_attention.problem import Problem
from mesh_attention.units import GIB


def time_memory(
    setting: Problem, *, comm: Comm, device: torch.device, ranks_here: int, effort: Effort = THOROUGH
) -> MemoryTimes:
    """Times of a large and a tiny merge. `nbytes` counts every byte that a merge must read or write once."""
    a_token = setting.heads * setting.head_dim_v * setting.accumulator_itemsize
    large = _merge_tensors(max(1, effort.merged_nbytes[device.type] // a_token), setting, device)
    tiny = _merge_tensors(1, setting, device)
    total, total_lse, partial, lse = large
    merging = choose_merging(device)
    return MemoryTimes(
        nbytes=2 * (total.nbytes + total_lse.nbytes) + partial.nbytes + lse.nbytes,
        large_s=time_call(lambda: merging.merge_output(*large), comm=comm, device=device, effort=effort),
        tiny_s=time_call(lambda: merging.merge_output(*tiny), comm=comm, device=device, effort=effort),
        memory_gib=memory_nbytes(device, ranks_here=ranks_here) / GIB,
    )


def memory_nbytes(device: torch.device, *, ranks_here: int) -> float:
    """Memory of a GPU, or a rank's share of the machine's."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks_here


def _merge_tensors(tokens: int, setting: Problem, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A running sum and a partial, each with its LSE."""
    total, partial = (
        Buffer.empty(token_format("o", setting, 1, is_running), tokens=tokens, batch=1, device=device).fields
        for is_running in (True, False)
    )
    for tensor in (*total.values(), *partial.values()):
        tensor.normal_()
    return total["o"], total["lse"], partial["o"], partial["lse"]
