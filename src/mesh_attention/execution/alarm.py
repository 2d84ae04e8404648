"""Alarms: what becomes of a pass on NCCL whose marks differ, or whose transfers will bring nothing any more.

The host does not wait for the device. So results are spoilt on the device, where their reader finds NaN, and the host
is told through numbers in its own memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mesh_attention.comm.reports import DIFFERENT_CALLS
from mesh_attention.comm.watch import Watch
from mesh_attention.kernels import merging
from mesh_attention.kernels.launching import triton_unsupported_reason


class Alarm:
    """Of one device. Two numbers: NaN once marks differed and 0 before, and how many passes are over.

    `seen` is a copy of them in host memory, with a third number, which the device reads: NaN once this rank gave up.
    Giving up must not need the device, where another thread may be waiting.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # later passes need not be in inference mode
            is_cuda = device.type == "cuda"
            self.state = torch.zeros(2, device=device, dtype=torch.float64)
            self.spoil, self.over = self.state.unbind()
            self.seen = torch.zeros(3, device="cpu", dtype=torch.float64, pin_memory=is_cuda)
        self._seen = self.seen.numpy()
        self.watch: Watch | None = None

    def check(self, largest: Tensor, results: Sequence[Tensor], *, counts: bool = False) -> None:
        """Make all results NaN unless the largest hash and -hash of all ranks add up to 0; count the pass as over."""
        if largest.is_cuda and triton_unsupported_reason(largest.device) is None:
            merging.poison_if_different(largest, self.state, self.seen, results, counts=counts)
            return
        self.spoil.masked_fill_(largest.sum() != 0, torch.nan)
        spoil = self.spoil + self.seen[2].to(self.spoil.device, non_blocking=True)
        for result in results:
            result.add_(spoil)
        self.over.add_(int(counts))
        self.seen[:2].copy_(self.state, non_blocking=True)

    def passes_over(self) -> int:
        return int(self._seen[1])

    def give_up(self) -> None:
        """Make the results of all passes under way NaN: from now on, their transfers bring nothing."""
        self._seen[2] = math.nan

    def verdict(self) -> str | None:
        """Why the results of some pass are NaN; None if none are, as far as the host knows."""
        watch, different = self.watch, bool(self._seen[0] != self._seen[0])
        if watch is not None and watch.verdict is not None:
            return watch.verdict.text
        if not different:
            return None
        found = f"ranks made different calls, and results are NaN; {DIFFERENT_CALLS}"
        return found if watch is None else watch.explain(found) or found
