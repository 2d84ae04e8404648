"""Alarms: what becomes of a pass on NCCL whose marks differ (see `comm.marked`).

The host does not wait for the comparison. So results are spoilt on the device, where the next call finds them, and the
host is told through a number in its own memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mesh_attention.comm.marked import DIFFERENT_CALLS
from mesh_attention.kernels import fused


class Alarm:
    """Of one device. `seen` is in host memory: 0, and NaN from the first pass on whose marks differed."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # later passes need not be in inference mode
            self.seen = torch.zeros((), device="cpu", pin_memory=device.type == "cuda")
            self.spoil = torch.zeros((), device=device)

    def check(self, largest: Tensor, results: Sequence[Tensor]) -> None:
        """Make all results NaN if the largest hash and -hash of all ranks do not add up to 0."""
        if largest.is_cuda and fused.lacks(largest.device) is None:
            fused.spoil(largest, self.seen, results)
            return
        self.spoil.masked_fill_(largest.sum() != 0, torch.nan)
        for result in results:
            result.add_(self.spoil)
        self.seen.copy_(self.spoil, non_blocking=True)

    def verdict(self) -> str | None:
        return f"ranks made different calls, and results are NaN; {DIFFERENT_CALLS}" if self.seen.isnan() else None
